"""Belady's forecast: which request will ask next for a block of a prompt.

It is made from the input alone, over all workers, and knows the order of the requests, not their
times. A request is forgotten once it is RETIRED (reference: vLLM backend, section 4).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state.layout import COVERS, END_OF_USERS, NEVER, NEXT_USER, RETIRED, USER


@inner
def next_use(requests, forecast, node, block):
    """First request, not retired, whose prompt covers the given block of a node of the prefix tree;
    NEVER when there is none."""
    users = forecast.users
    retired = requests.state[RETIRED]
    end = np.int64(forecast.nodes[END_OF_USERS, node])
    entry = np.int64(forecast.nodes[NEXT_USER, node])
    while entry < end and retired[users[USER, entry]] != 0:
        entry += 1
    forecast.nodes[NEXT_USER, node] = entry
    while entry < end and (users[COVERS, entry] <= block or retired[users[USER, entry]] != 0):
        entry += 1
    if entry == end:
        return NEVER
    return np.int64(users[USER, entry])
