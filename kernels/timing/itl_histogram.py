"""Observation: the distribution of inter-token gaps.

Tokens of one pass share one timestamp and mostly one gap, so gaps are counted with a weight: in
logarithmic bins of 13 mantissa bits (each within 0.007 % of its midpoint), and as moments about the
first gap of the worker, which keeps them exact to rounding.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import worker as W

MANTISSA_BITS = 13
_DROPPED = np.int64(52 - MANTISSA_BITS)
_FIRST_BIN = np.int64((1023 - 20) << MANTISSA_BITS)
GAP_BINS = 80 << MANTISSA_BITS
"""Bins from 2**-20 ms (below the 1 ns that any pass lasts at least) to 2**60 ms."""
_LAST_BIN = np.int64(GAP_BINS - 1)


def bin_midpoints(indices: np.ndarray) -> np.ndarray:
    """Midpoints (ms, float64) of the bins at `indices` (integers below GAP_BINS)."""
    bits = (np.asarray(indices, np.int64) + _FIRST_BIN) << _DROPPED
    half_a_bin = np.int64(1) << (_DROPPED - 1)
    return (bits + half_a_bin).view(np.float64)


def bin_of(gap: float) -> int:
    """Bin of a positive gap (ms)."""
    bits = int(np.float64(gap).view(np.int64)) >> int(_DROPPED)
    return min(max(bits - int(_FIRST_BIN), 0), int(_LAST_BIN))


@inner
def count_gaps(times, scratch, count, weight):
    """Count the first `count` of the gaps of the chunk, each `weight` times, for one worker."""
    if weight == 0:
        return
    gaps = scratch.chunk[W.GAPS]
    bins = scratch.bins
    if times[W.GAP_COUNT] == 0.0:
        times[W.GAP_SHIFT] = gaps[0]
        times[W.GAP_MIN] = gaps[0]
        times[W.GAP_MAX] = gaps[0]
    if times[W.RATE_SHIFT] == 0.0 and gaps[0] > 0.0:
        times[W.RATE_SHIFT] = 1000.0 / gaps[0]
        times[W.GAP_POSITIVE_MIN] = gaps[0]
    shift = times[W.GAP_SHIFT]
    rate_shift = times[W.RATE_SHIFT]
    total = 0.0
    squares = 0.0
    rates = 0.0
    rate_squares = 0.0
    zeros = np.int64(0)
    smallest = times[W.GAP_MIN]
    smallest_positive = times[W.GAP_POSITIVE_MIN]
    largest = times[W.GAP_MAX]
    for k in range(count):
        gap = np.float64(gaps[k])
        deviation = gap - shift
        total += deviation
        squares += deviation * deviation
        smallest = min(smallest, gap)
        largest = max(largest, gap)
        if gap > 0.0:
            bins[
                min(max((gap.view(np.int64) >> _DROPPED) - _FIRST_BIN, np.int64(0)), _LAST_BIN)
            ] += weight
            deviation = 1000.0 / gap - rate_shift
            rates += deviation
            rate_squares += deviation * deviation
            smallest_positive = min(smallest_positive, gap)
        else:
            zeros += 1
    factor = np.float64(weight)
    times[W.GAP_COUNT] += factor * np.float64(count)
    times[W.GAP_ZEROS] += factor * np.float64(zeros)
    times[W.GAP_SUM] += factor * total
    times[W.GAP_SQUARES] += factor * squares
    times[W.RATE_SUM] += factor * rates
    times[W.RATE_SQUARES] += factor * rate_squares
    times[W.GAP_MIN] = smallest
    times[W.GAP_POSITIVE_MIN] = smallest_positive
    times[W.GAP_MAX] = largest


@inner
def count_gap(times, scratch, gap, weight):
    """Count one gap (ms) `weight` times."""
    scratch.chunk[W.GAPS, 0] = max(gap, 0.0)
    count_gaps(times, scratch, np.int64(1), weight)
