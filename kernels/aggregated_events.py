"""Aggregated pools whose KV events are logged: the entry points that Python calls.

As aggregated.py, for vLLM-style ranks; pools and scratch are those of `kernels.events`.
"""

from __future__ import annotations

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import clock as pool_clock
from vecsim.kernels.fleet import worker
from vecsim.kernels.rebinding import rebound
from vecsim.kernels.sched import vllm_events

_worker = rebound(worker, vllm_events.walking)
_clock = rebound(pool_clock, vllm_events.walking, _worker)
advance_all, run_clock = _clock.bind(_worker.bind(vllm_events.SCHEDULER))[:2]


@entry
def run_independent(ranks, workers, requests, pools, scratch, clock):
    """Advance the workers NEXT_WORKER..END_WORKER-1 to the horizon (see `clock.advance_all`)."""
    return advance_all(ranks, workers, requests, pools, scratch, clock)


@entry
def run_coupled(ranks, workers, requests, pools, scratch, clock):
    """Run all workers on one clock to the horizon (see `clock.run_clock`)."""
    return run_clock(ranks, workers, requests, pools, scratch, clock)
