"""The ready set: workers that the clock has to drive at the present instant, ascending."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import fleet as F


@inner
def enter_ready(ready, counters, count, worker):
    """Enter a worker, once. `ready` int64 [workers]; `counters[count]` of them are in use."""
    at = counters[count]
    while at > 0 and ready[at - 1] > worker:
        at -= 1
    if at > 0 and ready[at - 1] == worker:
        return
    for i in range(counters[count] - at):
        position = counters[count] - i
        ready[position] = ready[position - 1]
    ready[at] = worker
    counters[count] += 1


@inner
def drop_driven(ready, counters, count, driven):
    """Take the first `driven` workers off: they are not to be driven again on re-entry."""
    for i in range(driven, counters[count]):
        ready[i - driven] = ready[i]
    counters[count] -= np.int64(driven)


@inner
def wake(clock, worker):
    """Enter a worker into the ready set."""
    enter_ready(clock.ready, clock.state, F.READY_WORKERS, worker)
