"""Laws that hold for every run, whatever the spec: beside the reference's answers."""

import copy
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import specs
from tests.support.specs import cache, r, rows, spec
from vecsim.kernels.state import status as S
from vecsim.run.replay import replay
from vecsim.traces import read_trace
from vecsim.workload.workload import Workload

ROOT = Path(__file__).parents[2]
WITHOUT = ("refused", "empty_prompt")  # empty prompts can preempt each other for ever
SEEDS = range(5000, 5120)


def make(seed: int, *features: str, without: tuple[str, ...] = ()) -> dict:
    return specs.make(seed, features, (*WITHOUT, *without))


def inner(payload: dict) -> dict:
    return payload.get("spec", payload)


def digest(result) -> str:
    """Of every column, the gaps and the report."""
    parts = []
    for column in vars(result.outcome).values():
        if isinstance(column, np.ndarray):
            parts.append(column.tobytes())
    for gap in vars(result.outcome.gaps).values():
        parts.append(gap.tobytes() if isinstance(gap, np.ndarray) else repr(gap).encode())
    parts.append(json.dumps(result.report, sort_keys=True).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def arrays(outcome) -> dict[str, np.ndarray]:
    return {k: v for k, v in vars(outcome).items() if isinstance(v, np.ndarray)}


def test_every_request_ends_in_one_status_and_the_counts_add_up():
    for seed in SEEDS:
        payload = make(seed)
        result = replay(payload)
        count = len(inner(payload)["requests"])
        report = result.report
        assert result.requests.height == count
        assert sum(report[f"{status}_requests"] for status in S.STATUS_NAMES) == count
        status = result.requests["terminal_status"]
        assert status.null_count() == 0
        for name in S.STATUS_NAMES:
            assert (status == name).sum() == report[f"{name}_requests"]
        reasons = result.requests["terminal_reason"]
        for name, found in report["terminal_reasons"].items():
            assert (reasons == name).sum() == found
        placed = result.requests.filter(result.requests["decode_worker_id"].is_not_null())
        assert placed.height == report["num_requests"]
        per_worker = placed.group_by("decode_worker_id", "terminal_status").len()
        assert per_worker["len"].sum() == report["num_requests"]


def test_times_are_in_order_and_gaps_add_up():
    for seed in SEEDS:
        result = replay(make(seed))
        between = 0.0
        for row in rows(result):
            steps = [
                row[name]
                for name in (
                    "arrival_time_ms",
                    "first_admit_ms",
                    "first_token_ms",
                    "last_token_ms",
                    "terminal_time_ms",
                )
                if row[name] is not None
            ]
            assert steps == sorted(steps)
            if row["terminal_status"] != "completed" or row["output_length"] == 0:
                continue
            gaps = (row["tpot_ms"] or 0.0) * (row["output_length"] - 1)
            between += gaps
            whole = row["ttft_ms"] + gaps
            assert math.isclose(whole, row["e2e_latency_ms"], rel_tol=1e-9, abs_tol=1e-9)
        gaps = result.outcome.gaps
        expected = sum(
            max(0, row["output_length"] - 1)
            for row in rows(result)
            if row["terminal_status"] == "completed"
        )
        assert gaps.count == expected
        assert gaps.zeros + gaps.bins.sum() == expected
        if expected:
            assert math.isclose(gaps.mean * gaps.count, between, rel_tol=1e-9, abs_tol=1e-9)


def test_blocks_in_use_never_exceed_the_pool():
    for seed in SEEDS:
        result = replay(make(seed))
        (pool,) = result.outcome.pools
        ceiling = pool.total_blocks * pool.dp_size * pool.busy_ms
        assert (pool.kv_block_ms >= 0).all()
        assert (pool.kv_block_ms <= ceiling * (1 + 1e-9)).all()
        assert (pool.busy_ms <= result.outcome.end_ms * (1 + 1e-9)).all()


def test_block_use_of_one_request():
    """Two blocks while the prompt of 8 runs, three while tokens 9 and 10 are computed."""
    result = replay(spec(r(0, 8, 3), decode_ms=1, rank=cache(100, 4)))
    (pool,) = result.outcome.pools
    assert pool.kv_block_ms.tolist() == [2 * 10.0 + 3 * 1.0 + 3 * 1.0]
    assert pool.busy_ms.tolist() == [12.0]
    assert pool.passes.tolist() == [3]


def test_equal_arrivals_are_served_in_workload_order():
    for seed in SEEDS:
        payload = make(seed, without=("workers", "dp", "tokenization"))
        for row in inner(payload)["requests"]:
            row["arrival_time_ms"] = 7
        admitted = [row["first_admit_ms"] for row in rows(replay(payload))]
        reached = [at for at in admitted if at is not None]
        assert reached == sorted(reached)


@pytest.mark.parametrize("feature", ["workers", "dp", "belady", "closed_loop", "time_limit"])
def test_threads_and_repetition_change_nothing(feature):
    for seed in range(6000, 6020):
        payload = make(seed, feature)
        first = digest(replay(payload, threads=1))
        assert digest(replay(payload, threads=2)) == first
        assert digest(replay(payload, threads=1)) == first


def test_compiled_or_not_changes_nothing():
    program = (
        "from tests.property.test_laws import digest, make\n"
        "from vecsim.run.replay import replay\n"
        "for seed in range(7000, 7060): print(digest(replay(make(seed), threads=1)))"
    )
    plain = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    compiled = [digest(replay(make(seed), threads=1)) for seed in range(7000, 7060)]
    assert plain.stdout.split() == compiled


@pytest.mark.parametrize("shift", [64.0, 4096.0, 2.0**20])
def test_a_later_start_shifts_everything(shift):
    """Whole milliseconds and fixed whole durations: every sum is exact."""
    for seed in range(8000, 8040):
        payload = make(seed, without=("closed_loop", "tokenization", "speedup", "time_limit"))
        timing = {"type": "fixed", "prefill_ms": 5, "decode_ms": 2}
        inner(payload)["engine"]["rank"]["timing_model"] = timing
        for row in inner(payload)["requests"]:
            row["arrival_time_ms"] = float(round(row["arrival_time_ms"]))
        later = copy.deepcopy(payload)
        for row in inner(later)["requests"]:
            row["arrival_time_ms"] += shift
        before, after = replay(payload).outcome, replay(later).outcome
        for name, column in arrays(before).items():
            moved = column + shift if name.endswith("_ms") else column
            np.testing.assert_array_equal(arrays(after)[name], moved, err_msg=name)
        assert after.gaps.mean == before.gaps.mean or before.gaps.count == 0


@pytest.mark.parametrize(("unit", "factor"), [("s", 1e3), ("ms", 1), ("us", 1e-3), ("ns", 1e-6)])
def test_time_units_agree(tmp_path, unit, factor):
    times = [0, 1000, 1000, 3000, 64000]
    lines = [
        {
            "timestamp": round(t / factor),
            "input_length": 600,
            "output_length": 5,
            "hash_ids": [k, 9],
        }
        for k, t in enumerate(times)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload = read_trace(path, time_unit=unit)
    assert workload.arrival_ms.tolist() == times
    fleet = spec()
    assert replay(fleet, workload=workload).requests["arrival_time_ms"].to_list() == times


def test_caching_without_shared_content_changes_nothing():
    """Only a preempted request could find its own blocks again, hence the large pool."""
    for seed in range(9000, 9040):
        payload = make(seed, without=("prefix", "planned", "small_pool", "caching_off", "belady"))
        inner(payload)["engine"]["rank"]["num_gpu_blocks"] = 16384
        off = copy.deepcopy(payload)
        inner(off)["engine"]["rank"]["enable_prefix_caching"] = False
        assert digest(replay(payload)) == digest(replay(off))


def test_lengths_only_equals_distinct_content():
    generator = np.random.default_rng(3)
    n = 60
    columns = {
        "arrival_ms": np.sort(generator.uniform(0, 400, n)),
        "input_length": generator.integers(1, 90, n),
        "output_length": generator.integers(1, 30, n),
    }
    lengths = Workload.from_columns(**columns)
    ids = [
        [1000 * k + j for j in range(-(-int(m) // 16))] for k, m in enumerate(lengths.input_length)
    ]
    content = Workload.from_columns(**columns, hash_ids=ids, block_tokens=16)
    fleet = spec(workers=2, rank=cache(24, 8, max_num_seqs=6))
    plain, distinct = replay(fleet, workload=lengths), replay(fleet, workload=content)
    assert plain.report["preemptions"] > 0
    assert digest(plain) == digest(distinct)
    assert digest(replay(fleet, workload=content.lengths_only())) == digest(plain)


def test_idle_ranks_cost_nothing():
    for seed in range(9100, 9130):
        payload = make(seed, without=("dp", "belady", "workers"))
        for row in inner(payload)["requests"]:
            row["dp_rank"] = 0
        wide = copy.deepcopy(payload)
        inner(wide)["engine"]["dp_size"] = 4
        before, after = replay(payload).outcome, replay(wide).outcome
        for name, column in arrays(before).items():
            np.testing.assert_array_equal(arrays(after)[name], column, err_msg=name)


def test_a_pool_without_pressure_never_preempts():
    for seed in range(9200, 9240):
        payload = make(seed, without=("small_pool",))
        inner(payload)["engine"]["rank"]["num_gpu_blocks"] = 16384
        report = replay(payload).report
        assert report["preemptions"] == 0
        assert report["readmissions"] == 0
        assert report["failed_requests"] == 0


def test_more_blocks_never_hurt_a_burst():
    """All arrive at once, no prefix is shared: the makespan falls as the pool grows."""
    burst = [r(0, 20 + 3 * k, 12) for k in range(12)]
    spans = [
        replay(spec(*burst, rank=cache(blocks, 4))).report["duration_ms"]
        for blocks in (20, 40, 80, 160, 1000)
    ]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[-1]
