"""Whole replays against the reference under its own external timing, and what a table costs."""

import json

import numpy as np
import pytest

import vecsim
from tests.pricing import recorded

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
    with pytest.warns(vecsim.pricing.providers.TimingWarning, match="backend vllm"):
        result = vecsim.replay(
            recorded.spec(timing, rank), workload=vecsim.read_trace(recorded.WORKLOADS[0])
        )
    assert result.report["completed_requests"] == 300
    assert result.report["mean_tpot_ms"] > 13.75
