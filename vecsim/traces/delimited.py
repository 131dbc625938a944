"""CSV and other tables of one row per request: Azure, BurstGPT, Vidur, Splitwise, or by mapping."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import polars as pl

from vecsim.errors import MISSING, InputError
from vecsim.traces.files import TraceFile
from vecsim.traces.json_rows import is_array
from vecsim.traces.raw import RawTable, json_columns
from vecsim.traces.table import ReadOptions, TraceTable

_SEPARATORS = ",;\t"


class Layout(NamedTuple):
    """Columns of a CSV format by name, whatever their case.

    `unit` is that of numeric times, None = there are dates. `fails` says that zero outputs mark
    requests that failed in the traced system.
    """

    time: str
    inputs: str
    outputs: str
    unit: str | None
    fails: bool = False
    request_id: str | None = None


AZURE = Layout("TIMESTAMP", "ContextTokens", "GeneratedTokens", None)
BURSTGPT = Layout("Timestamp", "Request tokens", "Response tokens", "s", fails=True)
VIDUR = Layout("arrived_at", "num_prefill_tokens", "num_decode_tokens", "s")
SPLITWISE = Layout("arrival_timestamp", "prompt_size", "token_size", "s", request_id="request_id")

TABLE_COLUMNS = ("arrival", "input_length", "output_length", "session_id", "delay", "request_id")
TABLE_CONTENT = ("hash_ids", "input_token_ids", "output_token_ids")


def looks_like(layout: Layout) -> Callable[[TraceFile], bool]:
    """A function that tells whether the first line names one of the layout's token columns."""

    def check(file: TraceFile) -> bool:
        if file.is_json:
            return False
        first = next((line for _, line in file.lines()), b"").decode().casefold()
        names = (layout.inputs, layout.outputs)
        return any(_word(name) in _words(first) for name in names)

    return check


def _word(name: str) -> str:
    return name.casefold().strip(" \"'")


def _words(line: str) -> list[str]:
    for separator in _SEPARATORS:
        line = line.replace(separator, "\n")
    return [_word(word) for word in line.split("\n")]


def reader(layout: Layout) -> Callable[[TraceFile, ReadOptions], TraceTable]:
    """A function that reads a file of that layout; lengths only."""

    def read(file: TraceFile, options: ReadOptions) -> TraceTable:
        return _read(file, options, layout)

    return read


def _read(file: TraceFile, options: ReadOptions, layout: Layout) -> TraceTable:
    names = [layout.time, layout.inputs, layout.outputs]
    extra = [] if layout.request_id is None else [layout.request_id]
    raw = read_csv(file, names, extra, options.limit)
    unit = options.time_unit or layout.unit
    times = raw.times(layout.time, unit)
    inputs, outputs = raw.lengths(layout.inputs), raw.lengths(layout.outputs)
    dropped = {}
    keep = np.ones(len(raw), np.bool_)
    if layout.fails:
        keep, dropped = _failed(raw, layout, outputs, options.failed_rows)
    dates = times.values.dtype.kind == "i"
    request_id = None if layout.request_id is None else raw.text(layout.request_id)
    return TraceTable(
        times=times.keep(keep),
        input_length=inputs[keep],
        output_length=outputs[keep],
        numbers=raw.numbers[keep],
        unit="ISO 8601" if dates else str(unit),
        request_id=None if request_id is None else request_id.filter(pl.Series(keep)),
        dropped=dropped,
    )


def _failed(
    raw: RawTable, layout: Layout, outputs: np.ndarray, how: str
) -> tuple[np.ndarray, Mapping[str, int]]:
    """(bool [n] rows to keep, number of dropped rows by reason)."""
    failed = np.flatnonzero(outputs == 0)
    keep = np.ones(len(raw), np.bool_)
    if how == "keep" or not failed.size:
        return keep, {}
    if how == "error":
        expected = "outputs above 0, unless failed_rows is 'drop' or 'keep'"
        raise raw.error(int(failed[0]), layout.outputs, 0, expected)
    keep[failed] = False
    return keep, {f"failed in the source (no {layout.outputs})": int(failed.size)}


