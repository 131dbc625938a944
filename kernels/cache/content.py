"""Placing a request on a rank while the run goes on: its index rows and copies there.

Lowering has numbered the contents that any two requests share, whatever their ranks (sharing.py).
Each rank needs rows of its own for them: a content gets one when the second request that has it is
placed there. Until then the blocks of the first one are its own affair (blockpool.py); what it has
of them by then becomes copies. So both memory and work grow with what is shared on a rank.

Where all blocks have copies of their own (SINGLE_COPIES) every content gets its row at once.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.block_pool import new_copy, publish, row_run, unlink_idle
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state.layout import (
    BLOCK_SIZE,
    BLOCKS_PER_NODE,
    COMPUTED,
    COPY_BUMP,
    COPY_FREE,
    FIRST_RUN,
    FOLLOWING,
    IDLE_TAIL,
    NEWER,
    NONE,
    NUM_BLOCKS,
    OWN_FROM,
    PATH,
    PREVIOUS,
    RANK,
    REFERENCES,
    RUN_CACHED,
    SHAREABLE,
    SHARED,
    SINGLE_COPIES,
    STATUS,
    UNFINISHED,
)

SPARE_COPIES = np.int64(8)
"""Copies per block of a request: one recomputed while an old copy lingers adds one."""

KEY, FIRST_ROW = (np.int64(k) for k in range(2))
"""`rows` is int64 [slots + 1, 2], slots a power of two: an open-addressing table from (rank,
content), -1 = empty, to its first row; before it has one, to -1 minus the only request that has the
content there. Its last line holds the next copy and the next row."""

_CONTENT_BITS = np.int64(32)
_FACTOR = np.int64(0x2545F491)


@inner
def _slot_of(rows, key):
    """Slot of a key, or the empty slot where it goes."""
    mask = np.int64(len(rows)) - 2
    mixed = (key ^ (key >> _CONTENT_BITS)) * _FACTOR
    slot = (mixed ^ (mixed >> np.int64(29))) & mask
    while rows[slot, KEY] >= 0 and rows[slot, KEY] != key:
        slot = (slot + 1) & mask
    return slot


@inner
def _grant_copies(pools, rows, s, wanted):
    """Give a rank copies for so many more blocks, but no more than it has blocks."""
    last = np.int64(len(rows)) - 1
    wanted = min(wanted, s[NUM_BLOCKS] - s[COPY_BUMP])
    for _ in range(wanted):
        copy = rows[last, KEY]
        pools.nodes[NEWER, copy] = s[COPY_FREE]
        s[COPY_FREE] = copy
        rows[last, KEY] = copy + 1
    s[COPY_BUMP] += wanted


@inner
def _split_run(requests, pools, s, q, first, count):
    """Make copies of the `count` leading blocks, from `first` on, of an idle run. They keep their
    places in the idle list: right behind the rest of the run, the last block first."""
    nodes = pools.nodes
    run = s[FIRST_RUN] + q
    before = run
    for back in range(count):
        row, _ = row_run(requests, s, q, first + count - 1 - np.int64(back))
        copy = new_copy(pools, s, row)
        nodes[REFERENCES, copy] = 0
        after = np.int64(nodes[FOLLOWING, before])
        nodes[PREVIOUS, copy] = before
        nodes[FOLLOWING, copy] = after
        nodes[FOLLOWING, before] = copy
        if after < 0:
            s[IDLE_TAIL] = copy
        else:
            nodes[PREVIOUS, after] = copy
        before = copy
    requests.state[RUN_CACHED, q] -= count
    if requests.state[RUN_CACHED, q] == 0:
        unlink_idle(pools, s, run)


@inner
def _share(requests, pools, rows, s, q, shared):
    """Another request has the `shared` leading blocks of `q`, which had fewer to share so far."""
    state = requests.state
    before = np.int64(state[SHARED, q])
    state[SHARED, q] = shared
    _grant_copies(pools, rows, s, shared - before)
    idle = np.int64(state[RUN_CACHED, q])
    if idle > 0:
        _split_run(requests, pools, s, q, before, min(idle, shared - before))
    elif state[STATUS, q] == UNFINISHED:
        publish(requests, pools, s, q, before, np.int64(state[COMPUTED, q]) // s[BLOCK_SIZE])


@inner
def place_blocks(requests, pools, rows, s, q, rank):
    """Place `q` on a rank: what it shares there gets index rows, the rank copies."""
    state = requests.state
    state[RANK, q] = rank
    shareable = np.int64(state[SHAREABLE, q])
    last = np.int64(len(rows)) - 1
    if shareable == 0 or last == 0:
        return
    per_node = s[BLOCKS_PER_NODE]
    single = s[SINGLE_COPIES] != 0
    path = np.int64(state[PATH, q])
    shared = np.int64(0)
    other = NONE
    nodes = (min(shareable, np.int64(state[OWN_FROM, q])) + per_node - 1) // per_node
    for depth in range(nodes):
        key = (rank << _CONTENT_BITS) | np.int64(requests.path_rows[path + depth])
        slot = _slot_of(rows, key)
        if rows[slot, KEY] < 0:
            rows[slot, KEY] = key
            rows[slot, FIRST_ROW] = -1 - q
            if not single:
                continue
        row = rows[slot, FIRST_ROW]
        if row < 0:
            other = -1 - row
            row = rows[last, FIRST_ROW]
            rows[slot, FIRST_ROW] = row
            rows[last, FIRST_ROW] += per_node
            requests.path_rows[state[PATH, other] + depth] = row
        requests.path_rows[path + depth] = row
        shared += per_node
    if single:
        _grant_copies(pools, rows, s, shareable * SPARE_COPIES)
        return
    state[SHARED, q] = min(shared, shareable)
    _grant_copies(pools, rows, s, np.int64(state[SHARED, q]))
    if other >= 0:
        most = min(shared, np.int64(state[SHAREABLE, other]))
        _share(requests, pools, rows, s, other, most)
