"""Capacity answers, checked against brute force and by replay."""

import numpy as np
import polars as pl
import pytest

import vecsim
from tests.support.specs import r, spec
from vecsim.config.load import load
from vecsim.errors import InputError
from vecsim.sweeps.axes import points_of
from vecsim.sweeps.capacity import capacity, gpus_by_pool
from vecsim.sweeps.evaluate import Evaluator, prepare
from vecsim.sweeps.steadiness import repeated
from vecsim.sweeps.verdict import read_slo
from vecsim.workload.workload import Workload

BLOCKS = "engine.rank.num_gpu_blocks"
TIMING = "engine.rank.timing_model"


def fixed(prefill_ms, decode_ms):
    return {"type": "fixed", "prefill_ms": prefill_ms, "decode_ms": decode_ms}


def base(workers=1, **rank):
    rank = {"block_size": 16, "num_gpu_blocks": 2000, "timing_model": fixed(20.0, 4.0), **rank}
    return {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": workers}},
        "engine": {"rank": rank},
        "requests": [],
    }


def load_of(seed, rows=40):
    random = np.random.default_rng(seed)
    return Workload.from_columns(
        np.cumsum(random.exponential(random.uniform(2, 30), rows)),
        random.integers(1, 400, rows),
        random.integers(1, 60, rows),
    )


def problem(seed):
    """(arguments of capacity, axes of the same candidates for a sweep, order of preference)."""
    random = np.random.default_rng(10_000 + seed)
    workload = load_of(seed)
    slo = {"p90_ttft_ms": float(random.uniform(20, 250)), "p99_itl_ms": 45.0}
    given = {
        "base": base(max_num_seqs=int(random.integers(1, 12))),
        "workload": workload,
        "slo": slo,
        "saturation": bool(random.integers(2)),
    }
    kind = seed % 4
    if kind == 0:
        axes = {"workers": {"range": [1, 32]}}
        return {**given, "fleet": axes}, axes
    if kind == 1:
        shapes = {
            "small": {"tp": 1, BLOCKS: 300, TIMING: fixed(20.0, 4.0)},
            "large": {"tp": 2, BLOCKS: 900, TIMING: fixed(11.0, 3.0)},
        }
        axes = {"shape": shapes, "workers": {"range": [1, 20]}}
        return {**given, "fleet": axes}, axes
    if kind == 2:
        axes = {"arrival_speedup": {"log_range": [0.05, 20.0, 40]}}
    else:
        axes = {"concurrency": {"range": [1, 36]}}
    return {**given, "base": base(3, max_num_seqs=int(random.integers(1, 12))), "load": axes}, axes


def all_rows(given, axes):
    """Every candidate by itself, as the search judges it."""
    points = points_of(axes)
    setup = prepare(
        given["base"],
        given["workload"],
        points,
        {},
        read_slo(given["slo"]),
        given.get("saturation", True),
        "load" in given,
    )
    evaluator = Evaluator(setup)
    return [evaluator.row(point) for point in points]


@pytest.mark.parametrize("seed", range(12))
def test_the_answer_is_the_best_of_all(seed):
    given, axes = problem(seed)
    found = capacity(**given, threads=1)
    good = [row for row in all_rows(given, axes) if row["feasible"]]
    assert found.exact
    assert found.feasible == bool(good)
    if good and "load" in given:
        (name,) = axes
        assert found.answer[name] == max(row[name] for row in good)
    elif good:
        assert found.answer["gpus"] == min(row["gpus"] for row in good)
    for row in found.neighbours:
        assert sum(row[name] != found.answer[name] for name in found.axes) == 1
    if found.neighbour is not None:
        assert found.neighbour["feasible"] is False


