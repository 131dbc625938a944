"""Metric definitions: against the reference's reports, and by hand where it has no case."""

import dataclasses

import numpy as np
import polars as pl
import pytest

import vecsim
from tests.support.outcomes import (
    cases,
    gap_values,
    gaps_of,
    outcome_of,
    plain_payload,
    pool,
    result_of,
    rows_of_case,
)
from vecsim.data import sample_path
from vecsim.errors import InputError
from vecsim.kernels.state import status as S
from vecsim.results import metrics as metrics

FILES = ("report", "vllm", "trtllm", "sglang", "runtime", "mooncake")
SKETCHED = ("itl_ms", "output_token_throughput_per_user")


def _aggregated_cases():
    for file in FILES:
        for case in cases(file):
            if case["expect"]["ok"] and "disaggregated" not in case["feature"]:
                yield pytest.param(case, id=f"{file}-{case['name']}")


def _replayed(case):
    """A result made of the case's own records."""
    report = case["expect"]["report"]
    payload = case["payload"]
    spec = payload.get("spec", payload)
    workers = spec["topology"]["workers"]["initial_workers"]
    gaps = gap_values(case)
    dp_size = spec.get("engine", {}).get("dp_size", 1)
    rows = rows_of_case(case)
    return gaps, result_of(
        rows,
        payload,
        gaps=gaps_of([] if gaps is None else gaps),
        committed_prefill_tokens=report["committed_prefill_tokens"],
        end_ms=report["decode_worker_seconds"] * 1000.0 / workers,
        pools=(
            pool(
                workers=workers,
                dp_size=dp_size,
                gpus_per_worker=report["decode_gpus_per_worker"],
            ),
        ),
    )


@pytest.mark.parametrize("case", list(_aggregated_cases()))
def test_report_equals_reference(case):
    gaps, result = _replayed(case)
    found = result.reference_report()
    for name, value in case["expect"]["report"].items():
        if name.endswith(SKETCHED) and gaps is None:
            continue
        if isinstance(value, str | None):
            assert found[name] == value, name
        elif isinstance(value, int):
            assert found[name] == value, name
            assert isinstance(found[name], int), name
        else:
            sketched = name.endswith(SKETCHED) and not name.startswith(
                ("mean", "min", "max", "std")
            )
            tolerance = 2e-3 if sketched else 1e-9
            assert found[name] == pytest.approx(value, rel=tolerance, abs=1e-9), name


def test_enough_cases_determine_their_gaps():
    known = [gap_values(case.values[0]) for case in _aggregated_cases()]
    assert sum(gaps is not None and len(gaps) > 0 for gaps in known) >= 40


@pytest.mark.parametrize(
    ("count", "percent", "rank"),
    [
        (1, 50, 0),
        (1, 99, 0),
        (2, 50, 1),
        (4, 50, 2),
        (10, 50, 5),
        (10, 75, 7),
        (10, 90, 8),
        (10, 95, 9),
        (10, 99, 9),
        (11, 95, 10),
        (100, 99, 98),
        (101, 99, 99),
    ],
)
def test_rank_rounds_half_up(count, percent, rank):
    assert metrics.rank_of(count, percent) == rank


def test_exact_statistics_of_ten_values_in_any_order():
    values = np.array([65.0, 20, 40, 25, 60, 30, 55, 35, 50, 45])
    found = metrics.exact_statistics(values)
    assert (found["median"], found["p75"], found["p90"]) == (45.0, 55.0, 60.0)
    assert (found["p95"], found["p99"]) == (65.0, 65.0)
    assert (found["min"], found["max"], found["mean"]) == (20.0, 65.0, 42.5)
    assert found["std"] == pytest.approx(np.std(values), rel=1e-12)
    assert values[0] == 65.0


@pytest.mark.parametrize("count", [1, 2, 10, 100])
def test_percentiles_are_monotone_between_the_extremes(count):
    values = np.random.default_rng(count).permutation(np.arange(float(count)))
    found = metrics.exact_statistics(values)
    chain = [found[name] for name in ("min", "median", "p75", "p90", "p95", "p99", "max")]
    assert chain == sorted(chain)
    assert (chain[0], chain[-1]) == (0.0, count - 1.0)


