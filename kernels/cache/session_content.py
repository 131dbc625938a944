"""Where a request goes when it is released, and what it is given there.

With known arrivals round robin and the rows of the prefix index are decided at lowering. A request
that waits for others learns its rank only at its release, and a prompt that grows with the tokens
of the turns before its length (reference: runtimes, section 5.1; traffic, section 3). Rows of the
index are handed out then: one range for each rank and shareable node, another for each rank and
family whose blocks nobody else can match but which have identities all the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state.layout import (
    BLOCK_SIZE,
    BLOCKS_PER_NODE,
    CAPACITY_TOKENS,
    COMPLETED,
    CONTENT,
    COPY_FREE,
    FAMILY,
    GENERATED,
    ISL,
    KV_CAPACITY_EXHAUSTED,
    LENGTH,
    LIMIT,
    MAX_MODEL_LEN,
    NEVER,
    NEWER,
    NEWEST,
    NO_REASON,
    NONE,
    NUM_BLOCKS,
    OWN_FROM,
    OWN_ROWS,
    PATH,
    PRIMARY,
    RANK,
    REASON,
    RESERVES_OUTPUT,
    ROOT,
    SHARED,
    STATUS,
    TREE_NODE,
)

ROWS_USED, RANGES_USED, COPIES_USED, SPARE_COPIES = (np.int64(k) for k in range(4))
SEATS_STATE = 4
TURN, GRANTED = (np.int64(k) for k in range(2))
"""Rows of `Seats.ranks`: TURN of a worker's ranks, GRANTED copies of a rank."""
RANGE_KEY, RANGE_ROW = (np.int64(k) for k in range(2))

_LOW_32 = np.int64(0xFFFFFFFF)
_KEY_FACTOR = np.int64(0x2545F491)


class Seats(NamedTuple):
    """Placement, and the index rows that were handed out."""

    state: np.ndarray  # int64 [SEATS_STATE]
    ranks: np.ndarray  # int64 [2, ranks]
    paths: np.ndarray  # int64 [n]: first entry of each path in `nodes`
    nodes: np.ndarray  # int32: paths through the prefix tree
    extents: np.ndarray  # int32 [nodes]: blocks of a node that two requests share
    own: np.ndarray  # int32 [n]: blocks of a family, by its first request
    ranges: np.ndarray  # int64 [2, capacity]: handed out to which key, first row
    table: np.ndarray  # int32 [power of two, twice the capacity at least]: range + 1 by key, or 0


# --- placement ------------------------------------------------------------------------------------
@inner
def seat(requests, seats, q, taken, workers, dp_size):
    """Put the request that is released as number `taken` on its rank: workers in turn, ranks of a
    worker in turn unless it is pinned to one. Returns the rank."""
    worker = taken % workers
    rank = np.int64(requests.state[RANK, q])
    if rank < 0:
        turns = seats.ranks[TURN]
        rank = turns[worker] % dp_size
        turns[worker] = rank + 1
    rank += worker * dp_size
    requests.state[RANK, q] = rank
    return rank


