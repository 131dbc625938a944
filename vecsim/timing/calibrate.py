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

_TUKEY = 4.685
"""Residuals beyond so many standard deviations have no weight: Tukey's biweight, 95 % efficient
for normal noise (Beaton and Tukey, Technometrics 16, 1974)."""
_SIGNIFICANT = 3.29
"""Standard deviations of a normal variable that are exceeded once in a thousand."""
_FAR, _MOST_UNCERTAIN = 1.25, 0.25
"""A table that goes beyond the measured prices by this factor is extrapolated; a scale that is
less certain than this, at two standard deviations, is refused."""
_WELL_KNOWN = 0.10


@dataclass(frozen=True)
class Fit:
    """How the prices of one phase were corrected: measured = scale * price + offset_ms.

    Attributes:
        scale, offset_ms: the correction; the offset is 0 unless the passes show one clearly.
        points: measured passes; outliers: those of them that had no part in the fit.
        before, after: root mean square of the relative residuals, without and with it, of passes
            that are no outliers.
        uncertainty: two standard deviations of the corrected price, relative, where the table has
            its highest price; NaN with one or two passes, which cannot tell.
        measured: what was measured, in words; advice: what to measure beside it, or "".
    """

    scale: float
    offset_ms: float
    points: int
    before: float
    after: float
    uncertainty: float = float("nan")
    outliers: int = 0
    measured: str = ""
    advice: str = ""

    def __str__(self) -> str:
        offset = f"offset {self.offset_ms:+.3f} ms" if self.offset_ms else "no offset"
        outliers = f", {self.outliers} of them outliers" if self.outliers else ""
        known = "" if np.isnan(self.uncertainty) else f"; +- {100 * self.uncertainty:.1f} %"
        advice = f"; {self.advice}" if self.advice else ""
        return (
            f"scale {self.scale:.4f}, {offset} from {self.points} passes{outliers}"
            f" ({self.measured}); error {100 * self.before:.1f} % before,"
            f" {100 * self.after:.1f} % after{known} at the highest price{advice}"
        )


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
            said = "nothing measured, left as it was" if fit is None else str(fit)
            lines.append(f"{name}: {said}")
        return "\n".join(lines)


