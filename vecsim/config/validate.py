"""Which descriptors make sense together, and which of them vecsim can simulate yet.

`validate` asks in the order in which the reference does; the first answer that is no is raised.
`check_supported` comes after it, so that a wrong descriptor is told so even where it uses a feature
that is not built yet.
"""

from __future__ import annotations

import math
from typing import Any

from vecsim.config.checks import (
    finite_positive,
    json_value,
    known,
    non_negative,
    optional_finite_positive,
    optional_positive,
    positive,
    present,
    refuse,
    unicode_text,
)
from vecsim.config.defaults import AUTO
from vecsim.config.diagnostics import MAX_UINT64
from vecsim.config.roles import Role, resolve
from vecsim.config.schema import (
    AggregatedTopology,
    DisaggregatedTopology,
    EngineDescriptor,
    ExternalTiming,
    FixedTiming,
    Payload,
    PolynomialTiming,
    RankConfig,
    ReplayRequest,
    ReplaySpec,
)
from vecsim.config.validate_rank import check_role, transfer_ms
from vecsim.config.validate_timing import check_timing_model
from vecsim.config.validate_traffic import check_traffic
from vecsim.errors import MISSING, NotSupportedYetError

PLACEMENT_PROVIDERS = (
    "round_robin",
    "random",
    "power_of_two",
    "least_requests",
    "least_tokens",
    "kv_aware",
    "cache_aware",
    "session_affinity",
    "prefix_affinity",
    "weighted",
)
SCALING_PROVIDERS = ("none", "plan", "load", "sla", "sla_corrected")
EXTERNAL_PROVIDERS = ("aic",)
_EXTERNAL_KEYS = {
    "model": ("model", "model_path"),
    "system": ("system",),
    "backend": ("backend",),
}

MAX_RANKS = 2**20
"""Ranks of a fleet, that is workers x dp_size, that can be simulated."""

_MAX_DURATION_S = 2.0**64
_LEAST_PREFILL_MS = 16.0
_LEAST_DECODE_MS = 5.0
"""Lower bounds of what the polynomial charges for a pass."""
_LEAST_SCALED_S = 1e-9
"""Shorter prices round to zero nanoseconds, which no ratio scales."""


def validate(payload: Payload) -> None:
    """Refuse a payload that makes no sense. Raises InputError: field, value, what was expected."""
    spec = payload.spec
    roles = resolve(spec)
    _check_state_caches(spec.engine)
    _check_external_timing(spec, roles)
    if payload.traffic is not None:
        check_traffic(payload.traffic, roles)
    if payload.workload is not None:
        _check_description(payload)
    _check_topology(spec)
    _check_limits(spec)
    _check_encoder(spec)
    _check_requests(spec)
    known("adapters.placement.provider", spec.adapters.placement.provider, PLACEMENT_PROVIDERS)
    known("adapters.scaling.provider", spec.adapters.scaling.provider, SCALING_PROVIDERS)
    for name in ("placement", "scaling"):
        json_value(f"adapters.{name}.config", getattr(spec.adapters, name).config)
    _check_tokenization(payload)
    _check_belady_engine(spec, roles)
    _check_tier_topology(roles)
    _check_request_ranks(spec.requests, roles)
    _check_belady_traffic(payload)
    _check_roles(roles)
    _check_handoff(spec, roles)


def check_engine(spec: ReplaySpec) -> None:
    """The part of `validate` that concerns the engine and its topology. Raises InputError."""
    roles = resolve(spec)
    _check_state_caches(spec.engine)
    _check_external_timing(spec, roles)
    _check_topology(spec)
    _check_belady_engine(spec, roles)
    _check_tier_topology(roles)
    _check_roles(roles)


def _check_description(payload: Payload) -> None:
    from vecsim.synthetic.description import parse

    if payload.traffic is not None:
        refuse("workload", payload.workload, "nothing beside traffic")
    parse(payload.workload, "workload")


# --- before the spec itself -----------------------------------------------------------------------


def _check_state_caches(engine: EngineDescriptor) -> None:
    """Rules of the state cache hold for every role that is written, used or not."""
    blocks = {"engine": engine, "engine.prefill": engine.prefill, "engine.decode": engine.decode}
    for path, block in blocks.items():
        if block is not None:
            _check_state_cache(f"{path}.rank", block.rank)


