"""What kernels are lowered to: subscripts, bundles and calls as in Python."""

from typing import NamedTuple

import numpy as np
import pytest
from numba import njit
from numba.core.errors import NumbaError

from vecsim.kernels.compile.jit import entry, inner
from vecsim.kernels.compile.mode import FAST


class Bundle(NamedTuple):
    """Arrays as kernels get them."""

    table: np.ndarray
    row: np.ndarray
    flags: np.ndarray
    strided: np.ndarray


class Nested(NamedTuple):
    """A bundle within a bundle, and numbers."""

    bundle: Bundle
    wanted: bool
    factor: float


def nested(wanted=True):
    strided = np.arange(20, dtype=np.int64)[::2]
    flags = np.array([True, False])
    bundle = Bundle(np.arange(12, dtype=np.int32).reshape(3, 4), np.zeros(4), flags, strided)
    return Nested(bundle, wanted, 0.5)


@entry
def read(n, i, j):
    b = n.bundle
    return b.table[i, j], b.table[i][j], b.row[j], b.flags[0], b.strided[i], b.strided[-1]


def test_subscripts_count_from_the_end_if_negative():
    n = nested()
    n.bundle.row[:] = [0.5, 1.5, 2.5, 3.5]
    assert read(n, 1, 2) == (6, 6, 2.5, True, 2, 18)
    assert read(n, -1, -4) == (8, 8, 0.5, True, 18, 18)
    assert read(n, np.uint64(2), np.uint64(3)) == (11, 11, 3.5, True, 4, 18)


@entry
def sizes(n):
    b = n.bundle
    return len(b.table), b.table.shape[1], len(b.table[0]), len(b.strided), b.table[1:].size


def test_sizes():
    assert sizes(nested()) == (3, 4, 4, 10, 8)


@inner
def fill(n, row, value, step=2):
    row[0] = value
    row[-1] += n.factor
    n.bundle.flags[1] = n.wanted
    n.bundle.strided[1] = value
    return row[0] + step


@entry
def write(n, i):
    row = n.bundle.table[i]
    first = fill(n, row, 40)
    second = fill(n, n.bundle.table[i - 1][1:], 50, step=3)
    return first, second


def test_bundles_views_and_numbers_reach_a_callee():
    n = nested()
    assert write(n, 1) == (42, 53)
    assert n.bundle.table.tolist() == [[0, 50, 2, 3], [40, 5, 6, 7], [8, 9, 10, 11]]
    assert n.bundle.flags.tolist() == [True, True]
    assert n.bundle.strided[1] == 50
    n = nested(wanted=False)
    n.bundle.flags[1] = True
    write(n, 1)
    assert n.bundle.flags.tolist() == [True, False]


@entry
def choose(n, wanted):
    row = n.bundle.table[0]
    found = np.int64(-1)
    for i in range(3):
        last = found
        if wanted == i:
            row = n.bundle.table[i]
            found = np.int64(row[0])
        if last != found:
            return row[1], last
    return row[1], found


def test_variables_that_are_assigned_again():
    assert choose(nested(), 2) == (9, -1)
    assert choose(nested(), 7) == (1, -1)


def test_an_array_is_not_handed_to_a_function_that_is_no_kernel():
    """Only plain Numba passes arrays as ordinary functions take them."""

    @njit
    def ordinary(row):
        return row[0]

    @entry
    def calls(row):
        return ordinary(row)

    if FAST:
        with pytest.raises(NumbaError, match="no kernel"):
            calls(np.zeros(2))
    else:
        assert calls(np.zeros(2)) == 0.0