def test_statistics_without_samples_are_null():
    nothing = dict.fromkeys(metrics.STATISTICS)
    assert metrics.exact_statistics(np.array([])) == nothing
    assert metrics.gap_statistics(gaps_of([])) == nothing
    assert metrics.rate_statistics(gaps_of([0.0, 0.0])) == nothing


def test_gap_percentiles_count_zeros_and_follow_the_rank_rule():
    values = np.array([0.0] * 30 + [5.0] * 40 + [20.0] * 29 + [400.0])
    found = metrics.gap_statistics(gaps_of(values))
    assert (found["median"], found["p75"], found["p99"]) == (5.0, 20.0, 20.0)
    assert (found["min"], found["max"]) == (0.0, 400.0)
    assert found["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert found["std"] == pytest.approx(values.std(), rel=1e-12)
    zeros = metrics.gap_statistics(gaps_of([0.0] * 60 + [7.0] * 40))
    assert (zeros["median"], zeros["p75"]) == (0.0, 7.0)


def test_rates_cover_positive_gaps_only_and_ascend():
    values = np.array([0.0, 0.0, 2.0, 4.0, 5.0, 10.0])
    rates = 1000.0 / values[2:]
    found = metrics.rate_statistics(gaps_of(values))
    assert (found["min"], found["median"], found["max"]) == (100.0, 250.0, 500.0)
    assert (found["p90"], found["p99"]) == (500.0, 500.0)
    assert found["mean"] == pytest.approx(rates.mean(), rel=1e-12)
    assert found["std"] == pytest.approx(rates.std(), rel=1e-12)


def test_binned_percentiles_stay_within_the_extremes():
    gaps = gaps_of([5.0] * 10)
    above = metrics.GapDistribution(**{**vars(gaps), "midpoints": gaps.midpoints * 1.0001})
    below = metrics.GapDistribution(**{**vars(gaps), "midpoints": gaps.midpoints * 0.9999})
    for skewed in (above, below):
        found = metrics.gap_statistics(skewed)
        assert {found[name] for name, _ in metrics.PERCENTILES} == {5.0}
        found = metrics.rate_statistics(skewed)
        assert {found[name] for name, _ in metrics.PERCENTILES} == {200.0}


def _served(arrival, first, last, tokens, **more):
    return {
        "arrival_ms": arrival,
        "first_admit_ms": arrival,
        "first_token_ms": first,
        "last_token_ms": last,
        "terminal_ms": last,
        "output_length": tokens,
        "admissions": 1,
        **more,
    }


def test_tpot_is_the_mean_gap_after_the_first_token():
    report = result_of([_served(0.0, 10.0, 50.0, 5, second_token_ms=20.0)]).report
    assert report["mean_tpot_ms"] == 10.0
    assert report["mean_ttst_ms"] == 10.0
    assert report["num_tpot_samples"] == 1


@pytest.mark.parametrize("tokens", [0, 1])
def test_tpot_is_null_below_two_tokens(tokens):
    row = _served(0.0, 10.0, 10.0, tokens)
    if tokens == 0:
        del row["first_token_ms"], row["last_token_ms"]
    report = result_of([row]).report
    assert report["mean_tpot_ms"] is None
    assert report["mean_ttst_ms"] is None
    assert report["mean_ttft_ms"] == (10.0 if tokens else None)
    assert report["num_ttft_samples"] == tokens
    assert report["completed_requests"] == 1


def test_durations_and_rates():
    rows = [
        _served(1000.0, 1010.0, 1010.0, 1, input_length=30),
        _served(2000.0, 2010.0, 3000.0, 4, second_token_ms=2020.0, input_length=60),
    ]
    report = result_of(rows, end_ms=9000.0).report
    assert report["duration_ms"] == 3000.0
    assert report["makespan_ms"] == 2000.0
    assert report["last_event_ms"] == 9000.0
    assert report["output_throughput_tok_s"] == pytest.approx(5 / 3.0)
    assert report["input_throughput_tok_s"] == pytest.approx(30.0)


def test_everything_rejected_leaves_counts_and_nulls():
    row = {"arrival_ms": 0.0, "terminal_ms": 5.0, "status": "rejected", "input_length": 99}
    rows = [{**row, "reason": "prompt_exceeds_kv_capacity"}] * 3
    report = result_of(rows).report
    assert report["rejected_requests"] == report["num_requests"] == 3
    assert report["terminal_reasons"]["prompt_exceeds_kv_capacity"] == 3
    assert report["completed_requests"] == report["total_input_tokens"] == 0
    for name in ("duration_ms", "mean_ttft_ms", "p99_itl_ms", "prefix_cache_reused_ratio"):
        assert report[name] is None
    assert report["request_throughput_rps"] == 0.0


def test_counts_add_up_to_the_workload():
    rows = [{"status": name, "arrival_ms": 0.0} for name in S.STATUS_NAMES]
    rows[-1] = {"status": "not_arrived"}
    report = result_of(rows).report
    counts = [report[f"{name}_requests"] for name in S.STATUS_NAMES]
    assert counts == [1] * len(rows)
    assert sum(counts) == report["workload_requests"] == len(rows)
    assert report["num_requests"] == len(rows) - 1


def test_an_empty_workload_has_a_report():
    report = result_of([]).report
    assert report["workload_requests"] == report["num_requests"] == 0
    assert report["mean_e2e_latency_ms"] is None
    assert report["decode_pool_busy_ratio"] is None
    assert report["backlog_growing"] is None


def test_pool_shares():
    busy = pool(
        workers=2,
        dp_size=2,
        gpus_per_worker=4,
        busy_ms=np.array([50.0, 100.0]),
        kv_block_ms=np.array([4000.0, 0.0]),
        passes=np.array([7, 3]),
        preemptions=np.array([1, 0, 2, 0]),
    )
    report = result_of([_served(0.0, 10.0, 10.0, 1)], end_ms=100.0, pools=(busy,)).report
    assert report["decode_pool_busy_ratio"] == 0.75
    assert report["decode_pool_mean_kv_usage"] == 0.1
    assert report["decode_pool_passes"] == 10
    assert report["preemptions"] == 3
    assert report["decode_worker_seconds"] == 0.2
    assert report["gpu_hours"] == pytest.approx(0.8 / 3600, rel=1e-15)
    assert report["prefill_pool_busy_ratio"] is None
    assert report["prefill_worker_seconds"] == 0.0


def test_a_pool_of_a_million_million_blocks():
    huge = pool(total_blocks=2**40, kv_block_ms=np.array([2.0**40]))
    report = result_of([_served(0.0, 1.0, 4.0, 1)], end_ms=4.0, pools=(huge,)).report
    assert report["decode_pool_mean_kv_usage"] == 0.25


@pytest.mark.parametrize(
    ("sla", "good"),
    [
        ({"ttft_ms": 10.0}, 2),
        ({"ttft_ms": 9.999}, 0),
        ({"itl_ms": 10.0}, 3),
        ({"itl_ms": 9.0}, 2),
        ({"ttft_ms": 10.0, "itl_ms": 9.0}, 1),
        ({"e2e_ms": 50.0}, 4),
        ({"e2e_ms": 20.0}, 2),
    ],
)
def test_goodput_bounds_are_inclusive(sla, good):
    rows = [
        _served(0.0, 10.0, 50.0, 5, second_token_ms=20.0),
        _served(0.0, 10.0, 10.0, 1),
        {**_served(0.0, None, None, 0), "first_token_ms": np.nan, "last_token_ms": np.nan},
        _served(0.0, 30.0, 48.0, 3, second_token_ms=39.0),
    ]
    rows[2]["terminal_ms"] = 20.0
    report = result_of(rows, plain_payload(sla=sla)).report
    assert report["goodput_completed_requests"] == good
    assert report["goodput_request_throughput_rps"] == pytest.approx(good / 0.05)
    assert report["goodput_ratio"] == good / 4


def test_no_goodput_fields_without_bounds():
    report = result_of([_served(0.0, 10.0, 10.0, 1)]).report
    assert not [name for name in report if name.startswith("goodput")]


def _single_server(arrivals, service):
    """Outcome of a FIFO server that takes `service` ms a request."""
    rows, free = [], 0.0
    for arrival in arrivals:
        start = max(arrival, free)
        free = start + service
        rows.append({**_served(arrival, free, free, 1), "first_admit_ms": start})
    return rows


@pytest.mark.parametrize("count", [12, 50, 1000])
@pytest.mark.parametrize(("interval", "growing"), [(5.0, True), (20.0, False)])
def test_backlog_of_a_server_at_twice_and_half_its_rate(count, interval, growing):
    rows = _single_server(np.arange(count) * interval, 10.0)
    assert result_of(rows).report["backlog_growing"] is growing


def test_backlog_of_random_arrivals():
    random = np.random.default_rng(7)
    for load, growing in ((0.5, False), (0.8, False), (1.5, True), (2.0, True)):
        arrivals = np.cumsum(random.exponential(10.0 / load, size=2000))
        assert metrics.backlog_growing(outcome_of(_single_server(arrivals, 10.0))) is growing


def test_backlog_of_long_requests_that_never_queue_is_not_growing():
    rows = [_served(t, t + 1e6, t + 1e6, 1) for t in np.arange(100.0)]
    assert metrics.backlog_growing(outcome_of(rows)) is False


def test_backlog_counts_requests_cut_off_in_the_queue():
    rows = [{"arrival_ms": t, "status": "unfinished"} for t in np.arange(40.0)]
    assert metrics.backlog_growing(outcome_of(rows)) is True


def test_backlog_is_null_in_a_closed_loop_and_for_one_burst():
    rows = _single_server([0.0, 5.0, 10.0, 15.0], 10.0)
    assert result_of(rows, plain_payload(max_in_flight=2)).report["backlog_growing"] is None
    assert result_of(_single_server([3.0] * 9, 10.0)).report["backlog_growing"] is None


def test_queue_time_covers_completed_requests():
    rows = [
        *_single_server([0.0, 5.0, 6.0], 10.0),
        {"arrival_ms": 7.0, "terminal_ms": 900.0, "status": "rejected"},
    ]
    report = result_of(rows).report
    assert report["max_queue_time_ms"] == 14.0
    assert report["mean_queue_time_ms"] == pytest.approx((0.0 + 5.0 + 14.0) / 3)


def test_pools_are_measured_over_the_window():
    """Sums of a pool over warm-up to cool-down are those that the timeline has there."""
    workload = vecsim.read_trace(sample_path())
    tree = {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 4}},
        "engine": {"rank": {"num_gpu_blocks": 1500, "block_size": 64}},
        "requests": [],
    }
    whole = vecsim.replay(tree, workload=workload, timeline=True)
    last = whole.requests["arrival_time_ms"].max()
    first = whole.requests["arrival_time_ms"].min()
    for warmup, cooldown in ((300_000.0, 0.0), (100_000.0, 50_000.0), (0.0, 200_000.0)):
        part = vecsim.replay(tree, workload=workload, warmup_ms=warmup, cooldown_ms=cooldown)
        assert not part.outcome.has_segments
        start = first + warmup
        end = last - cooldown if cooldown else whole.outcome.end_ms
        report = part.report
        assert report["decode_worker_seconds"] == pytest.approx(4 * (end - start) / 1000.0)
        assert report["gpu_hours"] == pytest.approx(4 * (end - start) / 3.6e6)
        fine = whole.timeline(bucket_ms=1.0).filter(
            (pl.col("start_ms") >= start) & (pl.col("end_ms") <= end)
        )
        assert report["decode_pool_busy_ratio"] == pytest.approx(
            fine["busy_ratio"].mean(), rel=1e-3
        )
        assert report["decode_pool_mean_kv_usage"] == pytest.approx(
            fine["kv_usage"].mean(), rel=1e-3
        )
    with pytest.raises(InputError, match="warmup_ms: got"):
        vecsim.replay(tree, workload=workload, warmup_ms=1e9)


def test_equal_gaps_have_no_deviation():
    workload = vecsim.Workload.from_columns(np.arange(30) * 17.3, np.full(30, 50), np.full(30, 80))
    rank = {"timing_model": {"type": "fixed", "prefill_ms": 0.0, "decode_ms": 7.0}}
    tree = {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 2}},
        "engine": {"rank": rank},
        "requests": [],
    }
    report = vecsim.replay(tree, workload=workload).report
    spread = report["max_output_token_throughput_per_user"]
    spread -= report["min_output_token_throughput_per_user"]
    assert report["std_output_token_throughput_per_user"] <= spread / 2
    equal = gaps_of([7.0] * 1000)
    equal = dataclasses.replace(equal, m2=1e-9, rate_m2=1e-9)
    assert metrics.gap_statistics(equal)["std"] == metrics.rate_statistics(equal)["std"] == 0.0
