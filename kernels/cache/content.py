"""Placing content on a rank while the run goes on: rows of the prefix index, and copies.

Lowering has numbered the contents that any two requests of the fleet share (sharing.py); a path in
`path_rows` holds such numbers until its request is placed. Each rank needs rows of its own for
them: a content gets its rows when the second request that has it is placed there. Until then the
blocks of the first one are its own affair (block_pool.py); what it has of them by then becomes
copies. So both memory and work grow with what is shared on a rank.

Where every block has an identity (SINGLE_COPIES), and for the turns of a session whose prompts
grow, contents get their rows at once, and what stands behind the path, prompt tails and generated
tokens, gets a range of rows for each rank and family: the turns that all begin with the turn
before.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.block_pool import cache_full_blocks, new_copy, row_run, unlink_evictable
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import pools as P
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NEVER, NONE

SPARE_COPIES = np.int64(8)
"""Copies per block of a request: one recomputed while an old copy lingers adds one."""

_CONTENT_BITS = np.int64(32)
_FACTOR = np.int64(0x2545F491)


@inner
def _slot_of(table, key):
    """Slot of a key, or the empty slot where it goes."""
    mask = np.int64(len(table)) - 1
    mixed = (key ^ (key >> _CONTENT_BITS)) * _FACTOR
    slot = (mixed ^ (mixed >> np.int64(29))) & mask
    while table[slot, F.CONTENT_KEY] >= 0 and table[slot, F.CONTENT_KEY] != key:
        slot = (slot + 1) & mask
    return slot


@inner
def _new_rows(next_uses, pools, content, first_content, count):
    """Hand out `count` rows; the next_uses may want to know what they stand for."""
    row = content.state[F.ROWS_USED]
    content.state[F.ROWS_USED] = row + count
    if next_uses is not None and first_content >= 0:
        for k in range(count):
            pools.index[P.CONTENT, row + k] = first_content + k
    return row


@inner
def _grant_copies(pools, content, s, wanted):
    """Give a rank copies for so many more blocks, but no more than it has blocks."""
    wanted = min(wanted, s[R.NUM_BLOCKS] - s[R.COPIES_GRANTED])
    first = content.state[F.COPIES_USED]
    for copy in range(first, first + wanted):
        pools.nodes[P.NEWER, copy] = s[R.COPY_FREE]
        s[R.COPY_FREE] = copy
    content.state[F.COPIES_USED] = first + wanted
    s[R.COPIES_GRANTED] += wanted


@inner
def _split_run(requests, pools, s, q, first, count):
    """Make copies of the `count` leading blocks, from `first` on, of an evictable run. They keep
    their places in the evictable list: right behind the rest of the run, the last block first."""
    nodes = pools.nodes
    run = s[R.FIRST_RUN] + q
    before = run
    for back in range(count):
        row, _ = row_run(requests, s, q, first + count - 1 - np.int64(back))
        copy = new_copy(pools, s, row)
        nodes[P.REFERENCES, copy] = 0
        after = np.int64(nodes[P.FOLLOWING, before])
        nodes[P.PREVIOUS, copy] = before
        nodes[P.FOLLOWING, copy] = after
        nodes[P.FOLLOWING, before] = copy
        if after < 0:
            s[R.EVICTABLE_TAIL] = copy
        else:
            nodes[P.PREVIOUS, after] = copy
        before = copy
    requests.state[Q.RUN_CACHED, q] -= count
    if requests.state[Q.RUN_CACHED, q] == 0:
        unlink_evictable(pools, s, run)


@inner
def _share(requests, pools, content, s, q, shared):
    """Another request has the `shared` leading blocks of `q`, which had fewer to share so far."""
    state = requests.state
    before = np.int64(state[Q.SHARED, q])
    state[Q.SHARED, q] = shared
    _grant_copies(pools, content, s, shared - before)
    idle = np.int64(state[Q.RUN_CACHED, q])
    if idle > 0:
        _split_run(requests, pools, s, q, before, min(idle, shared - before))
    elif state[Q.STATUS, q] == S.UNFINISHED:
        cache_full_blocks(
            requests, pools, s, q, before, np.int64(state[Q.COMPUTED, q]) // s[R.BLOCK_SIZE]
        )


@inner
def _place_path(requests, pools, content, s, q, rank, at_once):
    """Give the shareable nodes of a path their rows on a rank: all of them `at_once`, or those that
    another request has there. Returns how many blocks have rows."""
    state = requests.state
    per_node = s[R.BLOCKS_PER_NODE]
    path = np.int64(state[Q.PATH, q])
    shareable = np.int64(state[Q.SHAREABLE, q])
    shared = np.int64(0)
    other = NONE
    for depth in range((shareable + per_node - 1) // per_node):
        node = np.int64(requests.path_rows[path + depth])
        key = (rank << _CONTENT_BITS) | node
        slot = _slot_of(content.table, key)
        if content.table[slot, F.CONTENT_KEY] < 0:
            content.table[slot, F.CONTENT_KEY] = key
            content.table[slot, F.CONTENT_ROW] = -1 - q
            if not at_once:
                continue
        row = content.table[slot, F.CONTENT_ROW]
        if row < 0:
            first = -1 - row
            row = _new_rows(pools.next_uses, pools, content, node * per_node, per_node)
            content.table[slot, F.CONTENT_ROW] = row
            if first != q:
                other = first
                requests.path_rows[state[Q.PATH, other] + depth] = row
        requests.path_rows[path + depth] = row
        shared += per_node
    if other >= 0:
        most = min(shared, np.int64(state[Q.SHAREABLE, other]))
        _share(requests, pools, content, s, other, most)
    return min(shared, shareable)


@inner
def place_blocks(requests, pools, content, s, q, rank):
    """Place `q`, whose SHARED blocks others of the fleet have too, on a rank: it gets rows for what
    is shared there, the rank copies."""
    state = requests.state
    state[Q.RANK, q] = rank
    state[Q.SHAREABLE, q] = state[Q.SHARED, q]
    family = np.int64(state[Q.SESSION, q])
    own = np.int64(content.own[family])
    state[Q.OWN_FROM, q] = NEVER
    if state[Q.SHAREABLE, q] == 0 and own == 0:
        return
    single = s[R.SINGLE_COPIES] != 0
    shared = _place_path(requests, pools, content, s, q, rank, single or own > 0)
    if own > 0:
        key = (rank << _CONTENT_BITS) | (content.state[F.OWN_KEYS] + family)
        slot = _slot_of(content.table, key)
        if content.table[slot, F.CONTENT_KEY] < 0:
            content.table[slot, F.CONTENT_KEY] = key
            content.table[slot, F.CONTENT_ROW] = _new_rows(
                pools.next_uses, pools, content, NONE, own
            )
        state[Q.OWN_FROM, q] = shared
        state[Q.OWN_ROWS, q] = content.table[slot, F.CONTENT_ROW]
        if content.state[F.OWN_WHOLE] != 0:
            state[Q.OWN_ROWS, q] += shared
            shared = max(shared, own)
        else:
            shared += own
    state[Q.SHARED, q] = shared
    wanted = min((np.int64(state[Q.ISL, q]) + state[Q.LIMIT, q]) // s[R.BLOCK_SIZE], shared)
    if single:
        wanted *= SPARE_COPIES
    _grant_copies(pools, content, s, wanted)
