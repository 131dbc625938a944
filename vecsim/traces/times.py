"""Arrival times of a trace: units, ISO 8601 strings, the shift to zero."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import numpy as np

from vecsim.errors import InputError
from vecsim.workload.columns import scale_arrivals

UNIT_SHIFTS = {"s": 3, "ms": 0, "us": -3, "ns": -6}
"""Time unit -> power of ten that turns it into milliseconds."""

_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d+))?\s*(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
YEARS = range(1678, 2262)
"""Years whose every instant fits 64-bit nanoseconds."""


@dataclass(frozen=True)
class Times:
    """Authored times. Dates are kept as whole nanoseconds, so that no digit is lost.

    Attributes:
        values: float64 ms (NaN = missing), or int64 ns since 1970.
    """

    values: np.ndarray

    @classmethod
    def of(cls, values: Sequence[float | int | None]) -> Times:
        """Times of which all are dates (int ns), or all numbers (float ms) or missing (None)."""
        if values and isinstance(values[0], int):
            return cls(np.array(values, np.int64))
        return cls(np.array([np.nan if t is None else t for t in values], np.float64))

    def keep(self, mask: np.ndarray) -> Times:
        """The times where `mask` (bool [n]) holds."""
        return self if mask.all() else Times(self.values[mask])

    def arrivals(self, speedup: float, rebase: bool) -> np.ndarray:
        """float64 arrivals (ms): every gap divided by `speedup`, and the first moved to 0.

        A missing time counts as 0 before the shift. Without `rebase` the first stays where it is,
        and at a speed-up of 1 so does every other, to the last bit.
        """
        if self.values.size == 0:
            return np.zeros(0)
        if self.values.dtype.kind == "i":
            times = self.values / 1e6
            since_first = (self.values - self.values.min()) / 1e6
        else:
            times = np.nan_to_num(self.values, nan=0.0)
            since_first = times - times.min()
        scaled = scale_arrivals(since_first, speedup)
        if rebase:
            return scaled
        first = times.min()
        if first < 0:
            raise InputError("rebase", False, f"True, as the first arrival is at {first} ms")
        return times if speedup == 1 else first + scaled


def milliseconds(text: str, unit: str) -> float | None:
    """A decimal number of `unit` as the nearest float64 of milliseconds; None if it is none.

    The shift between units is decimal and exact: the same instants written in s, ms, us or ns
    give the same floats.
    """
    shift = UNIT_SHIFTS[unit]
    try:
        value = float(text) if shift == 0 else float(Decimal(text).scaleb(shift))
    except (ValueError, ArithmeticError):
        return None
    return value if np.isfinite(value) and "_" not in text else None


def nanoseconds(text: str) -> int | None:
    """An ISO 8601 date and time as ns since 1970 (UTC unless it has an offset); None if it is none.

    Digits beyond the ninth decimal are dropped.
    """
    match = _ISO.fullmatch(text.strip())
    if match is None:
        return None
    whole, fraction, offset = match.groups()
    try:
        moment = datetime.fromisoformat(whole).replace(tzinfo=UTC)
    except ValueError:
        return None
    if moment.year not in YEARS:
        return None
    if offset and offset != "Z":
        minutes = int(offset[1:3]) * 60 + int(offset[-2:])
        moment -= timedelta(minutes=-minutes if offset[0] == "-" else minutes)
    seconds = (moment - _EPOCH) // timedelta(seconds=1)
    return seconds * 10**9 + int((fraction or "0")[:9].ljust(9, "0"))


def check_unit(unit: str | None) -> None:
    if unit is not None and unit not in UNIT_SHIFTS:
        raise InputError("time_unit", unit, "one of s, ms, us, ns")
