"""`python -m tests.support.broken_handoffs BACKEND`: what the conformance fixture says of ranks of
vLLM or SGLang that break a rule.

Kernels have to run as plain Python (NUMBA_DISABLE_JIT=1), so that they can be exchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from vecsim.config.schema import FixedTiming, RankConfig, ReplayRequest
from vecsim.engine import ReplayEngineConfig, run_engine_handoff_conformance
from vecsim.errors import ConformanceError
from vecsim.kernels import disaggregated_events, disaggregated_sglang_events
from vecsim.kernels.cache.block_pool import row_run
from vecsim.kernels.cache.kv_events import AT_RESERVE, STORED_FIRST, log_blocks, mark_visible
from vecsim.kernels.fleet import handoff_events
from vecsim.kernels.fleet.handoff import NOW, HandoffRank
from vecsim.kernels.sched import sglang_roles_events, vllm_roles_events
from vecsim.kernels.state import rank as R
from vecsim.run import lower_handoff

ROLES = {"vllm": vllm_roles_events, "sglang": sglang_roles_events}
ENTRIES = {"vllm": disaggregated_events, "sglang": disaggregated_sglang_events}


def breaches(handoff: HandoffRank) -> dict[str, dict[str, Callable]]:
    """Other kernels for the rank of a handoff."""

    def log_first_block(requests, pools, s, q):
        row = row_run(getattr(pools, "named", requests), s, q, np.int64(0))[0]
        log_blocks(pools.events, s, STORED_FIRST, row, np.int64(1))

    def publish_when_reserved(requests, pools, s, q):
        new_blocks = handoff.reserve(requests, pools, s, q)
        log_first_block(requests, pools, s, q)
        mark_visible(pools.events, s, pools.steps.time[NOW], AT_RESERVE)
        return new_blocks

    def publish_never(requests, pools, s, q):
        s[R.PREFIX_CACHING] = 0
        handoff.activate(requests, pools, s, q)

    def publish_anew(requests, pools, s, q):
        handoff.activate(requests, pools, s, q)
        log_first_block(requests, pools, s, q)

    def keep_source(requests, pools, s, q):
        now = pools.steps.time[NOW]
        handoff_events.log_step(pools.steps, handoff_events.SOURCE_RELEASED, q, now)

    def never_release(requests, pools, s, q):
        pass

    return {
        "as they are": {},
        "published when reserved": {"reserve": publish_when_reserved},
        "never published": {"activate": publish_never},
        "published anew": {"activate": publish_anew},
        "blocks of the source kept": {"release_source": keep_source},
        "source never released": {"release_source": never_release},
    }


def let_two_tokens_out(workload):
    return replace(workload, output_length=np.minimum(workload.output_length, 2))


def clock_of(
    entries: ModuleType, roles: ModuleType, source_first: bool, **broken: Callable
) -> Callable:
    """The clock around ranks with other kernels."""
    worker = entries._worker.bind(roles.SCHEDULER)
    handoff = roles.HANDOFF._replace(**broken)
    return entries._clock.bind(worker, handoff, source_first=source_first)


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
    roles, entries = ROLES[backend], ENTRIES[backend]
    source_first = backend == "vllm"
    clocks = {
        breach: clock_of(entries, roles, source_first, **kernels)
        for breach, kernels in breaches(roles.HANDOFF).items()
    }
    clocks["the other side asked first"] = clock_of(entries, roles, not source_first)
    for breach, clock in clocks.items():
        print(f"{breach}: {with_(backend, entries, 'run_clock', clock)}")
    two = with_(backend, lower_handoff, "prompts_only", let_two_tokens_out)
    print(f"two tokens from the source: {two}")


if __name__ == "__main__":
    main(sys.argv[1])
