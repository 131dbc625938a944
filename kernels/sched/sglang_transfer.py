"""What a handoff asks of SGLang ranks beside their passes.

A decode rank keeps requests that wait for pages in its arrival list (QUEUE_HEAD, invisible to a
pass), reserves pages for the first of them, one at a time, and lists activated requests in order of
activation. (Reference: runtimes, section 7; SGLang backend, A11.)

Where KV events are observed (runtimes, sections 7.2 and 11; nothing in the reference shows the
events of a decode rank, its readable source inserts and stores at activation):

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
from vecsim.kernels.cache.page_events import hand_over, log_pages, pages_activated, report
from vecsim.kernels.cache.radix_tree import lock_path, match, probe, unlock_path
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.sglang_pages import give_up_pages, leave_pages, take_pages
from vecsim.kernels.sched.sglang_queue import pages_of, remove_behind
from vecsim.kernels.sched.waiting_queue import queue_head
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NONE


# --- what a command announces ---------------------------------------------------------------------
@inner
def report_before(events, s, now):
    """What passes brought about is seen before what a command does, if events are observed."""
    if events is not None:
        report(events, s, now)


@inner
def announce(events, s, now, occasion):
    """What a command brought about can be seen `now`, if events are observed."""
    if events is not None:
        hand_over(events, s, now, occasion)


@inner
def log_prompt(events, requests, pools, s, q, now, stores):
    """The full pages of a prompt that have no other copy, in the tree or in a prompt that waits as
    well, are stored, or else removed; without prefix caching there are none."""
    if events is not None and s[R.PREFIX_CACHING] != 0:
        full = np.int64(requests.state[Q.ISL, q]) // s[R.PAGE_SIZE]
        cached = probe(requests, pools, s, q, full)
        stored = max(cached, pages_activated(events, s, q, full))
        if stored < full:
            report(events, s, now)
            if stores:
                log_pages(events, s, q, stored, full, STORED_FIRST, STORED_NEXT)
                hand_over(events, s, now, AT_ACTIVATE)
            else:
                log_pages(events, s, q, stored, full, REMOVED_FIRST, REMOVED_NEXT)
                hand_over(events, s, now, AT_RELEASE)


# --- commands -------------------------------------------------------------------------------------
@inner
def place(requests, pools, content, s, q, rank):
    """Place `q` on a rank: its path begins at the root of the rank's tree."""
    requests.state[Q.RANK, q] = rank
    requests.state[Q.TREE_NODE, q] = s[R.ROOT]


@inner
def refusal(requests, s, q):
    """Reason why the destination can never hold the prompt, or 0."""
    prompt = np.int64(requests.state[Q.ISL, q])
    if prompt >= s[R.MAX_MODEL_LEN]:
        return S.PROMPT_EXCEEDS_MAX_MODEL_LEN
    if pages_of(s, prompt) > s[R.NUM_BLOCKS]:
        return S.PROMPT_EXCEEDS_KV_CAPACITY
    return np.int64(0)


@inner
def reserve(requests, pools, s, q, now):
    """Reserve pages for the prompt of `q`; those of prompts that are in the tree are shared.
    Returns how many of them are new, or NONE: no room, but the shared ones have been touched."""
    state = requests.state
    prompt = np.int64(state[Q.ISL, q])
    hits = np.int64(0)
    node = s[R.ROOT]
    if s[R.PREFIX_CACHING] != 0:
        hits = probe(requests, pools, s, q, prompt // s[R.PAGE_SIZE])
        node = match(requests, pools, s, q, hits)
        lock_path(pools, s, node, s[R.ROOT])
    need = pages_of(s, prompt) - hits
    if need > s[R.FREE] + s[R.EVICTABLE]:
        unlock_path(pools, s, node)
        return NONE
    state[Q.TREE_NODE, q] = node
    state[Q.CACHED_PAGES, q] = hits
    state[Q.COMPUTED, q] = prompt
    if need > s[R.FREE]:
        report_before(pools.events, s, now)
        take_pages(requests, pools, s, need)
        announce(pools.events, s, now, AT_RESERVE)
    else:
        s[R.FREE] -= need
    return need


@inner
def activate(requests, pools, s, q, now):
    """The prompt has arrived: it is stored, and waits for a slot."""
    log_prompt(pools.events, requests, pools, s, q, now, np.bool_(True))
    requests.state[Q.NEXT, q] = NONE
    if s[R.ACTIVATED_HEAD] < 0:
        s[R.ACTIVATED_HEAD] = q
    else:
        requests.state[Q.NEXT, s[R.ACTIVATED_TAIL]] = q
    s[R.ACTIVATED_TAIL] = q


@inner
def release_held(requests, pools, s, q, now):
    """Give the pages of a held request back."""
    s[R.HELD] -= 1
    leave_pages(requests, pools, s, q)


@inner
def cancel(requests, pools, s, q):
    """Take the pages of a reserved request back."""
    s[R.CAPACITY_VERSION] += 1
    give_up_pages(requests, pools, s, q)


@inner
def try_in_vain(f):
    """A pass that lowers new_token_ratio and has no other effect is tried again at the same
    instant, until the ratio is as low as it gets (reference: runtimes, section 9)."""
    ratio = f[R.NEW_TOKEN_RATIO]
    lowered = ratio - f[R.RATIO_STEP] < ratio
    f[R.NEW_TOKEN_RATIO] = f[R.RATIO_MIN] if lowered else max(ratio, f[R.RATIO_MIN])


# --- deadlocks ------------------------------------------------------------------------------------
@inner
def first_waiting(requests, s, now):
    """The request that a deadlock ends, or NONE."""
    q = queue_head(requests, s, now)
    return s[R.ACTIVATED_HEAD] if q < 0 else q


@inner
def fail_waiting(requests, pools, s, q, now):
    """Take `q`, the first that waits, off its list, with its pages."""
    state = requests.state
    activated = s[R.READY_HEAD] != q
    if activated:
        s[R.ACTIVATED_HEAD] = np.int64(state[Q.NEXT, q])
    else:
        remove_behind(requests, s, NONE, q)
        if state[Q.COMPUTED, q] == 0 and state[Q.ADMISSIONS, q] > 0:
            s[R.PREEMPTED_COUNT] -= 1
    give_up_pages(requests, pools, s, q)
    if activated:
        log_prompt(pools.events, requests, pools, s, q, now, np.bool_(False))
