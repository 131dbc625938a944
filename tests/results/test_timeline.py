"""Time series of a run: by hand, and their sums against the report."""

import numpy as np
import polars as pl
import pytest

import vecsim
from tests.fuzz import specs
from tests.support.specs import cache, r, spec
from vecsim.errors import InputError
from vecsim.kernels.state import worker as W
from vecsim.results.timeline import TIMELINE_SCHEMA
from vecsim.run.replay import replay


def test_by_hand():
    """Two prompts of 20 tokens in one pass of 10 ms, then three decode passes of 5 ms; a third
    request waits for a slot from 2 ms to 25 ms."""
    payload = spec(
        r(0, 20, 4),
        r(0, 20, 4),
        r(2, 40, 1),
        decode_ms=5,
        rank=cache(100, 10, max_num_seqs=2),
    )
    frame = replay(payload, timeline=True).timeline(5.0)
    assert frame.schema == TIMELINE_SCHEMA
    assert frame["end_ms"].to_list() == [5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0]
    assert frame["running"].to_list() == [2, 2, 2, 2, 2, 1, 1]
    assert frame["waiting"].to_list() == pytest.approx([0.6, 1, 1, 1, 1, 0, 0])
    assert frame["prefill_tokens"].to_list() == [20, 20, 0, 0, 0, 20, 20]
    assert frame["output_tokens"].to_list() == [1, 1, 2, 2, 2, 0, 1]
    assert frame["kv_blocks_used"].to_list() == [4, 4, 6, 6, 6, 4, 4]
    assert frame["kv_usage"].to_list() == pytest.approx([0.04, 0.04, 0.06, 0.06, 0.06, 0.04, 0.04])
    assert frame["passes"].to_list() == [0, 1, 1, 1, 1, 0, 1]
    assert frame["busy_ratio"].to_list() == [1] * 7
    assert frame["arrivals"].to_list() == [3, 0, 0, 0, 0, 0, 0]
    assert frame["completions"].to_list() == [0, 0, 0, 0, 0, 2, 1]
    assert frame["preemptions"].sum() == 0


@pytest.mark.parametrize("seed", range(60))
def test_sums_are_the_totals__llm_d_benchmark_597(seed):
    payload = specs.make(3000 + seed, (), ("refused", "sglang", "disaggregated"))
    result = replay(payload, timeline=True)
    report, requests = result.report, result.requests
    pool = result.outcome.pools[0]
    for by in ("worker", "pool"):
        frame = result.timeline(7.3, by=by)
        width = pl.col("end_ms") - pl.col("start_ms")
        sums = frame.select(
            pl.col("prefill_tokens", "output_tokens", "passes", "preemptions").sum(),
            pl.col("arrivals", "completions").sum(),
            (pl.col("kv_blocks_used") * width).sum().alias("held"),
            (pl.col("running") * width).sum().alias("running_ms"),
        ).row(0, named=True)
        assert sums["prefill_tokens"] == pytest.approx(report["committed_prefill_tokens"])
        assert sums["output_tokens"] == pytest.approx(requests["output_length"].sum())
        assert sums["passes"] == pytest.approx(report["decode_pool_passes"])
        assert sums["preemptions"] == report["preemptions"]
        assert sums["completions"] == report["completed_requests"]
        assert sums["arrivals"] == requests["decode_worker_id"].is_not_null().sum()
        assert sums["held"] == pytest.approx(pool.kv_block_ms.sum())
        assert frame["kv_usage"].max() <= 1 + 1e-9
        assert frame["busy_ratio"].max() <= 1 + 1e-9
    workers = result.timeline(7.3, by="worker")
    assert workers["worker"].unique().to_list() == list(range(pool.workers))


def test_recording_changes_nothing_else():
    for seed in (3001, 3002, 3003):
        payload = specs.make(seed, (), ("refused", "sglang", "disaggregated"))
        plain, recorded = replay(payload), replay(payload, timeline=True)
        assert plain.report == recorded.report
        assert plain.requests.equals(recorded.requests)


def test_the_log_grows():
    """More passes than the log has lines at first, in both clocks."""
    requests = [r(i * 30, 5, 2) for i in range(6000)]
    for more in ({}, {"max_in_flight": 2}):
        result = replay(spec(*requests, workers=2, **more), timeline=True)
        assert result.outcome.pools[0].segments.shape[1] > 8192
        assert result.timeline()["output_tokens"].sum() == pytest.approx(12000)


def test_a_run_cut_short_counts_what_became_visible():
    result = replay(spec(r(0, 5, 50), max_sim_time_ms=105.0), timeline=True)
    assert result.timeline()["output_tokens"].sum() == pytest.approx(10)
    assert result.requests["output_length"].to_list() == [10]


def test_round_default_widths_and_bad_arguments():
    result = replay(spec(r(0, 5, 50)), timeline=True)
    widths = np.unique(np.diff(result.timeline()["start_ms"].to_numpy()).round(9))
    assert widths.tolist() == [5.0]
    for given in ({"bucket_ms": 0}, {"bucket_ms": -1.0}, {"bucket_ms": "1"}, {"by": "rank"}):
        with pytest.raises(InputError):
            result.timeline(**given)
    with pytest.raises(InputError, match="timeline=True"):
        replay(spec(r(0, 5, 1))).timeline()


def test_nothing_arrived():
    result = replay(spec(r(50, 5, 1), max_sim_time_ms=10.0), timeline=True)
    assert result.timeline()["output_tokens"].sum() == 0
    assert result.outcome.pools[0].segments.shape == (W.SEGMENT_FIELDS, 0)


def test_sums_are_whole_and_count_requests_that_failed_or_were_cut_too():
    rank = {"num_gpu_blocks": 40, "block_size": 16, "max_num_seqs": 16}
    workload = vecsim.Workload.from_columns(
        np.arange(60) * 3.0, np.resize([300, 900, 40], 60), np.resize([500, 20, 60], 60)
    )
    for limit in (None, 400.0):
        tree = {
            "topology": {"kind": "aggregated", "workers": {"initial_workers": 2}},
            "engine": {"rank": rank},
            "requests": [],
            "max_sim_time_ms": limit,
        }
        result = vecsim.replay(tree, workload=workload, timeline=True)
        report = result.report
        assert report["completed_requests"] < 60
        for bucket_ms in (None, 7.3):
            sums = result.timeline(bucket_ms, by="worker")
            assert sums["output_tokens"].dtype == pl.Int64
            assert sums["output_tokens"].sum() == result.requests["output_length"].sum()
            assert sums["output_tokens"].sum() > report["total_output_tokens"]
            assert sums["prefill_tokens"].sum() == report["committed_prefill_tokens"]
            assert sums["passes"].sum() == report["decode_pool_passes"]
            assert sums["preemptions"].sum() == report["preemptions"]
