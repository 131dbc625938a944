"""Azure LLM inference traces (2023 and 2024): CSV of time, prompt tokens and generated tokens.

Like Mooncake files, clean ones go through Polars as a whole and all others through a pass over
lines.
"""

from __future__ import annotations

import csv
from typing import NamedTuple

import numpy as np
import polars as pl

from vecsim.columns import LENGTH, MAX_INT32
from vecsim.errors import MISSING, InputError
from vecsim.traces.files import TraceFile
from vecsim.traces.table import ReadOptions, TraceTable, automatic_sessions, token_count
from vecsim.traces.times import YEARS, Times, milliseconds, nanoseconds

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SEPARATORS = ",;\t"
_UTC_SUFFIX = r"(Z|\+00:?00)$"
_PLAIN_DATE = r"^\d{4}-\d\d-\d\d[T ]([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?$"


def looks_like(file: TraceFile) -> bool:
    """Whether the first line names one of the token columns."""
    first = next((line for _, line in file.lines()), b"").decode().casefold()
    return any(name.casefold() in first for name in COLUMNS[1:])


def read(file: TraceFile, options: ReadOptions) -> TraceTable:
    """All rows, or the first `options.limit`; lengths only.

    Times are ISO 8601, or numbers when `options.time_unit` is given.

    Raises:
        InputError: a missing column or a malformed row; names file, line and column.
    """
    header = _read_header(file)
    table = _read_whole(file, options, header)
    return table if table is not None else _read_lines(file, options, header)


class _Header(NamedTuple):
    """First line: its number, the separator, all names, and where the columns of `COLUMNS` are."""

    line: int
    separator: str
    names: list[str]
    positions: list[int]


def _read_header(file: TraceFile) -> _Header:
    line, text = next(file.lines(), (1, b""))
    first = text.decode().strip("\r\n")
    separator = max(_SEPARATORS, key=first.count)
    names = _split(file, line, first, separator)
    plain = [name.casefold() for name in names]
    for column in COLUMNS:
        if plain.count(column.casefold()) != 1:
            kinds = "commas, semicolons or tabs"
            expected = f"one column {column} among names separated by {kinds}"
            raise InputError(f"{file.name}:{line}", first, expected)
    return _Header(line, separator, names, [plain.index(name.casefold()) for name in COLUMNS])


def _split(file: TraceFile, line: int, text: str, separator: str) -> list[str]:
    try:
        row = next(csv.reader([text], delimiter=separator, skipinitialspace=True), [])
    except csv.Error as error:
        raise InputError(f"{file.name}:{line}", text, f"one row of CSV ({error})") from None
    return [value.strip() for value in row]


def _read_whole(file: TraceFile, options: ReadOptions, header: _Header) -> TraceTable | None:
    """The table of a clean file; None to leave it to the pass over lines."""
    stray_returns = file.data.count(b"\r") != file.data.count(b"\r\n")
    if options.time_unit is not None or header.line != 1 or stray_returns:
        return None
    if options.limit is not None:
        file = file.head(options.limit + 1)
    names = [header.names[k] for k in header.positions]
    types = dict(zip(names, (pl.String, pl.Int64, pl.Int64), strict=True))
    try:
        frame = pl.read_csv(
            file.data, separator=header.separator, columns=names, schema_overrides=types
        )
    except pl.exceptions.PolarsError:
        return None
    numbers = file.row_numbers(frame.height + 1)
    if numbers is None or frame.is_empty() or sum(frame.null_count().row(0)):
        return None
    dates, inputs, outputs = frame.select(names)
    times = _whole_times(dates)
    lengths = [column.to_numpy() for column in (inputs, outputs)]
    if times is None or any(c.min() < 0 or c.max() > MAX_INT32 for c in lengths):
        return None
    return TraceTable(times, *lengths, session_id=automatic_sessions(numbers[1:]))


def _whole_times(dates: pl.Series) -> Times | None:
    """Plain dates in UTC, all written alike; None for anything else."""
    if dates.str.contains(_UTC_SUFFIX)[0]:
        dates = dates.str.replace(_UTC_SUFFIX, "")
    in_range = dates.min() >= f"{YEARS.start}" and dates.max() < f"{YEARS.stop}"
    if not in_range or not dates.str.contains(_PLAIN_DATE).all():
        return None
    form = "%Y-%m-%dT%H:%M:%S%.f" if dates[0][10] == "T" else "%Y-%m-%d %H:%M:%S%.f"
    parsed = dates.str.to_datetime(form, time_unit="ns", strict=False)
    return None if parsed.null_count() else Times(parsed.to_physical().to_numpy())


def _read_lines(file: TraceFile, options: ReadOptions, header: _Header) -> TraceTable:
    numbers: list[int] = []
    columns: tuple[list, list, list] = ([], [], [])
    for line, text in file.lines():
        if line <= header.line:
            continue
        if options.limit is not None and len(numbers) == options.limit:
            break
        row = _split(file, line, text.decode(), header.separator)
        if len(row) > len(header.names):
            expected = f"at most {len(header.names)} fields, as in the first line"
            raise InputError(f"{file.name}:{line}", f"{len(row)} fields", expected)
        time, inputs, outputs = (row[k] if k < len(row) else "" for k in header.positions)
        columns[0].append(_time(f"{file.name}:{line}, {COLUMNS[0]}", time, options.time_unit))
        columns[1].append(_length(f"{file.name}:{line}, {COLUMNS[1]}", inputs))
        columns[2].append(_length(f"{file.name}:{line}, {COLUMNS[2]}", outputs))
        if type(columns[0][-1]) is not type(columns[0][0]):
            expected = "dates in all rows or in none"
            raise InputError(f"{file.name}:{line}, {COLUMNS[0]}", time, expected)
        numbers.append(line)
    dates = not columns[0] or isinstance(columns[0][0], int)
    return TraceTable(
        times=Times(np.array(columns[0], np.int64 if dates else np.float64)),
        input_length=np.array(columns[1], np.int64),
        output_length=np.array(columns[2], np.int64),
        session_id=automatic_sessions(np.array(numbers, np.int64)),
    )


def _time(where: str, text: str, unit: str | None) -> float | int:
    """A date as int ns; with a unit also a number, as float ms."""
    time = nanoseconds(text)
    if time is None and unit is not None:
        time = milliseconds(text, unit)
    if time is None:
        numbers = f"a finite number of {unit}" if unit else "a number if time_unit is given"
        value = text if text else MISSING
        raise InputError(where, value, f"an ISO 8601 date and time, or {numbers}")
    return time


def _length(where: str, text: str) -> int:
    number = token_count(text)
    if number is None:
        raise InputError(where, text if text else MISSING, LENGTH)
    return number
