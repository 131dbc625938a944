"""Correcting a timing table by measured passes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.timing.points import DECODE, PREFILL, phase_points, read_points
from vecsim.timing.table import TimingTable


@dataclass(frozen=True)
class Fit:
    """How the prices of one phase were corrected: measured = scale * price + offset_ms.

    Attributes:
        scale, offset_ms: the correction.
        points: measured passes.
        before, after: root mean square of the relative residuals, without and with it.
    """

    scale: float
    offset_ms: float
    points: int
    before: float
    after: float


@dataclass(frozen=True, repr=False)
class Calibration:
    """A corrected timing model and what is left.

    Attributes:
        timing: the corrected table.
        prefill, decode: the correction of each phase; None where nothing was measured.
        residuals: the measured passes with `predicted_ms` (corrected) and `residual`, that is
            predicted / measured - 1.
    """

    timing: TimingTable
    prefill: Fit | None
    decode: Fit | None
    residuals: pl.DataFrame

    def __repr__(self) -> str:
        lines = []
        for name, fit in ((PREFILL, self.prefill), (DECODE, self.decode)):
            if fit is None:
                lines.append(f"{name}: nothing measured, left as it was")
                continue
            lines.append(
                f"{name}: scale {fit.scale:.4f}, offset {fit.offset_ms:+.3f} ms from {fit.points}"
                f" passes; error {100 * fit.before:.1f} % before, {100 * fit.after:.1f} % after"
            )
        return "\n".join(lines)


def calibrate(
    timing: TimingTable, measurements: pl.DataFrame | str | os.PathLike[str]
) -> Calibration:
    """Fit scale and offset of each phase to measured passes, by least squares of relative errors.

    With one measured size of a phase, or where an offset would make prices negative, only the scale
    is fitted.

    Args:
        timing: the model to correct.
        measurements: passes in the layout of a timing table (frame or file); one phase may be
            missing, the other then stays as it is.

    Raises:
        InputError: something else than a table, or a measurement that is malformed.
    """
    if not isinstance(timing, TimingTable):
        raise InputError("timing", timing, "a vecsim.TimingTable")
    if isinstance(measurements, str | os.PathLike):
        frame, _ = read_points(Path(measurements), both_phases=False)
    else:
        frame = phase_points(measurements, "measurements")
    points = timing.points
    fits: dict[str, Fit | None] = {PREFILL: None, DECODE: None}
    residuals = []
    for role in (PREFILL, DECODE):
        rows = frame.filter(pl.col("role") == role)
        if rows.height == 0:
            continue
        predicted = _predict(timing, role, rows)
        least = float(points.filter(pl.col("role") == role)["latency_ms"].min())
        scale, offset = _fit(predicted, rows["latency_ms"].to_numpy(), least)
        corrected = scale * predicted + offset
        measured = rows["latency_ms"].to_numpy()
        fits[role] = Fit(
            scale,
            offset,
            rows.height,
            _root_mean_square(predicted / measured - 1.0),
            _root_mean_square(corrected / measured - 1.0),
        )
        price = pl.col("latency_ms")
        change = pl.when(pl.col("role") == role).then(scale * price + offset).otherwise(price)
        points = points.with_columns(latency_ms=change)
        residuals.append(
            rows.with_columns(
                predicted_ms=pl.Series(corrected), residual=pl.Series(corrected / measured - 1.0)
            )
        )
    metadata = dict(timing.metadata)
    metadata["source"] = f"{metadata.get('source', 'a table')}, calibrated"
    table = TimingTable(points, metadata, timing.beyond_batches)
    return Calibration(table, fits[PREFILL], fits[DECODE], pl.concat(residuals))


def _predict(timing: TimingTable, role: str, rows: pl.DataFrame) -> np.ndarray:
    if role == PREFILL:
        return timing.prefill_ms(rows["batch_size"], rows["isl"], rows["prefix"])
    return timing.decode_ms(rows["batch_size"], rows["context"])


def _fit(predicted: np.ndarray, measured: np.ndarray, least: float) -> tuple[float, float]:
    """(scale, offset) of the smallest relative residuals that leave the price `least` positive."""
    columns = np.stack([predicted / measured, 1.0 / measured], axis=1)
    if np.ptp(predicted) > 1e-9 * predicted.max():
        (scale, offset), *_ = np.linalg.lstsq(columns, np.ones(len(measured)), rcond=None)
        if scale > 0.0 and scale * least + offset > 0.0:
            return float(scale), float(offset)
    ratio = columns[:, 0]
    return float(ratio.sum() / (ratio @ ratio)), 0.0


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values * values)))
