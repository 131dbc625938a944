"""What a pass enters into the columns of its requests: admissions, tokens, rejections."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.jit import inner
from vecsim.kernels.layout import (
    ADMISSIONS,
    COUNTED,
    FIRST_ADMIT,
    FIRST_REUSED,
    FIRST_TOKEN,
    FRONT,
    FRONT_JOINED,
    GENERATED,
    LAST_TOKEN,
    NEXT,
    NONE,
    REJECTED,
    REJECTED_HEAD,
    REUSED,
    RUN_OFFSET,
    SECOND_TOKEN,
    STATUS,
    TERMINAL,
    TERMINALS,
)
from vecsim.kernels.observe import count_gap


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
def emit_token(requests, times, scratch, q, end):
    """An explicit request produces one token at `end`."""
    state = requests.state
    time = requests.time
    generated = state[GENERATED, q]
    if generated == 0:
        time[FIRST_TOKEN, q] = end
    else:
        count_gap(times, scratch, end - time[LAST_TOKEN, q], np.int64(state[COUNTED, q]))
        if generated == 1:
            time[SECOND_TOKEN, q] = end
    time[LAST_TOKEN, q] = end
    state[GENERATED, q] = generated + 1


@inner
def end_rejected(requests, w, s, end):
    """Rejections of the pass become visible."""
    q = s[REJECTED_HEAD]
    while q >= 0:
        following = np.int64(requests.state[NEXT, q])
        requests.state[STATUS, q] = REJECTED
        requests.time[TERMINAL, q] = end
        w[TERMINALS] += 1
        q = following
    s[REJECTED_HEAD] = NONE
