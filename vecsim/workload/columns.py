"""Checked conversion of user columns to the arrays of a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import polars as pl

from vecsim.config.checks import json_value
from vecsim.errors import MISSING, InputError

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
LENGTH = f"a whole number of tokens from 0 to {MAX_INT32}"


def float_column(name: str, values: Any) -> np.ndarray:
    """float64 [n] of finite numbers >= 0, always a copy."""
    array = _array(name, values)
    if array.dtype.kind not in "iuf":
        raise InputError(name, _first_odd(array), "numbers")
    array = np.array(array, np.float64)
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size:
        raise InputError(f"{name}[{bad[0]}]", float(array[bad[0]]), "a finite number, 0 or more")
    return array


def int_column(
    name: str, values: Any, n: int | None, low: int, high: int, expected: str
) -> np.ndarray:
    """int64 [n] of whole numbers in [low, high]; `n` None accepts any length."""
    array = _array(name, values)
    if n is not None and len(array) != n:
        raise InputError(name, f"{len(array)} values", f"one value per request, {n}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iuf":
        raise InputError(name, _first_odd(array), expected)
    with np.errstate(invalid="ignore"):
        fits = (array >= low) & (array <= high)
        if array.dtype.kind == "f":
            fits &= array == np.floor(array)
    bad = np.flatnonzero(~fits)
    if bad.size:
        raise InputError(f"{name}[{bad[0]}]", array[bad[0]].item(), expected)
    return array.astype(np.int64)


def rank_column(name: str, values: Any, n: int) -> np.ndarray:
    """int32 [n] of numbers >= 0, or -1 for none; all -1 when `values` is None."""
    if values is None:
        return np.full(n, -1, np.int32)
    expected = f"a whole number from 0 to {MAX_INT32}, or -1 for none"
    return int_column(name, values, n, -1, MAX_INT32, expected).astype(np.int32)


def text_column(name: str, values: Any, n: int) -> pl.Series | None:
    """Strings [n], null allowed."""
    if values is None:
        return None
    try:
        series = pl.Series(name, values, strict=True).cast(pl.String)
    except UnicodeError as error:
        raise InputError(name, error.object, "Unicode text") from None
    except (TypeError, pl.exceptions.PolarsError):
        raise InputError(name, type(values).__name__, "a sequence of strings") from None
    if len(series) != n:
        raise InputError(name, f"{len(series)} values", f"one value per request, {n}")
    return series


def json_column(name: str, values: Sequence[Any] | None, n: int) -> list[Any] | None:
    """n values that JSON can hold."""
    if values is None:
        return None
    _sequence(name, values)
    if len(values) != n:
        raise InputError(name, f"{len(values)} values", f"one value per request, {n}")
    for i, value in enumerate(values):
        json_value(f"{name}[{i}]", value)
    return list(values)


def positive_int(name: str, value: Any) -> int:
    return _whole(name, value, 1)


def natural_int(name: str, value: Any) -> int:
    return _whole(name, value, 0)


def csr_columns(
    offsets_name: str, offsets: Any, ids_name: str, ids: Any, n: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """(int64 [n + 1], uint32 [m]) of spans over 32-bit ids; None when both are None."""
    if offsets is None and ids is None:
        return None
    for name, other, values in ((offsets_name, ids_name, offsets), (ids_name, offsets_name, ids)):
        if values is None:
            raise InputError(name, MISSING, f"a column beside {other}")
    if isinstance(ids, np.ndarray) and ids.dtype == np.uint32 and ids.ndim == 1:
        id_array = ids.copy()
    else:
        id_array = int_column(ids_name, ids, None, 0, 2**32 - 1, "a whole number below 2**32")
    limit = len(id_array)
    starts = int_column(offsets_name, offsets, None, 0, limit, f"a position in {ids_name}")
    if len(starts) != n + 1:
        raise InputError(offsets_name, f"{len(starts)} values", f"requests + 1, {n + 1}")
    if starts[0] != 0 or starts[-1] != limit or (np.diff(starts) < 0).any():
        raise InputError(
            offsets_name, starts.tolist(), f"a rising sequence from 0 to {limit}, all of {ids_name}"
        )
    return starts, id_array.astype(np.uint32, copy=False)


def flatten_ids(name: str, lists: Sequence[Sequence[int]] | pl.Series, n: int) -> Any:
    """(int64 [n + 1], uint64 [m]) of one list of 64-bit ids per row."""
    _sequence(name, lists)
    rows = lists.to_list() if isinstance(lists, pl.Series) else lists
    if len(rows) != n:
        raise InputError(name, f"{len(rows)} values", f"one list per request, {n}")
    for i, row in enumerate(rows):
        if not is_id_list(row, 2**64):
            raise InputError(f"{name}[{i}]", row, "a list of whole numbers from 0 to 2**64 - 1")
    return flatten(rows, np.uint64)


def is_id_list(values: Any, limit: int) -> bool:
    """Whether `values` is a sequence of plain ints in [0, limit)."""
    if not isinstance(values, (list, tuple, np.ndarray)):
        return False
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not values:
        return True
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < limit


def flatten(lists: Sequence[Sequence[int] | None], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [n + 1] offsets, values) of lists of ints; None counts as empty."""
    filled = [values if values is not None else () for values in lists]
    offsets = offsets_of(np.fromiter(map(len, filled), np.int64, len(filled)))
    return offsets, np.fromiter(chain.from_iterable(filled), dtype, int(offsets[-1]))


