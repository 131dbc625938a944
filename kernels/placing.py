"""Placing a request on a rank while the run goes on: its index rows and copies there.

Lowering has numbered the contents that any two requests share, whatever their ranks (sharing.py).
Each rank needs rows of its own for them: they are handed out when the first request that has a
content is placed there, so that memory grows with the requests, not with the ranks.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.jit import inner
from vecsim.kernels.layout import (
    BLOCKS_PER_NODE,
    COPY_BUMP,
    COPY_FREE,
    NEWER,
    NUM_BLOCKS,
    OWN_FROM,
    PATH,
    RANK,
    SHARED,
    SINGLE_COPIES,
)

SPARE_COPIES = np.int64(8)
"""Copies per block of a request: one recomputed while an old copy lingers adds one."""

KEY, FIRST_ROW = (np.int64(k) for k in range(2))
"""`rows` is int64 [2, slots + 1], slots a power of two: an open-addressing table from (rank,
content) to its first row; -1 = empty. Its last column holds the next copy and the next row."""

_CONTENT_BITS = np.int64(32)
_FACTOR = np.int64(0x2545F491)


@inner
def _slot_of(rows, key):
    """Slot of a key, or the empty slot where it goes."""
    mask = np.int64(rows.shape[1]) - 2
    mixed = (key ^ (key >> _CONTENT_BITS)) * _FACTOR
    slot = (mixed ^ (mixed >> np.int64(29))) & mask
    while rows[KEY, slot] >= 0 and rows[KEY, slot] != key:
        slot = (slot + 1) & mask
    return slot


@inner
def place_blocks(requests, pools, rows, s, q, rank):
    """Place `q` on a rank: it gets index rows for its shareable blocks, the rank copies."""
    state = requests.state
    state[RANK, q] = rank
    shared = np.int64(state[SHARED, q])
    last = np.int64(rows.shape[1]) - 1
    if shared == 0 or last == 0:
        return
    per_node = s[BLOCKS_PER_NODE]
    entry = np.int64(state[PATH, q])
    for _ in range((min(shared, np.int64(state[OWN_FROM, q])) + per_node - 1) // per_node):
        key = (rank << _CONTENT_BITS) | np.int64(requests.path_rows[entry])
        slot = _slot_of(rows, key)
        if rows[KEY, slot] < 0:
            rows[KEY, slot] = key
            rows[FIRST_ROW, slot] = rows[FIRST_ROW, last]
            rows[FIRST_ROW, last] += per_node
        requests.path_rows[entry] = rows[FIRST_ROW, slot]
        entry += 1
    wanted = shared
    if s[SINGLE_COPIES] != 0:
        wanted *= SPARE_COPIES
    wanted = min(wanted, s[NUM_BLOCKS] - s[COPY_BUMP])
    for _ in range(wanted):
        copy = rows[KEY, last]
        pools.nodes[NEWER, copy] = s[COPY_FREE]
        s[COPY_FREE] = copy
        rows[KEY, last] = copy + 1
    s[COPY_BUMP] += wanted