# --- any table ------------------------------------------------------------------------------------


def read_table(file: TraceFile, options: ReadOptions) -> TraceTable:
    """A CSV, JSON or Parquet table whose columns `options.columns` names.

    Raises:
        InputError: no mapping, an unknown or missing column, a malformed row.
    """
    names = _mapping(options.columns)
    raw = read_raw(file, list(names.values()), [], options.limit)
    unit = options.time_unit or unit_of_name(names["arrival"])
    times = raw.times(names["arrival"], unit)
    delay = names.get("delay")
    ids, raw_ids, block = None, False, options.block_size
    if "hash_ids" in names:
        ids = raw.id_lists(names["hash_ids"], 64)
    elif "input_token_ids" in names:
        ids, raw_ids, block = raw.id_lists(names["input_token_ids"], 32), True, 1
    planned = None
    if "output_token_ids" in names:
        planned = raw.id_lists(names["output_token_ids"], 32)
    return TraceTable(
        times=times,
        input_length=raw.lengths(names["input_length"]),
        output_length=raw.lengths(names["output_length"]),
        numbers=raw.numbers,
        unit="ISO 8601" if times.values.dtype.kind == "i" else str(unit),
        session_id=raw.text(names["session_id"]) if "session_id" in names else None,
        delay_ms=None if delay is None else _delays(raw, delay, options.time_unit),
        request_id=raw.text(names["request_id"]) if "request_id" in names else None,
        ids=ids,
        raw_ids=raw_ids,
        block_size=block or 512,
        planned=None if planned is None else (planned[0], planned[1].astype(np.uint32)),
        in_items=is_array(file),
    )


def _mapping(columns: Mapping[str, str] | None) -> dict[str, str]:
    known = (*TABLE_COLUMNS, *TABLE_CONTENT)
    if not columns:
        raise InputError("columns", MISSING, f"names of the file's columns, for {', '.join(known)}")
    for name, column in columns.items():
        if name not in known:
            raise InputError("columns", name, f"one of {', '.join(known)}")
        if not isinstance(column, str):
            raise InputError(f"columns[{name!r}]", column, "the name of a column of the file")
    for name in TABLE_COLUMNS[:3]:
        if name not in columns:
            raise InputError(f"columns[{name!r}]", MISSING, "the name of a column of the file")
    return dict(columns)


def _delays(raw: RawTable, name: str, unit: str | None) -> np.ndarray:
    unit = unit_of_name(name) or unit or "ms"
    return raw.floats(name) * {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}[unit]


def unit_of_name(name: str) -> str | None:
    """The unit that a column's name ends with, as in `arrival_ms`."""
    ending = name.casefold().rpartition("_")[2]
    return ending if ending in ("s", "ms", "us", "ns") else None


def read_raw(file: TraceFile, names: list[str], extra: list[str], limit: int | None) -> RawTable:
    """Columns `names`, and of `extra` those that exist, of a Parquet, JSON or CSV file."""
    if file.is_parquet:
        return _read_parquet(file, names, extra, limit)
    if file.is_json:
        return json_columns(file, names, extra, limit)
    return read_csv(file, names, extra, limit)


def _read_parquet(
    file: TraceFile, names: list[str], extra: list[str], limit: int | None
) -> RawTable:
    try:
        frame = pl.read_parquet(io.BytesIO(file.data), n_rows=limit)
    except pl.exceptions.PolarsError as error:
        reason = str(error).split("\n", 1)[0]
        raise InputError(file.name, reason, "a Parquet file") from None
    for name in names:
        if name not in frame.columns:
            raise InputError(f"{file.name}, {name}", MISSING, f"one of {', '.join(frame.columns)}")
    wanted = names + [name for name in extra if name in frame.columns]
    return RawTable(
        frame.select(wanted),
        np.arange(1, frame.height + 1),
        lambda number: f"{file.name}, row {number}",
    )


# --- CSV ------------------------------------------------------------------------------------------


