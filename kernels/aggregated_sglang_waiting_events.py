"""Aggregated pools of SGLang ranks whose requests wait for others and whose KV events are logged:
the entry points that Python calls (see aggregated_sglang_events.py)."""

from __future__ import annotations

from vecsim.kernels.cache.session_content import settle_pages
from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import clock as pool_clock
from vecsim.kernels.fleet import waiting, worker
from vecsim.kernels.rebinding import rebound
from vecsim.kernels.sched import sglang_events

_worker = rebound(worker, sglang_events.walking)
_clock = rebound(pool_clock, sglang_events.walking, _worker)
run_clock = waiting.bind(_clock.bind(_worker.bind(sglang_events.SCHEDULER)), settle_pages)


@entry
def run_coupled(ranks, workers, requests, pools, scratch, clock, arrivals, seats):
    """Run all workers on one clock to the horizon (see `waiting.bind`)."""
    return run_clock(ranks, workers, requests, pools, scratch, clock, arrivals, seats)
