"""KV pages of one SGLang request: taken, entered into the radix tree, given back.

`evict`, here and in the pass, is the kernel that frees unlocked pages (`radix.evict`, or
`radix.evict_by_forecast`).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.radix_tree import insert, lock_path, unlock_path
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.decode_batch import known_tokens
from vecsim.kernels.sched.lifecycle import complete, settle
from vecsim.kernels.sched.sglang_queue import pages_of
from vecsim.kernels.state.layout import (
    ADMISSIONS,
    CACHED_PAGES,
    COMPUTED,
    FAILED,
    FREE,
    GENERATED,
    PAGE_SIZE,
    PREEMPTED_COUNT,
    PREFIX_CACHING,
    REJECTED,
    RETIRED,
    ROOT,
    TREE_NODE,
)


@inner
def pages_held(requests, s, q):
    """Pages that an explicit request owns or shares."""
    return pages_of(s, np.int64(requests.state[COMPUTED, q]))


@inner
def pages_to_grow(requests, s, q):
    """Pages that an explicit request, computed as far as it is known, needs for one more token."""
    return np.int64(known_tokens(requests, q) % s[PAGE_SIZE] == 0)


@inner
def take_pages(requests, pools, s, count, evict):
    """Take `count` pages, at most all free and evictable ones."""
    evict(requests, pools, s, count - s[FREE])
    s[FREE] -= count


@inner
def cache_computed(requests, pools, s, q):
    """Enter the full pages that `q` has computed into the tree, and hold on to them."""
    state = requests.state
    full = state[COMPUTED, q] // s[PAGE_SIZE]
    cached = np.int64(state[CACHED_PAGES, q])
    if s[PREFIX_CACHING] == 0 or full <= cached:
        return
    start = np.int64(state[TREE_NODE, q])
    end = insert(requests, pools, s, q, start, cached, full)
    lock_path(pools, s, end, start)
    state[TREE_NODE, q] = end
    state[CACHED_PAGES, q] = full


@inner
def give_up_pages(requests, pools, s, q):
    """Back to nothing computed; what is in the tree stays there until it is evicted."""
    state = requests.state
    s[FREE] += pages_held(requests, s, q) - state[CACHED_PAGES, q]
    unlock_path(pools, s, np.int64(state[TREE_NODE, q]))
    state[TREE_NODE, q] = s[ROOT]
    state[CACHED_PAGES, q] = 0
    state[COMPUTED, q] = 0


@inner
def leave_pages(requests, pools, s, q):
    """What an explicit request computed enters the tree, unlocked; its other pages are free."""
    state = requests.state
    full = np.int64(state[COMPUTED, q]) // s[PAGE_SIZE]
    if s[PREFIX_CACHING] != 0:
        s[FREE] += pages_held(requests, s, q) - full
        start = np.int64(state[TREE_NODE, q])
        if full > 0:
            insert(requests, pools, s, q, start, np.int64(state[CACHED_PAGES, q]), full)
        unlock_path(pools, s, start)
    else:
        s[FREE] += pages_held(requests, s, q)


@inner
def finish(requests, pools, w, s, q, end):
    """Complete an explicit request."""
    leave_pages(requests, pools, s, q)
    complete(requests, w, q, end)


@inner
def end_settled(requests, pools, w, s, q, reason, now):
    """End a request that has left its queue, because nothing else would let the rank go on."""
    state = requests.state
    if state[COMPUTED, q] == 0 and state[ADMISSIONS, q] > 0:
        s[PREEMPTED_COUNT] -= 1
    give_up_pages(requests, pools, s, q)
    requests.state[RETIRED, q] = 1
    status = FAILED if state[GENERATED, q] > 0 else REJECTED
    settle(requests, w, s, q, status, reason, now)
