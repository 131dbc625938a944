"""Whole replays against the reference under its own external timing, and what a table costs."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import vecsim
from tests.timing import recorded
from vecsim.timing.points import read_points

ANSWERS = json.loads(recorded.ANSWERS.read_text())


def test_ten_workloads_have_the_reference_means():
    timing = {"type": "table", "path": str(recorded.TABLE)}
    spec = recorded.spec(timing, {"num_gpu_blocks": "auto"})
    found = {"mean_ttft_ms": [], "mean_tpot_ms": []}
    assert len(recorded.WORKLOADS) == len(ANSWERS) == 10
    for path in recorded.WORKLOADS:
        workload = vecsim.read_trace(path)
        assert len(workload) == 300
        report = vecsim.replay(spec, workload=workload).report
        assert report["completed_requests"] == 300
        assert report["outside_table_prefill_lookups"] == 0
        assert report["outside_table_decode_lookups"] == 0
        for name, values in found.items():
            values.append(100.0 * (report[name] / ANSWERS[path.name][name] - 1.0))
    for values in found.values():
        assert abs(np.mean(values)) < 0.5
        assert np.abs(values).max() < 1.5


@pytest.mark.parametrize("backend", ["sglang", "trtllm"])
def test_other_backends_replay_with_a_table(backend):
    timing = {"type": "table", "path": str(recorded.TABLE)}
    rank = {"backend": backend, "num_gpu_blocks": 8192 if backend == "trtllm" else 2**18}
    rank["sglang"] = {"max_prefill_tokens": 2048, "chunked_prefill_size": 2048}
    with pytest.warns(vecsim.timing.resolve.TimingWarning, match="backend vllm"):
        result = vecsim.replay(
            recorded.spec(timing, rank), workload=vecsim.read_trace(recorded.WORKLOADS[0])
        )
    assert result.report["completed_requests"] == 300
    assert result.report["mean_tpot_ms"] > 13.75


def test_each_role_of_a_disaggregated_fleet_has_its_own_table():
    table = vecsim.TimingTable(*read_points(recorded.TABLE))
    timing = {"type": "table", "path": str(recorded.TABLE)}
    role = {"rank": {**recorded.RANK, "timing_model": timing, "num_gpu_blocks": "auto"}}
    slower = {"rank": {**recorded.RANK, "timing_model": {"type": "fixed", "prefill_ms": 9.0}}}
    slower["rank"]["timing_model"]["decode_ms"] = 30.0
    spec = {
        "topology": {
            "kind": "disaggregated",
            "prefill": {"initial_workers": 1},
            "decode": {"initial_workers": 1},
        },
        "requests": [{"id": "a", "arrival_time_ms": 0, "input_tokens": 1000, "output_tokens": 3}],
    }
    prefill = float(table.prefill_ms(1, 1000, 0))
    decodes = table.decode_ms(1, [999, 1000, 1001]).tolist()
    for decode_role, gaps in ((role, decodes), (slower, [30.0] * 3)):
        spec["engine"] = {"prefill": role, "decode": decode_role}
        result = vecsim.replay(spec)
        row = result.requests.row(0, named=True)
        assert row["first_token_ms"] == pytest.approx(prefill + gaps[0], abs=1e-5)
        assert row["last_token_ms"] == pytest.approx(prefill + sum(gaps), abs=1e-5)
        assert result.report["prefill_derived_num_gpu_blocks"] > 11000
    assert "decode_derived_num_gpu_blocks" not in result.report
    assert result.report["outside_table_decode_lookups"] == 0


def test_sessions_replay_with_a_table():
    timing = {"type": "table", "path": str(recorded.TABLE)}
    workload = vecsim.synthesize(
        requests=30,
        arrivals={"kind": "poisson", "rate": 2},
        input_tokens=400,
        output_tokens=40,
        turns=3,
        think_time_ms=500,
        seed=4,
    )
    report = vecsim.replay(recorded.spec(timing), workload=workload).report
    assert report["completed_requests"] == report["workload_requests"]
    assert report["outside_table_decode_lookups"] == 0
    assert report["mean_tpot_ms"] > 13.7


SMALL = """
import json, sys
import vecsim
from tests.timing import recorded
timing = {"type": "table", "path": str(recorded.TABLE)}
workload = vecsim.read_trace(recorded.WORKLOADS[3], limit=8)
result = vecsim.replay(recorded.spec(timing), workload=workload)
json.dump(result.requests["last_token_ms"].to_list(), sys.stdout)
"""


def test_plain_python_prices_the_same():
    times = []
    for disabled in ("0", "1"):
        ran = subprocess.run(
            [sys.executable, "-c", SMALL],
            env={**os.environ, "NUMBA_DISABLE_JIT": disabled},
            capture_output=True,
            text=True,
            check=True,
        )
        times.append(json.loads(ran.stdout))
    assert times[0] == times[1]
    assert len(times[0]) == 8
