"""The log of KV events: which blocks became findable, which are gone, and when it could be seen.

A rank logs an event when it decides it, run by run: `log_blocks`. It becomes visible later, when
the pass ends or the command is done: `mark_visible` closes all that the rank has logged since, with
the time and the occasion. What is never closed (a pass cut by the time limit) was never seen. Ranks
of several workers may write in turns; the order counts within a rank only.

A block is named by its row of the prefix index; `kernels.event_columns` gives rows their hashes and
numbers the events (reference: vLLM backend, section 12; runtimes, section 10).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import rank as R

# --- an entry of the log: a word of rank, kind and row, and a second word -------------------------
STORED_FIRST, STORED_NEXT, REMOVED_FIRST, REMOVED_NEXT, VISIBLE = (np.int64(k) for k in range(5))
"""FIRST begins an event, NEXT goes on with it. The second word is the number of blocks, which have
consecutive rows, negative where these fall. VISIBLE has an occasion in place of the row and a time
(ms, float64) in the second word."""
KIND_BITS = np.int64(3)
ROW_BITS = np.int64(32)

# --- when a rank hands its events over: the end of a pass, or a command of a handoff --------------
AT_PASS_END, AT_RESERVE, AT_ACTIVATE, AT_RELEASE = (np.int64(k) for k in range(4))

# --- `EventLog.state` -----------------------------------------------------------------------------
LOG_LENGTH, ROOM_FOR_A_PASS = (np.int64(k) for k in range(2))
"""Words in use; words that must be free before a worker starts its next pass."""
LOG_STATE = 2

# --- `EventLog.ranks`: int64 [LOG_RANK, ranks] ----------------------------------------------------
(
    OPEN,  # runs of blocks logged since the last mark
    TAKEN,  # blocks taken during the run being walked
    NEXT_REMOVED,  # SGLang: what a removed page would be, REMOVED_FIRST or REMOVED_NEXT
    LAST_STORED,  # SGLang: row of the page stored last, if a Stored event may go on; or NONE
    DECODES,  # SGLang: decode passes since the last that called for a report
    RUN_KIND,  # the run of consecutive rows that is being put together
    RUN_FIRST,
    RUN_LENGTH,
) = (np.int64(k) for k in range(8))
LOG_RANK = 8


@inner
def log_blocks(events, s, kind, row, count):
    """Blocks of an event of the rank `s`: rows from `row` up, or with a negative count, down."""
    rank = s[R.SCHEDULER_ID]
    at = events.state[LOG_LENGTH]
    events.words[at] = (((rank << KIND_BITS) | kind) << ROW_BITS) | row
    events.words[at + 1] = count
    events.state[LOG_LENGTH] = at + 2
    events.ranks[OPEN, rank] += 1


@inner
def mark_visible(events, s, now, occasion):
    """What the rank `s` logged since the last mark can be seen from `now` (ms, float64) on."""
    rank = s[R.SCHEDULER_ID]
    if events.ranks[OPEN, rank] == 0:
        return
    at = events.state[LOG_LENGTH]
    events.words[at] = (((rank << KIND_BITS) | VISIBLE) << ROW_BITS) | occasion
    events.words[at + 1] = np.float64(now).view(np.int64)
    events.state[LOG_LENGTH] = at + 2
    events.ranks[OPEN, rank] = 0


@inner
def events_have_room(events):
    """Whether the next pass of any worker finds room; always, if events are not observed."""
    if events is None:
        return True
    free = np.int64(len(events.words)) - events.state[LOG_LENGTH]
    return free >= events.state[ROOM_FOR_A_PASS]


@inner
def mark_pass_end(events, s, now):
    """What the rank decided in the pass that ends `now` becomes visible, if events are observed."""
    if events is not None:
        mark_visible(events, s, now, AT_PASS_END)


# --- runs of blocks, put together row by row ------------------------------------------------------
@inner
def begin_run(events, s, kind):
    """A new event of this kind; nothing without observation."""
    if events is not None:
        events.ranks[RUN_KIND, s[R.SCHEDULER_ID]] = kind
        events.ranks[RUN_LENGTH, s[R.SCHEDULER_ID]] = 0


@inner
def note_stored(events, s, row, primary):
    """A block with this row is published; it is stored if nobody could find it before (`primary`,
    its oldest copy, is NONE). What follows a known block begins an event of its own."""
    if events is not None:
        state = events.ranks[:, s[R.SCHEDULER_ID]]
        if state[RUN_LENGTH] > 0 and (primary >= 0 or row != state[RUN_FIRST] + state[RUN_LENGTH]):
            log_blocks(events, s, state[RUN_KIND], state[RUN_FIRST], state[RUN_LENGTH])
            state[RUN_KIND] = STORED_NEXT
            state[RUN_LENGTH] = 0
        if primary >= 0:
            state[RUN_KIND] = STORED_FIRST
        else:
            if state[RUN_LENGTH] == 0:
                state[RUN_FIRST] = row
            state[RUN_LENGTH] += 1


@inner
def note_removed(events, s, row, primary):
    """A copy of this row was evicted; the block is gone if `primary`, its oldest copy, is NONE."""
    if events is not None:
        state = events.ranks[:, s[R.SCHEDULER_ID]]
        if primary < 0:
            if state[RUN_LENGTH] > 0 and row != state[RUN_FIRST] - state[RUN_LENGTH]:
                log_blocks(events, s, state[RUN_KIND], state[RUN_FIRST], -state[RUN_LENGTH])
                state[RUN_KIND] = REMOVED_NEXT
                state[RUN_LENGTH] = 0
            if state[RUN_LENGTH] == 0:
                state[RUN_FIRST] = row
            state[RUN_LENGTH] += 1


@inner
def end_stored(events, s):
    """Log the run of stored blocks that was put together last."""
    if events is not None:
        state = events.ranks[:, s[R.SCHEDULER_ID]]
        if state[RUN_LENGTH] > 0:
            log_blocks(events, s, state[RUN_KIND], state[RUN_FIRST], state[RUN_LENGTH])


@inner
def end_removed(events, s):
    """Log the run of removed blocks that was put together last."""
    if events is not None:
        state = events.ranks[:, s[R.SCHEDULER_ID]]
        if state[RUN_LENGTH] > 0:
            log_blocks(events, s, state[RUN_KIND], state[RUN_FIRST], -state[RUN_LENGTH])
