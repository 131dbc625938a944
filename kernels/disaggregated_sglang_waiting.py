"""Prefill and decode pools of SGLang ranks whose requests wait for others: the entry points that
Python calls (see aggregated.py)."""

from __future__ import annotations

from vecsim.kernels import disaggregated_clock, sglang_roles, worker
from vecsim.kernels.compile.jit import entry
from vecsim.kernels.handoff_waiting import WAITING_ARRIVALS

run_clock = disaggregated_clock.bind(
    worker.bind(sglang_roles.SCHEDULER),
    sglang_roles.HANDOFF,
    source_first=False,
    arrivals=WAITING_ARRIVALS,
)


@entry
def run_disaggregated(prefill, decode, handoff):
    """Run both pools to the horizon (see `disaggregated_clock`); `handoff` is a
    `handoff_waiting.WaitingHandoff`."""
    return run_clock(prefill, decode, handoff)
