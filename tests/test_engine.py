"""The engine surface under its reference names."""

from __future__ import annotations

import pytest

from vecsim.config.load import load
from vecsim.config.schema import (
    AggregatedTopology,
    DisaggregatedTopology,
    FixedTiming,
    PolynomialTiming,
    PoolDescriptor,
    RankConfig,
    ReplaySpec,
)
from vecsim.engine import (
    ReplayEngineConfig,
    ReplayEngineFactory,
    ReplayRoleConfig,
    run_engine_handoff_conformance,
    run_engine_replay,
)
from vecsim.errors import InputError, NotSupportedYetError

POOL = PoolDescriptor(initial_workers=1)
AGGREGATED = AggregatedTopology(workers=POOL)
DISAGGREGATED = DisaggregatedTopology(prefill=POOL, decode=POOL)


def test_role_settings():
    config = ReplayEngineConfig(dp_size=2, prefill=ReplayRoleConfig(tensor_parallel_size=4))
    assert config.role("aggregated").dp_size == 2
    assert config.role("decode").dp_size == 2
    assert config.role("decode").rank.worker_type == "decode"
    prefill = config.role("prefill")
    assert (prefill.dp_size, prefill.tensor_parallel_size) == (1, 4)


def test_validate_topology():
    ReplayEngineConfig(dp_size=4).validate_topology(DISAGGREGATED)
    sglang = ReplayRoleConfig(rank=RankConfig(backend="sglang"))
    with pytest.raises(InputError) as caught:
        ReplayEngineConfig(decode=sglang).validate_topology(DISAGGREGATED)
    assert caught.value.where == "engine.decode.rank.backend"
    ReplayEngineConfig(decode=sglang).validate_topology(AGGREGATED)
    belady = ReplayEngineConfig(dp_size=2, kv_eviction_policy="belady")
    with pytest.raises(InputError) as caught:
        belady.validate_topology(AGGREGATED)
    assert caught.value.where == "engine.dp_size"


def test_a_config_is_an_engine_of_a_spec():
    spec = ReplaySpec(topology=AGGREGATED, engine=ReplayEngineConfig(dp_size=3), requests=[])
    assert load(spec).spec.engine.dp_size == 3


def test_role_factory():
    config = ReplayEngineConfig(
        dp_size=2, tensor_parallel_size=4, rank=RankConfig(backend="trtllm", num_gpu_blocks=9)
    )
    factory = ReplayEngineFactory().role_factory(config, "decode", emit_kv_events=True)
    assert (factory.dp_size, factory.gpus_per_worker) == (2, 8)
    assert (factory.backend, factory.total_blocks) == ("trtllm", 9)
    assert factory.timing == PolynomialTiming()
    assert factory.role.rank.emit_kv_events is True
    worker = factory.build(3)
    assert worker.worker_id == 3
    assert worker.scheduler_ids == (6, 7)
    assert worker.role is factory.role
    with pytest.raises(InputError) as caught:
        ReplayEngineFactory().role_factory(ReplayEngineConfig(dp_size=0), "prefill")
    assert caught.value.where == "engine.dp_size"


def test_the_role_s_own_timing_wins():
    fixed = FixedTiming(prefill_ms=1.0, decode_ms=2.0)
    config = ReplayEngineConfig(rank=RankConfig(timing_model=fixed))
    assert ReplayEngineFactory().role_factory(config, "decode").timing is fixed
    factory = ReplayEngineFactory(timing="common", decode_timing="own")
    assert factory.role_factory(config, "decode").timing == "own"
    assert factory.role_factory(config, "prefill").timing == "common"
    assert factory.role_factory(config, "aggregated").timing == "common"


def test_replay_by_its_reference_name():
    request = {"id": "a", "arrival_time_ms": 0.0, "input_tokens": 100, "output_tokens": 1}
    spec = {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "requests": [request],
    }
    result = run_engine_replay(spec)
    assert result.requests["first_token_ms"].to_list() == [18.023974000000003]


def test_what_is_not_built_says_so():
    config = ReplayEngineConfig(rank=RankConfig(aic_nextn=1))
    request = {"id": "a", "arrival_time_ms": 0.0, "input_tokens": 100, "output_tokens": 2}
    with pytest.raises(NotSupportedYetError, match=r"yet: engine\.rank\.aic_nextn"):
        run_engine_handoff_conformance(config, request)
