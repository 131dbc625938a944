"""Prefill and decode ranks of SGLang whose KV events are logged.

The roles of sglang_roles.py around the tree and the pass of sglang_events.py. What is in the tree
is stored, and the prompts of activated requests are, though they enter it only when a pass admits
them (reference: runtimes, sections 7.2 and 11; nothing in the reference shows the events of a
decode rank, its readable source inserts and stores at activation):

* Activation stores those full pages of a prompt that are not stored yet, whatever becomes of them.
  The others have a copy in the tree, or in a prompt that waits as well.
* Admission enters them into the tree, and stores nothing. A copy that the tree loses while the
  prompt waits is not removed, one that it gets is not stored.
* A prompt that a deadlock ends while it waits is removed, but for pages with another copy.

What a command brings about is seen when it is done. It does not overtake what passes brought about
and the rank has not reported, which is seen at the same time. Sources store their prompts when they
are computed, so that a release brings nothing about.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.kv_events import (
    AT_ACTIVATE,
    AT_RELEASE,
    AT_RESERVE,
    REMOVED_FIRST,
    REMOVED_NEXT,
    STORED_FIRST,
    STORED_NEXT,
)
from vecsim.kernels.cache.radix_tree import probe
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
from vecsim.kernels.sched import sglang, sglang_events, sglang_rank, sglang_roles
from vecsim.kernels.sched.sglang_events import hand_over, log_pages, pages_activated, report
from vecsim.kernels.state.layout import (
    DESTINATION,
    ISL,
    PAGE_SIZE,
    PREFIX_CACHING,
    READY_HEAD,
    ROLE,
)

# --- the pass -------------------------------------------------------------------------------------
_observed = (sglang_events._tree, sglang_events._pages, sglang_events._batch)
_ends = rebound(sglang_roles, *_observed)


@inner
def finish(requests, pools, w, s, q, end):
    """The request has produced what this role asks of it."""
    kind = COMPLETED if s[ROLE] == DESTINATION else SOURCE_HELD
    log_step(pools.steps, kind, q, end)
    _ends.finish(requests, pools, w, s, q, end)


_pass = rebound(
    sglang,
    *_observed,
    form_batch=_ends.form_batch,
    start_decode=_ends.start_decode,
    finish=finish,
)
_rank = rebound(sglang_rank, *_observed, _pass, tokens_asked=_ends.tokens_asked)
_plain = sglang_events.observing(_rank.bind(sglang_events._tree.evict))


@inner
def evict_for_destination(requests, pools, s, count):
    """Free `count` pages for a prompt (see `radix.evict`)."""
    if count <= 0:
        return
    now = pools.steps.time[NOW]
    report(pools, s, now)
    sglang_events._tree.evict(requests, pools, s, count)
    hand_over(pools, s, now, AT_RESERVE)


_roles = rebound(
    sglang_roles,
    *_observed,
    admit_activated=sglang_roles.admit_activated,
    finish=finish,
    evict=evict_for_destination,
    _schedule=_plain.schedule,
    _steady_passes=_plain.steady_passes,
    _apply=_plain.apply,
)
SCHEDULER = _plain._replace(
    has_work=_roles.has_work,
    steady_passes=_roles.steady_passes,
    schedule=_roles.schedule,
    tokens_to_emit=_roles.tokens_to_emit,
    apply=_roles.apply,
)


# --- the handoff ----------------------------------------------------------------------------------
@inner
def place(requests, pools, rows, s, q, rank):
    """Place `q` on a rank."""
    sglang_roles.place(requests, pools, rows, s, q, rank)
    if s[ROLE] == DESTINATION:
        log_step(pools.steps, ACCEPTED, q, pools.steps.time[NOW])


@inner
def reserve(requests, pools, s, q):
    """Reserve pages for the prompt of `q` (see `sglang_roles.reserve`)."""
    new_pages = _roles.reserve(requests, pools, s, q)
    if new_pages >= 0:
        log_step(pools.steps, RESERVED, q, pools.steps.time[NOW])
    return new_pages


@inner
def pages_stored(requests, pools, s, q):
    """How many pages of the prompt of `q` are in the tree or in other prompts that were activated,
    and how many it has; 0 without prefix caching, where nothing is stored."""
    if s[PREFIX_CACHING] == 0:
        return np.int64(0), np.int64(0)
    full = np.int64(requests.state[ISL, q]) // s[PAGE_SIZE]
    cached = probe(requests, pools, s, q, full)
    return max(cached, pages_activated(pools, s, q, full)), full


@inner
def activate(requests, pools, s, q):
    """The prompt of `q` has arrived: it is stored, and waits for a slot."""
    now = pools.steps.time[NOW]
    stored, full = pages_stored(requests, pools, s, q)
    if stored < full:
        report(pools, s, now)
        log_pages(pools, s, q, stored, full, STORED_FIRST, STORED_NEXT)
        hand_over(pools, s, now, AT_ACTIVATE)
    sglang_roles.activate(requests, pools, s, q)
    log_step(pools.steps, ACTIVATED, q, now)


@inner
def release_source(requests, pools, s, q):
    """Give the pages of a held request back, because it was activated or canceled."""
    _roles.release_source(requests, pools, s, q)
    log_step(pools.steps, SOURCE_RELEASED, q, pools.steps.time[NOW])


@inner
def fail_waiting(requests, pools, s, q):
    """Take `q`, the first that waits, off its list, with its pages."""
    activated = s[READY_HEAD] != q
    sglang_roles.fail_waiting(requests, pools, s, q)
    if not activated:
        return
    now = pools.steps.time[NOW]
    stored, full = pages_stored(requests, pools, s, q)
    if stored < full:
        report(pools, s, now)
        log_pages(pools, s, q, stored, full, REMOVED_FIRST, REMOVED_NEXT)
        hand_over(pools, s, now, AT_RELEASE)


HANDOFF = sglang_roles.HANDOFF._replace(
    place=place,
    reserve=reserve,
    activate=activate,
    release_source=release_source,
    fail_waiting=fail_waiting,
)