class _Header(NamedTuple):
    """First line: its number, the separator and all names."""

    line: int
    separator: str
    names: list[str]


def read_csv(file: TraceFile, names: list[str], extra: list[str], limit: int | None) -> RawTable:
    """Columns of a CSV file as text, under the given names, whatever their case in the file.

    Raises:
        InputError: a missing column, or a row with too many fields; names file and line.
    """
    header = _read_header(file, names)
    plain = [name.casefold() for name in header.names]
    wanted = names + [name for name in extra if name.casefold() in plain]
    positions = [plain.index(name.casefold()) for name in wanted]
    raw = _read_whole(file, header, wanted, positions, limit)
    return raw if raw is not None else _read_lines(file, header, wanted, positions, limit)


def _read_header(file: TraceFile, names: list[str]) -> _Header:
    line, text = next(file.lines(), (1, b""))
    first = text.decode().strip("\r\n")
    separator = max(_SEPARATORS, key=first.count)
    found = _split(file, line, first, separator)
    plain = [name.casefold() for name in found]
    for column in names:
        if plain.count(column.casefold()) != 1:
            kinds = "commas, semicolons or tabs"
            expected = f"one column {column} among names separated by {kinds}"
            raise InputError(f"{file.name}:{line}", first, expected)
    return _Header(line, separator, found)


def _split(file: TraceFile, line: int, text: str, separator: str) -> list[str]:
    try:
        row = next(csv.reader([text], delimiter=separator, skipinitialspace=True), [])
    except csv.Error as error:
        raise InputError(f"{file.name}:{line}", text, f"one row of CSV ({error})") from None
    return [value.strip() for value in row]


def _read_whole(
    file: TraceFile, header: _Header, names: list[str], positions: list[int], limit: int | None
) -> RawTable | None:
    """The columns of a clean file; None to leave it to the pass over lines."""
    stray_returns = file.data.count(b"\r") != file.data.count(b"\r\n")
    if header.line != 1 or stray_returns or len(set(header.names)) < len(header.names):
        return None
    if limit is not None:
        file = file.head(limit + 1)
    data = file.data.rstrip(b"\r\n")
    lines = data.count(b"\n") + 1
    if data.count(header.separator.encode()) != lines * (len(header.names) - 1):
        return None  # blank lines above all: each of them would be a row
    try:
        frame = pl.read_csv(
            data,
            separator=header.separator,
            columns=[header.names[k] for k in positions],
            infer_schema=False,
        )
    except pl.exceptions.PolarsError:
        return None
    if frame.height != lines - 1:
        return None
    frame = frame.select(
        _stripped(frame[header.names[k]]).alias(name)
        for k, name in zip(positions, names, strict=True)
    )
    if frame[names[0]].null_count():
        return None
    return RawTable(frame, np.arange(2, lines + 1), _line(file))


def _stripped(column: pl.Series) -> pl.Series:
    if column.str.contains(r"^\s|\s$").any():
        column = column.str.strip_chars()
    return column.replace("", None) if (column == "").any() else column


def _line(file: TraceFile) -> Callable[[int], str]:
    return lambda number: f"{file.name}:{number}"


def _read_lines(
    file: TraceFile, header: _Header, names: list[str], positions: list[int], limit: int | None
) -> RawTable:
    numbers: list[int] = []
    columns: list[list[str | None]] = [[] for _ in names]
    for line, text in file.lines():
        if line <= header.line:
            continue
        if limit is not None and len(numbers) == limit:
            break
        row = _split(file, line, text.decode(), header.separator)
        if len(row) > len(header.names):
            expected = f"at most {len(header.names)} fields, as in the first line"
            raise InputError(f"{file.name}:{line}", f"{len(row)} fields", expected)
        for column, k in zip(columns, positions, strict=True):
            column.append((row[k] or None) if k < len(row) else None)
        numbers.append(line)
    frame = pl.DataFrame(
        {name: pl.Series(name, c, pl.String) for name, c in zip(names, columns, strict=True)}
    )
    return RawTable(frame, np.array(numbers, np.int64), _line(file))
