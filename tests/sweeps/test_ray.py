"""Sweeps on a real local Ray cluster."""

import pytest

ray = pytest.importorskip("ray")

import numpy as np  # noqa: E402

from vecsim.sweeps.on_ray import writable  # noqa: E402
from vecsim.sweeps.run import sweep  # noqa: E402
from vecsim.timing.model import CompiledTiming  # noqa: E402
from vecsim.traces import read_trace  # noqa: E402

BASE = {
    "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
    "engine": {"rank": {"num_gpu_blocks": 2000, "block_size": 64}},
    "requests": [],
}
AXES = {"workers": [0, 1, 2], "arrival_speedup": [1, 2]}


def price_prefill(batch, isl, prefix):
    return 20.0 + 0.1 * isl


def price_decode(batch, context, mean, capacity):
    return 4.0


@pytest.fixture(scope="module")
def workload():
    from vecsim.data import sample_path

    return read_trace(sample_path()).limit(200)


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_results_are_identical_to_those_on_threads(cluster, workload):
    threads = sweep(BASE, AXES, workload=workload, slo={"p99_ttft_ms": 900.0})
    seen = []
    rayed = sweep(
        BASE,
        AXES,
        workload=workload,
        slo={"p99_ttft_ms": 900.0},
        executor="ray",
        progress=lambda done, total: seen.append(done),
    )
    assert rayed["status"].to_list() == ["invalid"] * 2 + ["ok"] * 4
    assert rayed.equals(threads)
    assert seen == list(range(7))
    assert ray.is_initialized()


def test_custom_timing_travels(cluster, workload):
    timing = CompiledTiming(price_prefill, price_decode)
    given = {"axes": {"workers": [1, 2]}, "workload": workload.limit(50), "timing": timing}
    assert sweep(BASE, **given, executor="ray").equals(sweep(BASE, **given))


def test_workers_get_arrays_they_may_write_to(workload):
    frozen = writable(workload)
    frozen.input_length.flags.writeable = False
    copy = writable(frozen)
    assert copy.input_length.flags.writeable
    assert np.array_equal(copy.block_ids, workload.block_ids)
