"""A request: what is asked, and what has become of it. `q` is the number of one request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# --- requests: int32 [REQUEST_STATE, n], float64 [REQUEST_TIME, n]; n in arrival order ------------
(
    ISL,  # prompt tokens
    LIMIT,  # tokens to produce: requested output, cut by max_model_len
    PATH,  # first entry of its path in `path_rows`
    SHARED,  # leading full blocks that have an identity of their own in the index
    OWN_FROM,  # block from which on the rows are OWN_ROWS, OWN_ROWS + 1, ... (single copies only)
    OWN_ROWS,
    COUNTED,  # its inter-token gaps enter the distribution
    PRIVATE,  # planned output tokens: never decodes in step with others
    COMPUTED,  # tokens computed; inside the decode batch: when it joined
    GENERATED,  # tokens produced; inside the decode batch: minus the rank's tick
    FINISH,  # inside the decode batch: tick at which it finishes
    NEXT,  # next in the waiting queue, the preempted, the rejected or the ended list
    FRESH,  # never preempted
    HITS,  # leading blocks that were found in the index at admission
    OWN_TAIL,  # last copy that it published
    RETIRED,  # admitted or rejected: no use for its blocks is next_uses any more
    RUN_CACHED,  # idle cached blocks behind SHARED; only this request can find them again
    PASS_TOKENS,  # tokens scheduled in the pass in flight
    PASS_PROMPT,  # prompt tokens among them
    PASS_PREFIX,  # prompt tokens there before
    ADMISSIONS,
    REUSED,
    FIRST_REUSED,
    STATUS,
    REASON,
    RANK,
    # SGLang only:
    TREE_NODE,  # radix node that it locks, with the whole path above
    CACHED_PAGES,  # depth of that node: pages of its own path that are in the tree
    REQUEUED,  # gave its pages back once so that another request could go on
    SESSION,  # itself; where prompts grow from turn to turn, the first turn of its session
    # A destination only:
    ORDER,  # when its blocks were asked for, among all requests
    # Requests on the fleet's clock only:
    SHAREABLE,  # what SHARED may grow to when others with its content come to its rank (content.py)
    SIGNALS,  # what became of it in the pass that ended: FIRST_OUTPUT, HELD_OUTPUT, ENDED
    NEXT_SIGNAL,  # next request of its rank with SIGNALS
) = (np.int64(k) for k in range(34))
REQUEST_STATE = 34

FIRST_OUTPUT, HELD_OUTPUT, ENDED = (np.int64(1 << k) for k in range(3))
"""Bits of SIGNALS: its first token came out; its prompt is done and its blocks are kept for the
transfer; it is terminal."""

RELEASED, ARRIVAL, FIRST_ADMIT, FIRST_TOKEN, SECOND_TOKEN, LAST_TOKEN, TERMINAL = (
    np.int64(k) for k in range(7)
)
"""RELEASED is when a request comes to the pool, ARRIVAL when it joins its rank's waiting queue: the
same, or the end of its tokenization."""
REQUEST_TIME = 7


class Requests(NamedTuple):
    """Request columns, in arrival order, and the paths of their prompts through the prefix tree."""

    state: np.ndarray  # int32 [REQUEST_STATE, n]
    time: np.ndarray  # float64 [REQUEST_TIME, n]
    path_rows: np.ndarray  # int32: first index row of each node of a path