def test_more_workers_may_be_worse():
    """Round robin sends all long prompts of a period of four to one worker of two, and of four."""
    lengths = np.tile([8000, 100, 100, 100], 100)
    workload = Workload.from_columns(np.arange(400) * 1000.0 / 30.0, lengths, np.full(400, 40))
    single = base(num_gpu_blocks=1500, block_size=64, max_num_seqs=64)
    del single["engine"]["rank"]["timing_model"]
    given = {"base": single, "workload": workload, "slo": {"p99_ttft_ms": 300.0}}
    axes = {"workers": {"range": [1, 16]}}
    found = capacity(**given, fleet=axes)
    feasible = [row["workers"] for row in all_rows(given, axes) if row["feasible"]]
    assert feasible == [3, 5, 6, 7, *range(9, 17)]
    assert found.answer["workers"] == 3
    assert not found.monotone
    assert "workers = 3 is feasible, workers = 4 is not" in found.breaches[0]


def test_beyond_the_budget_the_answer_says_what_it_rests_on():
    given, _ = problem(0)
    every = capacity(**given)
    few = capacity(**given, replays=14)
    assert len(few.points) <= 14
    assert few.answer["workers"] == every.answer["workers"]
    assert f"rests on {len(few.points)} of 32 candidates" in str(few) or few.exact
    hopeless = {**given, "slo": {"p99_ttft_ms": 0.001}}
    none = capacity(**hopeless, replays=10)
    assert str(none).startswith("none of the 10 replayed of 32 is feasible")
    assert str(capacity(**hopeless, replays=10, exhaustive=True)).startswith("no feasible point")


@pytest.mark.parametrize("replays", [None, 12])
def test_the_order_of_keys_changes_nothing(replays):
    given, axes = problem(1)
    turned = {name: axes[name] for name in reversed(axes)}
    turned["shape"] = dict(reversed(axes["shape"].items()))
    a = capacity(**given, replays=replays)
    b = capacity(**{**given, "fleet": turned}, replays=replays)
    assert {name: a.answer[name] for name in a.axes} == {name: b.answer[name] for name in a.axes}
    candidates = [set(one.points.select("shape", "workers").iter_rows()) for one in (a, b)]
    assert candidates[0] == candidates[1]
    assert {row["shape"] for row in a.neighbours} == {"small", "large"}


# --- a sustained load -----------------------------------------------------------------------------


def poisson(requests, seed=0):
    gaps = np.random.default_rng(seed).exponential(125.0, requests)
    return Workload.from_columns(np.cumsum(gaps), np.full(requests, 5), np.ones(requests, int))


def servers(count):
    """M/D/c: one request at a time on each worker, 100 ms."""
    return base(count, max_num_seqs=1, timing_model=fixed(100.0, 0.0), enable_prefix_caching=False)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("requests", [500, 2000, 4000])
def test_a_sustained_load_leaves_headroom_whatever_the_length(requests, workers):
    """Utilisation is 1 / 1.05 at the answer, so that the mean wait is bounded: for M/D/1 by the
    order of rho S / (2 (1 - rho)), 1 s, and for M/D/c by that over c."""
    workload = poisson(requests)
    rate = requests / (np.ptp(workload.arrival_ms) * requests / (requests - 1))
    found = capacity(servers(workers), load="arrival_speedup", workload=workload)
    rho = found.answer["arrival_speedup"] * rate * 100.0 / workers
    assert 0.93 < rho < 0.965
    assert found.answer["load_state"] == "stable"
    assert found.neighbour["load_state"] == "saturated"
    assert found.answer["mean_queue_time_ms"] < 2500.0 / workers
    states = found.points.filter(pl.col("status") == "ok").sort("arrival_speedup")
    rhos = states["arrival_speedup"].to_numpy() * rate * 100.0 / workers
    growing = (states["load_state"] == "growing").to_numpy()
    assert growing[rhos > 1.02].all()
    assert not growing[rhos < 0.99].any()


def test_queues_of_the_formula():
    """M/D/1 at rho 0.8: mean wait rho S / (2 (1 - rho)) = 200 ms; both labels hold there."""
    workload = poisson(40_000)
    found = capacity(servers(1), load={"arrival_speedup": [1.0]}, workload=workload)
    assert found.answer["mean_queue_time_ms"] == pytest.approx(200.0, rel=0.1)
    assert found.answer["load_state"] == "stable"


