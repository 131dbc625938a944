"""Readers of trace files, one module a format."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np

from vecsim.columns import check_ratio, fit_blocks, natural_int, number_ids, positive_int
from vecsim.errors import InputError, NotSupportedYetError
from vecsim.traces.files import read_file
from vecsim.traces.registry import FORMATS, check_format, format_of
from vecsim.traces.table import ReadOptions, TraceTable
from vecsim.traces.times import check_unit
from vecsim.workload import Workload

__all__ = ["FORMATS", "read_trace", "workload_of_traffic"]

DEFAULT_BLOCK_SIZE = 512


def read_trace(
    path: str | os.PathLike[str],
    format: str = "auto",
    time_unit: str | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    limit: int | None = None,
    arrival_speedup_ratio: float = 1.0,
    *,
    rebase: bool = True,
) -> Workload:
    """Read a trace file; all its rows, in file order.

    Files may be plain, gzip or Zstandard (recognised by content), with or without a byte order
    mark, with LF or CRLF. Arrivals are shifted so that the first is 0.

    Args:
        path: the file.
        format: "mooncake" (JSON lines, or one JSON array), "azure" (CSV), or "auto" by content.
        time_unit: unit of numeric times, "s", "ms", "us" or "ns"; the default is "ms". Azure
            traces have dates; numbers there need the unit. Dates (ISO 8601) need none.
        block_size: prompt tokens per hash id.
        limit: read only the first so many rows.
        arrival_speedup_ratio: divides every gap between arrivals.
        rebase: False keeps the first arrival where it is.

    Raises:
        InputError: a bad argument, or a malformed file; names file, line, column or field, value
            and what was expected.
        NotSupportedYetError: a session of several turns.

    Warns:
        UserWarning: once, when Mooncake rows lack hash ids; they share no prefix.
    """
    check_format("format", format)
    check_unit(time_unit)
    check_ratio("arrival_speedup_ratio", arrival_speedup_ratio)
    options = ReadOptions(
        time_unit=time_unit,
        block_size=positive_int("block_size", block_size),
        limit=None if limit is None else natural_int("limit", limit),
    )
    file = read_file(path)
    table = format_of(file, format).read(file, options)
    if len(table.input_length) == 0 and limit != 0:
        raise InputError(file.name, "a file without rows", "at least one request")
    if table.without_ids:
        warnings.warn(
            f"{file.name}: {table.without_ids} of {len(table.input_length)} rows have no hash_ids; "
            "they share no prefix with other rows",
            stacklevel=2,
        )
    return _workload(table, options, table.times.arrivals(arrival_speedup_ratio, rebase))


def workload_of_traffic(traffic: Any, spec: Any) -> Workload:
    """The workload of a payload's `traffic` (`vecsim.descriptors.Traffic`).

    Raises:
        InputError: an impossible option or a malformed trace; names field, or file and line.
        NotSupportedYetError: a source that is not built yet.
    """
    if traffic.source_type != "trace":
        raise NotSupportedYetError("traffic.source_type", traffic.source_type)
    paths = traffic.trace_paths or [traffic.trace_path]
    if len(paths) > 1:
        raise NotSupportedYetError("traffic.trace_paths", "several files")
    name = traffic.trace_format or "mooncake"
    check_format("traffic.trace_format", name)
    block = traffic.trace_block_size
    ratio = traffic.arrival_speedup_ratio
    return read_trace(
        paths[0],
        format=name,
        block_size=DEFAULT_BLOCK_SIZE
        if block is None
        else positive_int("traffic.trace_block_size", block),
        arrival_speedup_ratio=1.0
        if ratio is None
        else check_ratio("traffic.arrival_speedup_ratio", ratio),
    )


def _workload(table: TraceTable, options: ReadOptions, arrival_ms: np.ndarray) -> Workload:
    n = len(table.input_length)
    blocks = None
    if table.ids is not None:
        offsets, ids = table.ids
        blocks = fit_blocks(table.input_length, offsets, number_ids(ids), options.block_size)
    elif table.planned is not None:
        blocks = np.zeros(n + 1, np.int64), np.zeros(0, np.uint32)
    return Workload(
        arrival_ms=arrival_ms,
        input_length=table.input_length.astype(np.int32),
        output_length=table.output_length.astype(np.int32),
        dp_rank=np.full(n, -1, np.int32),
        prefill_dp_rank=np.full(n, -1, np.int32),
        session_id=table.session_id,
        turn_index=np.zeros(n, np.int32),
        block_offsets=None if blocks is None else blocks[0],
        block_ids=None if blocks is None else blocks[1],
        block_tokens=options.block_size,
        output_offsets=None if table.planned is None else table.planned[0],
        output_token_ids=None if table.planned is None else table.planned[1],
    )
