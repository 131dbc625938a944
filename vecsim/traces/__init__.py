"""Readers of trace files, one module a format."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vecsim.config.checks import known
from vecsim.errors import InputError
from vecsim.traces.assemble import fitting_blocks, head, join_tables, surplus_rows, workload_of
from vecsim.traces.files import Paths, TraceFile, corpus_names, expand, read_file
from vecsim.traces.registry import FORMATS, check_format, format_of
from vecsim.traces.table import DEFAULT_BLOCK_SIZE, FAILED_ROWS, ReadOptions, TraceTable
from vecsim.traces.times import check_unit
from vecsim.traces.weka import NESTED_TIMES
from vecsim.workload.columns import check_ratio, natural_int, positive_int
from vecsim.workload.workload import Workload

__all__ = ["FORMATS", "Recognised", "read_trace", "workload_of_traffic"]

# The reference takes these block sizes from the file alone.
_EMBEDDED_BLOCK = ("agentic_mooncake", "dynamo", "weka")


@dataclass(frozen=True)
class Recognised:
    """What a reader made of its files.

    Attributes:
        format: name of the format.
        files: the files, in the order read.
        unit: unit of the times as read, "ISO 8601", or "none".
        block_size: prompt tokens per hash id; None where there are no ids.
        rows: rows of the workload.
        dropped: number of rows left out, by reason.
        without_ids: rows without prompt content, of a format that has some.
    """

    format: str
    files: tuple[str, ...]
    unit: str
    block_size: int | None
    rows: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    without_ids: int = 0


def read_trace(
    path: Paths,
    format: str = "auto",
    time_unit: str | None = None,
    block_size: int | None = None,
    limit: int | None = None,
    arrival_speedup_ratio: float = 1.0,
    *,
    columns: Mapping[str, str] | None = None,
    rebase: bool | None = None,
    failed_rows: str = "drop",
    agentic_lanes: int | None = None,
    nested_times: str = "auto",
) -> Workload:
    """Read a trace: one file, or shards that a list, a glob or a folder names.

    Files may be plain, gzip or Zstandard (recognised by content), with or without a byte order
    mark, with LF or CRLF, blank lines anywhere. Arrivals are shifted so that the first is 0. All
    rows are used, in file order; shards without sessions are merged by time. What was recognised
    is the workload's `origin`.

    Args:
        path: the file or files.
        format: a name of `FORMATS`, or "auto" by content.
        time_unit: unit of numeric times, "s", "ms", "us" or "ns"; the default is that of the
            format, "ms" for Mooncake, "s" for BurstGPT, Vidur and Splitwise. Dates (ISO 8601)
            need none.
        block_size: prompt tokens per hash id; the default is what the file says, else 512.
        limit: read only the first so many rows (of one-row-per-session formats: sessions); of
            several files, the first rows of all. Of a graph it must not cut a play.
        arrival_speedup_ratio: divides every gap between arrivals and every delay.
        columns: for any other table (format "table"), the file's column for each of `arrival`,
            `input_length`, `output_length` and, where there are such, `session_id`, `delay`,
            `request_id`, `hash_ids`, `input_token_ids`, `output_token_ids`.
        rebase: False keeps the first arrival where it is; the default is True, but False for
            what `Workload.write` wrote.
        failed_rows: what to do with requests that failed in the traced system (BurstGPT: no
            response tokens): "drop" and count them, "keep" them with zero outputs, or "error".
        agentic_lanes: lanes of plays, see `vecsim.workload.dependencies.Dependencies`.
        nested_times: whether Weka's nested times are "absolute", "relative", or "auto".

    Raises:
        InputError: a bad argument, or a malformed file; names file, line, column or field, value
            and what was expected.

    Warns:
        UserWarning: once each, with their number, when rows lack hash ids (they share no prefix)
            or have more than their prompt has blocks, and when rows are dropped.
    """
    if columns is not None and format == "auto":
        format = "table"
    check_format("format", format)
    check_unit(time_unit)
    check_ratio("arrival_speedup_ratio", arrival_speedup_ratio)
    known("failed_rows", failed_rows, FAILED_ROWS)
    known("nested_times", nested_times, NESTED_TIMES)
    options = ReadOptions(
        time_unit=time_unit,
        block_size=None if block_size is None else positive_int("block_size", block_size),
        limit=None if limit is None else natural_int("limit", limit),
        failed_rows=failed_rows,
        columns=columns,
        nested_times=nested_times,
    )
    lanes = None if agentic_lanes is None else positive_int("agentic_lanes", agentic_lanes)
    names, table, form, place = _read(path, format, options)
    if len(table) == 0 and limit != 0 and not table.dropped:
        raise InputError(names[0], "a file without rows", "at least one request")
    if lanes is not None and table.graph is None:
        raise InputError("agentic_lanes", lanes, "nothing: the trace has no plays")
    _warn(names, table)
    if rebase is None:
        rebase = not table.keeps_times
    workload = workload_of(table, place, arrival_speedup_ratio, rebase, lanes)
    if table.graph is not None and limit is not None:
        workload = workload.limit(limit)
    origin = Recognised(
        format=form,
        files=tuple(names),
        unit=table.unit,
        block_size=None if table.ids is None else table.block_size,
        rows=len(workload),
        dropped=dict(table.dropped),
        without_ids=table.without_ids,
    )
    return replace(workload, origin=origin)


def _read(
    path: Paths, format: str, options: ReadOptions
) -> tuple[list[str], TraceTable, str, Callable[[int], str]]:
    """The files, their rows, the format's name, and the place of a row for messages."""
    first = None
    if format == "auto":
        first = read_file(expand(path)[0])
    name = format if first is None else format_of(first, format)
    form = FORMATS[name]
    names = expand(path, form.endings)
    if form.corpus:
        files = [
            replace(first, source=source)
            if first is not None and file_name == first.name
            else read_file(file_name, source)
            for file_name, source in zip(names, corpus_names(path, names), strict=True)
        ]
        table = form.read(files, options)
        return names, table, name, _place(files[:1], [table])
    tables, shells = [], []
    for k, file_name in enumerate(names):
        file = first if k == 0 and first is not None else read_file(file_name)
        if k > 0 and format == "auto" and (other := format_of(file, format)) != name:
            raise InputError(file.name, f"the format {other}", f"{name}, as in {names[0]}")
        tables.append(form.read(file, options))
        shells.append(TraceFile(file.name, b""))
    joined = join_tables(tables, names)
    if len(tables) > 1:
        joined = head(joined, options.limit)
    return names, joined, name, _place(shells, tables)


