"""Prefill and decode pools of SGLang ranks: the entry points that Python calls (see
aggregated.py)."""

from __future__ import annotations

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import disaggregated_clock, worker
from vecsim.kernels.sched import sglang_roles

run_clock = disaggregated_clock.bind(
    worker.bind(sglang_roles.SCHEDULER), sglang_roles.HANDOFF, source_first=False
)


@entry
def run_disaggregated(prefill, decode, handoff):
    """Run both pools to the horizon (see `disaggregated_clock`)."""
    return run_clock(prefill, decode, handoff)
