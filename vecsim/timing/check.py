"""What is odd about a timing table, beyond what makes it unusable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from vecsim.timing.calibrate import calibrate
from vecsim.timing.points import DECODE, PREFILL
from vecsim.timing.table import TimingTable

_FALL = 0.15
"""A price that falls by more than this share from one size to a larger one is a measuring error or
a mistake; kernels for other tile sizes take up to a tenth off."""

_OFF = 0.1
"""A table further from measured passes than this, root mean square, wants calibrating."""

_WIDE = 4.0
"""Neighbouring sizes further apart than this factor leave a gap."""


def examine(points: pl.DataFrame) -> tuple[list[str], list[str]]:
    """(what the table covers, what looks wrong), one sentence each.

    Args:
        points: as `vecsim.timing.points.points_of` returns them.
    """
    problems = list(TimingTable(points).notes)
    facts = []
    for role, size in ((PREFILL, "tokens"), (DECODE, "context")):
        rows = points.filter(pl.col("role") == role)
        if role == PREFILL:
            rows = rows.with_columns(tokens=pl.col("isl") - pl.col("prefix"))
        facts.append(_range(role, rows, size))
        problems += _gaps(role, rows, "batch_size")
        keys = ["batch_size", "prefix"] if role == PREFILL else ["batch_size"]
        for other, axis in ((keys, size), ([size, *keys[1:]], "batch_size")):
            problems += _falls(role, rows, other, axis)
        if role == PREFILL:
            problems += _falls(role, rows, ["batch_size", "tokens"], "prefix")
        row = rows.filter(pl.col("batch_size") == rows["batch_size"].min())
        if role == PREFILL:
            row = row.filter(pl.col("prefix") == row["prefix"].min())
        problems += _gaps(role, row, size)
    return facts, problems


def compare(points: pl.DataFrame, measurements: Path) -> tuple[list[str], list[str]]:
    """(how measured passes would correct a table, where it is far from them), one sentence each.

    Raises InputError as `calibrate` does.
    """
    fitted = calibrate(TimingTable(points), measurements)
    facts, problems = [], []
    for role, fit in ((PREFILL, fitted.prefill), (DECODE, fitted.decode)):
        if fit is None:
            continue
        facts.append(f"measured {role}: {fit}")
        if fit.before > _OFF:
            off = f"{100 * fit.before:.1f} % off the measured passes"
            problems.append(f"{role}: {off}; vecsim timing calibrate corrects it")
    return facts, problems


def _range(role: str, rows: pl.DataFrame, size: str) -> str:
    parts = [
        f"{name} {rows[column].min():,} to {rows[column].max():,}"
        for name, column in (("batch", "batch_size"), (size, size), ("prefix", "prefix"))
        if rows[column].null_count() == 0
    ]
    least, most = rows["latency_ms"].min(), rows["latency_ms"].max()
    return f"{role}: {rows.height:,} points, {', '.join(parts)}; {least:,.3f} to {most:,.3f} ms"


def _gaps(role: str, rows: pl.DataFrame, size: str) -> list[str]:
    sizes = np.maximum(np.unique(rows[size].to_numpy()), 1)
    wide = np.flatnonzero(sizes[1:] > _WIDE * sizes[:-1])
    if not len(wide):
        return []
    first = int(wide[0])
    more = f", and {len(wide) - 1} more such gaps" if len(wide) > 1 else ""
    name = size.replace("_", " ")
    return [f"{role}: nothing between {name} {sizes[first]} and {sizes[first + 1]}{more}"]


def _falls(role: str, rows: pl.DataFrame, keys: list[str], size: str) -> list[str]:
    """Cells whose price is clearly below that of the next smaller size."""
    ordered = rows.sort(*keys, size)
    drop = 1.0 - pl.col("latency_ms") / pl.col("latency_ms").shift(1).over(keys)
    fallen = ordered.with_columns(drop=drop).filter(pl.col("drop") > _FALL)
    if fallen.height == 0:
        return []
    worst = fallen.sort("drop", descending=True).row(0, named=True)
    at = ", ".join(f"{name} {worst[name]}" for name in (*keys, size))
    return [
        f"{role}: {fallen.height} prices fall as {size} grows, the worst by "
        f"{100 * worst['drop']:.0f} % at {at}"
    ]
