"""Aggregated pools of SGLang ranks whose requests wait for others: the entry points that Python
calls (see aggregated.py)."""

from __future__ import annotations

from vecsim.kernels.cache.session_content import settle_pages
from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import clock as pool_clock
from vecsim.kernels.fleet import waiting, worker
from vecsim.kernels.sched import sglang_rank

run_clock = waiting.bind(pool_clock.bind(worker.bind(sglang_rank.SCHEDULER)), settle_pages)


@entry
def run_coupled(ranks, workers, requests, pools, scratch, clock, arrivals, seats):
    """Run all workers on one clock to the horizon (see `waiting.bind`)."""
    return run_clock(ranks, workers, requests, pools, scratch, clock, arrivals, seats)
