"""Where to sample a price so that a table of it is accurate (timing providers, section 3.2).

Prices step just after tile multiples of the tokens of a pass and are smooth in everything else.
So every batch size of a decode, and every number of prefill tokens, gets points of its own up to
some size; contexts and prefixes get a few per octave. The steps do not depend on the prefix: what
a prefix adds is smooth and needs few points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from vecsim.timing.points import DECODE, PREFILL

Price = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(batch size, isl, prefix), or (batch size, context, zeros), int64 [n] -> ms, float64 [n]."""


@dataclass(frozen=True)
class Grid:
    """The points of a table.

    Attributes:
        batches: decode batch sizes that all have points; beyond them 8 an octave up to `most_seqs`.
        most_seqs: largest decode batch.
        tokens: tokens of a prefill pass up to which every whole number has points; beyond them 8
            an octave up to `most_tokens`.
        most_tokens: most tokens of a prefill pass.
        prefill_batches: most requests in a prefill pass.
        context: longest context, and longest prefix (tokens).
        per_octave: points an octave of decode contexts, and of prefixes.
        batch_coarse, coarse: points an octave of batches and of new tokens under a prefix.
    """

    batches: int = 256
    most_seqs: int = 256
    tokens: int = 8192
    most_tokens: int = 8192
    prefill_batches: int = 256
    context: int = 131072
    per_octave: int = 8
    batch_coarse: int = 8
    coarse: int = 4

    @property
    def _margin(self) -> float:
        """How much larger a pass at the far corner of a cell can be than one inside it: the passes
        of `most_tokens` are the most frequent ones, and have to be inside a whole cell."""
        return (1.0 + 1.0 / self.coarse) * (1.0 + 1.0 / self.batch_coarse)

    def decode(self) -> tuple[np.ndarray, np.ndarray]:
        """(batch size, context) of the decode points, int64 [n] each."""
        batches = np.arange(1, min(self.batches, self.most_seqs) + 1)
        batches = _with_octaves(batches, self.most_seqs, 8)
        contexts = octaves(self.context, self.per_octave)
        powers = 2 ** np.arange(1, 1 + int(np.log2(self.context)))
        contexts = np.union1d(contexts, (powers + 1)[powers < self.context])
        return np.repeat(batches, len(contexts)), np.tile(contexts, len(batches))

    def base(self) -> tuple[np.ndarray, np.ndarray]:
        """(batch size, new tokens of each request) of the prefills without a prefix."""
        batches, tokens = [], []
        for batch in range(1, self.prefill_batches + 1):
            row = np.arange(1, self.tokens // batch + 1)
            row = _with_octaves(row, int(self._margin * self.most_tokens) // batch, 8)
            tokens.append(row)
            batches.append(np.full(len(row), batch))
        return np.concatenate(batches), np.concatenate(tokens)

    def increments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(batch size, new tokens of each request, prefix) of the prefills with a prefix."""
        batches = octaves(self.prefill_batches, self.batch_coarse)
        if self.prefill_batches > 128:
            batches = np.union1d(batches, [129])
        tokens = octaves(int(self._margin * self.most_tokens), self.coarse)
        prefixes = octaves(self.context, self.per_octave)
        b, n, p = np.meshgrid(batches, tokens, prefixes, indexing="ij")
        fits = b * n <= int(self._margin * self.most_tokens)
        return b[fits], n[fits], p[fits]


def octaves(last: int, per_octave: int) -> np.ndarray:
    """Ascending whole numbers 2**k (1 + j / per_octave) from 1 to `last`, both included."""
    top = int(np.log2(last)) + 1
    grid = 2.0 ** np.arange(top + 1)[:, None] * (1.0 + np.arange(per_octave) / per_octave)
    grid = grid[(grid == np.rint(grid)) & (grid <= last)].astype(np.int64)
    return np.union1d(grid, [last])


def _with_octaves(every: np.ndarray, last: int, per_octave: int) -> np.ndarray:
    """Whole numbers 1, 2, ..., continued to `last` by octaves."""
    if len(every) == 0 or last <= every[-1]:
        return every
    beyond = octaves(last, per_octave)
    return np.concatenate([every, beyond[beyond > every[-1]]])


def sample(grid: Grid, prefill: Price, decode: Price) -> pl.DataFrame:
    """The points of a grid, priced, in the layout of `vecsim.timing.points`."""
    return pl.concat(list(_frames(grid, prefill, decode)))


def _frames(grid: Grid, prefill: Price, decode: Price) -> Iterator[pl.DataFrame]:
    batch, tokens = grid.base()
    yield _frame(PREFILL, batch, prefill(batch, tokens, np.zeros_like(batch)), tokens, 0 * tokens)
    batch, tokens, prefix = grid.increments()
    isl = tokens + prefix
    yield _frame(PREFILL, batch, prefill(batch, isl, prefix), isl, prefix)
    batch, context = grid.decode()
    latency = decode(batch, context, np.zeros_like(batch))
    yield _frame(DECODE, batch, latency, context=context)


def _frame(
    role: str,
    batch: np.ndarray,
    latency: np.ndarray,
    isl: np.ndarray | None = None,
    prefix: np.ndarray | None = None,
    context: np.ndarray | None = None,
) -> pl.DataFrame:
    sizes = {"batch_size": batch, "isl": isl, "prefix": prefix, "context": context}
    return pl.DataFrame(
        [
            pl.Series("role", [role], dtype=pl.String).new_from_index(0, len(batch)),
            *(
                pl.Series(name, values, dtype=pl.Int32)
                if values is not None
                else pl.Series(name, [None], dtype=pl.Int32).new_from_index(0, len(batch))
                for name, values in sizes.items()
            ),
            pl.Series("latency_ms", latency, dtype=pl.Float64),
        ]
    )
