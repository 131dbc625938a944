"""Aggregated pools of SGLang ranks: the entry points that Python calls (see aggregated.py)."""

from __future__ import annotations

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import clock as pool_clock
from vecsim.kernels.fleet import worker
from vecsim.kernels.sched import sglang_rank

advance_all, run_clock = pool_clock.bind(worker.bind(sglang_rank.SCHEDULER))[:2]


@entry
def run_independent(ranks, workers, requests, pools, scratch, clock):
    """Advance the workers NEXT_WORKER..END_WORKER-1 to the horizon (see `clock.advance_all`)."""
    return advance_all(ranks, workers, requests, pools, scratch, clock)


@entry
def run_coupled(ranks, workers, requests, pools, scratch, clock):
    """Run all workers on one clock to the horizon (see `clock.run_clock`)."""
    return run_clock(ranks, workers, requests, pools, scratch, clock)
