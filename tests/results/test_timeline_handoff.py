"""Time series of prefill/decode fleets: by hand, and their sums against the report."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from tests.fuzz import specs
from tests.support.specs import r
from vecsim.kernels.state import worker as W
from vecsim.results.timeline import TIMELINE_SCHEMA
from vecsim.run.replay import replay

BACKENDS = ("vllm", "trtllm", "sglang")


def fleet(backend, *requests, workers=1, dp_size=1, latency_ms=5, rank=None, **top):
    timing = {"type": "fixed", "prefill_ms": 100, "decode_ms": 10}
    rank = {"backend": backend, "block_size": 16, "num_gpu_blocks": 100, **(rank or {})}
    pool = {"initial_workers": workers}
    topology = {"kind": "disaggregated", "prefill": pool, "decode": pool}
    return {
        "version": 1,
        "topology": {**topology, "handoff_latency_ms": latency_ms},
        "engine": {"dp_size": dp_size, "rank": {"timing_model": timing, **rank}},
        "requests": [{"id": f"r{k}", **row} for k, row in enumerate(requests)],
        **top,
    }


def series(frame, pool, *names):
    rows = frame.filter(pl.col("pool") == pool)
    return [rows[name].to_list() for name in names]


def test_by_hand__vllm():
    """Prompts of 40 tokens at 0, of 32 and 20 at 50. Passes of the prefill pool: 0-100 and 100-200;
    of the decode pool: 105-135, three of the first request, 205-215 with two, 215-225 with one. The
    first source keeps its three blocks to 200, the others their two until 205."""
    payload = fleet("vllm", r(0, 40, 3), r(50, 32, 2), r(50, 20, 1))
    frame = replay(payload, timeline=True).timeline(25.0)
    assert frame.schema == TIMELINE_SCHEMA
    assert frame["pool"].to_list() == ["prefill"] * 9 + ["decode"] * 9
    running, waiting, blocks = series(frame, "prefill", "running", "waiting", "kv_blocks_used")
    assert running == [1, 1, 1, 1, 2, 2, 2, 2, 0]
    assert waiting == pytest.approx([0, 0, 2, 2, 0, 0, 0, 0, 0])
    assert blocks == pytest.approx([3, 3, 3, 3, 7, 7, 7, 7, 0.8])
    arrivals, completions, tokens = series(
        frame, "prefill", "arrivals", "completions", "output_tokens"
    )
    assert arrivals == [1, 0, 2, 0, 0, 0, 0, 0, 0]
    assert completions == [0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert tokens == [0] * 9
    running, waiting, blocks, usage = series(
        frame, "decode", "running", "waiting", "kv_blocks_used", "kv_usage"
    )
    assert running == pytest.approx([0, 0, 0, 0, 0.8, 0.4, 0, 0, 1.2])
    assert waiting == [0] * 9
    # The second token of the prompt of 32 takes a block more from 215 on.
    assert blocks == pytest.approx([0, 0, 0, 0, 3, 1.2, 0, 0, (4 * 15 + 3 * 10) / 25])
    assert usage == pytest.approx([used / 100 for used in blocks])
    arrivals, completions, tokens = series(
        frame, "decode", "arrivals", "completions", "output_tokens"
    )
    assert arrivals == [0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert completions == [0, 0, 0, 0, 0, 1, 0, 0, 2]
    assert tokens == pytest.approx([0, 0, 0, 0, 2, 1, 0, 0, 3])
    assert series(frame, "prefill", "busy_ratio") == [[1] * 8 + [0]]
    assert series(frame, "decode", "passes") == [pytest.approx([0, 0, 0, 0, 2, 1, 0, 0, 2])]


def test_by_hand__sglang():
    """Decode memory for one prompt of three pages and what it says: the second request waits for
    pages to 135, its prompt is computed until 235, and it is decoded from 240 to 260."""
    payload = fleet("sglang", r(0, 40, 3), r(50, 40, 2), rank={"num_gpu_blocks": 5})
    result = replay(payload, timeline=True)
    frame = result.timeline(50.0)
    assert result.requests["destination_reserved_ms"].to_list() == [0.0, 135.0]
    running, waiting, arrivals, completions = series(
        frame, "prefill", "running", "waiting", "arrivals", "completions"
    )
    assert running == pytest.approx([1, 1, 0.3, 1, 0.7, 0])
    assert waiting == [0] * 6
    assert arrivals == [1, 0, 1, 0, 0, 0]
    assert completions == [0, 0, 1, 0, 1, 0]
    running, waiting, arrivals, completions, blocks = series(
        frame, "decode", "running", "waiting", "arrivals", "completions", "kv_blocks_used"
    )
    assert running == pytest.approx([0, 0, 0.6, 0, 0.2, 0.2])
    assert waiting == pytest.approx([0, 1, 0.7, 0, 0, 0])
    assert arrivals == [1, 1, 0, 0, 0, 0]
    assert completions == [0, 0, 1, 0, 0, 1]
    assert blocks == pytest.approx([3, 3, 3, 3, 3, 0.6])


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_that_idle_workers_and_ranks_keep_are_counted(backend):
    """Nothing is shared, and one token is said: blocks are those of the prompts, in the prefill
    pool from admission to release, in the decode pool from reservation to the end."""
    rng = np.random.default_rng(5)
    requests = [
        r(float(at), int(16 * pages + 5), 1)
        for at, pages in zip(rng.uniform(0, 3000, 60), rng.integers(0, 6, 60), strict=True)
    ]
    payload = fleet(
        backend,
        *requests,
        workers=2,
        dp_size=2,
        latency_ms=130,
        rank={"enable_prefix_caching": False},
    )
    result = replay(payload, timeline=True)
    rows = result.requests.with_columns(blocks=(pl.col("input_length") / 16).ceil())
    spans = {
        "prefill": ("first_admit_ms", "source_released_ms"),
        "decode": ("destination_reserved_ms", "terminal_time_ms"),
    }
    frame = result.timeline(10.0)
    width = pl.col("end_ms") - pl.col("start_ms")
    for pool in result.outcome.pools:
        since, until = spans[pool.name]
        expected = rows.select((pl.col("blocks") * (pl.col(until) - pl.col(since))).sum()).item()
        assert pool.kv_block_ms.sum() == pytest.approx(expected)
        held = frame.filter(pl.col("pool") == pool.name).select(
            (pl.col("kv_blocks_used") * width).sum()
        )
        assert held.item() == pytest.approx(expected)
        usage = expected / (4 * 100 * result.outcome.end_ms)
        assert result.report[f"{pool.name}_pool_mean_kv_usage"] == pytest.approx(usage)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(30))
def test_sums_are_the_totals(backend, seed):
    forced = ("disagg",) if backend == "vllm" else ("disagg", backend)
    result = replay(specs.make(4000 + seed, forced, ("refused",)), timeline=True)
    report, requests = result.report, result.requests
    names = {"prefill": "prefill_worker_id", "decode": "decode_worker_id"}
    width = pl.col("end_ms") - pl.col("start_ms")
    for by in ("worker", "pool"):
        frame = result.timeline(7.3, by=by)
        assert frame["kv_usage"].max() <= 1 + 1e-9
        assert frame["busy_ratio"].max() <= 1 + 1e-9
        computed = frame["prefill_tokens"].sum()
        assert computed == pytest.approx(report["committed_prefill_tokens"])
        assert frame["preemptions"].sum() == report["preemptions"]
        for pool in result.outcome.pools:
            sums = (
                frame.filter(pl.col("pool") == pool.name)
                .select(
                    pl.col("output_tokens", "passes", "arrivals", "completions").sum(),
                    (pl.col("kv_blocks_used") * width).sum().alias("held"),
                    (pl.col("busy_ratio") * width).sum().alias("busy"),
                    (pl.col("running") * width).sum().alias("running"),
                )
                .row(0, named=True)
            )
            workers = 1 if by == "worker" else pool.workers
            assert sums["busy"] * workers == pytest.approx(pool.busy_ms.sum())
            assert sums["passes"] == pytest.approx(report[f"{pool.name}_pool_passes"])
            assert sums["held"] == pytest.approx(pool.kv_block_ms.sum())
            assert sums["arrivals"] == requests[names[pool.name]].is_not_null().sum()
            if pool.name == "prefill":
                assert sums["output_tokens"] == 0
                assert sums["completions"] == requests["source_held_ms"].is_not_null().sum()
            else:
                assert sums["output_tokens"] == pytest.approx(requests["output_length"].sum())
                assert sums["completions"] == report["completed_requests"]
    frame = result.timeline(7.3, by="worker")
    assert frame.select("pool", "worker").unique(maintain_order=True).rows() == [
        (pool.name, worker) for pool in result.outcome.pools for worker in range(pool.workers)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_recording_changes_nothing_else(backend):
    forced = ("disagg",) if backend == "vllm" else ("disagg", backend)
    for seed in range(4100, 4115):
        payload = specs.make(seed, forced, ("refused",))
        plain, recorded = replay(payload), replay(payload, timeline=True)
        assert plain.report == recorded.report
        assert plain.requests.equals(recorded.requests)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_logs_grow(backend):
    requests = [r(i * 130, 5, 2) for i in range(6000)]
    payload = fleet(backend, *requests, workers=2, dp_size=2)
    result = replay(payload, timeline=True)
    for pool in result.outcome.pools:
        assert pool.segments.shape[1] > 8192
    assert result.timeline()["output_tokens"].sum() == pytest.approx(12000)
    rows = result.requests
    kept = (rows["source_released_ms"] - rows["first_admit_ms"]).sum()
    assert result.outcome.pools[0].kv_block_ms.sum() == pytest.approx(kept)


def test_with_kv_events_and_with_sessions():
    import vecsim

    payload = fleet("vllm", r(0, 40, 3), r(50, 40, 2))
    both = replay(payload, timeline=True, observe="kv_events")
    assert both.timeline(25.0).equals(replay(payload, timeline=True).timeline(25.0))
    assert both.kv_events.height > 0
    turns = vecsim.synthesize(4, input_tokens=40, output_tokens=9, turns=3, block_tokens=16)
    for backend in BACKENDS:
        result = replay(fleet(backend), workload=turns, timeline=True)
        frame = result.timeline(50.0)
        assert frame["output_tokens"].sum() == pytest.approx(4 * 3 * 9)
        arrived = frame.group_by("pool", maintain_order=True).agg(pl.col("arrivals").sum())
        assert arrived.rows() == [("prefill", 12), ("decode", 12)]


@pytest.mark.parametrize(("cut_ms", "kept_ms"), [(50.0, 0.0), (104.0, 100.0), (115.0, 115.0)])
def test_a_run_cut_short_keeps_its_blocks_to_the_last_event(cut_ms, kept_ms):
    """Passes in flight do not count; the source of three blocks is held from 100 to 105."""
    payload = fleet("vllm", r(0, 40, 2), max_sim_time_ms=cut_ms)
    result = replay(payload, timeline=True)
    prefill, decode = result.outcome.pools
    assert prefill.kv_block_ms.sum() == 3 * min(kept_ms, 105.0)
    assert decode.kv_block_ms.sum() == 3 * max(kept_ms - 100.0, 0.0)
    for pool in (prefill, decode):
        assert pool.segments.shape[0] == W.SEGMENT_FIELDS
    frame = result.timeline(10.0)
    blocks = frame["kv_blocks_used"].sum() * 10.0
    assert blocks == pytest.approx(prefill.kv_block_ms.sum() + decode.kv_block_ms.sum())


def test_files_and_pictures_tell_the_pools_apart(tmp_path):
    result = replay(fleet("vllm", r(0, 40, 3), r(50, 40, 2)), timeline=True)
    result.write(tmp_path / "out")
    stored = pl.read_parquet(tmp_path / "out" / "timeline.parquet")
    assert stored.equals(result.timeline())
    pytest.importorskip("altair")
    plots = result.plot
    for chart in (plots.load(), plots.kv_usage()):
        row = json.loads(chart.to_json())["encoding"]["row"]
        assert row["field"] == "pool"
        assert row["sort"] == ["prefill", "decode"]
    assert plots.kv_usage_data()["kv_usage"].to_list() == stored["kv_usage"].to_list()


def test_pages_of_a_request_without_output_count_until_its_pass_ends():
    """Both prompts are decoded from 105 on; the one that says nothing leaves at 115 with its two
    pages, the other one takes a third page at 105 and ends at 125."""
    payload = fleet("sglang", r(0, 32, 0), r(0, 32, 2), rank={"enable_prefix_caching": False})
    result = replay(payload, timeline=True)
    assert result.requests["terminal_time_ms"].to_list() == [115.0, 125.0]
    (blocks,) = series(result.timeline(5.0), "decode", "kv_blocks_used")
    assert blocks == pytest.approx([4] * 21 + [5] * 2 + [3] * 2)
    used = 4 * 105 + 5 * 10 + 3 * 10
    assert result.report["decode_pool_mean_kv_usage"] == pytest.approx(used / 100 / 125)


def test_a_pass_that_the_time_limit_cuts_has_preempted():
    """Two prompts fill the decode pool; at 105 one has to make room for the token of the other."""
    payload = fleet("sglang", r(0, 4, 5), r(0, 4, 5), rank={"block_size": 1}, max_sim_time_ms=110)
    rank = {**payload["engine"]["rank"], "num_gpu_blocks": 8}
    payload["engine"]["decode"] = {"rank": rank}
    result = replay(payload, timeline=True)
    assert result.report["preemptions"] == 1
    for by in ("pool", "worker"):
        frame = result.timeline(10.0, by=by)
        assert series(frame, "prefill", "preemptions") == [[0] * 11]
        assert series(frame, "decode", "preemptions") == [[0] * 10 + [1]]
