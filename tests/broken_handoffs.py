"""`python -m tests.broken_handoffs`: what the conformance fixture says of ranks that break a rule.

Kernels have to run as plain Python (NUMBA_DISABLE_JIT=1), so that they can be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from vecsim import lower_handoff
from vecsim.descriptors import FixedTiming, RankConfig, ReplayRequest
from vecsim.engine import ReplayEngineConfig, run_engine_handoff_conformance
from vecsim.errors import ConformanceError
from vecsim.kernels import disaggregated_events, handoff_events, vllm_events
from vecsim.kernels.blockpool import row_run
from vecsim.kernels.events import AT_RESERVE, STORED_FIRST, log_blocks, mark_visible
from vecsim.kernels.handoff import NOW
from vecsim.kernels.layout import BLOCK_SIZE, ISL, PREFIX_CACHING
from vecsim.kernels.vllm_roles_events import HANDOFF, SCHEDULER


def publish_when_reserved(requests, pools, s, q):
    new_blocks = HANDOFF.reserve(requests, pools, s, q)
    full = np.int64(requests.state[ISL, q]) // s[BLOCK_SIZE]
    vllm_events.publish(requests, pools, s, q, np.int64(0), full)
    mark_visible(pools.events, s, pools.steps.time[NOW], AT_RESERVE)
    return new_blocks


def publish_never(requests, pools, s, q):
    s[PREFIX_CACHING] = 0
    HANDOFF.activate(requests, pools, s, q)


def publish_anew(requests, pools, s, q):
    HANDOFF.activate(requests, pools, s, q)
    row = row_run(requests, s, q, np.int64(0))[0]
    log_blocks(pools.events, s, STORED_FIRST, row, np.int64(1))


def keep_source(requests, pools, s, q):
    now = pools.steps.time[NOW]
    handoff_events.log_step(pools.steps, handoff_events.SOURCE_RELEASED, q, now)


def never_release(requests, pools, s, q):
    pass


def let_two_tokens_out(workload):
    return replace(workload, output_length=np.minimum(workload.output_length, 2))


def clock_of(source_first: bool = True, **broken: Callable) -> Callable:
    """The clock around ranks with other kernels."""
    worker = disaggregated_events._worker.bind(SCHEDULER)
    handoff = HANDOFF._replace(**broken)
    return disaggregated_events._clock.bind(worker, handoff, source_first=source_first)


def verdict() -> str:
    """What the fixture says."""
    rank = RankConfig(
        block_size=4, num_gpu_blocks=64, timing_model=FixedTiming(prefill_ms=100.0, decode_ms=10.0)
    )
    request = ReplayRequest(id="a", arrival_time_ms=0.0, input_tokens=10, output_tokens=2)
    try:
        run_engine_handoff_conformance(ReplayEngineConfig(rank=rank), request)
    except ConformanceError as error:
        return f"{error.group}, {error.where}"
    return "conforms"


def with_(module: Any, name: str, value: Any) -> str:
    """The verdict with something else in a module."""
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        return verdict()
    finally:
        setattr(module, name, kept)


def main() -> None:
    """Print a line for each breach."""
    clocks = {
        "as they are": clock_of(),
        "published when reserved": clock_of(reserve=publish_when_reserved),
        "never published": clock_of(activate=publish_never),
        "published anew": clock_of(activate=publish_anew),
        "blocks of the source kept": clock_of(release_source=keep_source),
        "source never released": clock_of(release_source=never_release),
        "destination asked first": clock_of(source_first=False),
    }
    for breach, clock in clocks.items():
        print(f"{breach}: {with_(disaggregated_events, 'run_clock', clock)}")
    two = with_(lower_handoff, "prompts_only", let_two_tokens_out)
    print(f"two tokens from the source: {two}")


if __name__ == "__main__":
    main()
