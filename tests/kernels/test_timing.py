"""Pass durations against exact arithmetic, and the vectorised series against single prices."""

from fractions import Fraction

import numpy as np

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import worker as W
from vecsim.kernels.timing import durations as kernel

RNG_SEED = 7


@entry
def round_all(fractions, out):
    """Round every fraction of a second to nanoseconds."""
    for k in range(len(fractions)):
        out[k] = kernel.round_ns(fractions[k])


@entry
def durations(raw, ratio, out):
    """Duration of every raw price."""
    for k in range(len(raw)):
        out[k] = kernel.duration_ms(raw[k], ratio)


@entry
def both_ways(fields, factors, batch, context, chunk, singles):
    """A chunk of decode durations, vectorised and one by one."""
    count = kernel.decode_series(fields, factors, batch, context, np.int64(W.CHUNK), chunk)
    for k in range(W.CHUNK):
        singles[k] = kernel.decode_ms(fields, factors, batch, context + k * batch)
    return count


def exact_ns(seconds):
    return round(Fraction(float(seconds)) * 10**9)


def exact_ms(raw, ratio):
    def seconds(ns):
        return float(ns // 10**9) + float(ns % 10**9) / 1e9

    value = seconds(exact_ns(raw / 1000.0))
    if ratio > 0 and value > 0:
        value = seconds(exact_ns(value / ratio))
    return value * 1000.0


def test_rounding_is_exact_beside_ties_and_on_them():
    generator = np.random.default_rng(RNG_SEED)
    near = (generator.integers(0, 10**9, 20_000) + 0.5) / 1e9
    ties = generator.integers(0, 2**20, 2_000) * 2.0**-20 + 2.0**-30
    fractions = np.concatenate(
        [near, np.nextafter(near, 0), np.nextafter(near, 1), ties, generator.random(20_000)]
    )
    fractions = fractions[fractions < 1.0]
    rounded = np.empty_like(fractions)
    round_all(fractions, rounded)
    assert rounded.astype(np.int64).tolist() == [exact_ns(value) for value in fractions]


def test_durations_with_and_without_speedup():
    generator = np.random.default_rng(RNG_SEED)
    raw = np.concatenate([generator.random(2_000) * 40.0, generator.random(500) * 1e7, [0.0]])
    for ratio in (0.0, 1.0, 1.5, 3.0, 1e-3):
        out = np.empty_like(raw)
        durations(raw, ratio, out)
        assert out.tolist() == [exact_ms(value, ratio) for value in raw.tolist()]


def test_unusable_prices_are_marked():
    raw = np.array([np.nan, -1.0, np.inf, 1e300])
    out = np.empty_like(raw)
    durations(raw, 1.0, out)
    assert (out == kernel.INVALID).all()


def test_a_series_equals_single_passes():
    for capacity, batch, context, ratio in (
        (1_048_576, 1, 100, 1.0),
        (1_048_576, 37, 5_000, 2.5),
        (4_096, 8, 3_900, 0.0),
        (640, 3, 100, 1e-3),
    ):
        fields = np.zeros(R.RANK_FIELDS, np.int64)
        fields[R.CAPACITY_TOKENS] = capacity
        factors = np.zeros(R.FACTORS)
        factors[R.DECODE_RATIO] = ratio
        chunk = np.zeros((W.CHUNK_FIELDS, W.CHUNK))
        chunk[W.COUNTING] = np.arange(W.CHUNK)
        singles = np.empty(W.CHUNK)
        assert both_ways(fields, factors, batch, context, chunk, singles) == W.CHUNK
        assert chunk[W.DURATIONS].tolist() == singles.tolist()
