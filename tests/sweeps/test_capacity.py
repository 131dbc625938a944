"""Capacity answers, checked against brute force and by replay."""

import numpy as np
import pytest

import vecsim
from tests.support.specs import r, spec
from vecsim.config.load import load
from vecsim.errors import InputError
from vecsim.sweeps.axes import SHORT_NAMES
from vecsim.sweeps.capacity import capacity, gpus_by_pool
from vecsim.sweeps.run import sweep
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


def test_fifty_problems_against_brute_force():
    replays = candidates = 0
    for seed in range(50):
        given, axes = problem(seed)
        answer = capacity(**given, threads=1)
        shared = {key: given[key] for key in ("base", "workload", "slo")}
        brute = sweep(**shared, axes=axes, threads=2)
        ok = (
            brute["feasible"]
            if given["saturation"]
            else (brute["slo_miss"].is_null() & brute["dropped"].is_null())
        )
        replays += len(answer.points)
        candidates += brute.height
        assert answer.candidates == brute.height >= 32
        _check(answer, brute, ok.to_list(), "load" in given)
    assert replays <= candidates / 3


def _check(answer, brute, ok, is_load):
    if not any(ok):
        assert not answer.feasible
        assert answer.nearest_miss is not None
        return
    rows = brute.rows(named=True)
    names = [name for name in answer.axes if name in SHORT_NAMES or name == "shape"]

    def at(row):
        return next(i for i, other in enumerate(rows) if all(other[n] == row[n] for n in names))

    assert answer.feasible
    best = at(answer.answer)
    assert ok[best]
    if answer.neighbour is not None:
        assert not ok[at(answer.neighbour)]
        step = at(answer.neighbour) - best
        assert step == (1 if is_load else -1)
    monotone = True
    for shape in {row.get("shape") for row in rows}:
        order = [o for o, row in zip(ok, rows, strict=True) if row.get("shape") == shape]
        order = order[::-1] if is_load else order
        monotone &= order == sorted(order)
    if not monotone:
        assert not answer.monotone
        return
    assert answer.monotone
    if is_load:
        assert best == max(i for i, good in enumerate(ok) if good)
    else:
        assert rows[best]["gpus"] == min(row["gpus"] for o, row in zip(ok, rows, strict=True) if o)


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
    """One request at a time, 10 ms each: about 100 requests a second. A backlog that grows by less
    than a tenth of the arrivals is not called growing, so up to 111 pass."""
    workload = Workload.from_columns(np.arange(2000) * 20.0, np.full(2000, 5), np.full(2000, 1))
    single = base(max_num_seqs=1, timing_model=fixed(10.0, 10.0))
    found = capacity(single, load="arrival_speedup", workload=workload, tolerance=0.01)
    assert found.answer["arrival_speedup"] * 50.0 == pytest.approx(100.0, rel=0.12)
    assert found.neighbour["backlog_growing"] is True
    assert len(found.points) < 25


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
    assert len(found.points) <= 40 // 3


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
    assert not found.monotone
    assert "p90_tpot_ms" in found.breaches[0]
    assert "not monotone" in str(found)
    assert len(found.points) <= 12
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
    short = capacity(**given, gpu_budget=free.answer["gpus"] - 1)
    assert not short.feasible
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
        {"fleet": {"workers": [1, 2]}, "size": "tp"},
        {"fleet": {"shape": {"a": {"tp": 1}}}},
        {"fleet": {"workers": [1, 2]}, "constraints": ["workers > 2"]},
        {"fleet": {"workers": [1, 2]}, "timing": 3},
    ],
)
def test_malformed_arguments_are_refused(given):
    with pytest.raises(InputError):
        capacity(base(), workload=load_of(0), **given)
