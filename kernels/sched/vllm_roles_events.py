"""Prefill and decode ranks of vLLM and TensorRT-LLM whose KV events are logged.

The roles of vllm_roles.py around the pass of vllm_events.py. Full blocks of a prompt are stored on
the decode rank when its request is activated, not before (reference: runtimes, section 7.2).
"""

from __future__ import annotations

from vecsim.kernels.cache import content
from vecsim.kernels.cache.kv_events import (
    AT_ACTIVATE,
    AT_PASS_END,
    AT_RELEASE,
    AT_RESERVE,
    mark_visible,
)
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.handoff import NOW
from vecsim.kernels.fleet.handoff_events import (
    ACCEPTED,
    ACTIVATED,
    COMPLETED,
    RESERVED,
    SOURCE_HELD,
    SOURCE_RELEASED,
    log_step,
)
from vecsim.kernels.rebinding import rebound
from vecsim.kernels.sched import vllm, vllm_events, vllm_rank, vllm_roles
from vecsim.kernels.state.layout import DESTINATION, ROLE

# --- the pass -------------------------------------------------------------------------------------
_SHARED = {
    name: getattr(vllm_events.observed_vllm, name)
    for name in (
        "leave",
        "dissolve_front",
        "dissolve_scheduled_front",
        "grow_running",
        "compute",
        "schedule_running",
        "schedule_explicit",
        "make_room",
    )
}
"""Parts of the observed pass that are the same in every role: one instance is enough."""

_bases = (vllm_events.observed_vllm, vllm_events.pool)
_admission = rebound(
    vllm,
    vllm_events.pool,
    queue_head=vllm_roles.ordinary_head,
    drop_head=vllm_roles.drop_head,
    settle_standstill=vllm_roles.settle_standstill,
    **_SHARED,
)
_ends = rebound(vllm_roles, *_bases, _admit_ordinary=_admission.admit_waiting)


@inner
def finish(requests, pools, w, s, q, end):
    """The request has produced what this role asks of it."""
    kind = COMPLETED if s[ROLE] == DESTINATION else SOURCE_HELD
    log_step(pools.steps, kind, q, end)
    _ends.finish(requests, pools, w, s, q, end)


_pass = rebound(vllm, vllm_events.pool, admit_waiting=_ends.admit_waiting, finish=finish, **_SHARED)
_rank = rebound(vllm_rank, _pass)
_roles = rebound(vllm_roles, *_bases, _rank=_rank)


@inner
def apply(requests, pools, times, scratch, w, s, f, lists, start, end):
    """Step 4 of a pass: what was logged when it was scheduled becomes visible at its end."""
    mark_visible(pools.events, s, end, AT_PASS_END)
    return _rank.apply(requests, pools, times, scratch, w, s, f, lists, start, end)


SCHEDULER = vllm_roles.SCHEDULER._replace(
    schedule=_roles.schedule,
    apply=apply,
    settle_stretch=_rank.settle_stretch,
    room=vllm_events.room,
)


# --- the handoff ----------------------------------------------------------------------------------
@inner
def place(requests, pools, rows, s, q, r):
    """Place `q` on the rank with number `r`."""
    content.place_blocks(requests, pools, rows, s, q, r)
    if s[ROLE] == DESTINATION:
        log_step(pools.steps, ACCEPTED, q, pools.steps.time[NOW])


@inner
def reserve(requests, pools, s, q):
    """Reserve blocks for the prompt of `q` (see `vllm_roles.reserve`)."""
    new_blocks = _roles.reserve(requests, pools, s, q)
    if new_blocks >= 0:
        now = pools.steps.time[NOW]
        mark_visible(pools.events, s, now, AT_RESERVE)
        log_step(pools.steps, RESERVED, q, now)
    return new_blocks


@inner
def activate(requests, pools, s, q):
    """The prompt of `q` has arrived (see `vllm_roles.activate`)."""
    now = pools.steps.time[NOW]
    _roles.activate(requests, pools, s, q)
    mark_visible(pools.events, s, now, AT_ACTIVATE)
    log_step(pools.steps, ACTIVATED, q, now)


@inner
def release_source(requests, pools, s, q):
    """Give the blocks of a held request back, because it was activated or canceled."""
    now = pools.steps.time[NOW]
    _roles.release_source(requests, pools, s, q)
    mark_visible(pools.events, s, now, AT_RELEASE)
    log_step(pools.steps, SOURCE_RELEASED, q, now)


HANDOFF = vllm_roles.HANDOFF._replace(
    place=place,
    reserve=reserve,
    activate=activate,
    release_source=release_source,
    fail_waiting=_roles.fail_waiting,
)