def test_repeated_rounds_share_no_contents():
    workload = Workload.from_columns(
        [0.0, 10.0, 20.0],
        [32, 32, 16],
        [1, 1, 1],
        block_offsets=[0, 2, 4, 5],
        block_ids=[7, 0, 7, 9, 2],
        block_tokens=16,
    )
    again = repeated(workload, 3)
    assert again.arrival_ms.tolist() == [0, 10, 20, 30, 40, 50, 60, 70, 80]
    ids = again.block_ids.reshape(3, 5)
    assert ids[0].tolist() == [7, 0, 7, 9, 2]
    assert len(set(again.block_ids.tolist())) == 12
    assert (ids[:, 0] == ids[:, 2]).all()


def test_rows_of_the_answer_equal_single_replays():
    workload = load_of(1)
    slots = {"max_num_seqs": 2}
    slo = {"p90_ttft_ms": 60.0}
    found = capacity(base(**slots), fleet={"workers": range(1, 20)}, slo=slo, workload=workload)
    tree = base(found.answer["workers"], **slots)
    report = vecsim.replay(tree, workload=workload).report
    assert {name: found.answer[name] for name in report} == report
    assert report["p90_ttft_ms"] <= 60.0
    fewer = vecsim.replay(base(found.neighbour["workers"], **slots), workload=workload).report
    assert found.neighbour["workers"] == found.answer["workers"] - 1
    assert fewer["p90_ttft_ms"] > 60.0
    assert f"workers = {found.answer['workers']}" in str(found)


def test_saturation_of_one_slot_of_10_ms__inference_sim_120():
    """One request at a time, 10 ms each: 100 requests a second, 5 % less with headroom."""
    workload = Workload.from_columns(np.arange(2000) * 20.0, np.full(2000, 5), np.full(2000, 1))
    single = base(max_num_seqs=1, timing_model=fixed(10.0, 10.0))
    found = capacity(single, load="arrival_speedup", workload=workload, tolerance=0.01)
    assert found.answer["arrival_speedup"] * 50.0 == pytest.approx(100.0 / 1.05, rel=0.015)
    assert found.neighbour["load_state"] == "saturated"


def test_largest_concurrency():
    workload = Workload.from_columns(np.zeros(200), np.full(200, 5), np.full(200, 10))
    slo = {"p99_ttft_ms": 100.0}
    found = capacity(base(max_num_seqs=8), load="concurrency", slo=slo, workload=workload)
    best = found.answer["concurrency"]
    assert found.neighbour["concurrency"] == best + 1
    assert found.answer["p99_ttft_ms"] <= 100.0 < found.neighbour["p99_ttft_ms"]


def test_no_feasible_point_is_said_with_the_nearest_miss():
    workload = load_of(2)
    found = capacity(
        base(), fleet={"workers": {"range": [1, 40]}}, slo={"p99_ttft_ms": 5.0}, workload=workload
    )
    assert not found.feasible
    assert found.answer is None
    assert found.neighbour is None
    misses = found.points["p99_ttft_ms"]
    assert found.nearest_miss["p99_ttft_ms"] == misses.min()
    assert "no feasible point" in str(found)
    assert "p99_ttft_ms 2" in str(found)
    assert len(found.points) == 40


def test_a_dropped_request_is_not_called_slow():
    found = capacity(
        spec(r(0, 90, 1), rank={"num_gpu_blocks": 2, "block_size": 16}),
        fleet={"workers": [1, 2]},
        slo={"p99_ttft_ms": 1e9},
    )
    assert not found.feasible
    assert "prompt_exceeds_kv_capacity" in str(found)
    assert found.nearest_miss["slo_miss"] is None or "samples" in found.nearest_miss["slo_miss"]


