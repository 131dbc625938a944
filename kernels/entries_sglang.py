"""The entry points of SGLang ranks.

They are functions of this module over bound kernels: an entry that carried them in a closure would
not be found in the cache again. Each combination of optional parts that is met compiles once.
"""

from __future__ import annotations

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import clock as fleet_clock
from vecsim.kernels.fleet import independent
from vecsim.kernels.sched.sglang_rank import SCHEDULER

advance_all = independent.bind(SCHEDULER)
run_clock = fleet_clock.bind(SCHEDULER)


@entry
def run_independent(ranks, workers, requests, pools, scratch, clock):
    """Advance the workers NEXT_WORKER..END_WORKER-1 to the horizon (see `independent.bind`)."""
    return advance_all(ranks, workers, requests, pools, scratch, clock)


@entry
def run_fleet(fleet):
    """Run all workers on one clock to the horizon (see `clock.bind`)."""
    return run_clock(fleet)
