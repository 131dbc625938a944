"""Prefill and decode pools of vLLM-style ranks: the entry points that Python calls.

See aggregated.py for why they are functions of this module.
"""

from __future__ import annotations

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import disaggregated_clock, worker
from vecsim.kernels.sched import vllm_roles

run_clock = disaggregated_clock.bind(
    worker.bind(vllm_roles.SCHEDULER), vllm_roles.HANDOFF, source_first=True
)


@entry
def run_disaggregated(prefill, decode, handoff):
    """Run both pools to the horizon (see `disaggregated_clock`)."""
    return run_clock(prefill, decode, handoff)