def offsets_of(counts: np.ndarray) -> np.ndarray:
    """int64 [n + 1] offsets of n spans with these lengths."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def optional(values: list[Any], build: Callable[[list[Any]], Any]) -> Any:
    """`build(values)`, or None when every value is None."""
    return None if all(value is None for value in values) else build(values)


def check_ratio(name: str, ratio: Any) -> float:
    """A speed-up ratio: finite and above 0."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float, np.number)):
        raise InputError(name, ratio, "a finite number above 0")
    if not (np.isfinite(ratio) and ratio > 0):
        raise InputError(name, ratio, "a finite number above 0")
    return float(ratio)


def scale_arrivals(since_first_ms: np.ndarray, ratio: float) -> np.ndarray:
    """Times since the first arrival (float64 ms), divided by `arrival_speedup_ratio`."""
    ratio = check_ratio("arrival_speedup_ratio", ratio)
    with np.errstate(over="ignore"):
        scaled = since_first_ms / ratio
    if not np.isfinite(scaled).all():
        raise InputError("arrival_speedup_ratio", ratio, "a ratio that leaves arrivals finite")
    return scaled


def fit_blocks(
    input_length: np.ndarray, offsets: np.ndarray, ids: np.ndarray, block_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and ids without those beyond the prompt.

    Raises:
        InputError: a row whose ids are present but cover less than its prompt; names the row.
    """
    have = np.diff(offsets)
    need = np.where(have > 0, -(-input_length.astype(np.int64) // block_tokens), 0)
    short = np.flatnonzero(have < need)
    if short.size:
        row = int(short[0])
        covered = int(have[row]) * block_tokens
        raise InputError(
            f"input_length[{row}]",
            int(input_length[row]),
            f"at most {covered}, the tokens that its content blocks cover",
        )
    if (have == need).all():
        return offsets, ids
    position = np.arange(len(ids)) - np.repeat(offsets[:-1], have)
    return offsets_of(need), ids[position < np.repeat(need, have)]


def number_ids(ids: np.ndarray) -> np.ndarray:
    """uint32 numbers 0, 1, 2 ... of uint64 ids, in order of first appearance."""
    if ids.size == 0:
        return np.zeros(0, np.uint32)
    top = int(ids.max())
    if top < 4 * ids.size + 1024:
        slot, slots = ids.astype(np.int64), top + 1
    else:
        slot, slots = np.unique(ids, return_inverse=True)[1], ids.size
    rows = np.arange(ids.size)
    first = np.zeros(slots, np.int64)
    first[slot[::-1]] = rows[::-1]
    slot_of_each = slot[first[slot] == rows]  # in order of first appearance
    number = np.zeros(slots, np.uint32)
    number[slot_of_each] = np.arange(len(slot_of_each), dtype=np.uint32)
    return number[slot]


def _array(name: str, values: Any) -> np.ndarray:
    """A 1-D array; nulls become NaN or stay objects, which the callers refuse."""
    try:
        array = values.to_numpy() if isinstance(values, pl.Series) else np.asarray(values)
    except ValueError:  # lists of different lengths
        raise InputError(name, values, "one value per request") from None
    if array.ndim != 1:
        raise InputError(name, f"shape {array.shape}", "one value per request")
    return array


def _sequence(name: str, values: Any) -> None:
    known = isinstance(values, Sequence | np.ndarray | pl.Series)
    if not known or isinstance(values, str | bytes):
        raise InputError(name, values, "a sequence, one value per request")


def _first_odd(array: np.ndarray) -> Any:
    """The first value that is not a number, for a message."""
    for value in array.tolist():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
    return array[0].item() if array.dtype.kind != "O" else array[0]


def _whole(name: str, value: Any, low: int) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise InputError(name, value, f"a whole number, {low} or more")
    if not low <= value <= MAX_INT64:
        expected = f"a whole number, {low} or more" + " and below 2**63" * (value > low)
        raise InputError(name, int(value), expected)
    return int(value)
