"""Defaults and shape of the descriptors."""

from __future__ import annotations

import msgspec
import pytest

from vecsim.config import schema as d

POOL = d.PoolDescriptor(initial_workers=1)


def test_rank_defaults():
    expected = {
        "backend": "vllm",
        "num_gpu_blocks": 16384,
        "block_size": None,
        "max_model_len": None,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "prefill_schedule_interval": 1,
        "prefill_decode_interval": 0,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "speedup_ratio": 1.0,
        "decode_speedup_ratio": 1.0,
        "aic_nextn": None,
        "aic_nextn_accept_rates": None,
        "aic_mtp_seed": 42,
        "worker_type": "aggregated",
        "preemption_mode": "lifo",
        "emit_kv_events": False,
        "emit_kv_token_ids": False,
        "kv_transfer_bytes_per_token": None,
        "kv_transfer_bandwidth": None,
        "kv_transfer_timing_mode": "full_prompt",
        "kv_cache_bytes_per_token": None,
        "kv_cache_groups": (),
        "kv_cache_capacity_bytes": None,
        "native_host_offload": None,
        "g3_offload": None,
        "kvcr": None,
        "state_cache": None,
        "prefix_match_unit": None,
        "timing_model": {"type": "polynomial"},
        "sglang": {
            "schedule_policy": "fifo",
            "max_prefill_tokens": 16384,
            "chunked_prefill_size": 8192,
            "clip_max_new_tokens": 4096,
            "schedule_conservativeness": 1.0,
            "vlm_cache_bytes": 104857600,
            "host_loop": False,
        },
        "trtllm": {"capacity_scheduler_policy": "guaranteed_no_evict"},
        "frontend": None,
        "vision": False,
    }
    assert msgspec.to_builtins(d.RankConfig()) == expected


def test_engine_and_spec_defaults():
    engine = msgspec.to_builtins(d.EngineDescriptor())
    assert engine["dp_size"] == 1
    assert engine["tensor_parallel_size"] == 1
    assert engine["prefill_context_parallel_size"] == 1
    assert engine["num_gpu_blocks_is_explicit"] is None
    assert engine["kv_eviction_policy"] == "lru"
    assert engine["prefill"] is None
    assert engine["decode"] is None
    spec = d.ReplaySpec(topology=d.AggregatedTopology(workers=POOL), requests=[])
    assert spec.version == 1
    assert spec.engine == d.EngineDescriptor()
    assert spec.record_per_request is True
    assert (spec.max_sim_time_ms, spec.max_in_flight, spec.encoder) == (None, None, None)
    assert spec.sla == d.Sla(ttft_ms=None, itl_ms=None, e2e_ms=None)
    assert spec.adapters.placement.provider == "round_robin"
    assert spec.adapters.scaling.provider == "none"
    payload = d.Payload(spec=spec)
    assert (payload.traffic, payload.tokenization) == (None, None)
    assert payload.determinism == "random"
    assert payload.capture_performance_diagnostics is False


def test_tier_and_stage_defaults():
    host = d.HostOffload(num_host_blocks=4)
    assert host.scope == "dp_rank_local"
    assert (host.d2h_bandwidth_gbps, host.h2d_bandwidth_gbps) == (32.0, 32.0)
    assert (host.shared_d2h_bandwidth_gbps, host.shared_h2d_bandwidth_gbps) == (80.0, 80.0)
    assert (host.latency_to_first_byte_ms, host.kv_layout_id) == (0.0, None)
    g3 = d.G3Offload(scope="worker_local", num_g3_blocks=4)
    assert g3.latency_to_first_byte_ms == 0.1
    assert (g3.read_bandwidth_gbps, g3.write_bandwidth_gbps) == (10.0, 10.0)
    assert (g3.shared_read_bandwidth_gbps, g3.shared_write_bandwidth_gbps) == (80.0, 80.0)
    assert d.Kvcr() == d.Kvcr(latency_to_first_byte_ms=1.0, bandwidth_gbps=50.0)
    assert d.FrontendStage(service_ms=1.0) == d.FrontendStage(
        workers=1, service_ms=1.0, concurrency_scale=()
    )
    tokenization = d.Tokenization(workers=1, base_ms=0.0, per_input_token_ms=0.0)
    assert d.Tokenization() == tokenization
    assert POOL.startup_delay_ms == 0.0
    assert d.DisaggregatedTopology(prefill=POOL, decode=POOL).handoff_latency_ms == 0.0


@pytest.mark.parametrize(("backend", "tokens"), [("vllm", 64), ("sglang", 1), ("trtllm", 32)])
def test_block_tokens(backend, tokens):
    assert d.RankConfig(backend=backend).block_tokens == tokens
    assert d.RankConfig(backend=backend, block_size=16).block_tokens == 16


def test_descriptors_are_immutable():
    rank = d.RankConfig()
    with pytest.raises(AttributeError):
        rank.block_size = 16


def test_aliases_name_fields():
    for struct, names in d.ALIASES.items():
        fields = set(struct.__struct_fields__)
        assert set(names.values()) <= fields
        assert not set(names) & fields
