"""Sweeps: rows equal single replays, bad points are rows, and results can be resumed."""

import dataclasses
import json
import threading
import time

import numpy as np
import polars as pl
import pytest

import vecsim
from tests.support.specs import r, spec
from vecsim.errors import InputError
from vecsim.run.replay import replay
from vecsim.sweeps import evaluate, run
from vecsim.sweeps.frame import report_schema
from vecsim.sweeps.run import SweepInterrupted, sweep
from vecsim.workload.workload import Workload

WORKERS = "topology.workers.initial_workers"
BLOCKS = "engine.rank.num_gpu_blocks"
FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
BASE = {
    "topology": {"kind": "aggregated", "workers": {"initial_workers": 2}},
    "engine": {"rank": {"block_size": 16, "num_gpu_blocks": 400, "timing_model": FIXED}},
    "requests": [],
}


@pytest.fixture(scope="module")
def workload():
    random = np.random.default_rng(3)
    inputs = random.integers(1, 2000, 60)
    return Workload.from_columns(
        np.sort(random.uniform(0, 3000, 60)),
        inputs,
        random.integers(1, 40, 60),
        hash_ids=[
            [int(k % 3), *range(100 * i, 100 * i + n // 512)]
            for i, (k, n) in enumerate(zip(random.integers(0, 9, 60), inputs, strict=True))
        ],
    )


def with_fields(**fields):
    tree = {**BASE, "engine": {"rank": dict(BASE["engine"]["rank"])}}
    for path, value in fields.items():
        vecsim.config.load.set_path(tree, path.replace("__", "."), value)
    return tree


def report_of(row, report):
    return {name: row[name] for name in report}


def test_a_point_equals_the_same_single_replay(workload):
    frame = sweep(
        BASE,
        {"workers": [1, 3], BLOCKS: [150, 400], "arrival_speedup": [1, 2.5], "dp": [1, 2]},
        workload=workload,
        threads=2,
    )
    assert frame["status"].unique().to_list() == ["ok"]
    for row in frame.iter_rows(named=True):
        tree = with_fields(
            topology__workers__initial_workers=row["workers"],
            engine__rank__num_gpu_blocks=row[BLOCKS],
            engine__dp_size=row["dp"],
        )
        report = replay(tree, workload=workload.speedup(row["arrival_speedup"])).report
        assert report_of(row, report) == report


def test_concurrency_and_limit_are_knobs(workload):
    frame = sweep(BASE, {"concurrency": [1, 8], "limit": [10, 60]}, workload=workload)
    for row in frame.iter_rows(named=True):
        tree = with_fields(max_in_flight=row["concurrency"])
        report = replay(tree, workload=workload.limit(row["limit"])).report
        assert report_of(row, report) == report
    assert frame["workload_requests"].to_list() == [10, 60, 10, 60]


def test_traffic_of_the_spec_is_read_once_and_its_knobs_act(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    rows = ['{"timestamp": %d, "input_length": 600, "output_length": 3, "hash_ids": [1, %d]}']
    path.write_text("\n".join(rows[0] % (40 * i, i) for i in range(20)))
    bare = {name: value for name, value in BASE.items() if name != "requests"}
    base = {
        "spec": {**bare, "requests": []},
        "traffic": {"source_type": "trace", "trace_path": str(path)},
    }
    read = []
    original = evaluate.authored_workload
    monkeypatch.setattr(
        evaluate, "authored_workload", lambda payload: read.append(1) or original(payload)
    )
    frame = sweep(base, {"workers": [1, 2], "concurrency": [1, 4]})
    assert frame["status"].to_list() == ["ok"] * 4
    assert len(read) == 1
    speeds = sweep(base, {"traffic.arrival_speedup_ratio": [1.0, 4.0], "workers": [1, 2]})
    assert len(read) == 3
    for row in speeds.iter_rows(named=True):
        single = {
            "spec": {**base["spec"], "topology": {**BASE["topology"]}},
            "traffic": {
                **base["traffic"],
                "arrival_speedup_ratio": row["traffic.arrival_speedup_ratio"],
            },
        }
        vecsim.config.load.set_path(single, WORKERS, row["workers"])
        report = replay(single).report
        assert report_of(row, report) == report


def test_generated_saved_and_loaded_requests_give_equal_bytes__inference_sim_1615(tmp_path):
    """One engine, one path: columns, a file of them, a sweep and the command line agree."""
    random = np.random.default_rng(11)
    rows = [
        {
            "timestamp": int(at),
            "input_length": int(n),
            "output_length": 5,
            "hash_ids": [1, *range(50 * i, 50 * i + int(n - 1) // 512)],
        }
        for i, (at, n) in enumerate(
            zip(np.sort(random.integers(0, 900, 29)), random.integers(1, 2000, 29), strict=True)
        )
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = rows[0]["timestamp"]
    generated = Workload.from_columns(
        [float(row["timestamp"] - first) for row in rows],
        [row["input_length"] for row in rows],
        [row["output_length"] for row in rows],
        hash_ids=[row["hash_ids"] for row in rows],
    )
    direct = replay(BASE, workload=generated)
    loaded = replay(BASE, workload=vecsim.read_trace(path))
    assert direct.report == loaded.report
    columns = [name for name in direct.requests.columns if "id" not in name and "turn" not in name]
    assert direct.requests.select(columns).equals(loaded.requests.select(columns))
    swept = sweep(BASE, {"workers": [2]}, workload=generated).row(0, named=True)
    assert report_of(swept, direct.report) == direct.report


def test_inline_requests_are_shared_unless_an_axis_changes_them():
    base = spec(r(0, 20, 3), r(5, 20, 3))
    frame = sweep(base, {"requests[1].input_tokens": [20, 70]})
    assert frame["total_input_tokens"].to_list() == [40, 90]
    frame = sweep(base, {"workers": [1, 2]})
    assert frame["total_input_tokens"].to_list() == [40, 40]
    assert base["requests"][0]["input_tokens"] == 20


def test_a_custom_timing_may_be_an_axis(workload):
    slow = vecsim.CompiledTiming(lambda b, isl, prefix: 50.0, lambda b, s, m, c: 5.0)
    quick = vecsim.CompiledTiming(lambda b, isl, prefix: 5.0, lambda b, s, m, c: 0.5)
    frame = sweep(
        BASE, {"gpu": {"old": {"timing": slow}, "new": {"timing": quick}}}, workload=workload
    )
    assert frame["gpu"].to_list() == ["old", "new"]
    assert frame["duration_ms"][1] < frame["duration_ms"][0]
    assert report_of(frame.row(0, named=True), replay(BASE, workload=workload, timing=slow).report)


# --- bad points -----------------------------------------------------------------------------------


def test_a_bad_point_is_a_row__vllm_57305_llama_cpp_22854(workload):
    frame = sweep(BASE, {"workers": [1, 0, 2]}, workload=workload)
    assert frame["status"].to_list() == ["ok", "invalid", "ok"]
    assert frame["reason"][1].startswith(f"{WORKERS}: got 0")
    assert frame["completed_requests"].to_list() == [60, None, 60]


def test_each_kind_of_failure_has_a_status_of_its_own__aiconfigurator_1121(workload):
    bad = vecsim.CompiledTiming(lambda b, isl, prefix: -1.0, lambda b, s, m, c: 5.0)
    points = [
        {"workers": 1},
        {BLOCKS: 10},
        {"workers": 0},
        {"adapters.placement.provider": "weighted"},
        {"timing": bad},
    ]
    slo = {"p99_ttft_ms": 10.0}
    frame = sweep(BASE, points, workload=workload, slo=slo)
    assert frame["status"].to_list() == ["ok", "ok", "invalid", "unsupported", "failed"]
    assert frame["feasible"].to_list() == [False, False, None, None, None]
    assert frame["slo_miss"][0].startswith("p99_ttft_ms ")
    assert frame["dropped"][0] is None
    assert "prompt_exceeds_kv_capacity" in frame["dropped"][1]
    assert "pass duration" in frame["reason"][4]
    assert frame["reason"][:2].to_list() == [None, None]


def test_a_field_that_would_have_no_effect_is_refused(workload):
    frame = sweep(BASE, {"prefill_workers": [1, 2]}, workload=workload)
    assert frame["status"].to_list() == ["invalid"] * 2
    assert "topology.prefill" in frame["reason"][0]
    pools = {"prefill": {"initial_workers": 1}, "decode": {"initial_workers": 1}}
    split = {**BASE, "topology": {"kind": "disaggregated", **pools}}
    frame = sweep(split, {"prefill_workers": [1], "decode_workers": [2]}, workload=workload)
    assert frame["status"][0] in ("ok", "unsupported")


def test_an_slo_bound_is_inclusive__aiconfigurator_727(workload):
    p99 = replay(BASE, workload=workload).report["p99_ttft_ms"]
    points = {"workers": [2]}
    met = sweep(BASE, points, workload=workload, slo={"p99_ttft_ms": p99})
    assert met["feasible"].to_list() == [True]
    missed = sweep(BASE, points, workload=workload, slo={"p99_ttft_ms": np.nextafter(p99, 0)})
    assert missed["feasible"].to_list() == [False]
    above = sweep(BASE, points, workload=workload, slo={"completed_requests": ">= 60"})
    assert above["feasible"].to_list() == [True]


@pytest.mark.parametrize(
    "slo", [{"p99_ttft": 3}, {"p99_ttft_ms": "fast"}, {"p99_ttft_ms": float("nan")}, [1]]
)
def test_a_malformed_slo_is_refused(workload, slo):
    with pytest.raises(InputError, match="slo"):
        sweep(BASE, {"workers": [1]}, workload=workload, slo=slo)


def test_an_infeasible_sweep_has_its_columns_and_an_empty_front__aiconfigurator_1003(workload):
    frame = sweep(BASE, {"workers": [0]}, workload=workload, slo={"p99_ttft_ms": 0.0})
    assert set(report_schema()) <= set(frame.columns)
    front = frame.pareto_front({"p99_ttft_ms": "min", "output_throughput_tok_s_per_gpu": "max"})
    assert front.height == 0
    assert front.columns == frame.columns
    none = sweep(BASE, {"workers": [1]}, workload=workload, constraints=["workers > 1"])
    assert none.height == 0
    assert set(report_schema()) <= set(none.columns)


@pytest.mark.parametrize(
    ("path", "value", "metric"),
    [
        (WORKERS, 5, "decode_worker_seconds"),
        (BLOCKS, 130, "decode_pool_mean_kv_usage"),
        ("engine.dp_size", 2, "decode_gpus_per_worker"),
        ("engine.tensor_parallel_size", 4, "gpus"),
        ("engine.rank.block_size", 64, "prefix_cache_reused_ratio"),
        ("engine.rank.enable_prefix_caching", False, "prefix_cache_reused_ratio"),
        ("engine.rank.max_num_seqs", 1, "mean_ttft_ms"),
        ("engine.rank.max_num_batched_tokens", 200, "mean_ttft_ms"),
        ("engine.rank.speedup_ratio", 2.0, "mean_ttft_ms"),
        ("engine.rank.decode_speedup_ratio", 2.0, "mean_tpot_ms"),
        ("engine.rank.max_model_len", 500, "rejected_requests"),
        ("max_sim_time_ms", 500.0, "not_arrived_requests"),
        ("workload.concurrency", 1, "mean_ttft_ms"),
        ("workload.arrival_speedup", 3.0, "duration_ms"),
        ("workload.limit", 30, "workload_requests"),
        ("sla.ttft_ms", 15.0, "goodput_completed_requests"),
        ("tokenization.base_ms", 7.0, "mean_ttft_ms"),
    ],
)
def test_a_swept_parameter_is_in_the_row_and_acts__aiconfigurator_328(
    workload, path, value, metric
):
    frame = sweep(BASE, [{}, {path: value}], workload=workload)
    plain, changed = frame.iter_rows(named=True)
    assert changed[path] == value
    assert plain[path] is None
    assert plain[metric] != changed[metric]


# --- threads, interruption, resuming --------------------------------------------------------------


def test_the_result_does_not_depend_on_the_number_of_threads(workload):
    axes = {"workers": [1, 2, 3], BLOCKS: [150, 200]}
    one = sweep(BASE, axes, workload=workload, threads=1)
    assert one.equals(sweep(BASE, axes, workload=workload, threads=4))


def test_the_prefix_tree_is_built_once(workload, monkeypatch):
    from vecsim.workload import workload as module

    built = []
    original = module._content_tree
    monkeypatch.setattr(
        module,
        "_content_tree",
        lambda *args: built.append(1) or time.sleep(0.05) or original(*args),
    )
    fresh = dataclasses.replace(workload, _trees={})
    sweep(
        BASE,
        {"workers": [1, 2, 3, 4], "engine.rank.block_size": [16, 32]},
        workload=fresh,
        threads=4,
    )
    assert built == [1]


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C when the third row is kept."""
    kept = []
    original = run._Store.keep

    def keep(store, row):
        original(store, row)
        kept.append(row["point"])
        if len(kept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(run._Store, "keep", keep)
    yield kept
    assert threading.active_count() < 50


def test_ctrl_c_keeps_finished_rows_and_resume_goes_on(workload, tmp_path, interrupted):
    axes = {"workers": [1, 2, 3, 4], BLOCKS: [150, 300]}
    path = tmp_path / "out" / "sweep.parquet"
    with pytest.raises(SweepInterrupted) as stopped:
        sweep(BASE, axes, workload=workload, threads=1, output=path)
    kept = stopped.value.frame
    assert 3 <= kept.height < 8
    assert pl.read_parquet(path).equals(kept)
    done = len(interrupted)
    resumed = sweep(BASE, axes, workload=workload, threads=1, output=path, resume=True)
    assert len(interrupted) - done == 8 - kept.height
    whole = sweep(BASE, axes, workload=workload, threads=1)
    assert resumed.equals(whole)
    assert pl.read_parquet(path).equals(whole)
    assert [file.name for file in path.parent.iterdir()] == ["sweep.parquet"]


def test_resume_refuses_a_changed_configuration(workload, tmp_path):
    path = tmp_path / "sweep.parquet"
    axes = {"workers": [1, 2]}
    sweep(BASE, axes, workload=workload, output=path)
    changes = (
        {"axes": {"workers": [1, 3]}},
        {"workload": workload.limit(59)},
        {"base": with_fields(engine__dp_size=2)},
        {"slo": {"p99_ttft_ms": 1.0}},
        {"gpu_hour_price": 2.0},
    )
    for change in changes:
        given = {"base": BASE, "axes": axes, "workload": workload, **change}
        with pytest.raises(InputError, match="resume"):
            sweep(**given, output=path, resume=True)
    other = tmp_path / "other.parquet"
    pl.DataFrame({"point": [0]}).write_parquet(other)
    with pytest.raises(InputError, match="a sweep wrote"):
        sweep(BASE, axes, workload=workload, output=other, resume=True)


def test_an_earlier_output_is_left_alone_unless_told(workload, tmp_path):
    path = tmp_path / "sweep.parquet"
    sweep(BASE, {"workers": [1]}, workload=workload, output=path)
    with pytest.raises(InputError, match="no earlier result"):
        sweep(BASE, {"workers": [2]}, workload=workload, output=path)
    sweep(BASE, {"workers": [2]}, workload=workload, output=path, overwrite=True)
    assert pl.read_parquet(path)["workers"].to_list() == [2]


def test_progress_is_reported(workload):
    seen = []
    sweep(
        BASE,
        {"workers": [1, 2, 3]},
        workload=workload,
        threads=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    "given",
    [
        {"executor": "dask"},
        {"threads": 0},
        {"combine": "mix"},
        {"resume": True},
        {"workload": "trace"},
        {"gpu_hour_price": -1},
        {"axes": "workers"},
        {"timing": 3},
    ],
)
def test_malformed_arguments_are_refused(workload, given):
    with pytest.raises(InputError):
        sweep(**{"base": BASE, "axes": {"workers": [1]}, "workload": workload, **given})


# --- costs ----------------------------------------------------------------------------------------


def test_costs_and_figures_per_gpu(workload):
    frame = sweep(BASE, {"tp": [1, 4]}, workload=workload, gpu_hour_price=3.0)
    for row in frame.iter_rows(named=True):
        assert row["gpus"] == 2 * row["tp"]
        assert row["cost"] == pytest.approx(3.0 * row["gpu_hours"])
        million = row["total_output_tokens"] / 1e6
        assert row["cost_per_million_output_tokens"] == pytest.approx(row["cost"] / million)
        million = row["processed_tokens"] / 1e6
        assert row["cost_per_million_tokens"] == pytest.approx(row["cost"] / million)
        throughput = row["output_throughput_tok_s"]
        assert row["output_throughput_tok_s_per_gpu"] == throughput / row["gpus"]


def test_each_pool_may_have_a_price_of_its_own():
    from vecsim.sweeps.frame import with_costs

    frame = pl.DataFrame(
        {
            "gpus": [10],
            "prefill_worker_seconds": [3600.0],
            "prefill_gpus_per_worker": [2],
            "decode_worker_seconds": [7200.0],
            "decode_gpus_per_worker": [4],
            "processed_tokens": [2_000_000],
            "total_output_tokens": [0],
        }
    )
    row = with_costs(frame, {"prefill": 1.0, "decode": 2.0}).row(0, named=True)
    assert row["cost"] == pytest.approx(2 * 1.0 + 8 * 2.0)
    assert row["cost_per_million_tokens"] == pytest.approx(9.0)
    assert row["cost_per_million_output_tokens"] is None


def test_goodput_without_bounds_is_refused_before_the_first_run(workload):
    slo = {"goodput_ratio": ">= 0.9"}
    with pytest.raises(InputError, match=r"slo\.goodput_ratio"):
        sweep(BASE, {"workers": [1, 2]}, workload=workload, slo=slo)
    rows = sweep(BASE, {"sla.ttft_ms": [1e6]}, workload=workload, slo=slo)
    assert rows["status"].to_list() == ["ok"]