def _place(files: Sequence[TraceFile], tables: Sequence[TraceTable]) -> Callable[[int], str]:
    """Names a row by its file and line (or item); rows are those of all files in turn."""

    def place(row: int) -> str:
        for file, table in zip(files, tables, strict=True):
            if row < len(table):
                number = table.numbers[row]
                return f"{file.name}, item {number}" if table.in_items else f"{file.name}:{number}"
            row -= len(table)
        raise IndexError(row)

    return place


def _warn(names: Sequence[str], table: TraceTable) -> None:
    if table.without_ids:
        warnings.warn(
            f"{names[0]}: {table.without_ids} of {len(table)} rows have no hash_ids; "
            "they share no prefix with other rows",
            stacklevel=3,
        )
    if surplus := surplus_rows(table):
        warnings.warn(
            f"{names[0]}: {surplus} of {len(table)} rows have more hash_ids than blocks of "
            f"{table.block_size} tokens; the last ones are ignored{_better_block(table)}",
            stacklevel=3,
        )
    for reason, count in table.dropped.items():
        warnings.warn(f"{names[0]}: {count} rows dropped: {reason}", stacklevel=3)


def _better_block(table: TraceTable) -> str:
    """A hint at the block sizes with which every row has as many ids as blocks."""
    sizes = fitting_blocks(table)
    if sizes is None:
        return ""
    low, high = sizes
    return f" (blocks of {low if low == high else f'{low} to {high}'} tokens would fit all rows)"


def workload_of_traffic(traffic: Any, spec: Any) -> Workload:
    """The workload of a payload's `traffic` (`vecsim.config.schema.Traffic`).

    Raises:
        InputError: an impossible option or a malformed trace; names field, or file and line.
    """
    if traffic.source_type != "trace":
        from vecsim.synthetic.reference import workload_of_synthetic

        return workload_of_synthetic(traffic, spec)
    name = traffic.trace_format or "mooncake"
    check_format("traffic.trace_format", name)
    block = traffic.trace_block_size
    if block is not None:
        positive_int("traffic.trace_block_size", block)
    elif name not in _EMBEDDED_BLOCK:
        block = DEFAULT_BLOCK_SIZE
    ratio = 1.0 if traffic.arrival_speedup_ratio is None else traffic.arrival_speedup_ratio
    return read_trace(
        traffic.trace_paths or [traffic.trace_path],
        format=name,
        block_size=block,
        arrival_speedup_ratio=check_ratio("traffic.arrival_speedup_ratio", ratio),
        agentic_lanes=traffic.agentic_lanes,
        nested_times=traffic.weka_nested_timestamp_basis or "auto",
    )
