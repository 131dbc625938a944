"""SGLang's radix tree of one rank, with keys kept as spans of request paths.

A node covers the pages START..END of its path. Keys are never stored: a node names a request whose
path goes through it, and two paths agree where the prefix tree of the workload says so, run by run.
Pages behind the shared part of a path (prompt tails and generated tokens) belong to that request
alone, or to its family: the turns of a session that all begin with the turn before. Children are
found in one open-addressing table by (parent, first page). Unlocked nodes form a list by time of
last access, so the least recently used leaf is at its head, or just behind nodes of its own path.

`s` is the rank's row, `pools` a `Forest`; FREE counts pages nobody has, IDLE those of unlocked
nodes (reference: SGLang backend, radix tree).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.belady import next_use
from vecsim.kernels.cache.page_events import log_cut
from vecsim.kernels.cache.page_keys import common_depth, page_key
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import pools as P
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state.codes import NEVER, NONE

_PARENT_FACTOR = np.int64(0x2545F491)
_KEY_FACTOR = np.int64(0x1B873593)


# --- children -------------------------------------------------------------------------------------
@inner
def home_slot(pools, parent, key):
    """Where the search for a child begins."""
    mixed = parent * _PARENT_FACTOR + key * _KEY_FACTOR
    return (mixed ^ (mixed >> np.int64(29))) & np.int64(len(pools.table) - 1)


@inner
def find_slot(pools, parent, key):
    """Slot of a child, or the empty slot where it would be."""
    mask = np.int64(len(pools.table) - 1)
    slot = home_slot(pools, parent, key)
    node = np.int64(pools.table[slot])
    while node >= 0 and (pools.nodes[P.PARENT, node] != parent or pools.nodes[P.KEY, node] != key):
        slot = (slot + 1) & mask
        node = np.int64(pools.table[slot])
    return slot


@inner
def find_child(pools, parent, key):
    """Child of `parent` that begins with the page `key`, or NONE."""
    return np.int64(pools.table[find_slot(pools, parent, key)])


@inner
def drop_child(pools, node):
    """Take a node out of the table, closing the gap it leaves."""
    table = pools.table
    mask = np.int64(len(table) - 1)
    gap = find_slot(
        pools, np.int64(pools.nodes[P.PARENT, node]), np.int64(pools.nodes[P.KEY, node])
    )
    slot = (gap + 1) & mask
    while table[slot] >= 0:
        other = np.int64(table[slot])
        parent = np.int64(pools.nodes[P.PARENT, other])
        home = home_slot(pools, parent, np.int64(pools.nodes[P.KEY, other]))
        if ((slot - home) & mask) >= ((slot - gap) & mask):
            table[gap] = other
            gap = slot
        slot = (slot + 1) & mask
    table[gap] = NONE


@inner
def build_table(pools):
    """Enter all nodes into an empty table."""
    for node in range(pools.state[P.NODE_BUMP]):
        parent = np.int64(pools.nodes[P.PARENT, node])
        if parent >= 0:
            pools.table[find_slot(pools, parent, np.int64(pools.nodes[P.KEY, node]))] = node
    pools.state[P.TABLE_STALE] = 0


@inner
def clear(pools, roots):
    """Forget all nodes but the `roots` roots."""
    pools.table[:] = NONE
    pools.state[P.UNUSED_HEAD] = NONE
    pools.state[P.UNUSED_COUNT] = 0
    pools.state[P.NODE_BUMP] = roots


# --- nodes ----------------------------------------------------------------------------------------
@inner
def new_node(requests, pools, s, parent, owner, start, end, time):
    """A childless, unlocked node, entered under its parent but not among the unlocked ones."""
    nodes = pools.nodes
    node = pools.state[P.UNUSED_HEAD]
    if node >= 0:
        pools.state[P.UNUSED_HEAD] = nodes[P.MORE_RECENT, node]
        pools.state[P.UNUSED_COUNT] -= 1
    else:
        node = pools.state[P.NODE_BUMP]
        pools.state[P.NODE_BUMP] = node + 1
    key = page_key(requests, s, owner, start)
    pools.table[find_slot(pools, parent, key)] = node
    nodes[P.OWNER, node] = owner
    nodes[P.START, node] = start
    nodes[P.END, node] = end
    nodes[P.KEY, node] = key
    nodes[P.PARENT, node] = parent
    nodes[P.CHILDREN, node] = 0
    nodes[P.LOCKS, node] = 0
    nodes[P.TIME, node] = time
    return node


@inner
def link_behind(pools, s, node, before):
    """Put a node behind `before` (NONE: first) in the list of unlocked nodes."""
    nodes = pools.nodes
    after = s[R.EVICTABLE_HEAD] if before < 0 else np.int64(nodes[P.MORE_RECENT, before])
    nodes[P.LESS_RECENT, node] = before
    nodes[P.MORE_RECENT, node] = after
    if before < 0:
        s[R.EVICTABLE_HEAD] = node
    else:
        nodes[P.MORE_RECENT, before] = node
    if after < 0:
        s[R.EVICTABLE_TAIL] = node
    else:
        nodes[P.LESS_RECENT, after] = node


@inner
def unlink(pools, s, node):
    """Take a node out of the list of unlocked nodes."""
    nodes = pools.nodes
    before = np.int64(nodes[P.LESS_RECENT, node])
    after = np.int64(nodes[P.MORE_RECENT, node])
    if before < 0:
        s[R.EVICTABLE_HEAD] = after
    else:
        nodes[P.MORE_RECENT, before] = after
    if after < 0:
        s[R.EVICTABLE_TAIL] = before
    else:
        nodes[P.LESS_RECENT, after] = before


@inner
def touch(pools, s, node, time):
    """Note an access; times only ever increase."""
    pools.nodes[P.TIME, node] = time
    if pools.nodes[P.LOCKS, node] == 0 and s[R.EVICTABLE_TAIL] != node:
        unlink(pools, s, node)
        link_behind(pools, s, node, s[R.EVICTABLE_TAIL])


@inner
def lock_path(pools, s, node, top):
    """Lock the nodes from `node` up to, without, `top`."""
    nodes = pools.nodes
    while node != top:
        if nodes[P.LOCKS, node] == 0:
            unlink(pools, s, node)
            s[R.EVICTABLE] -= np.int64(nodes[P.END, node]) - nodes[P.START, node]
        nodes[P.LOCKS, node] += 1
        node = np.int64(nodes[P.PARENT, node])


@inner
def unlock_path(pools, s, node):
    """Unlock the nodes from `node` up to the root."""
    nodes = pools.nodes
    while node != s[R.ROOT]:
        nodes[P.LOCKS, node] -= 1
        if nodes[P.LOCKS, node] == 0:
            before = s[R.EVICTABLE_TAIL]
            while before >= 0 and nodes[P.TIME, before] > nodes[P.TIME, node]:
                before = np.int64(nodes[P.LESS_RECENT, before])
            link_behind(pools, s, node, before)
            s[R.EVICTABLE] += np.int64(nodes[P.END, node]) - nodes[P.START, node]
        node = np.int64(nodes[P.PARENT, node])


@inner
def split(requests, pools, s, child, depth):
    """Cut a node at `depth`. A new node takes the pages above; whoever locked the old one holds on
    to its end. Returns the new node."""
    nodes = pools.nodes
    parent = np.int64(nodes[P.PARENT, child])
    owner = np.int64(nodes[P.OWNER, child])
    drop_child(pools, child)
    time = np.int64(nodes[P.TIME, child])
    prefix = new_node(
        requests, pools, s, parent, owner, np.int64(nodes[P.START, child]), depth, time
    )
    nodes[P.LOCKS, prefix] = nodes[P.LOCKS, child]
    nodes[P.CHILDREN, prefix] = 1
    if nodes[P.LOCKS, child] == 0:
        link_behind(pools, s, prefix, np.int64(nodes[P.LESS_RECENT, child]))
    key = page_key(requests, s, owner, depth)
    nodes[P.START, child] = depth
    nodes[P.PARENT, child] = prefix
    nodes[P.KEY, child] = key
    pools.table[find_slot(pools, prefix, key)] = child
    return prefix


# --- the tree's operations ------------------------------------------------------------------------
@inner
def probe(requests, pools, s, q, pages):
    """How many of the first `pages` pages of a request are in the tree. Leaves no trace."""
    node = s[R.ROOT]
    depth = np.int64(0)
    while depth < pages:
        node = find_child(pools, node, page_key(requests, s, q, depth))
        if node < 0:
            return depth
        end = np.int64(pools.nodes[P.END, node])
        owner = np.int64(pools.nodes[P.OWNER, node])
        depth = common_depth(requests, s, q, owner, depth, min(end, pages))
        if depth < end:
            return depth
    return depth


@inner
def match(requests, pools, s, q, pages):
    """Touch the path of the first `pages` pages, which are all there. Returns the node that ends
    with them, split off if need be."""
    s[R.TREE_CLOCK] += 1
    node = s[R.ROOT]
    depth = np.int64(0)
    while depth < pages:
        node = find_child(pools, node, page_key(requests, s, q, depth))
        touch(pools, s, node, s[R.TREE_CLOCK])
        depth = np.int64(pools.nodes[P.END, node])
        if depth > pages:
            return split(requests, pools, s, node, pages)
    return node


@inner
def extends(pools, s, node, start):
    """Whether an insertion from `start` lengthens `node` in place."""
    if node == s[R.ROOT] or pools.nodes[P.CHILDREN, node] > 0:
        return False
    locks = pools.nodes[P.LOCKS, node]
    return locks == 0 or (node == start and locks == 1)


@inner
def insert(requests, pools, s, q, start, depth, last):
    """Hand the pages depth..last of a request to the tree, below the node `start` that ends at
    `depth`. Its copies of pages that are there already become free. Returns the node that ends
    with the last page."""
    nodes = pools.nodes
    s[R.TREE_CLOCK] += 1
    time = s[R.TREE_CLOCK]
    s[R.UNSORTED] = 1
    node = start
    while node != s[R.ROOT]:
        touch(pools, s, node, time)
        node = np.int64(nodes[P.PARENT, node])
    node = start
    while depth < last:
        if extends(pools, s, node, start):
            nodes[P.OWNER, node] = q
            nodes[P.END, node] = last
            if nodes[P.LOCKS, node] == 0:
                s[R.EVICTABLE] += last - depth
            return node
        child = find_child(pools, node, page_key(requests, s, q, depth))
        if child < 0:
            s[R.TREE_CLOCK] += 1
            child = new_node(requests, pools, s, node, q, depth, last, s[R.TREE_CLOCK])
            link_behind(pools, s, child, s[R.EVICTABLE_TAIL])
            nodes[P.CHILDREN, node] += 1
            s[R.EVICTABLE] += last - depth
            return child
        touch(pools, s, child, time)
        end = np.int64(nodes[P.END, child])
        owner = np.int64(nodes[P.OWNER, child])
        agreed = common_depth(requests, s, q, owner, depth, min(end, last))
        s[R.FREE] += agreed - depth
        depth = agreed
        node = child if agreed == end else split(requests, pools, s, child, agreed)
    return node


@inner
def remove_leaf(pools, s, leaf):
    """Delete an empty leaf."""
    nodes = pools.nodes
    drop_child(pools, leaf)
    unlink(pools, s, leaf)
    nodes[P.CHILDREN, nodes[P.PARENT, leaf]] -= 1
    nodes[P.PARENT, leaf] = NONE
    nodes[P.MORE_RECENT, leaf] = pools.state[P.UNUSED_HEAD]
    pools.state[P.UNUSED_HEAD] = leaf
    pools.state[P.UNUSED_COUNT] += 1


@inner
def cut_tail(pools, s, leaf, pages):
    """Take the last `pages` pages off a leaf, which are gone."""
    log_cut(pools.events, pools.next_uses, pools, s, leaf, pages)
    pools.nodes[P.END, leaf] -= pages


@inner
def count_as_free(s, count):
    """Count `count` pages (all that are unlocked, if fewer) as free. Returns how many."""
    count = min(count, s[R.EVICTABLE])
    if count <= 0:
        return np.int64(0)
    s[R.EVICTABLE] -= count
    s[R.FREE] += count
    s[R.UNSORTED] = 1
    return count


@inner
def evict_least_recent(requests, pools, s, count):
    """Free `count` pages (all that are unlocked, if fewer): the least recently used leaf first,
    each from its tail."""
    nodes = pools.nodes
    count = count_as_free(s, count)
    node = s[R.EVICTABLE_HEAD]
    while count > 0:
        following = np.int64(nodes[P.MORE_RECENT, node])
        if nodes[P.CHILDREN, node] == 0:
            taken = min(count, np.int64(nodes[P.END, node]) - nodes[P.START, node])
            cut_tail(pools, s, node, taken)
            count -= taken
            if nodes[P.END, node] == nodes[P.START, node]:
                parent = np.int64(nodes[P.PARENT, node])
                time = nodes[P.TIME, node]
                remove_leaf(pools, s, node)
                # An older parent stands before the leaf and was passed over; now it is next.
                waits = parent != s[R.ROOT] and nodes[P.LOCKS, parent] == 0
                if waits and nodes[P.CHILDREN, parent] == 0 and nodes[P.TIME, parent] <= time:
                    following = parent
        node = following


# --- eviction by next_uses
# -------------------------------------------------------------------------
@inner
def page_use(next_uses, requests, s, owner, depth):
    """Next use of a page of a prompt; NEVER for all other pages."""
    if depth >= requests.state[Q.SHARED, owner]:
        return NEVER
    node = page_key(requests, s, owner, depth)
    return next_use(requests, next_uses, node, depth % s[R.BLOCKS_PER_NODE])


@inner
def leaf_used_last(next_uses, requests, pools, s):
    """(leaf, next use of its last page): the unlocked leaf to shorten, the least recently used of
    those whose last page is used latest."""
    nodes = pools.nodes
    leaf = NONE
    latest = NONE
    node = s[R.EVICTABLE_HEAD]
    while node >= 0:
        if nodes[P.CHILDREN, node] == 0:
            depth = np.int64(nodes[P.END, node]) - 1
            use = page_use(next_uses, requests, s, np.int64(nodes[P.OWNER, node]), depth)
            if use > latest:
                leaf = node
                latest = use
        node = np.int64(nodes[P.MORE_RECENT, node])
    return leaf, latest


@inner
def pages_alike(next_uses, requests, pools, s, leaf, use):
    """How many pages, from the last of a leaf up, surely have the next use of that last one."""
    owner = np.int64(pools.nodes[P.OWNER, leaf])
    start = np.int64(pools.nodes[P.START, leaf])
    end = np.int64(pools.nodes[P.END, leaf])
    shared = np.int64(requests.state[Q.SHARED, owner])
    if end > shared:
        return end - max(start, shared)
    first = max(start, (end - 1) // s[R.BLOCKS_PER_NODE] * s[R.BLOCKS_PER_NODE])
    if page_use(next_uses, requests, s, owner, first) == use:
        return end - first
    return np.int64(1)


@inner
def evict_by_forecast(next_uses, requests, pools, s, count):
    """Free `count` pages (all that are unlocked, if fewer), one by one, each from the tail of the
    leaf that is used last (Belady's rule)."""
    count = count_as_free(s, count)
    while count > 0:
        leaf, use = leaf_used_last(next_uses, requests, pools, s)
        # While the next use of its last page stays the same, so does its place among the leaves.
        taken = min(count, pages_alike(next_uses, requests, pools, s, leaf, use))
        cut_tail(pools, s, leaf, taken)
        count -= taken
        if pools.nodes[P.END, leaf] == pools.nodes[P.START, leaf]:
            remove_leaf(pools, s, leaf)


@inner
def free_pages(next_uses, requests, pools, s, count):
    """`evict` by the rule of the run: one of the two is compiled."""
    if next_uses is not None:
        evict_by_forecast(next_uses, requests, pools, s, count)
    else:
        evict_least_recent(requests, pools, s, count)


@inner
def evict(requests, pools, s, count):
    """Free `count` pages, or all that are unlocked, if fewer."""
    free_pages(pools.next_uses, requests, pools, s, count)
