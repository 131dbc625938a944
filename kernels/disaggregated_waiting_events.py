"""Prefill and decode pools of vLLM-style ranks whose requests wait for others and whose KV events
are logged: the entry points that Python calls (see disaggregated_events.py)."""

from __future__ import annotations

from vecsim.kernels.compile.jit import entry, inner
from vecsim.kernels.fleet import disaggregated_clock, worker
from vecsim.kernels.fleet.handoff import NOW
from vecsim.kernels.fleet.handoff_events import ACCEPTED, log_step
from vecsim.kernels.fleet.handoff_waiting import WAITING_ARRIVALS, seat_blocks
from vecsim.kernels.rebinding import rebound
from vecsim.kernels.sched import vllm_events, vllm_roles_events
from vecsim.kernels.state.layout import DESTINATION, ROLE


@inner
def place(requests, pools, seats, s, q, rank):
    """Place `q` on a rank (see `vllm_roles_events.place`)."""
    seat_blocks(requests, pools, seats, s, q, rank)
    if s[ROLE] == DESTINATION:
        log_step(pools.steps, ACCEPTED, q, pools.steps.time[NOW])


_worker = rebound(worker, vllm_events.walking)
_clock = rebound(disaggregated_clock, vllm_events.walking, _worker)
run_clock = _clock.bind(
    _worker.bind(vllm_roles_events.SCHEDULER),
    vllm_roles_events.HANDOFF._replace(place=place),
    source_first=True,
    arrivals=WAITING_ARRIVALS,
)


@entry
def run_disaggregated(prefill, decode, handoff):
    """Run both pools to the horizon (see `disaggregated_waiting`)."""
    return run_clock(prefill, decode, handoff)
