"""`python -m tests.support.broken_handoffs BACKEND`: what the conformance fixture says of ranks of
vLLM or SGLang that break a rule.

Kernels have to run as plain Python (NUMBA_DISABLE_JIT=1), so that they can be exchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from vecsim.config.schema import FixedTiming, RankConfig, ReplayRequest
from vecsim.engine import ReplayEngineConfig, run_engine_handoff_conformance
from vecsim.errors import ConformanceError
from vecsim.kernels import entries_sglang, entries_vllm
from vecsim.kernels.cache.block_pool import row_run
from vecsim.kernels.cache.kv_events import AT_RESERVE, STORED_FIRST, log_blocks, mark_visible
from vecsim.kernels.fleet import clock as fleet_clock
from vecsim.kernels.fleet import handoff
from vecsim.kernels.sched.interface import Scheduler
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import rank as R
from vecsim.run.lower import fleet as lowering

ENTRIES = {"vllm": entries_vllm, "sglang": entries_sglang}


def breaches(scheduler: Scheduler) -> dict[str, dict[str, Callable]]:
    """Other kernels for the ranks of a handoff."""

    def log_first_block(requests, pools, s, q):
        named = requests if pools.events.named is None else pools.events.named
        row = row_run(named, s, q, np.int64(0))[0]
        log_blocks(pools.events, s, STORED_FIRST, row, np.int64(1))

    def store_when_reserved(requests, pools, s, q, now):
        new_blocks = scheduler.reserve(requests, pools, s, q, now)
        log_first_block(requests, pools, s, q)
        mark_visible(pools.events, s, now, AT_RESERVE)
        return new_blocks

    def store_never(requests, pools, s, q, now):
        s[R.PREFIX_CACHING] = 0
        scheduler.activate(requests, pools, s, q, now)

    def store_anew(requests, pools, s, q, now):
        scheduler.activate(requests, pools, s, q, now)
        log_first_block(requests, pools, s, q)

    def keep_source(requests, pools, s, q, now):
        pass

    return {
        "as they are": {},
        "published when reserved": {"reserve": store_when_reserved},
        "never published": {"activate": store_never},
        "published anew": {"activate": store_anew},
        "blocks of the source kept": {"release_held": keep_source},
    }


def never_release(transfers, kind, q):
    """Appends an action, unless it is a release."""
    if kind != F.RELEASE:
        ACT(transfers, kind, q)


ACT = handoff.act


def let_two_tokens_out(workload):
    return replace(workload, output_length=np.minimum(workload.output_length, 2))


def verdict(backend: str) -> str:
    """What the fixture says."""
    timing = FixedTiming(prefill_ms=100.0, decode_ms=10.0)
    rank = RankConfig(backend=backend, block_size=4, num_gpu_blocks=64, timing_model=timing)
    request = ReplayRequest(id="a", arrival_time_ms=0.0, input_tokens=10, output_tokens=2)
    try:
        run_engine_handoff_conformance(ReplayEngineConfig(rank=rank), request)
    except ConformanceError as error:
        return f"{error.group}, {error.where}"
    return "conforms"


def with_(backend: str, module: Any, name: str, value: Any) -> str:
    """The verdict with something else in a module."""
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        return verdict(backend)
    finally:
        setattr(module, name, kept)


def main(backend: str) -> None:
    """Print a line for each breach."""
    entries = ENTRIES[backend]
    scheduler = entries.SCHEDULER
    broken = {
        breach: scheduler._replace(**kernels) for breach, kernels in breaches(scheduler).items()
    }
    other = scheduler._replace(reserves_first=not scheduler.reserves_first)
    broken["the other side asked first"] = other
    for breach, ranks in broken.items():
        print(f"{breach}: {with_(backend, entries, 'run_clock', fleet_clock.bind(ranks))}")
    print(f"source never released: {with_(backend, handoff, 'act', never_release)}")
    two = with_(backend, lowering, "prompts_only", let_two_tokens_out)
    print(f"two tokens from the source: {two}")


if __name__ == "__main__":
    main(sys.argv[1])
