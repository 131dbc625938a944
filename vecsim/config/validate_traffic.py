"""What the `traffic` of a payload must satisfy before a file is opened or a request is made."""

from __future__ import annotations

from vecsim.config.checks import (
    finite_positive,
    known,
    optional_finite_positive,
    optional_positive,
    present,
    refuse,
)
from vecsim.config.roles import Role
from vecsim.config.schema import Traffic

SOURCE_TYPES = ("trace", "synthetic", "synthetic-session")
SYNTHETIC_LOADS = ("concurrency", "poisson", "constant_rate", "kv_capacity_fraction")
TRACE_FORMATS = (
    "mooncake",
    "mooncake-delta",
    "applied_compute_agentic",
    "agentic_mooncake",
    "dynamo",
    "weka",
)
_AGENTIC_FORMATS = ("agentic_mooncake", "weka")
_LANED_FORMATS = (*_AGENTIC_FORMATS, "dynamo")
_MANY_FILES = ("dynamo",)


def check_traffic(traffic: Traffic, roles: tuple[Role, ...]) -> None:
    """Raises InputError naming the field of `traffic` that is wrong."""
    known("traffic.source_type", traffic.source_type, SOURCE_TYPES)
    if traffic.source_type == "trace":
        _check_trace(traffic, roles)
    else:
        _check_synthetic(traffic)


def _check_trace(traffic: Traffic, roles: tuple[Role, ...]) -> None:
    trace_format = traffic.trace_format or "mooncake"
    known("traffic.trace_format", trace_format, TRACE_FORMATS)
    if not traffic.trace_paths:
        present("traffic.trace_path", traffic.trace_path, "the path of a trace file")
    elif len(traffic.trace_paths) > 1 and trace_format not in _MANY_FILES:
        refuse("traffic.trace_paths", traffic.trace_paths, f"one path for {trace_format}")
    optional_positive("traffic.trace_block_size", traffic.trace_block_size)
    optional_finite_positive("traffic.arrival_speedup_ratio", traffic.arrival_speedup_ratio)
    optional_positive("traffic.replay_concurrency", traffic.replay_concurrency)
    optional_positive("traffic.agentic_lanes", traffic.agentic_lanes)
    if trace_format not in _LANED_FORMATS and traffic.agentic_lanes is not None:
        refuse("traffic.agentic_lanes", traffic.agentic_lanes, f"nothing for {trace_format}")
    basis = traffic.weka_nested_timestamp_basis
    if trace_format != "weka" and basis is not None:
        refuse("traffic.weka_nested_timestamp_basis", basis, f"nothing for {trace_format}")
    if trace_format in _AGENTIC_FORMATS:
        _check_agentic(traffic, trace_format, roles)


def _check_agentic(traffic: Traffic, trace_format: str, roles: tuple[Role, ...]) -> None:
    if not traffic.execution_model:
        refuse("traffic.execution_model", traffic.execution_model, "the name of the target model")
    if traffic.load_type != "trace_timestamps":
        refuse("traffic.load_type", traffic.load_type, f"'trace_timestamps' for {trace_format}")
    for name in ("replay_concurrency", "max_sim_time_ms"):
        value = getattr(traffic, name)
        if value is not None:
            refuse(f"traffic.{name}", value, f"nothing for {trace_format}")
    for role in roles:
        if role.backend == "trtllm":
            refuse(f"{role.path}.rank.backend", "trtllm", f"vllm or sglang for {trace_format}")


def _check_synthetic(traffic: Traffic) -> None:
    load = traffic.load_type or "concurrency"
    known("traffic.load_type", load, SYNTHETIC_LOADS)
    present("traffic.isl", traffic.isl, "input tokens per request")
    present("traffic.osl", traffic.osl, "output tokens per request")
    optional_positive("traffic.request_count", traffic.request_count)
    if traffic.request_count is None:
        ratio = traffic.num_request_ratio
        present("traffic.request_count", ratio, "a number of requests, or num_request_ratio")
        finite_positive("traffic.num_request_ratio", ratio)
    optional_finite_positive("traffic.request_rate", traffic.request_rate)
    optional_finite_positive("traffic.arrival_interval_ms", traffic.arrival_interval_ms)
    if load == "poisson":
        present("traffic.request_rate", traffic.request_rate, "a rate of poisson arrivals")
    if load == "constant_rate" and traffic.arrival_interval_ms is None:
        present("traffic.request_rate", traffic.request_rate, "a rate, or arrival_interval_ms")
    if load == "kv_capacity_fraction":
        present("traffic.kv_load_ratio", traffic.kv_load_ratio, "a share of the KV capacity")
        finite_positive("traffic.kv_load_ratio", traffic.kv_load_ratio)
    optional_positive("traffic.concurrency", traffic.concurrency)
    if traffic.source_type == "synthetic-session":
        optional_positive("traffic.turns_per_session", traffic.turns_per_session)
    _check_prefixes(traffic)


def _check_prefixes(traffic: Traffic) -> None:
    share = traffic.shared_prefix_ratio
    if share is not None and not 0.0 <= share <= 1.0:
        refuse("traffic.shared_prefix_ratio", share, "a number from 0 to 1")
    if (traffic.cached_prefix_tokens or 0) > traffic.isl:
        expected = f"at most isl ({traffic.isl}) tokens"
        refuse("traffic.cached_prefix_tokens", traffic.cached_prefix_tokens, expected)
