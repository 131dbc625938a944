"""Paged KV pool of one rank: free blocks, cached copies, prefix index, evictable list, eviction.

A block is free, owned and not findable (a plain count), or a *copy*: cached under an identity and
findable. Blocks that only their own request can find again (everything behind SHARED) need no copy:
while owned they are a count, and when released they form one idle *run*, eaten from its tail.
Identities are dense index rows; a row's oldest copy is the one that look-ups use.

`s` is the rank's row (reference: vLLM backend, sections 4 and 5).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.belady import next_use
from vecsim.kernels.cache.kv_events import (
    REMOVED_FIRST,
    STORED_FIRST,
    begin_run,
    end_removed,
    end_stored,
    note_removed,
    note_stored,
)
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import pools as P
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state.codes import NEVER, NONE, UNLIMITED


@inner
def blocks_of(tokens, block_size):
    """Blocks that hold `tokens` tokens."""
    return (tokens + block_size - 1) // block_size


@inner
def row_run(requests, s, q, block):
    """(row, count): index row of a request's block, and how many blocks from it on have
    consecutive rows."""
    state = requests.state
    own = block - state[Q.OWN_FROM, q]
    if own >= 0:
        return state[Q.OWN_ROWS, q] + own, UNLIMITED
    per_node = s[R.BLOCKS_PER_NODE]
    inside = block % per_node
    first = np.int64(requests.path_rows[state[Q.PATH, q] + block // per_node])
    return first + inside, min(per_node - inside, -own)


@inner
def link_evictable(pools, s, node):
    """Append a node to the tail of the evictable list."""
    tail = s[R.EVICTABLE_TAIL]
    pools.nodes[P.PREVIOUS, node] = tail
    pools.nodes[P.FOLLOWING, node] = NONE
    if tail < 0:
        s[R.EVICTABLE_HEAD] = node
    else:
        pools.nodes[P.FOLLOWING, tail] = node
    s[R.EVICTABLE_TAIL] = node


@inner
def unlink_evictable(pools, s, node):
    """Take a node out of the evictable list."""
    before = np.int64(pools.nodes[P.PREVIOUS, node])
    after = np.int64(pools.nodes[P.FOLLOWING, node])
    if before < 0:
        s[R.EVICTABLE_HEAD] = after
    else:
        pools.nodes[P.FOLLOWING, before] = after
    if after < 0:
        s[R.EVICTABLE_TAIL] = before
    else:
        pools.nodes[P.PREVIOUS, after] = before


@inner
def new_copy(pools, s, row):
    """A referenced copy of `row`, the newest of its identity."""
    nodes = pools.nodes
    index = pools.index
    copy = s[R.COPY_FREE]
    if copy >= 0:
        s[R.COPY_FREE] = nodes[P.NEWER, copy]
    else:
        copy = s[R.COPY_BUMP]
        s[R.COPY_BUMP] += 1
    older = np.int64(index[P.NEWEST, row])
    nodes[P.ROW, copy] = row
    nodes[P.REFERENCES, copy] = 1
    nodes[P.OLDER, copy] = older
    nodes[P.NEWER, copy] = NONE
    if older < 0:
        index[P.PRIMARY, row] = copy
    else:
        nodes[P.NEWER, older] = copy
        s[R.DUPLICATES] += 1
    index[P.NEWEST, row] = copy
    return copy


@inner
def forget_copy(pools, s, copy):
    """Drop an evicted copy; the next oldest of its identity takes over."""
    nodes = pools.nodes
    row = nodes[P.ROW, copy]
    older = np.int64(nodes[P.OLDER, copy])
    newer = np.int64(nodes[P.NEWER, copy])
    if older < 0:
        pools.index[P.PRIMARY, row] = newer
    else:
        nodes[P.NEWER, older] = newer
    if newer < 0:
        pools.index[P.NEWEST, row] = older
    else:
        nodes[P.OLDER, newer] = older
    s[R.DUPLICATES] -= np.int64(older >= 0 or newer >= 0)
    nodes[P.NEWER, copy] = s[R.COPY_FREE]
    s[R.COPY_FREE] = copy


@inner
def belady_victim(requests, pools, next_uses, s):
    """Idle copy to evict: a duplicate, else the farthest next use, else the earliest release."""
    victim = s[R.EVICTABLE_HEAD]
    victim_use = NONE
    node = victim
    while node >= 0:
        row = pools.nodes[P.ROW, node]
        if pools.index[P.PRIMARY, row] != pools.index[P.NEWEST, row]:
            return node
        use = NEVER
        content = np.int64(pools.index[P.CONTENT, row])
        if content >= 0:
            per_node = s[R.BLOCKS_PER_NODE]
            use = next_use(requests, next_uses, content // per_node, content % per_node)
        if use > victim_use:
            victim = node
            victim_use = use
        if victim_use == NEVER and s[R.DUPLICATES] == 0:
            # Nothing is used later, and no duplicate is to be found further on.
            return victim
        node = np.int64(pools.nodes[P.FOLLOWING, node])
    return victim


@inner
def next_victim(next_uses, requests, pools, s):
    """Idle copy or run to evict: the head of the evictable list, or Belady's choice."""
    if next_uses is not None:
        return belady_victim(requests, pools, next_uses, s)
    return s[R.EVICTABLE_HEAD]


