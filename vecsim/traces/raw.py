"""Columns as they stand in a file, and their conversion with the place of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import polars as pl

from vecsim.errors import MISSING, InputError
from vecsim.traces.files import TraceFile
from vecsim.traces.json_rows import decode, is_array, items
from vecsim.traces.table import token_count
from vecsim.traces.times import UNIT_SHIFTS, Times, milliseconds, nanoseconds
from vecsim.workload.columns import LENGTH, MAX_INT32, flatten, is_id_list, offsets_of

_DECODER = msgspec.json.Decoder(dict[str, Any])
_PLAIN_NUMBER = r"^\d{1,15}(?:\.\d{1,15})?$"
_EXACT = 2**53
_NAMES = "a string or a whole number"


@dataclass(frozen=True)
class RawTable:
    """Columns of text, numbers or lists.

    Attributes:
        frame: the columns, n rows; text is stripped, and null where it is empty.
        numbers: int64 [n], line or item of each row.
        where: place of a row by its number, as messages name it.
    """

    frame: pl.DataFrame
    numbers: np.ndarray
    where: Callable[[int], str]

    def __len__(self) -> int:
        return self.frame.height

    def error(self, row: int, name: str, value: Any, expected: str) -> InputError:
        place = f"{self.where(int(self.numbers[row]))}, {name}"
        return InputError(place, MISSING if value is None else value, expected)

    def head(self, rows: int | None) -> RawTable:
        """The first rows; all of them for None."""
        if rows is None:
            return self
        return RawTable(self.frame.head(rows), self.numbers[:rows], self.where)

    def keep(self, mask: np.ndarray) -> RawTable:
        """The rows where `mask` holds."""
        return RawTable(self.frame.filter(pl.Series(mask)), self.numbers[mask], self.where)

    def lengths(self, name: str) -> np.ndarray:
        """int64 [n] of token counts; all must be there."""
        return self._ints(name, token_count, 0, LENGTH)

    def ranks(self, name: str) -> np.ndarray:
        """int32 [n] of ranks from 0, or -1 or nothing for none."""
        expected = f"a whole number from 0 to {MAX_INT32}, or -1 for none"

        def rank(value: Any) -> int | None:
            return -1 if value in (None, -1, "-1") else token_count(value)

        return self._ints(name, rank, -1, expected).astype(np.int32)

    def constant(self, name: str, low: int = 1) -> int | None:
        """The one whole number of a column; None if the column is absent or empty."""
        if name not in self.frame.columns or self.frame[name].null_count() == len(self):
            return None
        values = self._ints(name, token_count, low, f"a whole number from {low}")
        other = np.flatnonzero(values != values[0])
        if other.size:
            row = int(other[0])
            raise self.error(row, name, int(values[row]), f"{values[0]}, as in the first row")
        return int(values[0])

    def _ints(
        self, name: str, convert: Callable[[Any], int | None], low: int, expected: str
    ) -> np.ndarray:
        column = self.frame[name]
        numbers = column.cast(pl.Int64, strict=False) if _is_plain(column) else _nulls(column)
        result = numbers.fill_null(low - 1).to_numpy().copy()
        for row in np.flatnonzero((result < low) | (result > MAX_INT32)):
            value = column[int(row)]
            number = convert(value)
            if number is None or number < low:
                raise self.error(row, name, value, expected)
            result[row] = number
        return result

    def floats(self, name: str, expected: str = "a finite number, 0 or more") -> np.ndarray:
        """float64 [n], finite and not negative; NaN where there is none."""
        column = self.frame[name]
        numbers = column.cast(pl.Float64, strict=False)
        result = numbers.fill_null(np.nan).to_numpy().copy()
        given = column.is_not_null().to_numpy()
        bad = np.flatnonzero(given & ~(np.isfinite(result) & (result >= 0)))
        if bad.size:
            row = int(bad[0])
            raise self.error(row, name, column[row], expected)
        return result

    def text(self, name: str) -> pl.Series | None:
        """Strings [n], null where there is none; None if the column is absent or all null."""
        if name not in self.frame.columns or self.frame[name].null_count() == len(self):
            return None
        column = self.frame[name]
        if column.dtype == pl.Object:
            values = [self._as_text(name, row, v) for row, v in enumerate(column.to_list())]
            return pl.Series(name, values, pl.String)
        if column.dtype.is_nested():
            raise self.error(0, name, column[0], _NAMES)
        return column.cast(pl.String).alias(name)

    def _as_text(self, name: str, row: int, value: Any) -> str | None:
        """A string as it is, a whole number by its digits, and None."""
        if type(value) is int:
            return str(value)
        if value is not None and not isinstance(value, str):
            raise self.error(row, name, value, _NAMES)
        return value

    def id_lists(self, name: str, bits: int) -> tuple[np.ndarray, np.ndarray] | None:
        """(int64 [n + 1], uint64 [m]) of lists of ids, or of their JSON text."""
        if name not in self.frame.columns or self.frame[name].null_count() == len(self):
            return None
        whole = _whole_lists(self.frame[name], bits)
        if whole is not None:
            return whole
        expected = f"a list of whole numbers from 0 to 2**{bits} - 1"
        rows = []
        for row, value in enumerate(self.frame[name].to_list()):
            ids = value
            if isinstance(value, str):
                try:
                    ids = json.loads(value)
                except (ValueError, RecursionError):
                    raise self.error(row, name, value, expected) from None
            if ids is not None and not (isinstance(ids, list) and is_id_list(ids, 2**bits)):
                raise self.error(row, name, value, expected)
            rows.append(ids)
        return flatten(rows, np.uint64)

    def times(self, name: str, unit: str | None) -> Times:
        """Numbers of `unit`, or dates; none may be missing."""
        column = self.frame[name]
        if column.dtype.is_temporal():
            return Times(self._instants(name, column))
        whole = None
        if column.dtype == pl.String:
            whole = _plain_numbers(column, unit) if unit else None
            if whole is None:
                whole = plain_dates(column)
        return whole if whole is not None else self._each_time(name, column, unit)

    def _instants(self, name: str, column: pl.Series) -> np.ndarray:
        if column.null_count():
            row = int(column.is_null().arg_max() or 0)
            raise self.error(row, name, None, "dates in all rows or in none")
        return column.cast(pl.Datetime("ns")).to_physical().to_numpy()

    def _each_time(self, name: str, column: pl.Series, unit: str | None) -> Times:
        times: list[float | int] = []
        for row, value in enumerate(column.to_list()):
            text = value if isinstance(value, str) else None if value is None else repr(value)
            time: float | int | None = None if text is None else nanoseconds(text)
            if text is not None and time is None and unit is not None:
                time = milliseconds(text, unit)
            if time is None:
                numbers = f"a finite number of {unit}" if unit else "a number if time_unit is given"
                expected = f"an ISO 8601 date and time, or {numbers}"
                raise self.error(row, name, value, expected)
            if times and type(time) is not type(times[0]):
                raise self.error(row, name, value, "dates in all rows or in none")
            times.append(time)
        return Times.of(times)


def json_columns(
    file: TraceFile, names: list[str], extra: list[str], limit: int | None
) -> RawTable:
    """Fields `names`, and of `extra` those that some row has, of JSON rows.

    Raises:
        InputError: malformed JSON, or a field of `names` that no row has.
    """
    wanted = names + extra
    numbers: list[int] = []
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    for place, line in items(file):
        if limit is not None and len(numbers) == limit:
            break
        row = decode(place, line, _DECODER)
        for name, column in columns.items():
            column.append(row.get(name))
        numbers.append(place.number)
    series = {name: _series(name, values) for name, values in columns.items()}
    for name in names:
        if numbers and all(value is None for value in columns[name]):
            raise InputError(f"{file.name}, {name}", MISSING, "a field of the rows")
    frame = pl.DataFrame({n: s for n, s in series.items() if n in names or s.dtype != pl.Null})
    form = f"{file.name}, item {{}}" if is_array(file) else f"{file.name}:{{}}"
    return RawTable(frame, np.array(numbers, np.int64), form.format)


def _series(name: str, values: list[Any]) -> pl.Series:
    """A column of one type where there is one, else of objects."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pl.Series(name, values, pl.Null)
    dtypes = {str: pl.String, bool: pl.Boolean, float: pl.Float64}
    if len(kinds) == 1 and (kind := kinds.pop()) in dtypes:
        return pl.Series(name, values, dtypes[kind])
    if kinds == {int, float}:
        return pl.Series(name, values, pl.Float64)
    return pl.Series(name, values, pl.Object)


