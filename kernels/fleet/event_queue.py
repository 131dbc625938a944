"""The event queue: a winner tree of many times, the least of them and whose it is.

`tree` is float64 [2 * leaves], leaves a power of two; leaf k stands at leaves + k, infinity = no
time. The winner is at index 1.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner


@inner
def set_leaf(tree, leaf, time):
    """Enter a time for a leaf."""
    node = np.int64(len(tree)) // 2 + leaf
    tree[node] = time
    node //= 2
    while node >= 1:
        tree[node] = min(tree[2 * node], tree[2 * node + 1])
        node //= 2


@inner
def first_leaf(tree):
    """Lowest leaf among those with the least time."""
    leaves = np.int64(len(tree)) // 2
    node = np.int64(1)
    while node < leaves:
        node *= 2
        if tree[node] > tree[node + 1]:
            node += 1
    return node - leaves
