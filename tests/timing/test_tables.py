"""Interpolation against a slow model and against the estimator; what lies outside a table."""

import warnings

import numpy as np
import polars as pl
import pytest

import vecsim
from tests.timing import recorded
from tests.timing.naive import Naive
from vecsim.kernels.compile.jit import DISABLED, entry
from vecsim.kernels.timing.durations import call_decode, call_series
from vecsim.timing.points import COLUMNS, read_points
from vecsim.timing.resolve import TimingWarning
from vecsim.timing.table import TimingTable

SEED = 11


@entry
def both_ways(record, batch, context_sum, series, singles):
    """A series of decode prices, and the same one by one."""
    count = np.int64(len(series))
    filled = call_series(record, batch, context_sum, count, series)
    for k in range(count):
        total = context_sum + k * batch
        singles[k] = call_decode(record, batch, total, total // batch, np.int64(0))
    return filled


def points(prefills, decodes):
    """Points from (batch, isl, prefix, ms) and (batch, context, ms)."""
    rows = [("prefill", b, i, p, None, ms) for b, i, p, ms in prefills]
    rows += [("decode", b, None, None, c, ms) for b, c, ms in decodes]
    names = ("role", "batch_size", "isl", "prefix", "context", "latency_ms")
    return pl.DataFrame(rows, schema=names, orient="row", infer_schema_length=None)


def scattered(batches, most_tokens):
    """Random prices: prefills on a grid that ends at most_tokens in all, ragged decodes."""
    generator = np.random.default_rng(SEED)
    prefills = [
        (b, n + p, p, 5.0 + 0.02 * b * n + 1e-4 * b * p + generator.random())
        for b in batches
        for n in (1, 16, 17, 40, 128, 500)
        for p in (0, 1, 64, 512, 4096)
        if b * n <= most_tokens
    ]
    decodes = [
        (b, int(c), 5.0 + 0.1 * b + 1e-4 * c + generator.random())
        for b in batches
        for c in np.unique(generator.integers(0, 3000, 12))
    ]
    return points(prefills, decodes)


@pytest.mark.parametrize("batches", [(1, 2, 5, 8), (3,), (2, 7)])
def test_prices_equal_those_of_the_slow_model(batches):
    frame = scattered(batches, 10**9)
    table, naive = TimingTable(frame), Naive(frame)
    generator = np.random.default_rng(SEED)
    batch = generator.integers(1, 12, 400)
    tokens, prefix = generator.integers(1, 700, 400), generator.integers(0, 6000, 400)
    if len(batches) > 1:  # a lone batch is a grid of one layer, which the slow model has not
        expected = [
            naive.prefill(*size) for size in zip(batch, tokens + prefix, prefix, strict=True)
        ]
        assert table.prefill_ms(batch, tokens + prefix, prefix) == pytest.approx(
            expected, rel=1e-12
        )
    context = generator.integers(0, 5000, 400)
    expected = [naive.decode(*size) for size in zip(batch, context, strict=True)]
    assert table.decode_ms(batch, context) == pytest.approx(expected, rel=1e-12)


def test_points_are_met_exactly():
    frame, _ = read_points(recorded.TABLE)
    table = TimingTable(frame)
    prefill = frame.filter((pl.col("role") == "prefill") & (pl.col("prefix") == 0))
    found = table.prefill_ms(prefill["batch_size"], prefill["isl"], prefill["prefix"])
    assert found.tolist() == prefill["latency_ms"].to_list()
    decode = frame.filter((pl.col("role") == "decode") & (pl.col("context") < 16384))
    found = table.decode_ms(decode["batch_size"], decode["context"])
    assert found.tolist() == decode["latency_ms"].to_list()


def test_random_passes_are_within_half_a_percent_of_the_estimator():
    table = TimingTable(*read_points(recorded.TABLE))
    random = pl.read_parquet(recorded.RANDOM)
    prefill = random.filter(pl.col("role") == "prefill")
    decode = random.filter(pl.col("role") == "decode")
    found = table.prefill_ms(prefill["batch_size"], prefill["isl"], prefill["prefix"])
    errors = np.abs(found / prefill["latency_ms"].to_numpy() - 1.0)
    assert len(errors) == 1000
    assert np.quantile(errors, 0.99) < 0.005
    assert errors.mean() < 0.0005
    found = table.decode_ms(decode["batch_size"], decode["context"])
    errors = np.abs(found / decode["latency_ms"].to_numpy() - 1.0)
    assert np.quantile(errors, 0.99) < 0.005


@pytest.mark.skipif(DISABLED, reason="plain Python has no series")
@pytest.mark.parametrize("batches", [(1, 2, 5, 8), (3,)])
def test_a_series_equals_single_prices(batches):
    table = TimingTable(scattered(batches, 10**9), beyond_batches=True)
    generator = np.random.default_rng(SEED)
    for _ in range(200):
        one, many = table.bind(), table.bind()
        batch = np.int64(generator.integers(1, 12))
        total = np.int64(batch * generator.integers(1, 5000) + generator.integers(0, batch))
        series, singles = np.empty(64), np.empty(64)
        assert both_ways(np.int64(one.addresses[1]), batch, total, series, singles) == 1
        assert series.tolist() == singles.tolist()
        both_ways(np.int64(many.addresses[1]), batch, total, series, singles)
        assert one.outside[1] % 2 == 0  # as many of the series as of the single ones
        assert one.outside == many.outside


def test_passes_outside_the_table_are_counted():
    table = TimingTable(scattered((1, 2, 5, 8), 10**9), beyond_batches=True)
    bound = table.bind()
    from vecsim.kernels.timing.table_many import prices

    def ask(phase, *sizes):
        columns = [np.array([size], np.int64) for size in sizes]
        prices(np.int64(bound.addresses[phase]), np.int64(phase), *columns, np.empty(1))
        return bound.outside

    assert ask(0, 4, 100, 50) == (0, 0)
    assert ask(0, 9, 10, 0) == (1, 0)
    assert ask(0, 1, 5200, 5000) == (2, 0)
    assert ask(0, 1, 600, 0) == (3, 0)
    assert ask(1, 4, 1000, 0) == (3, 0)
    assert ask(1, 4, 5000, 0) == (3, 1)
    assert ask(1, 9, 1000, 0) == (3, 2)


def test_holes_take_the_nearest_point_and_are_noted():
    whole = scattered((1, 2), 10**9)
    one = (pl.col("isl") == 17 + 64) & (pl.col("prefix") == 64)
    holed = whole.filter(~one.fill_null(value=False))
    assert not TimingTable(whole).notes
    assert "do not fill a grid" in TimingTable(holed).notes[0]
    staircase = scattered((1, 2, 5, 8), 1000)
    assert not TimingTable(staircase).notes
    at_the_edge = TimingTable(staircase).prefill_ms(8, 125 + 512, 512)
    assert at_the_edge > TimingTable(staircase).prefill_ms(8, 125, 0)


def test_ten_measured_points_are_a_model():
    frame = points(
        [(1, 100, 0, 10.0), (1, 1000, 0, 40.0), (1, 4000, 0, 150.0), (4, 400, 0, 60.0)],
        [(1, 1000, 6.0), (8, 1000, 7.4), (8, 2000, 8.4), (32, 1000, 12.0)],
    )
    table = TimingTable(frame)
    assert [note.partition(":")[0] for note in table.notes] == ["prefill", "decode"]
    assert table.prefill_ms([1, 1, 2], [550, 8000, 400], 0).tolist() == pytest.approx(
        [25.0, 296.0 + 2.0 / 3.0, 33.333333333 + (60.0 - 33.333333333) / 3.0], rel=1e-6
    )
    assert table.decode_ms([1, 8, 4], [5000, 1500, 1000]).tolist() == pytest.approx([6.0, 7.9, 6.6])


def test_points_measured_several_times_count_once():
    frame = points([(1, 100, 0, ms) for ms in (10.0, 11.0, 99.0)], [(1, 100, 6.0)])
    assert TimingTable(frame).prefill_ms(1, 100, 0) == 11.0


def replay(table, rank=None, **arguments):
    spec = recorded.spec({"type": "polynomial"}, rank)
    workload = vecsim.synthesize(
        requests=40, arrivals={"kind": "burst"}, input_tokens=300, output_tokens=30, seed=1
    )
    return vecsim.replay(spec, workload=workload, timing=table, **arguments)


def test_a_decode_batch_beyond_the_table_ends_the_run_unless_allowed():
    frame = scattered((1, 2, 5, 8), 10**9)
    with pytest.raises(vecsim.SimulationError, match=r"decode pass of .* at most 8"):
        replay(TimingTable(frame))
    with pytest.warns(TimingWarning, match="outside"):
        result = replay(TimingTable(frame, beyond_batches=True))
    assert result.report["outside_table_decode_lookups"] > 0
    assert result.report["completed_requests"] == 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = replay(TimingTable(frame), {"max_num_seqs": 8})
    assert result.report["outside_table_decode_lookups"] == 0


def test_counts_and_results_do_not_depend_on_threads():
    table = TimingTable(scattered((1, 2, 5, 8), 10**9), beyond_batches=True)
    spec = {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 5}},
        "engine": {"rank": {"num_gpu_blocks": 400}},
        "requests": [],
    }
    workload = vecsim.synthesize(
        requests=200,
        arrivals={"kind": "poisson", "rate": 40},
        input_tokens={"kind": "uniform", "low": 20, "high": 900},
        output_tokens={"kind": "uniform", "low": 1, "high": 90},
        seed=2,
    )
    with pytest.warns(TimingWarning):
        one = vecsim.replay(spec, workload=workload, timing=table, threads=1)
    with pytest.warns(TimingWarning):
        two = vecsim.replay(spec, workload=workload, timing=table, threads=2)
    assert one.report == two.report
    assert one.report["outside_table_prefill_lookups"] > 0
    assert one.requests.equals(two.requests)


