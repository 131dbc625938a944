"""Which descriptors are refused, in which order, and which are not built yet."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from pathlib import Path

import pytest

from vecsim.config.load import IgnoredKeyWarning, load, set_path
from vecsim.config.schema import Payload
from vecsim.config.validate import check_supported, validate
from vecsim.errors import InputError, NotSupportedYetError

HERE = Path(__file__).parent
CASES = HERE.parent / "conformance" / "cases"
REFUSED_FIELDS = json.loads((HERE / "refused_fields.json").read_text())
BUILT_FEATURES = {
    *("dp", "belady", "closed_loop", "time_limit", "sla", "tokenization", "sglang", "trtllm"),
    *("trace", "mooncake", "speedup", "sessions", "disaggregated"),
}
"""Features of the case files that descriptors may ask for. Sessions are a matter of trace rows."""

HOST = {"num_host_blocks": 4}
GROUP = {
    "name": "g",
    "kind": "attention",
    "num_layers": 1,
    "block_size_tokens": 4,
    "page_size_bytes": 8,
}
DISAGGREGATED = {
    "kind": "disaggregated",
    "prefill": {"initial_workers": 1},
    "decode": {"initial_workers": 1},
}


def cases_of(name):
    return json.loads((CASES / f"{name}_cases.json").read_text())["cases"]


def load_quietly(source) -> Payload:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredKeyWarning)
        return load(source)


def spec(changes=None, **top):
    tree = {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "engine": {},
        "requests": [
            {
                "id": "a",
                "arrival_time_ms": 0.0,
                "input_tokens": 2,
                "output_tokens": 1,
                "input_token_ids": [1, 2],
            }
        ],
        **copy.deepcopy(top),
    }
    for path, value in (changes or {}).items():
        set_path(tree, path, copy.deepcopy(value))
    return tree


def refused(source) -> InputError | None:
    try:
        validate(load_quietly(source))
    except NotSupportedYetError:
        raise
    except InputError as error:
        return error
    return None


def refused_field(source) -> str | None:
    error = refused(source)
    return None if error is None else error.where


# --- reference answers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config", "runtime", "sglang", "tiers"])
def test_refused_cases_name_their_field(name):
    fields = {
        case["name"]: refused_field(case["payload"])
        for case in cases_of(name)
        if case["expect"]["error_kind"] == "validation"
    }
    assert fields == REFUSED_FIELDS[name]


def test_messages_name_the_field_first():
    for case in cases_of("config"):
        if case["expect"]["error_kind"] == "validation":
            error = refused(case["payload"])
            assert str(error).startswith(f"{error.where}: "), case["name"]
            assert ", expected " in str(error) or ": missing, " in str(error), case["name"]


@pytest.mark.parametrize(
    "name",
    ["config", "runtime", "sglang", "tiers", "vllm", "trtllm", "timing", "report", "mooncake"],
)
def test_accepted_cases_are_accepted_and_unbuilt_features_named(name):
    used = {
        "extra_external_on_unused_prefill_role",
        "extra_external_shared_unused_in_disagg",
    }
    for case in cases_of(name):
        if case["expect"]["error_kind"] == "validation":
            continue
        payload = load_quietly(case["payload"])
        validate(payload)
        features = set(case["feature"])
        if features <= BUILT_FEATURES or case["name"] in used:
            check_supported(payload)
        else:
            with pytest.raises(NotSupportedYetError):
                check_supported(payload)


def test_traffic_cases_at_the_door():
    fields = {}
    for case in cases_of("traffic"):
        field = refused_field(case["payload"])
        if field is not None:
            assert case["expect"]["error_kind"] == "validation", case["name"]
            fields[case["name"]] = field
    assert fields == {
        "moon_speedup_zero": "traffic.arrival_speedup_ratio",
        "closed_0": "traffic.replay_concurrency",
        "agentic_err_trtllm": "engine.rank.backend",
        "agentic_err_cap": "traffic.replay_concurrency",
        "agentic_err_time_limit": "traffic.max_sim_time_ms",
        "agentic_err_execution_model": "traffic.execution_model",
        "syn_err_gamma": "traffic.load_type",
        "syn_err_prefix_too_long": "traffic.cached_prefix_tokens",
        "syn_err_rate_zero": "traffic.request_rate",
        "syn_err_count_zero": "traffic.request_count",
        "syn_err_unknown_key": "traffic.zzz",
        "err_block_zero": "traffic.trace_block_size",
        "err_unknown_format": "traffic.trace_format",
    }


# --- order ----------------------------------------------------------------------------------------

RANK_DEFECTS = [
    ("engine.rank.num_gpu_blocks", 0),
    ("engine.rank.block_size", 0),
    ("engine.rank.max_num_seqs", 0),
    ("engine.rank.max_num_batched_tokens", 0),
    ("engine.rank.prefill_schedule_interval", 0),
    ("engine.rank.prefill_decode_interval", 1),
    ("engine.rank.sglang.host_loop", True),
    ("engine.rank.frontend", {"stages": []}),
    ("engine.rank.vision", True),
    ("engine.rank.max_model_len", 0),
    ("engine.rank.speedup_ratio", -1.0),
    ("engine.rank.decode_speedup_ratio", -1.0),
    ("engine.rank.aic_nextn", 6),
    ("engine.rank.emit_kv_token_ids", True),
    ("engine.rank.kv_transfer_bytes_per_token", 0),
    ("engine.rank.kv_cache_bytes_per_token", 0),
    ("engine.rank.kv_cache_capacity_bytes", 4),
    ("engine.rank.g3_offload", {"scope": "worker_local", "num_g3_blocks": 0}),
    ("engine.rank.kvcr", {"bandwidth_gbps": -1.0}),
    ("engine.rank.native_host_offload", {"num_host_blocks": 0}),
    ("engine.rank.kv_transfer_bandwidth", -1.0),
    ("engine.rank.timing_model", {"type": "fixed", "prefill_ms": -1.0, "decode_ms": 1.0}),
]
SPEC_DEFECTS = [
    ("requests[0].output_tokens", -1),
    ("engine.zzz", 1),
    ("engine.rank.prefix_match_unit", 8),
    ("engine.rank.timing_model", {"type": "external", "provider": "x"}),
    ("traffic", {"source_type": "trace"}),
    ("version", 2),
    ("topology.workers.initial_workers", 0),
    ("topology.workers.startup_delay_ms", -1.0),
    ("max_sim_time_ms", -1.0),
    ("max_in_flight", 0),
    ("sla.ttft_ms", 0.0),
    ("requests[0].id", ""),
    ("requests[0].arrival_time_ms", -1.0),
    ("requests[0].input_token_ids", [1]),
    ("requests[0].metadata", 5),
    ("requests[0].prefill_dp_rank", 0),
    ("adapters.placement", {"provider": "x"}),
    ("adapters.scaling", {"provider": "x"}),
    ("tokenization.workers", 0),
    ("tokenization.base_ms", -1.0),
    ("requests[0].dp_rank", 7),
    ("engine.tensor_parallel_size", 0),
    ("engine.prefill_context_parallel_size", 0),
    ("engine.rank.num_gpu_blocks", 0),
]


@pytest.mark.parametrize("defects", [RANK_DEFECTS, SPEC_DEFECTS], ids=["rank", "spec"])
def test_the_earlier_of_two_defects_is_told(defects):
    fields = [refused_field(spec({path: value})) for path, value in defects]
    assert None not in fields
    for first, second in itertools.combinations(range(len(defects)), 2):
        (path, value), (other, other_value) = defects[first], defects[second]
        tree = spec({path: value, other: other_value})
        assert refused_field(tree) == fields[first], (path, other)


# --- single rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"engine.rank.block_size": 1},
            "engine.rank.block_size: got 1, expected at least 2 for vllm",
        ),
        (
            {"engine.rank.aic_nextn": 2, "engine.rank.aic_nextn_accept_rates": "0.5, 1_0"},
            "engine.rank.aic_nextn_accept_rates: got '0.5, 1_0', "
            "expected numbers separated by commas",
        ),
        (
            {"engine.dp_size": 2, "requests[0].dp_rank": 2},
            "requests[0].dp_rank: got 2, expected a rank below engine.dp_size (2)",
        ),
        (
            {"sla.e2e_ms": 5.0, "sla.itl_ms": 1.0},
            "sla.e2e_ms: got 5.0, expected nothing beside sla.ttft_ms or sla.itl_ms",
        ),
        (
            {"adapters.scaling": {"provider": "planner"}},
            "adapters.scaling.provider: got 'planner', "
            "expected one of 'none', 'plan', 'load', 'sla', 'sla_corrected'",
        ),
        (
            {"requests[0].metadata": {"priority": True}},
            "requests[0].metadata.priority: got True, "
            "expected an integer from -2147483648 to 2147483647",
        ),
        (
            {"requests[0].kv_hints": {"source_worker": 0, "source_dp_rank": 1}},
            "requests[0].kv_hints.source_dp_rank: got 1, expected a rank below engine.dp_size (1)",
        ),
        (
            {"engine.rank.speedup_ratio": 1e-300},
            "engine.rank.speedup_ratio: got 1e-300, "
            "expected a ratio that leaves passes below 2**64 seconds",
        ),
    ],
)
def test_messages(changes, message):
    assert str(refused(spec(changes))) == message


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        [],
        [1, 2, "class"],
        {"priority": -(2**31), "strict_priority": 2**32 - 1, "policy_class": None, "own": [1]},
    ],
)
def test_metadata_that_routing_can_read(metadata):
    assert refused(spec({"requests[0].metadata": metadata})) is None


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ("x", "requests[0].metadata"),
        ([1, 2, "p", 4], "requests[0].metadata"),
        (["x"], "requests[0].metadata.priority"),
        ({"priority": 1.0}, "requests[0].metadata.priority"),
        ({"strict_priority": None}, "requests[0].metadata.strict_priority"),
    ],
)
def test_metadata_that_it_cannot(metadata, field):
    assert refused_field(spec({"requests[0].metadata": metadata})) == field


@pytest.mark.parametrize(
    ("rates", "ok"),
    [("", True), (" ", True), (".5,1.", True), ("1e-1,+0.5", True), ("0x1", False), ("-1", False)],
)
def test_acceptance_rates(rates, ok):
    changes = {"engine.rank.aic_nextn": 1, "engine.rank.aic_nextn_accept_rates": rates}
    assert (refused(spec(changes)) is None) is ok


def test_roles_that_share_a_host_tier_must_agree():
    host = {**HOST, "scope": "cluster_shared", "kv_layout_id": "x"}
    rank = {"block_size": 16, "kv_cache_bytes_per_token": 8, "native_host_offload": host}
    role = {"rank": rank}
    tree = spec(topology=DISAGGREGATED, engine={"prefill": role, "decode": copy.deepcopy(role)})
    assert refused(tree) is None
    for path, value in {
        "rank.native_host_offload.kv_layout_id": "y",
        "rank.native_host_offload.shared_d2h_bandwidth_gbps": 1.0,
        "rank.block_size": 8,
        "rank.kv_cache_bytes_per_token": 16,
        "tensor_parallel_size": 2,
    }.items():
        changed = set_path(copy.deepcopy(tree), f"engine.decode.{path}", value)
        assert refused_field(changed) == f"engine.decode.{path}"
    changed = set_path(tree, "engine.decode.rank.native_host_offload.d2h_bandwidth_gbps", 1.0)
    assert refused(changed) is None


def test_belady_with_traffic():
    trace = {"source_type": "trace", "trace_path": "t.jsonl"}
    tree = spec({"engine.kv_eviction_policy": "belady", "traffic": trace})
    tree["spec"]["requests"] = []
    assert refused(tree) is None
    for path, value in {"traffic.replay_concurrency": 1, "traffic.trace_format": "weka"}.items():
        changed = set_path(copy.deepcopy(tree), path, value)
        changed["traffic"] |= {"execution_model": "m", "load_type": "trace_timestamps"}
        assert refused_field(changed) == path
    changed = set_path(copy.deepcopy(tree), "adapters.scaling", {"provider": "load"})
    assert refused_field(changed) == "adapters.scaling.provider"


@pytest.mark.parametrize(
    ("traffic", "field"),
    [
        ({"source_type": "replay"}, "source_type"),
        ({"source_type": "trace"}, "trace_path"),
        ({"source_type": "trace", "trace_path": "t", "trace_format": "zzz"}, "trace_format"),
        ({"source_type": "trace", "trace_paths": ["t", "u"]}, "trace_paths"),
        ({"source_type": "trace", "trace_path": "t", "agentic_lanes": 1}, "agentic_lanes"),
        ({"source_type": "synthetic", "osl": 1, "request_count": 1}, "isl"),
        ({"source_type": "synthetic", "isl": 1, "osl": 1}, "request_count"),
        (
            {"source_type": "synthetic", "isl": 1, "osl": 1, "num_request_ratio": -1.0},
            "num_request_ratio",
        ),
        (
            {"source_type": "synthetic", "isl": 1, "osl": 1, "request_count": 1}
            | {"load_type": "poisson"},
            "request_rate",
        ),
        (
            {"source_type": "synthetic", "isl": 1, "osl": 1, "request_count": 1}
            | {"load_type": "kv_capacity_fraction"},
            "kv_load_ratio",
        ),
        (
            {"source_type": "synthetic", "isl": 1, "osl": 1, "request_count": 1}
            | {"shared_prefix_ratio": 1.5},
            "shared_prefix_ratio",
        ),
    ],
)
def test_traffic_rules(traffic, field):
    assert refused_field({"spec": spec(), "traffic": traffic}) == f"traffic.{field}"


# --- what is not built ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"engine.rank.backend": "sglang", "engine.rank.sglang.host_loop": True},
            "engine.rank.sglang.host_loop (True)",
        ),
        ({"engine.rank.aic_nextn": 3}, "engine.rank.aic_nextn (3)"),
        (
            {"engine.rank.native_host_offload": HOST, "engine.rank.kv_cache_bytes_per_token": 8},
            "engine.rank.native_host_offload",
        ),
        (
            {
                "engine.rank.kv_cache_groups": [GROUP],
                "engine.rank.kv_cache_capacity_bytes": 64,
                "engine.rank.enable_prefix_caching": False,
            },
            "engine.rank.kv_cache_groups",
        ),
        (
            {"adapters.placement": {"provider": "kv_aware"}},
            "adapters.placement.provider (kv_aware)",
        ),
        ({"adapters.scaling": {"provider": "plan"}}, "adapters.scaling.provider (plan)"),
        ({"capture_performance_diagnostics": True}, "capture_performance_diagnostics (True)"),
    ],
)
def test_unbuilt_features_are_named(changes, message):
    payload = load(spec(changes))
    validate(payload)
    with pytest.raises(NotSupportedYetError) as caught:
        check_supported(payload)
    assert str(caught.value) == f"not supported yet: {message}"


def test_a_wrong_descriptor_is_refused_even_where_it_is_not_built():
    assert refused_field(spec({"engine.rank.backend": "trtllm", "engine.rank.block_size": 1}))


def test_ten_thousand_requests_are_validated_quickly():
    request = spec()["requests"][0]
    tree = spec(requests=[{**request, "id": f"r{i}"} for i in range(10_000)])
    payload = load(tree)
    validate(payload)
    check_supported(payload)
    tree["requests"][-1]["id"] = "r0"
    assert refused_field(tree) == "requests[9999].id"
