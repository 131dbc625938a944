"""Optional parts: a branch for a part that is None is not compiled, in whichever way."""

from typing import NamedTuple

import numpy as np

from vecsim.kernels.compile.jit import entry, inner


class Log(NamedTuple):
    """A part that some runs have."""

    rows: np.ndarray


class Pools(NamedTuple):
    """A bundle with room for the part."""

    counts: np.ndarray
    log: Log | None


@inner
def note(log, k):
    """Of None neither `rows` nor a subscript would compile."""
    if log is not None:
        log.rows[k] += 10
        return log.rows[k]
    return np.int64(-1)


@inner
def note_twice(log, k):
    first = note(log, k)
    if log is None:
        return first
    return note(log, k) + np.int64(len(log.rows))


@inner
def step(pools, k):
    pools.counts[k] += 1
    return note_twice(pools.log, k)


@entry
def run(pools, k):
    return step(pools, k)


@entry
def run_part(log, k):
    return note_twice(log, k)


@entry
def run_without(counts):
    counts[0] += note_twice(None, 0)


@inner
def default(k, log=None):
    if log is None:
        return k
    return note(log, k)


@entry
def run_default(k):
    return default(k)


@entry
def run_default_with(k, log):
    return default(k, log)


def pools(log):
    return Pools(np.zeros(3, dtype=np.int64), log)


def log():
    return Log(np.arange(3, dtype=np.int64))


def test_a_field_that_is_none():
    bare = pools(None)
    assert run(bare, 1) == -1
    assert bare.counts.tolist() == [0, 1, 0]


def test_a_field_that_is_there():
    full = pools(log())
    assert run(full, 1) == 24
    assert full.log.rows.tolist() == [0, 21, 2]
    assert full.counts.tolist() == [0, 1, 0]


def test_an_argument():
    assert run_part(None, 2) == -1
    assert run_part(log(), 2) == 25


def test_none_within_a_kernel():
    counts = np.zeros(1, dtype=np.int64)
    run_without(counts)
    assert counts.tolist() == [-1]


def test_a_default_of_none():
    assert run_default(5) == 5
    part = log()
    assert run_default_with(np.int64(2), part) == 12
    assert part.rows.tolist() == [0, 1, 12]


class Nested(NamedTuple):
    """A bundle whose part may itself lack a part."""

    pools: Pools
    other: Log | None


@inner
def choose(nested, log, k):
    """A value that both branches assign, and a loop around a branch."""
    total = np.int64(0)
    for i in range(k):
        add = log.rows[i] if log is not None else nested.pools.counts[i]
        if nested.other is not None:
            total += np.int64(1)
        total += add
    return total


@entry
def run_nested(nested, k):
    return choose(nested, nested.pools.log, k)


def test_a_part_of_a_part():
    counts = np.full(3, 100, dtype=np.int64)
    assert run_nested(Nested(Pools(counts, None), None), 3) == 300
    assert run_nested(Nested(Pools(counts, log()), None), 3) == 3
    assert run_nested(Nested(Pools(counts, None), log()), 3) == 303
