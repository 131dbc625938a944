"""vecsim's own workload files: every column of a workload, as Parquet, CSV or JSON lines."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.traces.delimited import read_raw
from vecsim.traces.files import TraceFile
from vecsim.traces.json_rows import is_array
from vecsim.traces.raw import RawTable
from vecsim.traces.table import DEFAULT_BLOCK_SIZE, Graph, ReadOptions, TraceTable
from vecsim.traces.times import UNIT_SHIFTS, Times
from vecsim.workload.columns import offsets_of

if TYPE_CHECKING:
    from vecsim.workload.workload import Workload

ARRIVALS = {f"arrival_{unit}": unit for unit in UNIT_SHIFTS}
KEEPS_TIMES = "keeps_times"
"""Column that says that the first arrival stays where it is: of a written workload that begins
after 0. Other tables of one's own begin when their trace did."""
_NEEDED = ("input_length", "output_length")
_OTHERS = (
    "request_id",
    "session_id",
    "delay_ms",
    "hash_ids",
    "block_ids",
    "input_token_ids",
    "block_tokens",
    "output_token_ids",
    "dp_rank",
    "prefill_dp_rank",
    "prompt_is_delta",
    "session_cap",
    "play_id",
    "play_index",
    "not_before_ms",
    "dependencies",
    "lanes",
    KEEPS_TIMES,
)
WRITABLE = (".parquet", ".csv", ".jsonl")


def looks_like(file: TraceFile) -> bool:
    """Whether the file is Parquet, or has a column `arrival_<unit>` and the two lengths."""
    if file.is_parquet:
        return True
    if file.is_json:
        names = set(file.first_object)
    else:
        first = next((line for _, line in file.lines()), b"").decode(errors="replace")
        names = {name.strip(' "\r') for name in first.replace(";", ",").split(",")}
    return not names.isdisjoint(ARRIVALS) and names.issuperset(_NEEDED)


def read(file: TraceFile, options: ReadOptions) -> TraceTable:
    """All rows, or the first `options.limit`.

    The arrival column says its unit: `arrival_s`, `arrival_ms`, `arrival_us` or `arrival_ns`.
    Prompt content is `hash_ids` (64 bits), `block_ids` (32 bits, token values) or
    `input_token_ids` (one per token).

    Raises:
        InputError: a missing column or a malformed value; names file, line and column.
    """
    name = _arrival(file)
    raw = read_raw(file, [name, *_NEEDED], list(_OTHERS), options.limit)
    times = _times(raw, name, options.time_unit or ARRIVALS[name])
    ids, raw_ids, block = _content(raw, options.block_size)
    planned = raw.id_lists("output_token_ids", 32)
    return TraceTable(
        times=times,
        input_length=raw.lengths("input_length"),
        output_length=raw.lengths("output_length"),
        numbers=raw.numbers,
        unit=options.time_unit or ARRIVALS[name],
        session_id=raw.text("session_id"),
        delay_ms=raw.floats("delay_ms") if "delay_ms" in raw.frame.columns else None,
        request_id=raw.text("request_id"),
        ids=ids,
        raw_ids=raw_ids,
        block_size=block,
        planned=None if planned is None else (planned[0], planned[1].astype(np.uint32)),
        accumulate=_flag(raw, "prompt_is_delta"),
        dp_rank=raw.ranks("dp_rank") if "dp_rank" in raw.frame.columns else None,
        prefill_dp_rank=raw.ranks("prefill_dp_rank")
        if "prefill_dp_rank" in raw.frame.columns
        else None,
        graph=_graph(raw),
        session_cap=raw.constant("session_cap"),
        lanes=raw.constant("lanes"),
        in_items=is_array(file),
        keeps_times=_flag(raw, KEEPS_TIMES),
    )


def _arrival(file: TraceFile) -> str:
    if file.is_parquet:
        try:
            names = pl.read_parquet_schema(io.BytesIO(file.data)).keys()
        except pl.exceptions.PolarsError as error:
            reason = str(error).split("\n", 1)[0]
            raise InputError(file.name, reason, "a Parquet file") from None
    elif file.is_json:
        names = file.first_object.keys()
    else:
        first = next((line for _, line in file.lines()), b"").decode()
        names = [name.strip(' "\r\n') for name in first.replace(";", ",").split(",")]
    found = [name for name in ARRIVALS if name in names]
    if len(found) != 1:
        raise InputError(f"{file.name}:1", list(names), f"one column of {', '.join(ARRIVALS)}")
    return found[0]


def _times(raw: RawTable, name: str, unit: str) -> Times:
    column = raw.frame[name]
    if column.dtype == pl.Float64 and unit == "ms" and not column.null_count():
        values = column.to_numpy()
        if np.isfinite(values).all():
            return Times(values)
    times = raw.times(name, unit)
    missing = np.flatnonzero(np.isnan(times.values)) if times.values.dtype.kind == "f" else []
    if len(missing):
        raise raw.error(int(missing[0]), name, None, f"a finite number of {unit}")
    return times


def _content(raw: RawTable, asked: int | None) -> tuple[Any, bool, int]:
    """(ids, whether they are token values, tokens per id)."""
    block = raw.constant("block_tokens")
    if block is not None and asked not in (None, block):
        raise InputError("block_size", asked, f"{block}, as the file says, or none")
    block = block or asked or DEFAULT_BLOCK_SIZE
    tokens = raw.id_lists("input_token_ids", 32)
    if tokens is not None:
        return tokens, True, 1
    blocks = raw.id_lists("block_ids", 32)
    if blocks is not None:
        return blocks, True, block
    return raw.id_lists("hash_ids", 64), False, block


