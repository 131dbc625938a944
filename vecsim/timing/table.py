"""Timing tables: measured or sampled pass prices, and how the kernels get to see them.

A table is a frame of points in the layout of the README; `vecsim.kernels.timing.table` says how
prices are interpolated between them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.kernels.timing import table as words
from vecsim.kernels.timing.durations import CODE, CODE_OF_SERIES
from vecsim.timing.model import BoundTiming
from vecsim.timing.points import DECODE, PREFILL, points_of

_MOST_CELLS = 20_000_000
"""Cells of a prefix grid; more would come of prefix rows at all sorts of sizes."""


@dataclass(frozen=True, eq=False)
class TimingTable:
    """Pass prices as points, interpolated linearly.

    Attributes:
        points: columns `role` (prefill or decode), `batch_size`, `isl`, `prefix`, `context`
            (tokens), `latency_ms`; one row a point, see `vecsim.timing.points`.
        metadata: what the points were measured or computed on: `model`, `system`, `tp`, ...
        beyond_batches: extrapolate decode batches beyond the largest one measured; otherwise a run
            that meets one ends with an error.
    """

    points: pl.DataFrame
    metadata: dict[str, str] = field(default_factory=dict)
    beyond_batches: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", points_of(self.points, "points"))

    @cached_property
    def _compiled(self) -> _Buffer:
        return _Buffer(self.points)

    @property
    def notes(self) -> list[str]:
        """What the points leave open, one sentence each."""
        return list(self._compiled.notes)

    @property
    def digest(self) -> str:
        """Hex digest of everything that prices depend on."""
        described = repr((sorted(self.metadata.items()), self.beyond_batches)).encode()
        return hashlib.sha256(described + self._compiled.words.tobytes()).hexdigest()

    def bind(self) -> BoundTable:
        """The table for one run."""
        return BoundTable(self._compiled.words, self.beyond_batches)

    def prefill_ms(self, batch_size: Any, isl: Any, prefix: Any) -> np.ndarray:
        """Raw prices (float64 ms) of prefill passes; arrays or numbers, in tokens."""
        return self._prices(0, batch_size, isl, prefix)

    def decode_ms(self, batch_size: Any, context: Any) -> np.ndarray:
        """Raw prices (float64 ms) of decode passes over `context` past KV tokens a sequence."""
        return self._prices(1, batch_size, context, 0)

    def _prices(self, phase: int, *arguments: Any) -> np.ndarray:
        from vecsim.kernels.timing.table_many import prices

        columns = np.broadcast_arrays(*(np.asarray(a, np.int64) for a in arguments))
        out = np.empty(columns[0].size)
        bound = BoundTable(self._compiled.words, beyond_batches=True)
        flat = [np.ascontiguousarray(column).ravel() for column in columns]
        prices(np.int64(bound.addresses[phase]), np.int64(phase), *flat, out)
        return out.reshape(columns[0].shape)


class BoundTable(BoundTiming):
    """A table as one run uses it."""

    def __init__(self, buffer: np.ndarray, beyond_batches: bool) -> None:
        self._lines = np.zeros((2, words.RECORD_WORDS), np.int64)
        self._lines[:, words.BUFFER] = buffer.ctypes.data
        self._lines[:, words.BEYOND_BATCHES] = beyond_batches
        self._lines[0, CODE] = words.prefill_price.address
        self._lines[1, CODE] = words.decode_price.address
        self._lines[1, CODE_OF_SERIES] = words.series_address()
        self._ends = [_end_of(buffer, at) for at in (words.PREFILL_AT, words.DECODE_AT)]
        self._last_batch = int(buffer[words.DECODE_AT + words.LAST_BATCH])
        super().__init__(self._lines[0], self._lines[1], buffer)

    @property
    def outside(self) -> tuple[int, int]:
        return int(self._lines[0, words.OUTSIDE]), int(self._lines[1, words.OUTSIDE])

    @property
    def farthest(self) -> list[str]:
        """How far outside the table the run went, by phase."""
        said = []
        for phase, (name, size) in enumerate((("prefill", "new tokens"), ("decode", "context"))):
            if self._lines[phase, words.OUTSIDE]:
                batch, most = self._lines[phase, [words.FARTHEST_BATCH, words.FARTHEST_SIZE]]
                said.append(f"{name} to batch {batch:,} and {size} {most:,} ({self._ends[phase]})")
        return said

    @property
    def refusal(self) -> str | None:
        batch = int(self._lines[1, words.REFUSED])
        if batch == 0:
            return None
        return (
            f"timing table: a decode pass of {batch} requests; expected at most {self._last_batch},"
            " the largest batch measured (extrapolate_batch: true goes beyond)"
        )


def _end_of(buffer: np.ndarray, at: int) -> str:
    """What a table of these words measured at most in a phase."""
    first, count = int(buffer[at + words.ROWS]), int(buffer[at + words.ROW_COUNT])
    rows = buffer[first : first + count * words.ROW_WORDS].reshape(count, words.ROW_WORDS)
    last = rows[:, words.ROW_NODES] + rows[:, words.ROW_LENGTH] - 1
    return f"measured to {buffer[at + words.LAST_BATCH]:,} and {buffer[last].max():,}"


class _Buffer:
    """The words of a table (int64 [n]) and what its points leave open."""

    def __init__(self, points: pl.DataFrame) -> None:
        self.notes: list[str] = []
        self._parts: list[np.ndarray] = [np.zeros(words.HEADER_WORDS, np.int64)]
        self._length = words.HEADER_WORDS
        self._known: dict[bytes, int] = {}
        prefill = points.filter(pl.col("role") == PREFILL)
        prefixes = np.unique(prefill["prefix"].to_numpy())
        lowest = int(prefixes[0])
        base = prefill.filter(pl.col("prefix") == lowest)
        tokens = (base["isl"] - base["prefix"]).to_numpy()
        rows = _Rows(base["batch_size"].to_numpy(), tokens, base["latency_ms"].to_numpy())
        self._phase(words.PREFILL_AT, rows, prefill["latency_ms"].min())
        if len(prefixes) > 1:
            self._grid(rows, prefill, lowest)
        else:
            self.notes.append(
                f"prefill: measured with {lowest} cached tokens only, which is taken for any prefix"
            )
        decode = points.filter(pl.col("role") == DECODE)
        columns = (decode[name].to_numpy() for name in ("batch_size", "context", "latency_ms"))
        rows = _Rows(*columns)
        self._phase(words.DECODE_AT, rows, decode["latency_ms"].min())
        if (rows.ends - rows.starts == 1).any():
            self.notes.append("decode: batches with one context only have a constant price")
        self.words = np.concatenate(self._parts)
        del self._parts, self._known

    def _add(self, values: np.ndarray) -> int:
        """Position of these words in the buffer; equal ones are kept once."""
        values = np.ascontiguousarray(values).view(np.int64)
        key = values.tobytes()
        if key not in self._known:
            self._known[key] = self._length
            self._parts.append(values)
            self._length += len(values)
        return self._known[key]

    def _phase(self, at: int, rows: _Rows, lowest: float) -> None:
        described = np.zeros((len(rows.batches), words.ROW_WORDS), np.int64)
        described[:, words.ROW_BATCH] = rows.batches
        described[:, words.ROW_LENGTH] = rows.ends - rows.starts
        for row, (start, end) in enumerate(zip(rows.starts, rows.ends, strict=True)):
            described[row, words.ROW_NODES] = self._add(rows.nodes[start:end])
            described[row, words.ROW_VALUES] = self._add(rows.values[start:end])
        described[:, words.ROW_SLOPE] = rows.slopes.view(np.int64)
        first = self._length
        self._parts.append(described.ravel())
        self._length += described.size
        last = int(rows.batches[-1])
        every = np.arange(last + 1)
        upper = np.searchsorted(rows.batches, every)
        lower = np.maximum(np.searchsorted(rows.batches, every, side="right") - 1, 0)
        header = self._parts[0]
        header[at + words.LAST_BATCH] = last
        header[at + words.LOWER] = self._add(first + lower * words.ROW_WORDS)
        header[at + words.UPPER] = self._add(first + upper * words.ROW_WORDS)
        header[at + words.ROWS] = first
        header[at + words.ROW_COUNT] = len(rows.batches)
        octave = np.searchsorted(rows.batches, last / 2.0, side="right") - 1
        header[at + words.OCTAVE] = first + max(int(octave), 0) * words.ROW_WORDS
        header[at + words.LOWEST] = np.array([lowest], np.float64).view(np.int64)[0]

    def _grid(self, rows: _Rows, prefill: pl.DataFrame, lowest: int) -> None:
        """The increments over the rows without a prefix, on the grid of those with one."""
        above = prefill.filter(pl.col("prefix") > lowest)
        columns = {
            words.GRID_BATCHES: above["batch_size"].to_numpy(),
            words.GRID_TOKENS: (above["isl"] - above["prefix"]).to_numpy(),
            words.GRID_PREFIXES: above["prefix"].to_numpy(),
        }
        axes = {at: np.unique(column) for at, column in columns.items()}
        axes[words.GRID_PREFIXES] = np.concatenate([[lowest], axes[words.GRID_PREFIXES]])
        shape = tuple(len(axis) for axis in axes.values())
        if np.prod(shape, dtype=np.float64) > _MOST_CELLS:
            found = " x ".join(map(str, shape))
            expected = f"prefill rows on a grid of at most {_MOST_CELLS} cells"
            raise InputError("points", f"{found} (batch x new tokens x prefix)", expected)
        places = tuple(np.searchsorted(axes[at], column) for at, column in columns.items())
        batches, tokens = axes[words.GRID_BATCHES], axes[words.GRID_TOKENS]
        base = np.full(shape[:2], np.nan)
        for b, n in set(zip(places[0].tolist(), places[1].tolist(), strict=True)):
            base[b, n] = rows.price(int(batches[b]), int(tokens[n]))
        cells = np.full(shape, np.nan)
        cells[places] = above["latency_ms"].to_numpy() - base[places[:2]]
        cells[:, :, 0] = np.where(np.isnan(cells[:, :, 1:]).all(axis=2), np.nan, 0.0)
        if _has_holes(cells):
            self.notes.append(
                "prefill: rows with a prefix do not fill a grid of batch, new tokens and prefix;"
                " holes take the nearest point"
            )
        for axis in (1, 0, 2):
            cells = _filled(cells, axis)
        header = self._parts[0]
        for at, axis in axes.items():
            header[at] = self._add(axis.astype(np.int64))
            header[at + 1] = len(axis)
        # The last cell of the last axis reads one word on, with weight zero.
        header[words.GRID_VALUES] = self._add(np.append(cells.ravel(), 0.0))


def _has_holes(cells: np.ndarray) -> bool:
    """Whether a cell is missing although one with as many or more new tokens is there: a table may
    end at some number of tokens in all."""
    there = ~np.isnan(cells)
    beyond = np.flip(np.logical_or.accumulate(np.flip(there.any(axis=2), 1), axis=1), 1)
    return bool((beyond[:, :, None] & ~there).any())


def _filled(cells: np.ndarray, axis: int) -> np.ndarray:
    """The cells, missing ones replaced by the last one before them along an axis, or else by the
    first one after."""
    for _ in range(2):
        there = np.moveaxis(~np.isnan(cells), axis, -1)
        places = np.where(there, np.arange(there.shape[-1]), 0)
        places = np.maximum.accumulate(places, axis=-1)
        moved = np.take_along_axis(np.moveaxis(cells, axis, -1), places, axis=-1)
        cells = np.flip(np.moveaxis(moved, -1, axis), axis)
    return cells


class _Rows:
    """Points of one phase by batch: ascending nodes and their prices.

    Attributes:
        batches: int64 [rows], ascending; starts, ends: int64 [rows], spans of the rows in
        nodes: int64 [points], tokens, and values: float64 [points], ms; slopes: float64 [rows],
        ms a token beyond the last node.
    """

    def __init__(self, batches: np.ndarray, nodes: np.ndarray, values: np.ndarray) -> None:
        order = np.lexsort((nodes, batches))
        self.nodes = nodes[order].astype(np.int64)
        self.values = values[order].astype(np.float64)
        self.batches, self.starts = np.unique(batches[order].astype(np.int64), return_index=True)
        self.ends = np.append(self.starts[1:], len(order))
        spans = zip(self.starts, self.ends, strict=True)
        self.slopes = np.array([self._slope(*span) for span in spans])

    def _slope(self, start: int, end: int) -> float:
        """Price of another token beyond the last node of a span, as over the octave below it."""
        nodes, values = self.nodes[start:end], self.values[start:end]
        if len(nodes) == 1:
            return 0.0
        half = max(float(nodes[0]), nodes[-1] / 2.0)
        below = np.interp(half, nodes, values)
        return max(float((values[-1] - below) / (nodes[-1] - half)), 0.0)

    def price(self, batch: int, tokens: int) -> float:
        """A prefill without a prefix, as `vecsim.kernels.timing.table.base_at` interpolates it."""
        upper = min(int(np.searchsorted(self.batches, batch)), len(self.batches) - 1)
        lower = upper if self.batches[upper] <= batch or upper == 0 else upper - 1
        prices = [self._along(row, batch * tokens / self.batches[row]) for row in (lower, upper)]
        if lower == upper:
            return prices[0]
        below, above = self.batches[lower], self.batches[upper]
        return prices[0] + (batch - below) / (above - below) * (prices[1] - prices[0])

    def _along(self, row: int, x: float) -> float:
        nodes = self.nodes[self.starts[row] : self.ends[row]]
        values = self.values[self.starts[row] : self.ends[row]]
        if x > nodes[-1]:
            return float(values[-1] + self.slopes[row] * (x - nodes[-1]))
        if len(nodes) == 1:
            return float(values[0])
        k = int(np.clip(np.searchsorted(nodes, x, side="right") - 1, 0, len(nodes) - 2))
        slope = (values[k + 1] - values[k]) / (nodes[k + 1] - nodes[k])
        return float(values[k] + slope * (x - nodes[k]))
