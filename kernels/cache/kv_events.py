"""The log of KV events: which blocks became findable, which are gone, and when it could be seen.

A rank logs an event when it decides it, run by run: `log_blocks`. It becomes visible later, when
the pass ends or the command is done: `mark_visible` closes all that the rank has logged since, with
the time and the occasion. What is never closed (a pass cut by the time limit) was never seen. Ranks
of several workers may write in turns; the order counts within a rank only.

A block is named by its row of the prefix index; `kernels.event_columns` gives rows their hashes and
numbers the events (reference: vLLM backend, section 12; runtimes, section 10).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state.layout import SCHEDULER_ID, Requests

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
LENGTH, ROOM_FOR_A_PASS = (np.int64(k) for k in range(2))
"""Words in use; words that must be free before a worker starts its next pass."""
LOG_STATE = 2

# --- `EventLog.ranks`: int64 [LOG_RANK, ranks] ----------------------------------------------------
(
    OPEN,  # runs of blocks logged since the last mark
    TAKEN,  # blocks taken during the stretch being walked
    NEXT_REMOVED,  # SGLang: what a removed page would be, REMOVED_FIRST or REMOVED_NEXT
    LAST_STORED,  # SGLang: row of the page stored last, if a Stored event may go on; or NONE
    DECODES,  # SGLang: decode passes since the last that called for a report
) = (np.int64(k) for k in range(5))
LOG_RANK = 5


class EventLog(NamedTuple):
    """What all ranks logged."""

    words: np.ndarray  # int64 [capacity]
    state: np.ndarray  # int64 [LOG_STATE]
    ranks: np.ndarray  # int64 [LOG_RANK, ranks]


class ObservedPools(NamedTuple):
    """`layout.Pools` with a log."""

    nodes: np.ndarray
    index: np.ndarray
    forecast: np.ndarray
    users: np.ndarray
    events: EventLog


class ObservedForest(NamedTuple):
    """`layout.ForecastForest` with a log. Pages have the rows that `named` gives its requests."""

    nodes: np.ndarray
    table: np.ndarray
    state: np.ndarray
    order: np.ndarray
    forecast: np.ndarray
    users: np.ndarray
    events: EventLog
    named: Requests


class ObservedScratch(NamedTuple):
    """`layout.Scratch` with the pools: a stretch changes them pass by pass."""

    chunk: np.ndarray
    bins: np.ndarray
    log: np.ndarray
    log_length: np.ndarray
    segments: np.ndarray
    pools: NamedTuple


@inner
def log_blocks(events, s, kind, row, count):
    """Blocks of an event of the rank `s`: rows from `row` up, or with a negative count, down."""
    rank = s[SCHEDULER_ID]
    at = events.state[LENGTH]
    events.words[at] = (((rank << KIND_BITS) | kind) << ROW_BITS) | row
    events.words[at + 1] = count
    events.state[LENGTH] = at + 2
    events.ranks[OPEN, rank] += 1


@inner
def mark_visible(events, s, now, occasion):
    """What the rank `s` logged since the last mark can be seen from `now` (ms, float64) on."""
    rank = s[SCHEDULER_ID]
    if events.ranks[OPEN, rank] == 0:
        return
    at = events.state[LENGTH]
    events.words[at] = (((rank << KIND_BITS) | VISIBLE) << ROW_BITS) | occasion
    events.words[at + 1] = np.float64(now).view(np.int64)
    events.state[LENGTH] = at + 2
    events.ranks[OPEN, rank] = 0


@inner
def log_has_room(events):
    """Whether the next pass of any worker finds room."""
    free = np.int64(len(events.words)) - events.state[LENGTH]
    return free >= events.state[ROOM_FOR_A_PASS]