def test_a_broken_order_is_flagged():
    """More slots help the first token and hurt the gaps: only the middle of the range will do."""
    single = base()
    del single["engine"]["rank"]["timing_model"]
    single["engine"]["rank"]["num_gpu_blocks"] = 1000
    axes = {"engine.rank.max_num_seqs": {"range": [1, 36]}}
    slo = {"p90_ttft_ms": 9000.0, "p90_tpot_ms": 33.0}
    workload = load_of(3, rows=200)
    given = {"base": single, "workload": workload, "slo": slo, "saturation": False}
    found = capacity(**given, fleet=axes)
    assert found.feasible
    everything = capacity(**given, fleet=axes, replays=20)
    assert "p90_tpot_ms" in everything.breaches[0]
    assert "not monotone" in str(everything)
    at = found.answer["engine.rank.max_num_seqs"]
    assert found.neighbour["engine.rank.max_num_seqs"] == at - 1
    assert found.answer["p90_ttft_ms"] <= 9000.0 < found.neighbour["p90_ttft_ms"]


def test_budget_price_and_constraints():
    workload = load_of(5)
    shapes = {
        "small": {"tp": 1, TIMING: fixed(20.0, 4.0)},
        "large": {"tp": 4, TIMING: fixed(5.0, 1)},
    }
    given = {
        "base": base(max_num_seqs=4),
        "fleet": {"shape": shapes, "workers": {"range": [1, 16]}},
        "workload": workload,
        "slo": {"p90_ttft_ms": 45.0},
    }
    free = capacity(**given)
    within = capacity(**given, gpu_budget=free.answer["gpus"])
    assert within.answer["gpus"] == free.answer["gpus"]
    assert within.points["gpus"].max() <= free.answer["gpus"]
    assert within.candidates < free.candidates == 32
    if free.answer["gpus"] > 1:
        assert not capacity(**given, gpu_budget=free.answer["gpus"] - 1).feasible
    priced = capacity(**given, gpu_hour_price=2.0)
    assert priced.answer["cost"] == pytest.approx(2.0 * priced.answer["gpu_hours"])
    large = capacity(**given, constraints=["tp == 4"])
    assert large.answer["shape"] == "large"


def test_gpus_of_both_pools():
    tree = {
        "topology": {
            "kind": "disaggregated",
            "prefill": {"initial_workers": 3},
            "decode": {"initial_workers": 2},
        },
        "engine": {
            "tensor_parallel_size": 2,
            "decode": {"dp_size": 4, "tensor_parallel_size": 1, "rank": {}},
        },
        "requests": [],
    }
    assert gpus_by_pool(load(tree)) == {"prefill": 6, "decode": 8}


def test_candidates_that_cannot_run_are_rows():
    workload = load_of(6)
    found = capacity(
        base(), fleet={"workers": [0, 1, 2, 40]}, slo={"p90_ttft_ms": 500.0}, workload=workload
    )
    assert found.feasible
    zero = found.points.filter(found.points["workers"] == 0)
    assert zero.height == 0 or zero["status"].to_list() == ["invalid"]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"fleet": {"workers": [1]}, "load": "concurrency"},
        {"load": 3},
        {"load": {"a": [1], "b": [2]}},
        {"load": {"concurrency": {"between": [0, 3]}}},
        {"load": {"concurrency": {"between": [5, 3]}}},
        {"load": "arrival_speedup", "tolerance": 0},
        {"fleet": {"workers": [1, 2]}, "gpu_budget": -5},
        {"fleet": {"workers": [2, 3]}, "gpu_budget": 1},
        {"fleet": {"workers": [1, 2]}, "replays": 0},
        {"fleet": {"workers": [1, 2]}, "slo": {"goodput_ratio": ">= 0.9"}},
        {"fleet": {"workers": [1, 2]}, "constraints": ["workers > 2"]},
        {"fleet": {"workers": [1, 2]}, "timing": 3},
    ],
)
def test_malformed_arguments_are_refused(given):
    with pytest.raises(InputError):
        capacity(base(), workload=load_of(0), **given)