def _flag(raw: RawTable, name: str) -> bool:
    text = raw.text(name)
    return text is not None and text[0].casefold() in ("true", "1")


def _graph(raw: RawTable) -> Graph | None:
    if not {"play_id", "dependencies", "not_before_ms"} <= set(raw.frame.columns):
        return None
    play = raw.text("play_id")
    if play is None:
        return None
    sources, completion, delays, counts = [], [], [], []
    for row, value in enumerate(raw.frame["dependencies"].to_list()):
        edges = _edges(raw, row, value)
        counts.append(len(edges))
        for source, trigger, delay in edges:
            sources.append(source)
            completion.append(trigger == "completion")
            delays.append(delay)
    return Graph(
        offsets=offsets_of(np.array(counts, np.int64)),
        source=np.array(sources, np.int32),
        on_completion=np.array(completion, np.bool_),
        delay_ms=np.array(delays, np.float64),
        not_before_ms=raw.floats("not_before_ms"),
        play_id=play,
        play_index=raw.ranks("play_index"),
    )


def _edges(raw: RawTable, row: int, value: Any) -> list[tuple[int, str, float]]:
    """Edges of a row: JSON text of [source row, trigger, delay in ms] lists."""
    expected = "JSON text of [earlier row, 'dispatch' or 'completion', delay in ms] lists"
    try:
        edges = json.loads(value) if isinstance(value, str) else (value or [])
        for source, trigger, delay in edges:
            known = trigger in ("dispatch", "completion")
            if not (known and 0 <= source < len(raw) and source != row and delay >= 0):
                raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise raw.error(row, "dependencies", value, expected) from None
    return edges


# --- writing --------------------------------------------------------------------------------------


def workload_frame(workload: Workload) -> pl.DataFrame:
    """The columns of a workload that hold something; `read` gives back an equal workload."""
    columns: dict[str, Any] = {
        "arrival_ms": workload.arrival_ms,
        "input_length": workload.input_length,
        "output_length": workload.output_length,
        "request_id": workload.request_id,
        "session_id": workload.session_id,
    }
    for name in ("dp_rank", "prefill_dp_rank"):
        ranks = getattr(workload, name)
        columns[name] = ranks if (ranks >= 0).any() else None
    n = len(workload)
    if workload.block_offsets is not None:
        columns["block_ids"] = _lists(workload.block_offsets, workload.block_ids)
        columns["block_tokens"] = np.full(n, workload.block_tokens, np.int64)
    if workload.output_offsets is not None:
        columns["output_token_ids"] = _lists(workload.output_offsets, workload.output_token_ids)
    if workload.sessions is not None:
        columns["delay_ms"] = workload.sessions.delay_ms
        columns["prompt_is_delta"] = np.full(n, workload.sessions.accumulate)
    if workload.session_cap is not None:
        columns["session_cap"] = np.full(n, workload.session_cap, np.int64)
    if workload.dependencies is not None:
        columns |= _graph_columns(workload)
        starts = workload.dependencies.not_before_ms
    else:
        starts = workload.arrival_ms
    if n and starts.min() != 0:
        columns[KEEPS_TIMES] = np.full(n, True)
    return pl.DataFrame({name: c for name, c in columns.items() if c is not None})


def _lists(offsets: np.ndarray, ids: np.ndarray) -> pl.Series:
    values = ids.tolist()
    spans = itertools.pairwise(offsets.tolist())
    return pl.Series([values[a:b] for a, b in spans], dtype=_IDS)


_IDS = pl.List(pl.UInt32)


def _graph_columns(workload: Workload) -> dict[str, Any]:
    graph = workload.dependencies
    edges = []
    for a, b in zip(graph.offsets, graph.offsets[1:], strict=False):
        triggers = ["completion" if t else "dispatch" for t in graph.on_completion[a:b].tolist()]
        rows = zip(graph.source[a:b].tolist(), triggers, graph.delay_ms[a:b].tolist(), strict=True)
        edges.append(json.dumps([list(edge) for edge in rows]))
    columns = {
        "play_id": graph.play_id.gather(graph.play),
        "play_index": graph.play,
        "not_before_ms": graph.not_before_ms,
        "dependencies": pl.Series(edges, dtype=pl.String),
    }
    if graph.lanes is not None:
        columns["lanes"] = np.full(len(workload), graph.lanes, np.int64)
    return columns


def _write_csv(frame: pl.DataFrame, path: Path) -> None:
    lists = [name for name, dtype in frame.schema.items() if dtype == _IDS]
    text = {
        name: pl.Series(name, [json.dumps(ids) for ids in frame[name].to_list()], pl.String)
        for name in lists
    }
    frame.with_columns(**text).write_csv(path)


_WRITERS: dict[str, Callable[[pl.DataFrame, Path], Any]] = {
    ".parquet": lambda frame, path: frame.write_parquet(path),
    ".csv": _write_csv,
    ".jsonl": lambda frame, path: frame.write_ndjson(path),
}


def write(workload: Workload, path: Path, overwrite: bool = False) -> None:
    """Write a workload; the suffix of `path` says how: .parquet, .csv or .jsonl.

    Raises:
        InputError: another suffix, or a file that is there already, unless `overwrite`.
    """
    from vecsim.files import replace_files

    suffix = path.suffix.lower()
    if suffix not in WRITABLE:
        raise InputError("output file", str(path), f"a name that ends with {', '.join(WRITABLE)}")
    frame = workload_frame(workload)
    replace_files(
        path.parent,
        {path.name: lambda temporary: _WRITERS[suffix](frame, temporary)},
        owned=(path.name,),
        overwrite=overwrite,
    )
