"""Prefill and decode pools of SGLang ranks whose requests wait for others and whose KV events are
logged: the entry points that Python calls (see disaggregated_sglang_events.py)."""

from __future__ import annotations

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import disaggregated_clock, worker
from vecsim.kernels.fleet.handoff_waiting import WAITING_ARRIVALS
from vecsim.kernels.rebinding import rebound
from vecsim.kernels.sched import sglang_events, sglang_roles_events

_worker = rebound(worker, sglang_events.walking)
_clock = rebound(disaggregated_clock, sglang_events.walking, _worker)
run_clock = _clock.bind(
    _worker.bind(sglang_roles_events.SCHEDULER),
    sglang_roles_events.HANDOFF,
    source_first=False,
    arrivals=WAITING_ARRIVALS,
)


@entry
def run_disaggregated(prefill, decode, handoff):
    """Run both pools to the horizon (see `disaggregated_sglang_waiting`)."""
    return run_clock(prefill, decode, handoff)
