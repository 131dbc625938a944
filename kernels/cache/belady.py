"""Belady's next_uses: which request will ask next for a block of a prompt.

It is made from the input alone, over all workers, and knows the order of the requests, not their
times. A request is forgotten once it is RETIRED (reference: vLLM backend, section 4).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import pools as P
from vecsim.kernels.state import request as Q
from vecsim.kernels.state.codes import NEVER


@inner
def next_use(requests, next_uses, node, block):
    """First request, not retired, whose prompt covers the given block of a node of the prefix tree;
    NEVER when there is none."""
    users = next_uses.users
    retired = requests.state[Q.RETIRED]
    end = np.int64(next_uses.nodes[P.END_OF_USERS, node])
    entry = np.int64(next_uses.nodes[P.NEXT_USER, node])
    while entry < end and retired[users[P.USER, entry]] != 0:
        entry += 1
    next_uses.nodes[P.NEXT_USER, node] = entry
    while entry < end and (users[P.COVERS, entry] <= block or retired[users[P.USER, entry]] != 0):
        entry += 1
    if entry == end:
        return NEVER
    return np.int64(users[P.USER, entry])