def _check_state_cache(path: str, rank: RankConfig) -> None:
    cache, unit = rank.state_cache, rank.prefix_match_unit
    if cache is None:
        if unit is not None:
            refuse(f"{path}.prefix_match_unit", unit, "nothing without state_cache")
        return
    for name in ("block_size", "kv_cache_bytes_per_token"):
        present(f"{path}.{name}", getattr(rank, name), "an explicit value beside state_cache")
    if rank.backend != "vllm":
        refuse(f"{path}.backend", rank.backend, "'vllm' beside state_cache")
    for name in ("native_host_offload", "g3_offload"):
        if getattr(rank, name) is not None:
            refuse(f"{path}.{name}", "a cache tier", "nothing beside state_cache")
    positive(f"{path}.state_cache.bytes_per_request", cache.bytes_per_request)
    if rank.block_size < 2:
        refuse(f"{path}.block_size", rank.block_size, "at least 2 beside state_cache")
    positive(f"{path}.kv_cache_bytes_per_token", rank.kv_cache_bytes_per_token)
    block_bytes = rank.block_size * rank.kv_cache_bytes_per_token
    if block_bytes > MAX_UINT64:
        expected = "a block size in bytes (times block_size) below 2**64"
        refuse(f"{path}.kv_cache_bytes_per_token", rank.kv_cache_bytes_per_token, expected)
    if unit is not None and (unit <= 0 or rank.block_size % unit):
        refuse(f"{path}.prefix_match_unit", unit, f"a divisor of block_size ({rank.block_size})")
    if rank.num_gpu_blocks == AUTO:
        refuse(f"{path}.num_gpu_blocks", AUTO, "a number of blocks beside state_cache")
    least = -(-cache.bytes_per_request // block_bytes) + 1
    if rank.num_gpu_blocks < least:
        expected = f"at least {least} blocks: one of tokens and one request's state"
        refuse(f"{path}.num_gpu_blocks", rank.num_gpu_blocks, expected)


def _check_external_timing(spec: ReplaySpec, roles: tuple[Role, ...]) -> None:
    for role in roles:
        where = f"{role.path}.rank.timing_model"
        _check_external(where, role.rank.timing_model)
        check_timing_model(where, role)
    if spec.encoder is not None:
        where = "encoder.timing_model"
        present(where, spec.encoder.timing_model, "a timing model that prices vision batches")
        _check_external(where, spec.encoder.timing_model)


def _check_external(where: str, model: Any) -> None:
    if not isinstance(model, ExternalTiming):
        return
    known(f"{where}.provider", model.provider, EXTERNAL_PROVIDERS)
    if not isinstance(model.config, dict):
        refuse(f"{where}.config", model.config, "an object with model, system and backend")
    for name, spellings in _EXTERNAL_KEYS.items():
        if not any(spelling in model.config for spelling in spellings):
            refuse(f"{where}.config.{name}", MISSING, "a string")


# --- the spec -------------------------------------------------------------------------------------


def _check_topology(spec: ReplaySpec) -> None:
    if spec.version != 1:
        refuse("version", spec.version, "1")
    topology = spec.topology
    if isinstance(topology, AggregatedTopology):
        pools = {"workers": topology.workers}
    else:
        pools = {"prefill": topology.prefill, "decode": topology.decode}
    for name, pool in pools.items():
        positive(f"topology.{name}.initial_workers", pool.initial_workers)
        non_negative(f"topology.{name}.startup_delay_ms", pool.startup_delay_ms)
    if not isinstance(topology, AggregatedTopology):
        non_negative("topology.handoff_latency_ms", topology.handoff_latency_ms)


def _check_limits(spec: ReplaySpec) -> None:
    if spec.max_sim_time_ms is not None:
        non_negative("max_sim_time_ms", spec.max_sim_time_ms)
    optional_positive("max_in_flight", spec.max_in_flight)
    sla = spec.sla
    if sla.e2e_ms is not None and (sla.ttft_ms is not None or sla.itl_ms is not None):
        refuse("sla.e2e_ms", sla.e2e_ms, "nothing beside sla.ttft_ms or sla.itl_ms")
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        optional_finite_positive(f"sla.{name}", getattr(sla, name))


def _check_encoder(spec: ReplaySpec) -> None:
    encoder = spec.encoder
    if encoder is None:
        return
    for name in ("instances", "max_batch", "gpus_per_instance", "images_per_request"):
        positive(f"encoder.{name}", getattr(encoder, name))
    for name in ("sequences", "patch_tokens", "transformer_tokens", "output_tokens"):
        positive(f"encoder.shape.{name}", getattr(encoder.shape, name))
    non_negative("encoder.preprocess_ms_per_image", encoder.preprocess_ms_per_image)
    finite_positive("encoder.transfer_bandwidth_gb_s", encoder.transfer_bandwidth_gb_s)
    if isinstance(encoder.timing_model, PolynomialTiming | FixedTiming):
        kind = type(encoder.timing_model).__struct_config__.tag
        refuse("encoder.timing_model.type", kind, "a timing model that prices vision batches")


def _check_requests(spec: ReplaySpec) -> None:
    aggregated = isinstance(spec.topology, AggregatedTopology)
    seen: set[str] = set()
    for index, request in enumerate(spec.requests):
        if not request.id:
            refuse(f"requests[{index}].id", request.id, "a name that is not empty")
        if not 0.0 <= request.arrival_time_ms < math.inf:
            non_negative(f"requests[{index}].arrival_time_ms", request.arrival_time_ms)
        ids = request.input_token_ids
        if ids is not None and len(ids) != request.input_tokens:
            expected = f"{request.input_tokens} ids, as input_tokens says"
            refuse(f"requests[{index}].input_token_ids", f"{len(ids)} ids", expected)
        unicode_text(f"requests[{index}].id", request.id)
        unicode_text(f"requests[{index}].session_id", request.session_id)
        if request.metadata is not None:
            json_value(f"requests[{index}].metadata", request.metadata)
            _check_metadata(f"requests[{index}].metadata", request.metadata)
        if aggregated and request.prefill_dp_rank is not None:
            where = f"requests[{index}].prefill_dp_rank"
            refuse(where, request.prefill_dp_rank, "nothing in an aggregated topology")
        if request.id in seen:
            refuse(f"requests[{index}].id", request.id, "an id that no other request has")
        seen.add(request.id)


_METADATA = {
    "priority": (int, -(2**31), 2**31 - 1, "an integer from -2147483648 to 2147483647"),
    "strict_priority": (int, 0, 2**32 - 1, "an integer from 0 to 4294967295"),
    "policy_class": (str | None, None, None, "a string, or null"),
}


def _check_metadata(where: str, metadata: Any) -> None:
    """Routing hints in the metadata: an object, or a list of their values in this order."""
    if isinstance(metadata, list):
        if len(metadata) > len(_METADATA):
            refuse(where, metadata, f"at most {len(_METADATA)} values")
        metadata = dict(zip(_METADATA, metadata, strict=False))
    if not isinstance(metadata, dict):
        refuse(where, metadata, "an object")
    for name, (type_, least, most, expected) in _METADATA.items():
        if name not in metadata:
            continue
        value = metadata[name]
        fits = isinstance(value, type_) and not isinstance(value, bool)
        if not fits or (least is not None and not least <= value <= most):
            refuse(f"{where}.{name}", value, expected)


def _check_tokenization(payload: Payload) -> None:
    if payload.tokenization is None:
        return
    positive("tokenization.workers", payload.tokenization.workers)
    non_negative("tokenization.base_ms", payload.tokenization.base_ms)
    where = "tokenization.per_input_token_ms"
    non_negative(where, payload.tokenization.per_input_token_ms)


# --- engine and topology together -----------------------------------------------------------------


def _check_belady_engine(spec: ReplaySpec, roles: tuple[Role, ...]) -> None:
    """Belady eviction forecasts over one flat list of accesses, so it excludes a good deal."""
    if spec.engine.kv_eviction_policy != "belady":
        return
    role = roles[0]
    path = f"{role.path}.rank"
    if role.stage != "aggregated":
        refuse("engine.kv_eviction_policy", "belady", "'lru' in a disaggregated topology")
    if role.dp_size != 1:
        refuse(f"{role.path}.dp_size", role.dp_size, "1 under belady eviction")
    for name in ("native_host_offload", "g3_offload"):
        if getattr(role.rank, name) is not None:
            refuse(f"{path}.{name}", "a cache tier", "nothing under belady eviction")
    unit = role.rank.prefix_match_unit
    if unit is not None:
        refuse(f"{path}.prefix_match_unit", unit, "nothing under belady eviction")
    if not role.rank.enable_prefix_caching:
        refuse(f"{path}.enable_prefix_caching", False, "true under belady eviction")


def _check_tier_topology(roles: tuple[Role, ...]) -> None:
    for role in roles:
        if role.rank.g3_offload is not None:
            if role.stage != "aggregated":
                where = f"{role.path}.rank.g3_offload"
                refuse(where, "a cache tier", "nothing in a disaggregated topology")
            if role.dp_size != 1:
                refuse(f"{role.path}.dp_size", role.dp_size, "1 beside g3_offload")
    if len({role.rank.state_cache is None for role in roles}) > 1:
        bare = next(role for role in roles if role.rank.state_cache is None)
        refuse(f"{bare.path}.rank.state_cache", MISSING, "a state cache on both roles, or on none")


def _check_request_ranks(requests: list[ReplayRequest], roles: tuple[Role, ...]) -> None:
    for index, request in enumerate(requests):
        if request.dp_rank is None and request.prefill_dp_rank is None and not request.kv_hints:
            continue
        for role in roles:
            name = "dp_rank"
            if role.stage == "prefill" and request.prefill_dp_rank is not None:
                name = "prefill_dp_rank"
            rank = getattr(request, name)
            expected = f"a rank below {role.path}.dp_size ({role.dp_size})"
            if rank is not None and rank >= role.dp_size:
                refuse(f"requests[{index}].{name}", rank, expected)
            hints = request.kv_hints
            if hints is not None and hints.source_dp_rank >= role.dp_size:
                where = f"requests[{index}].kv_hints.source_dp_rank"
                refuse(where, hints.source_dp_rank, expected)


def _check_belady_traffic(payload: Payload) -> None:
    spec, traffic = payload.spec, payload.traffic
    if spec.engine.kv_eviction_policy != "belady":
        return
    if spec.max_in_flight is not None:
        refuse("max_in_flight", spec.max_in_flight, "nothing under belady eviction")
    if spec.adapters.scaling.provider != "none":
        provider = spec.adapters.scaling.provider
        refuse("adapters.scaling.provider", provider, "'none' under belady eviction")
    if traffic is None:
        for index, request in enumerate(spec.requests):
            where = f"requests[{index}].input_token_ids"
            present(where, request.input_token_ids, "token ids under belady eviction")
        return
    for name in ("replay_concurrency", "concurrency"):
        value = getattr(traffic, name)
        if value is not None:
            refuse(f"traffic.{name}", value, "nothing under belady eviction")
    if traffic.source_type == "trace" and traffic.trace_format not in (None, "mooncake", "dynamo"):
        expected = "a format of full prompts at fixed times, under belady eviction"
        refuse("traffic.trace_format", traffic.trace_format, expected)


# --- roles ----------------------------------------------------------------------------------------


def _check_roles(roles: tuple[Role, ...]) -> None:
    for role in roles:
        check_role(role)
    if len({role.backend for role in roles}) > 1:
        prefill, decode = roles
        expected = f"the backend of {prefill.path} ({prefill.backend})"
        refuse(f"{decode.path}.rank.backend", decode.backend, expected)
    _check_shared_host_tiers(roles)
    for role in roles:
        _check_durations(role)


def _check_shared_host_tiers(roles: tuple[Role, ...]) -> None:
    """Roles that share one host tier must agree on its shape."""
    shared = [
        role
        for role in roles
        if role.rank.native_host_offload is not None
        and role.rank.native_host_offload.scope == "cluster_shared"
    ]
    for role in shared[1:]:
        for name, value, path in _host_tier_shape(role):
            first = next(entry for entry in _host_tier_shape(shared[0]) if entry[0] == name)
            if value != first[1]:
                refuse(path, value, f"{first[1]!r} as in {first[2]}: they share one host tier")


def _host_tier_shape(role: Role) -> list[tuple[str, Any, str]]:
    """(name, value, path) of everything that the sharers of a host tier have in common."""
    rank, host = role.rank, role.rank.native_host_offload
    path = f"{role.path}.rank"
    shape = [
        (name, getattr(host, name), f"{path}.native_host_offload.{name}")
        for name in (
            "kv_layout_id",
            "num_host_blocks",
            "shared_d2h_bandwidth_gbps",
            "shared_h2d_bandwidth_gbps",
        )
    ]
    shape.append(("tp", role.tensor_parallel_size, f"{role.path}.tensor_parallel_size"))
    shape.append(("block_size", rank.block_tokens, f"{path}.block_size"))
    per_token = rank.kv_cache_bytes_per_token
    shape.append(("bytes_per_token", per_token, f"{path}.kv_cache_bytes_per_token"))
    return shape


def _check_durations(role: Role) -> None:
    """Refuse prices that no pass could be charged: durations of 2**64 seconds and more."""
    rank, path = role.rank, f"{role.path}.rank"
    if not isinstance(rank.timing_model, PolynomialTiming | FixedTiming):
        return
    fixed = rank.timing_model if isinstance(rank.timing_model, FixedTiming) else None
    if role.stage != "decode":
        price = _LEAST_PREFILL_MS if fixed is None else fixed.prefill_ms
        _check_duration(path, "prefill_ms", price, rank.speedup_ratio, "speedup_ratio")
    if role.stage != "prefill":
        ratio = rank.speedup_ratio * rank.decode_speedup_ratio
        if math.isinf(ratio):
            expected = "a finite product with speedup_ratio"
            refuse(f"{path}.decode_speedup_ratio", rank.decode_speedup_ratio, expected)
        price = _LEAST_DECODE_MS if fixed is None else fixed.decode_ms
        _check_duration(path, "decode_ms", price, ratio, "decode_speedup_ratio")


def _check_duration(path: str, name: str, price_ms: float, ratio: float, ratio_name: str) -> None:
    seconds = price_ms / 1000.0
    if seconds >= _MAX_DURATION_S:
        refuse(f"{path}.timing_model.{name}", price_ms, "less than 2**64 seconds")
    if ratio > 0.0 and seconds >= _LEAST_SCALED_S and seconds >= _MAX_DURATION_S * ratio:
        refuse(f"{path}.{ratio_name}", ratio, "a ratio that leaves passes below 2**64 seconds")


def _check_handoff(spec: ReplaySpec, roles: tuple[Role, ...]) -> None:
    """Refuse a transfer of the longest prompt that would take an infinite time."""
    role = roles[0]
    bandwidth, per_token = role.rank.kv_transfer_bandwidth, role.rank.kv_transfer_bytes_per_token
    if role.stage != "prefill" or not bandwidth or per_token is None:
        return
    tokens = max((request.input_tokens for request in spec.requests), default=1)
    if not math.isfinite(transfer_ms(float(tokens) * float(per_token), bandwidth)):
        where = f"{role.path}.rank.kv_transfer_bandwidth"
        refuse(where, bandwidth, "a bandwidth that moves every prompt in a finite time")


# --- what is built --------------------------------------------------------------------------------

_BUILT_SPEC: dict[str, tuple[Any, ...]] = {
    "topology": (AggregatedTopology, DisaggregatedTopology),
    "encoder": (None,),
    "adapters.placement.provider": ("round_robin",),
    "adapters.scaling.provider": ("none",),
}
_BUILT_PAYLOAD: dict[str, tuple[Any, ...]] = {
    "capture_performance_diagnostics": (False,),
}
_BUILT_RANK: dict[str, tuple[Any, ...]] = {
    "backend": ("vllm", "sglang", "trtllm"),
    "aic_nextn": (None,),
    "native_host_offload": (None,),
    "g3_offload": (None,),
    "kvcr": (None,),
    "state_cache": (None,),
    "kv_cache_groups": ((),),
    "frontend": (None,),
    "sglang.host_loop": (False,),
    "vision": (False,),
}
"""Fields with the values, or the descriptor types, that are built; other fields are built whole."""


def check_supported(payload: Payload) -> None:
    """Refuse what vecsim cannot simulate yet. Raises NotSupportedYetError naming the field."""
    _check_built("", payload.spec, _BUILT_SPEC)
    _check_built("", payload, _BUILT_PAYLOAD)
    for role in resolve(payload.spec):
        _check_built(f"{role.path}.rank.", role.rank, _BUILT_RANK)
    _check_fleet_size(payload.spec)


def _check_fleet_size(spec: ReplaySpec) -> None:
    """Every rank has its own columns, so that a fleet is bounded by memory."""
    for role in resolve(spec):
        name = "workers" if role.stage == "aggregated" else role.stage
        workers = getattr(spec.topology, name).initial_workers
        if role.dp_size > MAX_RANKS:
            refuse(f"{role.path}.dp_size", role.dp_size, f"at most {MAX_RANKS} ranks in a pool")
        if workers * role.dp_size > MAX_RANKS:
            expected = f"at most {MAX_RANKS} ranks in a pool (workers x dp_size)"
            refuse(f"topology.{name}.initial_workers", workers, expected)


def _check_built(prefix: str, struct: Any, built: dict[str, tuple[Any, ...]]) -> None:
    for path, values in built.items():
        holder, _, name = path.rpartition(".")
        owner = struct
        for part in holder.split(".") if holder else ():
            owner = getattr(owner, part)
        if owner is None:
            continue
        value = getattr(owner, name)
        if not any(_is(value, built_value) for built_value in values):
            raise NotSupportedYetError(prefix + path, _shown(value))


def _is(value: Any, built: Any) -> bool:
    if isinstance(built, type):
        return isinstance(value, built)
    return bool(type(value) is type(built) and value == built)


def _shown(value: Any) -> str:
    """A scalar as it is, a tagged descriptor as its tag; nothing for what would be long."""
    if isinstance(value, str | int | float):
        return str(value)
    return str(getattr(getattr(value, "__struct_config__", None), "tag", None) or "")