@inner
def evict(requests, pools, s, count):
    """Evict `count` evictable blocks: one event, as far as no copy of them is left."""
    first_run = s[R.FIRST_RUN]
    run_cached = requests.state[Q.RUN_CACHED]
    s[R.EVICTABLE] -= count
    begin_run(pools.events, s, REMOVED_FIRST)
    while count > 0:
        node = next_victim(pools.next_uses, requests, pools, s)
        if node < first_run:
            row = np.int64(pools.nodes[P.ROW, node])
            unlink_evictable(pools, s, node)
            forget_copy(pools, s, node)
            note_removed(pools.events, s, row, np.int64(pools.index[P.PRIMARY, row]))
            count -= 1
        else:
            eaten = min(count, np.int64(run_cached[node - first_run]))
            run_cached[node - first_run] -= eaten
            if run_cached[node - first_run] == 0:
                unlink_evictable(pools, s, node)
            count -= eaten
    end_removed(pools.events, s)


@inner
def take_blocks(requests, pools, s, count):
    """Take `count` blocks for new content: free ones first, then by eviction."""
    evicted = max(count - s[R.FREE], np.int64(0))
    s[R.FREE] -= count - evicted
    if evicted > 0:
        evict(requests, pools, s, evicted)


@inner
def find_prefix(requests, pools, s, q, most):
    """(hits, active): leading blocks of `q`, at most `most`, that are cached; referenced ones
    among them."""
    hits = np.int64(0)
    active = np.int64(0)
    if s[R.PREFIX_CACHING] == 0:
        return hits, active
    shared = np.int64(requests.state[Q.SHARED, q])
    last = min(most, shared)
    while hits < last:
        row, count = row_run(requests, s, q, hits)
        for _ in range(min(count, last - hits)):
            copy = pools.index[P.PRIMARY, row]
            if copy < 0:
                return hits, active
            active += np.int64(pools.nodes[P.REFERENCES, copy] > 0)
            hits += 1
            row += 1
    if hits == shared:
        hits += min(most - hits, np.int64(requests.state[Q.RUN_CACHED, q]))
    return hits, active


@inner
def reference_prefix(requests, pools, s, q, hits):
    """Reference the `hits` leading blocks that `find_prefix` reported."""
    shared = min(hits, np.int64(requests.state[Q.SHARED, q]))
    block = np.int64(0)
    while block < shared:
        row, count = row_run(requests, s, q, block)
        for _ in range(min(count, shared - block)):
            copy = np.int64(pools.index[P.PRIMARY, row])
            if pools.nodes[P.REFERENCES, copy] == 0:
                unlink_evictable(pools, s, copy)
                s[R.EVICTABLE] -= 1
            pools.nodes[P.REFERENCES, copy] += 1
            block += 1
            row += 1
    run = hits - shared
    if run > 0:
        requests.state[Q.RUN_CACHED, q] -= run
        s[R.EVICTABLE] -= run
        if requests.state[Q.RUN_CACHED, q] == 0:
            unlink_evictable(pools, s, s[R.FIRST_RUN] + q)
    requests.state[Q.HITS, q] = shared
    requests.state[Q.OWN_TAIL, q] = NONE


@inner
def cache_full_blocks(requests, pools, s, q, first, end):
    """Make the just computed full blocks first..end-1 findable; those that were not are stored."""
    if s[R.PREFIX_CACHING] == 0:
        return
    end = min(end, np.int64(requests.state[Q.SHARED, q]))
    block = first
    begin_run(pools.events, s, STORED_FIRST)
    while block < end:
        row, count = row_run(requests, s, q, block)
        for _ in range(min(count, end - block)):
            note_stored(pools.events, s, row, np.int64(pools.index[P.PRIMARY, row]))
            copy = new_copy(pools, s, row)
            pools.nodes[P.OWN_BEFORE, copy] = requests.state[Q.OWN_TAIL, q]
            requests.state[Q.OWN_TAIL, q] = copy
            block += 1
            row += 1
    end_stored(pools.events, s)


@inner
def release_copy(pools, s, copy):
    """Give back one reference."""
    pools.nodes[P.REFERENCES, copy] -= 1
    if pools.nodes[P.REFERENCES, copy] == 0:
        link_evictable(pools, s, copy)
        s[R.EVICTABLE] += 1


@inner
def release(requests, pools, s, q, computed):
    """Give back all blocks of `q`, which hold `computed` tokens: the last block first."""
    full = computed // s[R.BLOCK_SIZE]
    s[R.FREE] += np.int64(computed % s[R.BLOCK_SIZE] != 0)
    if s[R.PREFIX_CACHING] == 0:
        s[R.FREE] += full
        return
    shared = min(full, np.int64(requests.state[Q.SHARED, q]))
    if full > shared:
        requests.state[Q.RUN_CACHED, q] = full - shared
        link_evictable(pools, s, s[R.FIRST_RUN] + q)
        s[R.EVICTABLE] += full - shared
    hits = np.int64(requests.state[Q.HITS, q])
    copy = np.int64(requests.state[Q.OWN_TAIL, q])
    for _ in range(shared - hits):
        release_copy(pools, s, copy)
        copy = np.int64(pools.nodes[P.OWN_BEFORE, copy])
    for back in range(hits):
        row, _ = row_run(requests, s, q, hits - 1 - np.int64(back))
        release_copy(pools, s, np.int64(pools.index[P.PRIMARY, row]))
    requests.state[Q.OWN_TAIL, q] = NONE
    requests.state[Q.HITS, q] = 0
