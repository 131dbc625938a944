"""The waiting queue of a rank: a *ready* list in front of the arrivals.

Requests wait in the order of arrival (QUEUE_HEAD, see `placement.enqueue`). Those that are served
before them form the ready list: requests that were preempted, and with SGLang all that a pass has
seen (see sglang_queue.py).
"""

from __future__ import annotations

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state.codes import NONE


@inner
def queue_head(requests, s, now):
    """Request that is served next, as far as known at `now`, or NONE."""
    if s[R.READY_HEAD] >= 0:
        return s[R.READY_HEAD]
    q = s[R.QUEUE_HEAD]
    if q >= 0 and requests.time[Q.ARRIVAL, q] <= now:
        return q
    return NONE


@inner
def has_work(requests, s, now):
    """Whether a pass of this rank starting at `now` has anybody to look at."""
    return s[R.RUNNING] > 0 or queue_head(requests, s, now) >= 0
