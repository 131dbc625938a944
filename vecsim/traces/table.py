"""What every reader takes and gives: options, and the rows of a trace as columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from vecsim.columns import MAX_INT32
from vecsim.traces.times import Times

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class ReadOptions:
    """How to read a trace.

    Attributes:
        time_unit: unit of numeric times, "s", "ms", "us" or "ns"; None = the format's own.
        block_size: prompt tokens per hash id.
        limit: read only so many rows; None = all.
    """

    time_unit: str | None = None
    block_size: int = 512
    limit: int | None = None


@dataclass(frozen=True)
class TraceTable:
    """Rows of a trace in file order; every row is a complete single-turn request.

    Attributes:
        times: authored times.
        input_length, output_length: int64 [n], tokens.
        session_id: strings [n], authored or `request_<line>`.
        ids: (int64 [n + 1] offsets, uint64 [m] hash ids), or None where the format has none. A
            prompt without ids is private.
        planned: (int64 [n + 1] offsets, uint32 [k] output tokens), or None.
        without_ids: number of rows that lack hash ids although their format has them.
    """

    times: Times
    input_length: np.ndarray
    output_length: np.ndarray
    session_id: pl.Series
    ids: tuple[np.ndarray, np.ndarray] | None = None
    planned: tuple[np.ndarray, np.ndarray] | None = None
    without_ids: int = 0


def automatic_sessions(lines: np.ndarray) -> pl.Series:
    """`request_<line>` for each line (or item) number."""
    return ("request_" + pl.Series(lines).cast(pl.String)).alias("session_id")


def token_count(value: Any) -> int | None:
    """A number of tokens, 0 to 2**31 - 1, or None; 100.0, 1e3 and "100" are numbers too."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_INT32 else None