# --- prompts that grow ----------------------------------------------------------------------------
@inner
def grow_prompt(requests, answers, s, q):
    """Put the conversation so far in front of a later turn; turns follow each other in the columns.
    A turn that produced less than planned leaves the path that was known ahead.

    `answers` are the copies of the requests that hold what was produced.
    """
    state = requests.state
    before = q - 1
    said = np.int64(answers.state[ISL, before]) + answers.state[GENERATED, before]
    prompt = said + state[ISL, q]
    state[ISL, q] = prompt
    known = np.int64(state[SHARED, q])
    if state[OWN_FROM, before] < known:
        known = np.int64(state[OWN_FROM, before])
    if answers.state[STATUS, before] != COMPLETED or answers.state[REASON, before] != NO_REASON:
        known = min(known, said // s[BLOCK_SIZE])
    state[SHARED, q] = known
    # Where rows are known ahead, those of a family begin with its first block.
    state[OWN_ROWS, q] += known - state[OWN_FROM, q]
    state[OWN_FROM, q] = known
    limit = np.int64(state[LIMIT, q])
    room = max(s[MAX_MODEL_LEN] - prompt, np.int64(0))
    if room < limit:
        limit = room
        state[REASON, q] = LENGTH
    room = s[CAPACITY_TOKENS] - prompt
    if s[RESERVES_OUTPUT] != 0 and room > 0 and room < limit:
        limit = room
        state[REASON, q] = KV_CAPACITY_EXHAUSTED
    state[LIMIT, q] = limit


# --- rows of the prefix index ---------------------------------------------------------------------
@inner
def rows_of(pools, seats, key, count):
    """First of the `count` rows of a key; new rows stand for nothing cached."""
    state = seats.state
    ranges = seats.ranges
    mask = np.int64(len(seats.table) - 1)
    mixed = (key & _LOW_32) * _KEY_FACTOR + (key >> np.int64(32))
    slot = (mixed ^ (mixed >> np.int64(29))) & mask
    while seats.table[slot] != 0:
        known = np.int64(seats.table[slot]) - 1
        if ranges[RANGE_KEY, known] == key:
            return ranges[RANGE_ROW, known]
        slot = (slot + 1) & mask
    entry = state[RANGES_USED]
    row = state[ROWS_USED]
    ranges[RANGE_KEY, entry] = key
    ranges[RANGE_ROW, entry] = row
    seats.table[slot] = entry + 1
    state[RANGES_USED] = entry + 1
    state[ROWS_USED] = row + count
    for k in range(row, row + count):
        pools.index[PRIMARY, k] = NONE
        pools.index[NEWEST, k] = NONE
        pools.index[CONTENT, k] = NONE
    return row


@inner
def grant_copies(requests, pools, s, seats, rank, q):
    """Let a rank have as many more copies as the request may publish, at most one a block of its
    pool."""
    state = requests.state
    blocks = (np.int64(state[ISL, q]) + state[LIMIT, q]) // s[BLOCK_SIZE]
    count = min(blocks, np.int64(state[SHARED, q])) * seats.state[SPARE_COPIES]
    count = min(count, s[NUM_BLOCKS] - seats.ranks[GRANTED, rank])
    seats.ranks[GRANTED, rank] += count
    first = seats.state[COPIES_USED]
    seats.state[COPIES_USED] = first + count
    for copy in range(first, first + count):
        pools.nodes[NEWER, copy] = s[COPY_FREE]
        s[COPY_FREE] = copy


@inner
def settle_blocks(requests, pools, s, seats, rank, q):
    """Give a vLLM-style request on its rank the rows of its blocks, and copies for them."""
    state = requests.state
    nodes = np.int64(len(seats.extents))
    keys = nodes + np.int64(len(seats.own))
    left = np.int64(state[SHARED, q])
    entry = np.int64(0)
    while left > 0:
        node = np.int64(seats.nodes[seats.paths[q] + entry])
        extent = np.int64(seats.extents[node])
        row = rows_of(pools, seats, rank * keys + node, extent)
        requests.path_rows[state[PATH, q] + entry] = row
        left -= min(left, s[BLOCKS_PER_NODE])
        entry += 1
    family = np.int64(state[FAMILY, q])
    own = np.int64(seats.own[family])
    if own > 0:
        # Rows for all its blocks: how much of the known path is followed may turn out later.
        row = rows_of(pools, seats, rank * keys + nodes + family, own)
        state[OWN_ROWS, q] = row + state[OWN_FROM, q]
        state[SHARED, q] = max(np.int64(state[SHARED, q]), own)
    else:
        state[OWN_FROM, q] = NEVER
    grant_copies(requests, pools, s, seats, rank, q)


@inner
def settle_pages(requests, pools, s, seats, rank, q):
    """An SGLang request starts at the root of its rank's tree."""
    requests.state[TREE_NODE, q] = s[ROOT]
