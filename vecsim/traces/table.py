"""What every reader takes and gives: options, and the rows of a trace as columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from vecsim.traces.times import Times
from vecsim.workload.columns import MAX_INT32

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)

DEFAULT_BLOCK_SIZE = 512
FAILED_ROWS = ("drop", "keep", "error")


@dataclass(frozen=True)
class ReadOptions:
    """How to read a trace.

    Attributes:
        time_unit: unit of numeric times, "s", "ms", "us" or "ns"; None = the format's own.
        block_size: prompt tokens per hash id; None = what the file says, else 512.
        limit: read only so many rows; None = all.
        failed_rows: rows that the traced system failed: "drop" (counted), "keep" or "error".
        columns: names of the file's columns by vecsim's, for the format "table".
        nested_times: of Weka files, "auto", "absolute" or "relative".
    """

    time_unit: str | None = None
    block_size: int | None = None
    limit: int | None = None
    failed_rows: str = "drop"
    columns: Mapping[str, str] | None = None
    nested_times: str = "auto"


@dataclass(frozen=True)
class Graph:
    """Edges between the rows of a table.

    Attributes:
        offsets: int64 [n + 1], span of each row in the edge columns.
        source: int32 [m], row that an edge waits for.
        on_completion: bool [m], trigger: True = end of the source, False = its release.
        delay_ms: float64 [m], wait after the trigger.
        not_before_ms: float64 [n], earliest time of each row, as authored.
        play_id: strings [n].
        play_index: int32 [n], position of the row's play in their order.
    """

    offsets: np.ndarray
    source: np.ndarray
    on_completion: np.ndarray
    delay_ms: np.ndarray
    not_before_ms: np.ndarray
    play_id: pl.Series
    play_index: np.ndarray


@dataclass(frozen=True)
class TraceTable:
    """Rows of a trace, in the order of the workload.

    Attributes:
        times: authored times.
        input_length, output_length: int64 [n], tokens.
        numbers: int64 [n], line (or item) of each row, from 1.
        unit: unit of the times as read, or "ISO 8601".
        session_id: strings [n], null = a session of its own; None = all null.
        delay_ms: float64 [n], wait after the previous turn, NaN = none; None = all NaN.
        request_id: strings [n], or None.
        ids: (int64 [n + 1] offsets, uint64 [m] hash ids), or None where the format has none. A
            prompt without ids is private.
        block_size: prompt tokens per id.
        raw_ids: whether `ids` are token values below 2**32, to be kept as they are.
        planned: (int64 [n + 1] offsets, uint32 [k] output tokens), or None.
        without_ids: number of rows that lack hash ids although their format has them.
        accumulate: whether the prompt of a later turn only has what is new.
        dp_rank, prefill_dp_rank: int32 [n], -1 = free; None = all free.
        graph: edges between rows, or None.
        session_cap: sessions in flight at once, or None.
        lanes: lanes of plays, or None.
        dropped: number of rows left out, by reason.
        in_items: whether rows are numbered as items of an array, not as lines.
        keeps_times: whether the first arrival stays where it is unless told otherwise.
    """

    times: Times
    input_length: np.ndarray
    output_length: np.ndarray
    numbers: np.ndarray
    unit: str = "ms"
    session_id: pl.Series | None = None
    delay_ms: np.ndarray | None = None
    request_id: pl.Series | None = None
    ids: tuple[np.ndarray, np.ndarray] | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    raw_ids: bool = False
    planned: tuple[np.ndarray, np.ndarray] | None = None
    without_ids: int = 0
    accumulate: bool = False
    dp_rank: np.ndarray | None = None
    prefill_dp_rank: np.ndarray | None = None
    graph: Graph | None = None
    session_cap: int | None = None
    lanes: int | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    in_items: bool = False
    keeps_times: bool = False

    def __len__(self) -> int:
        return len(self.input_length)


def token_count(value: Any) -> int | None:
    """A number of tokens, 0 to 2**31 - 1, or None; 100.0, 1e3 and "100" are numbers too."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_INT32 else None