def _whole_lists(column: pl.Series, bits: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(int64 [n + 1], uint64 [m]) of a column of lists of ids; None for anything else."""
    if not isinstance(column.dtype, pl.List) or not column.dtype.inner.is_integer():
        return None
    counts = column.list.len().fill_null(0).to_numpy().astype(np.int64)
    ids = column.filter(pl.Series(counts > 0)).explode()
    if ids.null_count() or (len(ids) and (ids.min() < 0 or ids.max() >= 2**bits)):
        return None
    return offsets_of(counts), ids.cast(pl.UInt64).to_numpy()


def _is_plain(column: pl.Series) -> bool:
    return column.dtype == pl.String or column.dtype.is_integer()


def _nulls(column: pl.Series) -> pl.Series:
    return pl.repeat(None, len(column), dtype=pl.Int64, eager=True)


def _plain_numbers(column: pl.Series, unit: str) -> Times | None:
    """Decimal numbers as milliseconds, each rounded once; None for anything else."""
    if column.is_empty() or column.null_count() or not column.str.contains(_PLAIN_NUMBER).all():
        return None
    parts = column.str.split_exact(".", 1).struct.unnest()
    fraction = parts["field_1"].fill_null("")
    digits = int(fraction.str.len_bytes().max() or 0)
    joined = parts["field_0"] + fraction.str.pad_end(digits, "0")
    whole = joined.cast(pl.Int64, strict=False)
    if whole.null_count() or whole.max() >= _EXACT:
        return None
    values, shift = whole.to_numpy().astype(np.float64), UNIT_SHIFTS[unit] - digits
    return Times(values * 10.0**shift if shift >= 0 else values / 10.0**-shift)


# --- dates ----------------------------------------------------------------------------------------

_UTC_SUFFIXES = ("Z", "+00:00", "+0000")
_CHUNK = 1 << 18
_WEIGHTS = {2: np.array([10, 1]), 4: np.array([1000, 100, 10, 1])}
_MARKS = ((4, "-"), (7, "-"), (13, ":"), (16, ":"))


def plain_dates(column: pl.Series) -> Times | None:
    """Dates in UTC of the form YYYY-MM-DD HH:MM:SS[.fraction]; None for anything else."""
    if column.null_count() or column.is_empty():
        return None
    suffix = next((s for s in _UTC_SUFFIXES if column[0].endswith(s)), None)
    if suffix is not None:
        if not column.str.ends_with(suffix).all():
            return None
        column = column.str.head(-len(suffix))
    result = np.empty(len(column), np.int64)
    for start in range(0, len(column), _CHUNK):
        part = column.slice(start, _CHUNK)
        sizes = part.str.len_bytes().to_numpy()
        for size in np.unique(sizes):
            rows = np.flatnonzero(sizes == size)
            values = _fixed_dates(part if len(rows) == len(part) else part.gather(rows), int(size))
            if values is None:
                return None
            result[start + rows] = values
    return Times(result)


def _fixed_dates(column: pl.Series, size: int) -> np.ndarray | None:
    """int64 ns since 1970 of dates of one size; None if they are not all plain dates."""
    if size != 19 and not 21 <= size <= 29:
        return None
    text = np.frombuffer(column.str.join("").item().encode(), np.uint8)
    if text.size != size * len(column):
        return None
    text = text.reshape(-1, size)
    marks = [(text[:, k] == ord(mark)).all() for k, mark in _MARKS]
    if not all(marks) or not ((text[:, 10] == 32) | (text[:, 10] == ord("T"))).all():
        return None
    if size > 19 and not (text[:, 19] == ord(".")).all():
        return None
    digits = text - 48  # wraps around below "0"
    spans = ((0, 4), (5, 7), (8, 10), (11, 13), (14, 16), (17, 19), (20, size))
    if any((digits[:, a:b] > 9).any() for a, b in spans):
        return None
    year, month, day, hour, minute, second = (
        digits[:, a:b].astype(np.int64) @ _WEIGHTS[b - a] for a, b in spans[:6]
    )
    first = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]")
    in_year = (month >= 1) & (month <= 12)
    months = first + (np.where(in_year, month, 1) - 1)
    days = months.astype("datetime64[D]")
    last = ((months + 1).astype("datetime64[D]") - days).astype(np.int64)
    good = in_year & (day >= 1) & (day <= last) & (hour < 24) & (minute < 60) & (second < 60)
    if not (good & (year >= 1678) & (year < 2262)).all():
        return None
    seconds = (days.astype(np.int64) + day - 1) * 86_400 + hour * 3600 + minute * 60 + second
    fraction = np.zeros(len(column), np.int64)
    for k in range(20, size):
        fraction = fraction * 10 + digits[:, k]
    return seconds * 10**9 + fraction * 10 ** max(0, 9 - max(0, size - 20))
