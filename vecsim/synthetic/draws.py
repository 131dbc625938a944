"""Arrivals and lengths drawn from their descriptions."""

from __future__ import annotations

from typing import assert_never

import numpy as np

from vecsim.errors import InputError
from vecsim.synthetic.description import (
    Arrivals,
    Burst,
    Constant,
    Diurnal,
    Fixed,
    Gamma,
    Length,
    Lognormal,
    Piecewise,
    Poisson,
    Uniform,
)
from vecsim.synthetic.rng import Random

_BISECTIONS = 100


def arrivals_of(arrivals: Arrivals, random: Random, count: int) -> np.ndarray:
    """float64 [count] of arrival times (ms), rising; of a renewal process the first is at 0.

    Raises:
        InputError: times that are not finite.
    """
    with np.errstate(over="ignore"):
        times = _times(arrivals, random, count)
    if not np.isfinite(times).all():
        raise InputError("arrivals", arrivals, "a rate that leaves arrivals finite")
    return times


def _times(arrivals: Arrivals, random: Random, count: int) -> np.ndarray:
    if isinstance(arrivals, Burst):
        return np.zeros(count)
    if isinstance(arrivals, Constant):
        return _sums(np.full(max(count - 1, 0), 1000.0 / arrivals.rate))
    if isinstance(arrivals, Poisson):
        return _sums(random.exponential(1000.0 / arrivals.rate, max(count - 1, 0)))
    if isinstance(arrivals, Gamma):
        mean = 1000.0 / arrivals.rate
        shape = arrivals.shape
        return _sums(random.gamma(shape, mean / shape, max(count - 1, 0)))
    if isinstance(arrivals, Piecewise):
        return _piecewise(arrivals, np.cumsum(random.exponential(1.0, count))) * 1000.0
    if isinstance(arrivals, Diurnal):
        return _diurnal(arrivals, np.cumsum(random.exponential(1.0, count))) * 1000.0
    assert_never(arrivals)


def _sums(gaps: np.ndarray) -> np.ndarray:
    """0, then the running sums."""
    return np.concatenate([np.zeros(1), np.cumsum(gaps)])


def _piecewise(arrivals: Piecewise, expected: np.ndarray) -> np.ndarray:
    """Seconds at which the integral of the rate reaches `expected`."""
    durations = np.array([segment.duration_s for segment in arrivals.segments])
    rates = np.array([segment.rate for segment in arrivals.segments])
    edges = np.concatenate([np.zeros(1), np.cumsum(durations)])
    sums = np.concatenate([np.zeros(1), np.cumsum(durations * rates)])
    rounds, rest = np.divmod(expected, sums[-1])
    segment = np.clip(np.searchsorted(sums, rest, side="right") - 1, 0, len(rates) - 1)
    return rounds * edges[-1] + edges[segment] + (rest - sums[segment]) / rates[segment]


def _diurnal(arrivals: Diurnal, expected: np.ndarray) -> np.ndarray:
    """Seconds at which the integral of the rate reaches `expected`, by bisection."""
    turn = 2.0 * np.pi / arrivals.period_s
    swing = arrivals.amplitude / turn
    start = np.sin(turn * arrivals.peak_s)
    target = expected / arrivals.rate
    low, high = np.maximum(target - 2.0 * swing, 0.0), target + 2.0 * swing
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        before = middle + swing * (np.sin(turn * (middle - arrivals.peak_s)) + start) < target
        low, high = np.where(before, middle, low), np.where(before, high, middle)
    return np.maximum.accumulate(high)


def lengths_of(length: Length, random: Random, count: int) -> np.ndarray:
    """int64 [count] of token counts."""
    if isinstance(length, Fixed):
        return np.full(count, length.tokens, np.int64)
    if isinstance(length, Uniform):
        span = length.high - length.low + 1
        return length.low + np.floor(random.uniform(count) * span).astype(np.int64)
    if isinstance(length, Lognormal):
        with np.errstate(over="ignore"):
            drawn = length.median * np.exp(length.sigma * random.normal(count))
        return np.rint(np.clip(drawn, length.low, length.high)).astype(np.int64)
    assert_never(length)
