"""Prefill and decode pools whose KV events are logged: the entry points that Python calls.

As disaggregated.py, for vLLM-style ranks; pools are those of `kernels.handoff_events`, scratch that
of `kernels.events`.
"""

from __future__ import annotations

from vecsim.kernels import disaggregated_clock, vllm_events, vllm_roles_events, worker
from vecsim.kernels.compile.jit import entry
from vecsim.kernels.rebinding import rebound

_worker = rebound(worker, vllm_events.walking)
_clock = rebound(disaggregated_clock, vllm_events.walking, _worker)
run_clock = _clock.bind(
    _worker.bind(vllm_roles_events.SCHEDULER), vllm_roles_events.HANDOFF, source_first=True
)


@entry
def run_disaggregated(prefill, decode, handoff):
    """Run both pools to the horizon (see `disaggregated_clock`)."""
    return run_clock(prefill, decode, handoff)
