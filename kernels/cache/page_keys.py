"""What the pages of an SGLang request hold: equal keys at equal depth are equal content.

`s` is the rank's row (reference: SGLang backend, radix tree).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state.layout import BLOCKS_PER_NODE, FAMILY, PATH, SHARED


@inner
def page_key(requests, s, q, depth):
    """What the page at `depth` of a request's path holds, among paths that agree above it."""
    if depth >= requests.state[SHARED, q]:
        return -1 - np.int64(requests.state[FAMILY, q])
    return np.int64(requests.path_rows[requests.state[PATH, q] + depth // s[BLOCKS_PER_NODE]])


@inner
def common_depth(requests, s, q, other, depth, limit):
    """How deep, at most `limit`, the paths of two requests agree that agree down to `depth`."""
    state = requests.state
    if state[FAMILY, q] == state[FAMILY, other]:
        return limit
    per_node = s[BLOCKS_PER_NODE]
    path = np.int64(state[PATH, q])
    other_path = np.int64(state[PATH, other])
    shared = min(np.int64(state[SHARED, q]), np.int64(state[SHARED, other]))
    last = min(limit, shared)
    while depth < last:
        entry = depth // per_node
        if requests.path_rows[path + entry] != requests.path_rows[other_path + entry]:
            return depth
        depth = min(last, (entry + 1) * per_node)
    return depth
