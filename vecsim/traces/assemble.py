"""From the rows of one or several files to a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.traces.table import Graph, TraceTable
from vecsim.traces.times import Times
from vecsim.traces.turns import session_names, sessions_of
from vecsim.workload.columns import fit_blocks, number_ids, offsets_of, scale_arrivals
from vecsim.workload.dependencies import Dependencies, Sessions
from vecsim.workload.select import take_spans
from vecsim.workload.workload import Workload


def join_tables(tables: Sequence[TraceTable], names: Sequence[str]) -> TraceTable:
    """One table of several files, sorted by time where no row belongs to a session.

    Line numbers run on from file to file, so that automatic session names stay unique.

    Raises:
        InputError: graphs, or files that differ in block size, in their kind of times or contents.
    """
    first = tables[0]
    if len(tables) == 1:
        return first
    for table, name in zip(tables, names, strict=True):
        if table.graph is not None or first.graph is not None:
            raise InputError(name, "a graph of requests", "one file: graphs do not span several")
        if table.block_size != first.block_size:
            expected = f"{first.block_size}, as in {names[0]}"
            raise InputError(f"{name}, block size", table.block_size, expected)
        if table.times.values.dtype != first.times.values.dtype:
            raise InputError(f"{name}, times", table.unit, f"{first.unit}, as in {names[0]}")
        if (table.ids is None) != (first.ids is None) or table.raw_ids != first.raw_ids:
            raise InputError(f"{name}, prompt content", "of another kind", f"that of {names[0]}")
    joined = replace(
        first,
        times=Times(np.concatenate([t.times.values for t in tables])),
        input_length=np.concatenate([t.input_length for t in tables]),
        output_length=np.concatenate([t.output_length for t in tables]),
        numbers=_running_numbers(tables),
        session_id=_join_text("session_id", [t.session_id for t in tables], tables),
        request_id=_join_text("request_id", [t.request_id for t in tables], tables),
        delay_ms=_join_floats([t.delay_ms for t in tables], tables),
        ids=_join_spans([t.ids for t in tables], tables, np.uint64),
        planned=_join_spans([t.planned for t in tables], tables, np.uint32),
        dp_rank=_join_ranks([t.dp_rank for t in tables], tables),
        prefill_dp_rank=_join_ranks([t.prefill_dp_rank for t in tables], tables),
        without_ids=sum(t.without_ids for t in tables),
        dropped=_sum_dropped(tables),
    )
    if joined.session_id is None and joined.delay_ms is None and not _has_gaps(joined.times):
        return _take(joined, np.argsort(joined.times.values, kind="stable"))
    return joined


def _has_gaps(times: Times) -> bool:
    return times.values.dtype.kind == "f" and bool(np.isnan(times.values).any())


def _running_numbers(tables: Sequence[TraceTable]) -> np.ndarray:
    result, base = [], 0
    for table in tables:
        result.append(table.numbers + base)
        base += int(table.numbers.max(initial=0))
    return np.concatenate(result)


def _join_text(name: str, columns: list, tables: Sequence[TraceTable]) -> pl.Series | None:
    if all(column is None for column in columns):
        return None
    return pl.concat(
        pl.repeat(None, len(t), dtype=pl.String, eager=True).alias(name) if c is None else c
        for c, t in zip(columns, tables, strict=True)
    )


def _join_floats(columns: list, tables: Sequence[TraceTable]) -> np.ndarray | None:
    if all(column is None for column in columns):
        return None
    filled = zip(columns, tables, strict=True)
    return np.concatenate([np.full(len(t), np.nan) if c is None else c for c, t in filled])


def _join_ranks(columns: list, tables: Sequence[TraceTable]) -> np.ndarray | None:
    if all(column is None for column in columns):
        return None
    filled = zip(columns, tables, strict=True)
    return np.concatenate([np.full(len(t), -1, np.int32) if c is None else c for c, t in filled])


def _join_spans(spans: list, tables: Sequence[TraceTable], dtype: type) -> tuple | None:
    if all(span is None for span in spans):
        return None
    empty = np.zeros(0, dtype)
    filled = [
        (np.zeros(len(t) + 1, np.int64), empty) if s is None else s
        for s, t in zip(spans, tables, strict=True)
    ]
    counts = np.concatenate([np.diff(offsets) for offsets, _ in filled])
    return offsets_of(counts), np.concatenate([ids for _, ids in filled])


def _sum_dropped(tables: Sequence[TraceTable]) -> dict[str, int]:
    total: dict[str, int] = {}
    for table in tables:
        for reason, count in table.dropped.items():
            total[reason] = total.get(reason, 0) + count
    return total


def _take(table: TraceTable, rows: np.ndarray) -> TraceTable:
    """Rows of a table without sessions or a graph, in another order."""
    return replace(
        table,
        times=Times(table.times.values[rows]),
        input_length=table.input_length[rows],
        output_length=table.output_length[rows],
        numbers=table.numbers[rows],
        request_id=None if table.request_id is None else table.request_id.gather(rows),
        ids=None if table.ids is None else take_spans(*table.ids, rows),
        planned=None if table.planned is None else take_spans(*table.planned, rows),
        dp_rank=None if table.dp_rank is None else table.dp_rank[rows],
        prefill_dp_rank=None if table.prefill_dp_rank is None else table.prefill_dp_rank[rows],
    )


def head(table: TraceTable, limit: int | None) -> TraceTable:
    """The first rows of a table without a graph."""
    if limit is None or len(table) <= limit:
        return table
    rows = np.arange(limit)
    session = None if table.session_id is None else table.session_id.head(limit)
    delay = None if table.delay_ms is None else table.delay_ms[:limit]
    return replace(_take(table, rows), session_id=session, delay_ms=delay)


# --- the workload ---------------------------------------------------------------------------------


def workload_of(
    table: TraceTable,
    place: Callable[[int], str],
    speedup: float,
    rebase: bool,
    lanes: int | None,
) -> Workload:
    """The workload of a table; `place(row)` names a row in messages.

    Raises:
        InputError: turns or arrivals that cannot be; names the row.
    """
    n = len(table)
    _check_content(table, place)
    names = session_names(table)
    sessions = None if table.graph is not None else sessions_of(table, names, place)
    dependencies = None
    if table.graph is not None:
        dependencies = _dependencies(table, table.graph, speedup, rebase, lanes)
        arrival_ms = dependencies.not_before_ms
    else:
        arrival_ms = _arrivals(table, sessions, speedup, rebase)
    if sessions is not None:
        sessions = sessions.speedup(speedup)
    blocks = _blocks(table, n)
    return Workload(
        arrival_ms=arrival_ms,
        input_length=table.input_length.astype(np.int32),
        output_length=table.output_length.astype(np.int32),
        dp_rank=_ranks(table.dp_rank, n),
        prefill_dp_rank=_ranks(table.prefill_dp_rank, n),
        request_id=table.request_id,
        session_id=names,
        turn_index=np.zeros(n, np.int32) if sessions is None else sessions.turn,
        block_offsets=None if blocks is None else blocks[0],
        block_ids=None if blocks is None else blocks[1],
        block_tokens=table.block_size,
        output_offsets=None if table.planned is None else table.planned[0],
        output_token_ids=None if table.planned is None else table.planned[1],
        sessions=sessions,
        dependencies=dependencies,
        session_cap=table.session_cap,
    )


def surplus_rows(table: TraceTable) -> int:
    """Number of rows with more hash ids than their prompt has blocks."""
    if table.ids is None or table.raw_ids:
        return 0
    return int(np.count_nonzero(np.diff(table.ids[0]) > _blocks_needed(table)))


def fitting_blocks(table: TraceTable) -> tuple[int, int] | None:
    """The least and the largest block size with which all rows have one id a block, or None."""
    if table.ids is None:
        return None
    have = np.diff(table.ids[0])
    some = have > 0
    have, tokens = have[some], table.input_length[some]
    low = int((-(-tokens // have)).max(initial=1))
    several = have > 1
    high = int(((tokens[several] - 1) // (have[several] - 1)).min(initial=np.iinfo(np.int64).max))
    return (low, high) if several.any() and low <= high else None


def _blocks_needed(table: TraceTable) -> np.ndarray:
    return -(-table.input_length // table.block_size)


def _check_content(table: TraceTable, place: Callable[[int], str]) -> None:
    """Raise InputError for ids that do not cover their prompt, or tokens of another number."""
    if table.ids is not None:
        have = np.diff(table.ids[0])
        for row in np.flatnonzero((have > 0) & (have < _blocks_needed(table)))[:1]:
            what = f"{have[row]} ids of {table.block_size} tokens"
            covered = int(have[row]) * table.block_size
            expected = f"at most {covered}, as {what} cover"
            raise InputError(f"{place(row)}, input_length", int(table.input_length[row]), expected)
        tokens = table.raw_ids and table.block_size == 1
        for row in np.flatnonzero((have > 0) & (have != table.input_length))[: int(tokens)]:
            expected = f"{int(table.input_length[row])}, as input_length says"
            raise InputError(f"{place(row)}, token ids", f"{have[row]} ids", expected)
    if table.planned is not None:
        have = np.diff(table.planned[0])
        for row in np.flatnonzero((have > 0) & (have != table.output_length))[:1]:
            expected = f"{int(table.output_length[row])}, as output_length says"
            raise InputError(f"{place(row)}, output_token_ids", f"{have[row]} ids", expected)


def _ranks(column: np.ndarray | None, n: int) -> np.ndarray:
    return np.full(n, -1, np.int32) if column is None else column


def _blocks(table: TraceTable, n: int) -> tuple[np.ndarray, np.ndarray] | None:
    if table.ids is not None:
        offsets, ids = table.ids
        numbered = ids.astype(np.uint32) if table.raw_ids else number_ids(ids)
        return fit_blocks(table.input_length, offsets, numbered, table.block_size)
    if table.planned is not None:
        return np.zeros(n + 1, np.int64), np.zeros(0, np.uint32)
    return None


def _arrivals(
    table: TraceTable, sessions: Sessions | None, speedup: float, rebase: bool
) -> np.ndarray:
    """Arrivals by the times of first turns; a later turn repeats that of its first."""
    if sessions is None:
        return table.times.arrivals(speedup, rebase)
    first = np.flatnonzero(sessions.turn == 0)
    arrivals = Times(table.times.values[first]).arrivals(speedup, rebase)
    by_session = np.empty(sessions.count)
    by_session[sessions.session[first]] = arrivals
    return by_session[sessions.session]


def _dependencies(
    table: TraceTable, graph: Graph, speedup: float, rebase: bool, lanes: int | None
) -> Dependencies:
    base = graph.not_before_ms.min(initial=np.inf) if rebase and len(table) else 0.0
    order = np.argsort(np.array(table.request_id.to_list(), object), kind="stable")
    node = np.empty(len(order), np.int32)
    node[order] = np.arange(len(order))
    plays = int(graph.play_index.max(initial=-1)) + 1
    first_row = np.zeros(plays, np.int64)
    first_row[graph.play_index[::-1]] = np.arange(len(order))[::-1]
    scale_arrivals(graph.not_before_ms - base, speedup)
    return Dependencies(
        offsets=graph.offsets,
        source=graph.source,
        on_completion=graph.on_completion,
        delay_ms=graph.delay_ms,
        not_before_ms=graph.not_before_ms - base,
        node=node,
        play=graph.play_index,
        play_id=graph.play_id.gather(first_row).alias("play_id"),
        lanes=table.lanes if lanes is None else lanes,
    ).speedup(speedup)
