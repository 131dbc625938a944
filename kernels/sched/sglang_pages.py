"""KV pages of one SGLang request: taken, entered into the radix tree, given back."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.page_events import log_inserted
from vecsim.kernels.cache.radix_tree import evict, insert, lock_path, unlock_path
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.decode_batch import known_tokens
from vecsim.kernels.sched.lifecycle import complete, end_stuck, hold
from vecsim.kernels.sched.sglang_queue import pages_of
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S


@inner
def pages_held(requests, s, q):
    """Pages that an explicit request owns or shares."""
    return pages_of(s, np.int64(requests.state[Q.COMPUTED, q]))


@inner
def pages_to_grow(requests, s, q):
    """Pages that an explicit request, computed as far as it is known, needs for one more token."""
    return np.int64(known_tokens(requests, q) % s[R.PAGE_SIZE] == 0)


@inner
def take_pages(requests, pools, s, count):
    """Take `count` pages, at most all free and evictable ones."""
    evict(requests, pools, s, count - s[R.FREE])
    s[R.FREE] -= count


@inner
def enter_tree(requests, pools, s, q, start, depth, last, stores):
    """Hand pages to the tree (see `radix_tree.insert`); if it `stores`, those that were not there
    are announced."""
    free = s[R.FREE]
    end = insert(requests, pools, s, q, start, depth, last)
    if stores:
        log_inserted(pools.events, s, q, depth + s[R.FREE] - free, last)
    return end


@inner
def hold_computed(requests, pools, s, q, stores):
    """Enter the full pages that `q` has computed into the tree, and hold on to them."""
    state = requests.state
    full = np.int64(state[Q.COMPUTED, q]) // s[R.PAGE_SIZE]
    cached = np.int64(state[Q.CACHED_PAGES, q])
    if s[R.PREFIX_CACHING] == 0 or full <= cached:
        return
    start = np.int64(state[Q.TREE_NODE, q])
    end = enter_tree(requests, pools, s, q, start, cached, full, stores)
    lock_path(pools, s, end, start)
    state[Q.TREE_NODE, q] = end
    state[Q.CACHED_PAGES, q] = full


@inner
def cache_computed(requests, pools, s, q):
    """Enter the full pages that `q` has computed into the tree, where they are stored."""
    hold_computed(requests, pools, s, q, np.bool_(True))


@inner
def cache_activated(requests, pools, s, q):
    """Enter the pages of an activated prompt into the tree: they were stored at its activation."""
    hold_computed(requests, pools, s, q, np.bool_(False))


@inner
def give_up_pages(requests, pools, s, q):
    """Back to nothing computed; what is in the tree stays there until it is evicted."""
    state = requests.state
    s[R.FREE] += pages_held(requests, s, q) - state[Q.CACHED_PAGES, q]
    unlock_path(pools, s, np.int64(state[Q.TREE_NODE, q]))
    state[Q.TREE_NODE, q] = s[R.ROOT]
    state[Q.CACHED_PAGES, q] = 0
    state[Q.COMPUTED, q] = 0


@inner
def leave_pages(requests, pools, s, q):
    """What an explicit request computed enters the tree, unlocked; its other pages are free."""
    state = requests.state
    full = np.int64(state[Q.COMPUTED, q]) // s[R.PAGE_SIZE]
    if s[R.PREFIX_CACHING] != 0:
        s[R.FREE] += pages_held(requests, s, q) - full
        start = np.int64(state[Q.TREE_NODE, q])
        cached = np.int64(state[Q.CACHED_PAGES, q])
        if full > 0:
            enter_tree(requests, pools, s, q, start, cached, full, np.bool_(True))
        unlock_path(pools, s, start)
    else:
        s[R.FREE] += pages_held(requests, s, q)


@inner
def finish(requests, pools, w, s, q, end):
    """An explicit request has produced what the rank asks of it: complete it; a prefill rank keeps
    its pages, though those of the prompt are in the tree from now on."""
    if s[R.ROLE] == R.SOURCE:
        cache_computed(requests, pools, s, q)
        hold(requests, w, s, q)
        return
    s[R.CAPACITY_VERSION] += 1
    leave_pages(requests, pools, s, q)
    complete(requests, w, s, q, end)


@inner
def end_stuck_request(requests, pools, w, s, q, reason, now):
    """End a request that has left its queue, because nothing else would let the rank go on."""
    state = requests.state
    if state[Q.COMPUTED, q] == 0 and state[Q.ADMISSIONS, q] > 0:
        s[R.PREEMPTED_COUNT] -= 1
    give_up_pages(requests, pools, s, q)
    requests.state[Q.RETIRED, q] = 1
    status = S.FAILED if state[Q.GENERATED, q] > 0 else S.REJECTED
    end_stuck(requests, w, s, q, status, reason, now)
