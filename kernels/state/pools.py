"""KV blocks that can be found again: pools of blocks (vLLM, TensorRT-LLM), radix trees (SGLang)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vecsim.kernels.state.request import Requests

# --- nodes of the evictable lists: int32 [NODE_FIELDS, copies + n]
# ------------------------------------- Copies of blocks first, then one node per request for its
# evictable run; only copies use ROW and on.
PREVIOUS, FOLLOWING, ROW, REFERENCES, NEWER, OLDER, OWN_BEFORE = (np.int64(k) for k in range(7))
NODE_FIELDS = 7

# --- prefix index: int32 [INDEX_FIELDS, rows] -----------------------------------------------------
PRIMARY, NEWEST, CONTENT = (np.int64(k) for k in range(3))
"""Oldest and newest copy of an identity; what it stands for in the next_uses (NONE: nothing)."""
INDEX_FIELDS = 3

# --- Next uses of prompts (Belady): int32 [NEXT_USE_FIELDS, nodes of the prefix tree]
# --------------
NEXT_USER, END_OF_USERS = (np.int64(k) for k in range(2))
"""Span in `users` of the requests that have the node in their prompt and may still come."""
NEXT_USE_FIELDS = 2
USER, COVERS = (np.int64(k) for k in range(2))
"""The request, and how many of the node's blocks its prompt covers."""

# --- nodes of radix trees: int32 [TREE_FIELDS, nodes]; the roots of all ranks come first ----------
(
    OWNER,  # a request whose path goes through the node
    START,  # pages above it
    END,  # pages down to its end
    KEY,  # first page: what sets it apart from its siblings
    PARENT,  # NONE: a root, or not in use
    CHILDREN,  # number of children
    LOCKS,
    TIME,  # last access, in tree operations
    LESS_RECENT,  # neighbours in the list of unlocked nodes, by TIME
    MORE_RECENT,  # also the next of the nodes not in use
) = (np.int64(k) for k in range(10))
TREE_FIELDS = 10

UNUSED_HEAD, UNUSED_COUNT, NODE_BUMP, TABLE_STALE = (np.int64(k) for k in range(4))
"""Given-back nodes, next node never used, whether the table must be built anew."""
FOREST_STATE = 4
QUEUE_DUPLICATE, QUEUE_SCORE, QUEUE_REQUEST, QUEUE_PREFIX = (np.int64(k) for k in range(4))
LPM_LIMIT = np.int64(128)
"""A longer queue is not sorted by prefix."""


class NextUseTable(NamedTuple):
    """Which requests will ask next for the blocks of prompts (Belady)."""

    nodes: np.ndarray  # int32 [NEXT_USE_FIELDS, nodes of the prefix tree]
    users: np.ndarray  # int32 [2, users]: by node, ascending


class EventLog(NamedTuple):
    """KV events as all ranks logged them (kv_events.py)."""

    words: np.ndarray  # int64 [capacity]
    state: np.ndarray  # int64 [LOG_STATE]
    ranks: np.ndarray  # int64 [LOG_RANK, ranks]
    named: Requests | None  # SGLang: the requests with rows for their pages


class Pools(NamedTuple):
    """KV blocks that can be found again: copies, evictable lists, prefix index."""

    nodes: np.ndarray  # int32 [NODE_FIELDS, copies + n]
    index: np.ndarray  # int32 [INDEX_FIELDS, rows]
    next_uses: NextUseTable | None
    events: EventLog | None


class Forest(NamedTuple):
    """Radix trees of SGLang ranks; what `Pools` is to the other backends."""

    nodes: np.ndarray  # int32 [TREE_FIELDS, capacity]
    table: np.ndarray  # int32 [power of two, twice the capacity at least]: children by first page
    state: np.ndarray  # int64 [FOREST_STATE]
    order: np.ndarray  # int64 [4, LPM_LIMIT]: the queue being sorted
    next_uses: NextUseTable | None
    events: EventLog | None
