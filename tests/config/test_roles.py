"""Role resolution."""

from __future__ import annotations

import pytest

from vecsim.config.load import load
from vecsim.config.roles import resolve, resolve_role
from vecsim.config.schema import EngineDescriptor, RankConfig, RoleDescriptor

AGGREGATED = {"kind": "aggregated", "workers": {"initial_workers": 1}}
DISAGGREGATED = {
    "kind": "disaggregated",
    "prefill": {"initial_workers": 1},
    "decode": {"initial_workers": 1},
}


def roles_of(topology, engine):
    return resolve(load({"topology": topology, "engine": engine, "requests": []}).spec)


def test_aggregated_takes_the_shared_settings():
    engine = {
        "dp_size": 2,
        "tensor_parallel_size": 3,
        "prefill_context_parallel_size": 5,
        "rank": {"num_gpu_blocks": 7, "worker_type": "decode", "emit_kv_events": True},
        "prefill": {"dp_size": 9},
    }
    (role,) = roles_of(AGGREGATED, engine)
    assert role.stage == "aggregated"
    assert role.path == "engine"
    assert (role.dp_size, role.tensor_parallel_size) == (2, 3)
    assert role.prefill_context_parallel_size == 5
    assert role.gpus_per_worker == 30
    assert role.total_blocks == 7
    assert role.backend == "vllm"
    assert role.rank == RankConfig(num_gpu_blocks=7, worker_type="aggregated")


def test_a_role_block_replaces_the_shared_settings_whole():
    engine = {"dp_size": 2, "rank": {"backend": "sglang"}, "prefill": {}}
    prefill, decode = roles_of(DISAGGREGATED, engine)
    assert (prefill.stage, decode.stage) == ("prefill", "decode")
    assert (prefill.path, decode.path) == ("engine.prefill", "engine")
    assert (prefill.backend, prefill.dp_size) == ("vllm", 1)
    assert (decode.backend, decode.dp_size) == ("sglang", 2)
    assert prefill.rank == RankConfig(worker_type="prefill")
    assert decode.rank == RankConfig(backend="sglang", worker_type="decode")


@pytest.mark.parametrize("stage", ["aggregated", "prefill", "decode"])
def test_the_runner_decides_on_kv_events(stage):
    engine = EngineDescriptor(decode=RoleDescriptor(rank=RankConfig(emit_kv_events=True)))
    assert resolve_role(engine, stage).rank.emit_kv_events is False
    role = resolve_role(engine, stage, emit_kv_events=True)
    assert role.rank.emit_kv_events is True
    assert role.rank.worker_type == stage
