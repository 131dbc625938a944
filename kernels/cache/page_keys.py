"""What the pages of an SGLang request hold: equal keys at equal depth are equal content.

`s` is the rank's row (reference: SGLang backend, radix tree).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q


@inner
def page_key(requests, s, q, depth):
    """What the page at `depth` of a request's path holds, among paths that agree above it."""
    if depth >= requests.state[Q.SHARED, q]:
        return -1 - np.int64(requests.state[Q.SESSION, q])
    return np.int64(requests.path_rows[requests.state[Q.PATH, q] + depth // s[R.BLOCKS_PER_NODE]])


@inner
def common_depth(requests, s, q, other, depth, limit):
    """How deep, at most `limit`, the paths of two requests agree that agree down to `depth`."""
    state = requests.state
    if state[Q.SESSION, q] == state[Q.SESSION, other]:
        return limit
    per_node = s[R.BLOCKS_PER_NODE]
    path = np.int64(state[Q.PATH, q])
    other_path = np.int64(state[Q.PATH, other])
    shared = min(np.int64(state[Q.SHARED, q]), np.int64(state[Q.SHARED, other]))
    last = min(limit, shared)
    while depth < last:
        entry = depth // per_node
        if requests.path_rows[path + entry] != requests.path_rows[other_path + entry]:
            return depth
        depth = min(last, (entry + 1) * per_node)
    return depth
