"""Python functions as timing tables: asked once, at the points of a grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from vecsim.errors import InputError
from vecsim.timing.grids import Grid, sample
from vecsim.timing.table import TimingTable

_CHECKS = 500
_SEED = 1


def tabulate(
    prefill: Callable[[int, int, int], float],
    decode: Callable[[int, int, int, int], float],
    *,
    capacity_tokens: int = 0,
    grid: Grid | None = None,
) -> TimingTable:
    """Ask two functions once, at the points of a grid, and interpolate between the answers.

    `metadata["error_bound"]` states the largest relative error at 500 passes of each phase, drawn
    from the whole range between the points. Compiled functions (`CompiledTiming`) have none.

    Args:
        prefill, decode: as of `CompiledTiming`; they may do anything, but are asked some 180,000
            times with the default grid (a coarser one asks less often).
        capacity_tokens: what `decode` is told that a pool holds.
        grid: where to ask; the default covers 256 sequences, passes of 8,192 tokens, contexts and
            prefixes of 131,072.

    Raises:
        InputError: a function that fails, or answers something else than a number above 0.
    """
    grid = grid or Grid()
    price_prefill = _array(
        "prefill", lambda batch, isl, prefix: prefill(int(batch), int(isl), int(prefix))
    )
    price_decode = _array(
        "decode",
        lambda batch, context, _: decode(
            int(batch), int(batch * (context + 1)), int(context + 1), capacity_tokens
        ),
    )
    points = sample(grid, price_prefill, price_decode)
    table = TimingTable(points, {"source": "Python functions"}, beyond_batches=True)
    bound = _error_bound(table, grid, price_prefill, price_decode)
    return replace(table, metadata={**table.metadata, "error_bound": f"{bound:.6f}"})


def _array(name: str, function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """The function over columns of sizes, its answers checked."""

    def prices(*columns: np.ndarray) -> np.ndarray:
        out = np.empty(len(columns[0]))
        for row, sizes in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            try:
                out[row] = function(*sizes)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise InputError(f"timing.{name}", sizes, f"no failure ({reason})") from None
            if not 0.0 < out[row] < math.inf:
                expected = f"a finite number of ms above 0 for {sizes}"
                raise InputError(f"timing.{name}", float(out[row]), expected)
        return out

    return prices


def _error_bound(
    table: TimingTable,
    grid: Grid,
    price_prefill: Callable[..., np.ndarray],
    price_decode: Callable[..., np.ndarray],
) -> float:
    """Largest relative error at passes drawn log-uniformly from the range of the grid."""
    generator = np.random.default_rng(_SEED)

    def draw(last: int) -> np.ndarray:
        drawn = np.floor(2.0 ** generator.uniform(0.0, math.log2(last + 1), _CHECKS))
        return np.clip(drawn, 1, last).astype(np.int64)

    batch, prefix = draw(grid.prefill_batches), draw(grid.context)
    isl = np.maximum(np.minimum(draw(grid.most_tokens), grid.most_tokens // batch), 1) + prefix
    seqs, context = draw(grid.most_seqs), draw(grid.context)
    errors = [
        table.prefill_ms(batch, isl, prefix) / price_prefill(batch, isl, prefix) - 1.0,
        table.decode_ms(seqs, context) / price_decode(seqs, context, np.zeros_like(seqs)) - 1.0,
    ]
    return float(np.abs(errors).max())
