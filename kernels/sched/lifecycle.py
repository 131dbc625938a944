"""What a pass enters into its sums and the columns of its requests: admissions, tokens, ends."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.itl_histogram import count_gap
from vecsim.kernels.state.layout import (
    ADMISSIONS,
    COMPLETED,
    COUNTED,
    ENDED,
    FIRST_ADMIT,
    FIRST_OUTPUT,
    FIRST_REUSED,
    FIRST_TOKEN,
    FRONT,
    FRONT_JOINED,
    FRUITLESS,
    GENERATED,
    HELD,
    HELD_OUTPUT,
    LAST_TOKEN,
    NEXT,
    NEXT_SIGNAL,
    NONE,
    PREEMPTED_ANY,
    PREFILL_ISL,
    PREFILL_PREFIX,
    PREFILL_TOKENS,
    PREFILLS,
    REASON,
    REJECTED,
    REJECTED_HEAD,
    REJECTED_TAIL,
    REUSED,
    RUN_OFFSET,
    RUNNING,
    SECOND_TOKEN,
    SETTLED,
    SIGNAL_HEAD,
    SIGNAL_TAIL,
    SIGNALS,
    STATUS,
    TERMINAL,
    TERMINALS,
    TICK,
)


@inner
def log_admission(requests, scratch, q, now, cached):
    """Record an admission; those after a preemption go to the log."""
    state = requests.state
    if state[ADMISSIONS, q] == 0:
        requests.time[FIRST_ADMIT, q] = now
        state[FIRST_REUSED, q] = cached
    else:
        line = scratch.log_length[0]
        scratch.log[0, line] = q
        scratch.log[1, line] = now
        scratch.log[2, line] = cached
        scratch.log_length[0] = line + 1
    state[ADMISSIONS, q] += 1
    state[REUSED, q] = max(state[REUSED, q], cached)


@inner
def mark_second_tokens(requests, s, lists, end):
    """Front members that joined at the last pass end and had one token get their second now."""
    for i in range(s[FRONT_JOINED], s[FRONT]):
        q = lists[s[RUN_OFFSET] + i]
        if np.isnan(requests.time[SECOND_TOKEN, q]):
            requests.time[SECOND_TOKEN, q] = end
    s[FRONT_JOINED] = s[FRONT]


@inner
def emit_token(requests, times, scratch, s, q, end):
    """An explicit request produces one token at `end`."""
    state = requests.state
    time = requests.time
    generated = state[GENERATED, q]
    if generated == 0:
        time[FIRST_TOKEN, q] = end
        signal(requests, s, q, FIRST_OUTPUT)
    else:
        count_gap(times, scratch, end - time[LAST_TOKEN, q], np.int64(state[COUNTED, q]))
        if generated == 1:
            time[SECOND_TOKEN, q] = end
    time[LAST_TOKEN, q] = end
    state[GENERATED, q] = generated + 1


@inner
def begin_pass(s):
    """Nothing is decided yet in the pass that starts."""
    if s[RUNNING] == 0:
        # Ticks are kept in 32 bits; without a front nothing counts from them.
        s[TICK] = 0
    s[PREEMPTED_ANY] = 0
    s[SETTLED] = 0
    s[REJECTED_HEAD] = NONE
    s[PREFILLS] = 0
    s[PREFILL_ISL] = 0
    s[PREFILL_PREFIX] = 0
    s[PREFILL_TOKENS] = 0


# --- signals --------------------------------------------------------------------------------------
@inner
def signal(requests, s, q, what):
    """Put what became of a request on the list of its rank, for those who look after the pass."""
    state = requests.state
    if state[SIGNALS, q] == 0:
        state[NEXT_SIGNAL, q] = NONE
        if s[SIGNAL_HEAD] < 0:
            s[SIGNAL_HEAD] = q
        else:
            state[NEXT_SIGNAL, s[SIGNAL_TAIL]] = q
        s[SIGNAL_TAIL] = q
    state[SIGNALS, q] |= np.int32(what)


@inner
def take_signal(requests, s):
    """Take the first request off the list of signals: (request or NONE, bits of SIGNALS)."""
    q = s[SIGNAL_HEAD]
    if q < 0:
        return q, np.int64(0)
    state = requests.state
    what = np.int64(state[SIGNALS, q])
    s[SIGNAL_HEAD] = np.int64(state[NEXT_SIGNAL, q])
    state[SIGNALS, q] = 0
    return q, what


# --- ends -----------------------------------------------------------------------------------------
@inner
def end_request(requests, w, s, q, status, now):
    """A request, in no list any more, ends `now`."""
    requests.state[STATUS, q] = status
    requests.time[TERMINAL, q] = now
    signal(requests, s, q, ENDED)
    w[TERMINALS] += 1


@inner
def complete(requests, w, s, q, end):
    """A request has produced all it may."""
    end_request(requests, w, s, q, COMPLETED, end)


@inner
def hold(requests, w, s, q):
    """A prefill rank has the hidden token of a request: it keeps the blocks for the transfer."""
    w[FRUITLESS] = 0
    s[HELD] += 1
    signal(requests, s, q, HELD_OUTPUT)


@inner
def settle(requests, w, s, q, status, reason, now):
    """End a request, which has left its queue or the running list, for good: nothing else would
    let the rank go on."""
    requests.state[REASON, q] = reason
    s[SETTLED] += 1
    end_request(requests, w, s, q, status, now)


@inner
def reject(requests, s, q, reason):
    """Note a request, which has left its queue, for rejection at the end of the pass."""
    requests.state[REASON, q] = reason
    requests.state[NEXT, q] = NONE
    if s[REJECTED_HEAD] < 0:
        s[REJECTED_HEAD] = q
    else:
        requests.state[NEXT, s[REJECTED_TAIL]] = q
    s[REJECTED_TAIL] = q


@inner
def end_rejected(requests, w, s, end):
    """Rejections of the pass become visible."""
    q = s[REJECTED_HEAD]
    while q >= 0:
        following = np.int64(requests.state[NEXT, q])
        end_request(requests, w, s, q, REJECTED, end)
        q = following
    s[REJECTED_HEAD] = NONE
