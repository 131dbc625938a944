"""Prefill and decode pools of vLLM-style ranks: the entry points that Python calls.

See aggregated.py for why they are functions of this module.
"""

from __future__ import annotations

from vecsim.kernels import disaggregated_clock, vllm_roles, worker
from vecsim.kernels.compile.jit import entry

run_clock = disaggregated_clock.bind(
    worker.bind(vllm_roles.SCHEDULER), vllm_roles.HANDOFF, source_first=True
)


@entry
def run_disaggregated(prefill, decode, handoff):
    """Run both pools to the horizon (see `disaggregated_clock`)."""
    return run_clock(prefill, decode, handoff)
