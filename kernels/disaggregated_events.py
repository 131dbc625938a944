"""Prefill and decode pools whose KV events are logged: the entry points that Python calls.

As disaggregated.py, for vLLM-style ranks; pools are those of `kernels.handoff_events`, scratch that
of `kernels.events`.
"""

from __future__ import annotations

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import disaggregated_clock, worker
from vecsim.kernels.rebinding import rebound
from vecsim.kernels.sched import vllm_events, vllm_roles_events

_worker = rebound(worker, vllm_events.walking)
_clock = rebound(disaggregated_clock, vllm_events.walking, _worker)
run_clock = _clock.bind(
    _worker.bind(vllm_roles_events.SCHEDULER), vllm_roles_events.HANDOFF, source_first=True
)


@entry
def run_disaggregated(prefill, decode, handoff):
    """Run both pools to the horizon (see `disaggregated_clock`)."""
    return run_clock(prefill, decode, handoff)
