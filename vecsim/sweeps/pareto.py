"""The Pareto front of a frame."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from vecsim.errors import InputError


def pareto_front(frame: pl.DataFrame, objectives: Mapping[str, str]) -> pl.DataFrame:
    """The rows that no other row dominates, in their order.

    A row dominates another when it is at least as good in every objective and better in at least
    one; rows that are equal in all of them do not dominate each other, so exact ties all stay.
    Rows without a value in some objective (null or NaN), and rows that did not run, take no part.

    Args:
        frame: rows of a sweep, or any frame with the columns named.
        objectives: column -> "min" or "max".

    Returns:
        The rows of the front, perhaps none.

    Raises:
        InputError: no objective, an unknown column, or a direction other than min and max.
    """
    if not objectives:
        raise InputError("objectives", dict(objectives), "at least one column")
    for name, direction in objectives.items():
        if name not in frame.columns or not frame.schema[name].is_numeric():
            raise InputError(f"objectives.{name}", direction, "a numeric column of the frame")
        if direction not in ("min", "max"):
            raise InputError(f"objectives.{name}", direction, "min or max")
    taking_part = pl.all_horizontal(_has_value(frame, name) for name in objectives)
    if "status" in frame.columns:
        taking_part &= pl.col("status").cast(pl.String) == "ok"
    candidates = frame.filter(taking_part)
    # Dense ranks keep the order of whole numbers that float64 does not tell apart.
    ranks = candidates.select(pl.col(list(objectives)).rank("dense").cast(pl.Float64))
    signs = np.array([1.0 if way == "min" else -1.0 for way in objectives.values()])
    on_front = undominated(ranks.to_numpy() * signs)
    return candidates.filter(pl.Series(on_front, dtype=pl.Boolean))


def _has_value(frame: pl.DataFrame, name: str) -> pl.Expr:
    known = pl.col(name).is_not_null()
    return known & pl.col(name).is_not_nan() if frame.schema[name].is_float() else known


def undominated(values: np.ndarray) -> np.ndarray:
    """bool [n]: rows of `values` (float64 [n, k], smaller is better) that no other dominates."""
    kept = np.zeros(len(values), bool)
    front = np.zeros((0, values.shape[1]))
    # In lexical order a row can only be dominated by one before it.
    for row in np.lexsort(values.T[::-1]):
        better = (front <= values[row]).all(axis=1) & (front < values[row]).any(axis=1)
        if not better.any():
            kept[row] = True
            front = np.concatenate([front, values[row : row + 1]])
    return kept
