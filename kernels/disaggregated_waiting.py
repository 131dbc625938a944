"""Prefill and decode pools of vLLM-style ranks whose requests wait for others: the entry points
that Python calls (see aggregated.py)."""

from __future__ import annotations

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import disaggregated_clock, worker
from vecsim.kernels.fleet.handoff_waiting import WAITING_ARRIVALS, seat_blocks
from vecsim.kernels.sched import vllm_roles

run_clock = disaggregated_clock.bind(
    worker.bind(vllm_roles.SCHEDULER),
    vllm_roles.HANDOFF._replace(place=seat_blocks),
    source_first=True,
    arrivals=WAITING_ARRIVALS,
)


@entry
def run_disaggregated(prefill, decode, handoff):
    """Run both pools to the horizon (see `disaggregated_clock`); `handoff` is a
    `handoff_waiting.WaitingHandoff`, and the rows of both sides are `seating.Seats`."""
    return run_clock(prefill, decode, handoff)