# --- far outside ----------------------------------------------------------------------------------


def stepped(batches, contexts, beyond=True):
    """A table whose price falls by a tenth from batch 255 to 256, as kernels for other tiles do."""

    def price(batch, context):
        return (5.0 + 0.05 * batch + 2e-5 * batch * context) * (0.9 if batch >= 256 else 1.0)

    rows = [("decode", b, None, None, c, price(b, c)) for b in batches for c in contexts]
    rows += [("prefill", 1, n, 0, None, 5.0 + 0.01 * n) for n in (1, 100, 2048)]
    frame = pl.DataFrame(rows, schema=list(COLUMNS), orient="row", infer_schema_length=None)
    return vecsim.TimingTable(frame, {}, beyond), price


@pytest.mark.parametrize("batch", [257, 300, 512, 1024, 4096])
def test_batches_beyond_the_last_follow_the_octave_below_it(batch):
    table, price = stepped(range(1, 257), (1, 1000, 4000))
    last = float(table.decode_ms(256, 1000))
    found = float(table.decode_ms(batch, 1000))
    assert found >= last
    assert found == pytest.approx(price(batch, 1000), rel=0.25)


def test_a_price_beyond_is_never_below_the_last_one():
    rows = [("decode", b, None, None, 100, ms) for b, ms in ((1, 9.0), (64, 20.0), (128, 12.0))]
    rows += [("prefill", 1, n, 0, None, 5.0 + 0.01 * n) for n in (1, 100)]
    frame = pl.DataFrame(rows, schema=list(COLUMNS), orient="row", infer_schema_length=None)
    table = vecsim.TimingTable(frame, {}, True)
    assert float(table.decode_ms(500, 100)) == 12.0
    assert float(table.decode_ms(96, 100)) == 16.0


