"""What a pass enters into its sums and the columns of its requests: admissions, tokens, ends."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import NONE
from vecsim.kernels.timing.itl_histogram import count_gap


@inner
def log_admission(requests, scratch, q, now, cached):
    """Record an admission; those after a preemption go to the log."""
    state = requests.state
    if state[Q.ADMISSIONS, q] == 0:
        requests.time[Q.FIRST_ADMIT, q] = now
        state[Q.FIRST_REUSED, q] = cached
    else:
        line = scratch.log_length[0]
        scratch.log[0, line] = q
        scratch.log[1, line] = now
        scratch.log[2, line] = cached
        scratch.log_length[0] = line + 1
    state[Q.ADMISSIONS, q] += 1
    state[Q.REUSED, q] = max(state[Q.REUSED, q], cached)


@inner
def mark_second_tokens(requests, s, lists, end):
    """Front members that joined at the last pass end and had one token get their second now."""
    for i in range(s[R.DECODING_JOINED], s[R.DECODING]):
        q = lists[s[R.RUN_OFFSET] + i]
        if np.isnan(requests.time[Q.SECOND_TOKEN, q]):
            requests.time[Q.SECOND_TOKEN, q] = end
    s[R.DECODING_JOINED] = s[R.DECODING]


@inner
def emit_token(requests, times, scratch, s, q, end):
    """An explicit request produces one token at `end`."""
    state = requests.state
    time = requests.time
    generated = state[Q.GENERATED, q]
    if generated == 0:
        time[Q.FIRST_TOKEN, q] = end
        signal(requests, s, q, Q.FIRST_OUTPUT)
    else:
        count_gap(times, scratch, end - time[Q.LAST_TOKEN, q], np.int64(state[Q.COUNTED, q]))
        if generated == 1:
            time[Q.SECOND_TOKEN, q] = end
    time[Q.LAST_TOKEN, q] = end
    state[Q.GENERATED, q] = generated + 1


@inner
def begin_pass(s):
    """Nothing is decided yet in the pass that starts."""
    if s[R.RUNNING] == 0:
        # Ticks are kept in 32 bits; without a decode batch nothing counts from them.
        s[R.TICK] = 0
    s[R.PREEMPTED_ANY] = 0
    s[R.STUCK_ENDED] = 0
    s[R.REJECTED_HEAD] = NONE
    s[R.PREFILLS] = 0
    s[R.PREFILL_ISL] = 0
    s[R.PREFILL_PREFIX] = 0
    s[R.PREFILL_TOKENS] = 0


# --- signals --------------------------------------------------------------------------------------
@inner
def signal(requests, s, q, what):
    """Put what became of a request on the list of its rank, for those who look after the pass."""
    state = requests.state
    if state[Q.SIGNALS, q] == 0:
        state[Q.NEXT_SIGNAL, q] = NONE
        if s[R.SIGNAL_HEAD] < 0:
            s[R.SIGNAL_HEAD] = q
        else:
            state[Q.NEXT_SIGNAL, s[R.SIGNAL_TAIL]] = q
        s[R.SIGNAL_TAIL] = q
    state[Q.SIGNALS, q] |= np.int32(what)


@inner
def take_signal(requests, s):
    """Take the first request off the list of signals: (request or NONE, bits of SIGNALS)."""
    q = s[R.SIGNAL_HEAD]
    if q < 0:
        return q, np.int64(0)
    state = requests.state
    what = np.int64(state[Q.SIGNALS, q])
    s[R.SIGNAL_HEAD] = np.int64(state[Q.NEXT_SIGNAL, q])
    state[Q.SIGNALS, q] = 0
    return q, what


# --- ends -----------------------------------------------------------------------------------------
@inner
def end_request(requests, w, s, q, status, now):
    """A request, in no list any more, ends `now`."""
    requests.state[Q.STATUS, q] = status
    requests.time[Q.TERMINAL, q] = now
    signal(requests, s, q, Q.ENDED)
    w[W.TERMINALS] += 1


@inner
def complete(requests, w, s, q, end):
    """A request has produced all it may."""
    end_request(requests, w, s, q, S.COMPLETED, end)


@inner
def hold(requests, w, s, q):
    """A prefill rank has the hidden token of a request: it keeps the blocks for the transfer."""
    w[W.PASSES_WITHOUT_PROGRESS] = 0
    s[R.HELD] += 1
    signal(requests, s, q, Q.HELD_OUTPUT)


@inner
def end_stuck(requests, w, s, q, status, reason, now):
    """End a request, which has left its queue or the running list, for good: nothing else would
    let the rank go on."""
    requests.state[Q.REASON, q] = reason
    s[R.STUCK_ENDED] += 1
    end_request(requests, w, s, q, status, now)


@inner
def reject(requests, s, q, reason):
    """Note a request, which has left its queue, for rejection at the end of the pass."""
    requests.state[Q.REASON, q] = reason
    requests.state[Q.NEXT, q] = NONE
    if s[R.REJECTED_HEAD] < 0:
        s[R.REJECTED_HEAD] = q
    else:
        requests.state[Q.NEXT, s[R.REJECTED_TAIL]] = q
    s[R.REJECTED_TAIL] = q


@inner
def end_rejected(requests, w, s, end):
    """Rejections of the pass become visible."""
    q = s[R.REJECTED_HEAD]
    while q >= 0:
        following = np.int64(requests.state[Q.NEXT, q])
        end_request(requests, w, s, q, S.REJECTED, end)
        q = following
    s[R.REJECTED_HEAD] = NONE