def calibrate(
    timing: TimingTable, measurements: pl.DataFrame | str | os.PathLike[str]
) -> Calibration:
    """Fit a scale to the measured passes of each phase, and an offset where they show one.

    The fit is of log prices, so that noise of either sign weighs the same, and robust: a few wrong
    measurements have no part in it. An offset is taken only where it is significant (once in a
    thousand by chance), where it leaves the highest price of the table known to 10 %, and where
    all prices stay positive.

    Args:
        timing: the model to correct.
        measurements: passes in the layout of a timing table (frame or file); one phase may be
            missing, the other then stays as it is.

    Raises:
        InputError: something else than a table, a measurement that is malformed, or passes that
            scatter so much that no scale is known to 25 %; says what to measure.
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
        fit = _fit(role, points.filter(pl.col("role") == role), _predict(timing, role, rows), rows)
        fits[role] = fit
        corrected = fit.scale * _predict(timing, role, rows) + fit.offset_ms
        price = pl.col("latency_ms")
        change = pl.when(pl.col("role") == role).then(fit.scale * price + fit.offset_ms)
        points = points.with_columns(latency_ms=change.otherwise(price))
        measured = rows["latency_ms"].to_numpy()
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


def _fit(role: str, points: pl.DataFrame, predicted: np.ndarray, rows: pl.DataFrame) -> Fit:
    """The correction of a phase: `points` are the table's, float64 `predicted` its prices of the
    measured `rows`."""
    measured = rows["latency_ms"].to_numpy()
    least, most = (float(x) for x in (points["latency_ms"].min(), points["latency_ms"].max()))
    scale, uncertainty, weights = _scale_of(predicted, measured)
    offset = 0.0
    both = _scale_and_offset(predicted, measured)
    if both is not None:
        found, covariance, both_weights = both
        far = np.array([most, 1.0])
        price = float(far @ found)
        known = 2.0 * float(np.sqrt(far @ covariance @ far)) / max(price, 1e-9)
        positive = found[0] > 0.0 and found[0] * least + found[1] > 0.0
        if positive and known <= _WELL_KNOWN:
            scale, offset = float(found[0]), float(found[1])
            uncertainty, weights = known, both_weights
    if uncertainty > _MOST_UNCERTAIN:
        raise InputError(
            f"measurements, {role}",
            f"{rows.height} passes that leave the scale uncertain by {100 * uncertainty:.0f} %",
            "25 % or less: measure each size several times, or sizes that the table prices alike",
        )
    kept = weights > 0.0
    corrected = scale * predicted + offset
    return Fit(
        scale,
        offset,
        rows.height,
        _root_mean_square((predicted / measured - 1.0)[kept]),
        _root_mean_square((corrected / measured - 1.0)[kept]),
        uncertainty,
        int((~kept).sum()),
        _range(role, predicted[kept], rows.filter(pl.Series(kept))),
        _advice(role, points, most, float(predicted[kept].max())),
    )


def _scale_of(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float, np.ndarray]:
    """(scale, its uncertainty at two standard deviations, weights) of the measured passes."""
    ratios = np.log(measured / predicted)
    center = float(np.median(ratios))
    for _ in range(50):
        weights = _weights(ratios - center)
        moved = float(weights @ ratios / weights.sum())
        if abs(moved - center) < 1e-12:
            break
        center = moved
    count = len(ratios)
    if count < 3:
        return float(np.exp(center)), float("nan"), np.ones(count)
    variance = _variance(ratios - center, weights, 1)
    return float(np.exp(center)), 2.0 * float(np.sqrt(variance / weights.sum())), weights


def _scale_and_offset(
    predicted: np.ndarray, measured: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """((scale, offset), their covariance, weights) where an offset is significant, else None:
    robust least squares of log(measured) - log(scale * predicted + offset), by Gauss-Newton."""
    if len(predicted) < 4 or np.ptp(predicted) <= 1e-9 * predicted.max():
        return None
    columns = np.stack([predicted, np.ones_like(predicted)], axis=1)
    found = _start(predicted, measured)
    for _ in range(100):
        fitted = np.maximum(columns @ found, 1e-9)
        residuals = np.log(measured / fitted)
        weights = _weights(residuals)
        root = np.sqrt(weights)[:, None]
        slopes = columns / fitted[:, None]
        step, *_ = np.linalg.lstsq(root * slopes, root[:, 0] * residuals, rcond=None)
        found = found + step
        if np.abs(slopes @ step).max() < 1e-12:
            break
    normal = (slopes * weights[:, None]).T @ slopes
    if weights.sum() <= 3.0 or np.linalg.cond(normal) > 1e15:
        return None
    covariance = _variance(residuals, weights, 2) * np.linalg.inv(normal)
    if abs(found[1]) <= _t_value(weights.sum() - 2.0) * np.sqrt(covariance[1, 1]) + 1e-9:
        return None
    return found, covariance, weights


def _start(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """The median line through pairs of passes (Theil and Sen): a few wrong ones do not move it."""
    first, second = np.triu_indices(len(predicted), 1)
    gaps = predicted[second] - predicted[first]
    apart = np.abs(gaps) > 1e-9 * predicted.max()
    slope = float(np.median((measured[second] - measured[first])[apart] / gaps[apart]))
    if slope <= 0.0:
        return np.array([np.median(measured / predicted), 0.0])
    return np.array([slope, np.median(measured - slope * predicted)])


def _weights(residuals: np.ndarray) -> np.ndarray:
    """Tukey's biweight of residuals, whose spread is that of their median."""
    spread = max(1.4826 * float(np.median(np.abs(residuals))), 1e-9)
    share = residuals / (_TUKEY * spread)
    return np.where(np.abs(share) < 1.0, (1.0 - share**2) ** 2, 0.0)


def _variance(residuals: np.ndarray, weights: np.ndarray, fitted: int) -> float:
    """Variance of the noise; the biweight shortens residuals, which its efficiency makes up for."""
    free = max(float(weights.sum()) - fitted, 0.5)
    return float((weights * residuals**2).sum()) / free / 0.9


def _t_value(freedom: float) -> float:
    """What Student's t exceeds once in a thousand, by the expansion in 1 / freedom (Abramowitz
    and Stegun, 26.7.5)."""
    z, f = _SIGNIFICANT, max(freedom, 1.0)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / f + second / f**2 + third / f**3


def _range(role: str, predicted: np.ndarray, rows: pl.DataFrame) -> str:
    size = "context" if role == DECODE else "isl"
    parts = [
        f"{name} {rows[column].min():,} to {rows[column].max():,}"
        for name, column in (("batch", "batch_size"), (size, size))
    ]
    return f"{', '.join(parts)}, {predicted.min():,.3f} to {predicted.max():,.3f} ms of the table"


def _advice(role: str, points: pl.DataFrame, most: float, measured: float) -> str:
    """What to measure where the table goes far beyond what was."""
    if most <= _FAR * measured:
        return ""
    batch = points["batch_size"].max()
    near = f"batches of {batch}" if role == DECODE else "passes of the most tokens"
    return f"the table goes on to {most:,.3f} ms, extrapolated: measure {near} too"


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values * values)))