def test_contexts_and_tokens_beyond_the_last_follow_the_octave_below_it():
    contexts = (1, 1000, 2000, 3999, 4000)
    rows = [("decode", 1, None, None, c, 5.0 + 0.001 * c - 0.5 * (c == 4000)) for c in contexts]
    tokens = (1, 1024, 2047, 2048)
    rows += [("prefill", 1, n, 0, None, 5.0 + 0.01 * n - 3.0 * (n == 2048)) for n in tokens]
    frame = pl.DataFrame(rows, schema=list(COLUMNS), orient="row", infer_schema_length=None)
    table = vecsim.TimingTable(frame)
    assert float(table.decode_ms(1, 4000)) == pytest.approx(8.5)
    slope = (8.5 - 7.0) / 2000
    assert float(table.decode_ms(1, 8000)) == pytest.approx(8.5 + 4000 * slope)
    slope = (22.48 - 15.24) / 1024
    assert float(table.prefill_ms(1, 4096, 0)) == pytest.approx(22.48 + 2048 * slope)


def test_the_warning_says_how_far_outside_and_series_price_as_single_passes():
    table, _ = stepped((1, 8, 16), (1, 20, 40))
    workload = vecsim.Workload.from_columns([0.0] * 24, [30] * 24, [60] * 24)
    spec = recorded.spec({"type": "fixed", "prefill_ms": 1.0, "decode_ms": 1.0})
    with pytest.warns(TimingWarning, match=r"decode to batch 24 and context 88 \(measured to 16"):
        report = vecsim.replay(spec, workload=workload, timing=table).report
    total = float(table.prefill_ms(24, 30, 0)) + sum(
        float(table.decode_ms(24, context)) for context in range(30, 89)
    )
    assert report["duration_ms"] == pytest.approx(total, rel=0.02)
