"""What one resolved role must satisfy, in the order in which the reference looks."""

from __future__ import annotations

import math
import re

from vecsim.config.checks import (
    finite_positive,
    non_negative,
    optional_positive,
    positive,
    present,
    refuse,
)
from vecsim.config.defaults import AUTO
from vecsim.config.diagnostics import MAX_UINT64
from vecsim.config.roles import Role
from vecsim.config.schema import (
    FixedTiming,
    KvCacheGroup,
    PolynomialTiming,
    PythonTiming,
    RankConfig,
    RooflineTiming,
)

MAX_PAGE_BYTES = 2**53
MAX_DRAFT_TOKENS = 5

_FLOAT = re.compile(
    r"[-+]?(inf|infinity|nan|(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)", re.ASCII | re.IGNORECASE
)


def check_role(role: Role) -> None:
    """Check the sizes of a role, then its rank. Raises InputError."""
    positive(f"{role.path}.dp_size", role.dp_size)
    positive(f"{role.path}.tensor_parallel_size", role.tensor_parallel_size)
    positive(f"{role.path}.prefill_context_parallel_size", role.prefill_context_parallel_size)
    path = f"{role.path}.rank"
    rank = role.rank
    _check_pool(path, rank)
    _check_cadence(path, rank)
    _check_frontend(path, rank)
    optional_positive(f"{path}.max_model_len", rank.max_model_len)
    non_negative(f"{path}.speedup_ratio", rank.speedup_ratio)
    non_negative(f"{path}.decode_speedup_ratio", rank.decode_speedup_ratio)
    _check_drafts(path, rank)
    _check_sglang(path, rank, role.dp_size)
    if rank.emit_kv_token_ids and not rank.emit_kv_events:
        refuse(f"{path}.emit_kv_token_ids", True, "false in a replay that records no KV events")
    optional_positive(f"{path}.kv_transfer_bytes_per_token", rank.kv_transfer_bytes_per_token)
    optional_positive(f"{path}.kv_cache_bytes_per_token", rank.kv_cache_bytes_per_token)
    _check_groups(path, rank)
    _check_g3(path, rank)
    _check_kvcr(path, rank)
    _check_host(path, rank)
    _check_transfer(path, rank)
    if isinstance(rank.timing_model, FixedTiming):
        non_negative(f"{path}.timing_model.prefill_ms", rank.timing_model.prefill_ms)
        non_negative(f"{path}.timing_model.decode_ms", rank.timing_model.decode_ms)


def _check_pool(path: str, rank: RankConfig) -> None:
    if rank.num_gpu_blocks != AUTO:
        positive(f"{path}.num_gpu_blocks", rank.num_gpu_blocks)
    elif isinstance(rank.timing_model, PolynomialTiming | FixedTiming | PythonTiming):
        expected = "a number of blocks: the timing model names no GPU and no model"
        refuse(f"{path}.num_gpu_blocks", AUTO, expected)
    least = 1 if rank.backend == "sglang" else 2
    if rank.block_tokens < least:
        refuse(f"{path}.block_size", rank.block_size, f"at least {least} for {rank.backend}")
    optional_positive(f"{path}.max_num_seqs", rank.max_num_seqs)
    optional_positive(f"{path}.max_num_batched_tokens", rank.max_num_batched_tokens)


def _check_cadence(path: str, rank: RankConfig) -> None:
    where = f"{path}.prefill_schedule_interval"
    positive(where, rank.prefill_schedule_interval)
    if rank.prefill_schedule_interval != 1 and rank.backend != "vllm":
        refuse(where, rank.prefill_schedule_interval, f"1, as the backend is {rank.backend}")
    if rank.prefill_decode_interval != 0 and rank.backend != "sglang":
        where = f"{path}.prefill_decode_interval"
        refuse(where, rank.prefill_decode_interval, f"0, as the backend is {rank.backend}")


def _check_frontend(path: str, rank: RankConfig) -> None:
    """SGLang's host loop, request frontend and vision encoder."""
    if rank.sglang.host_loop:
        _only_sglang_before_decode(f"{path}.sglang.host_loop", rank)
    if rank.frontend is not None:
        if rank.backend != "sglang" or not rank.sglang.host_loop:
            refuse(f"{path}.frontend", "stages", "none without sglang.host_loop on an sglang rank")
        if not rank.frontend.stages:
            refuse(f"{path}.frontend.stages", [], "at least one stage")
        for index, stage in enumerate(rank.frontend.stages):
            where = f"{path}.frontend.stages[{index}]"
            positive(f"{where}.workers", stage.workers)
            non_negative(f"{where}.service_ms", stage.service_ms)
            scale = stage.concurrency_scale
            if scale and len(scale) != stage.workers:
                expected = f"{stage.workers} entries, one for each worker"
                refuse(f"{where}.concurrency_scale", list(scale), expected)
            for position, factor in enumerate(scale):
                finite_positive(f"{where}.concurrency_scale[{position}]", factor)
    if rank.vision:
        _only_sglang_before_decode(f"{path}.vision", rank)


def _only_sglang_before_decode(where: str, rank: RankConfig) -> None:
    if rank.backend != "sglang":
        refuse(where, True, f"false, as the backend is {rank.backend}")
    if rank.worker_type == "decode":
        refuse(where, True, "false on a decode worker")


def _check_drafts(path: str, rank: RankConfig) -> None:
    """Multi-token prediction."""
    where = f"{path}.aic_nextn_accept_rates"
    if rank.aic_nextn is None:
        if rank.aic_nextn_accept_rates is not None:
            refuse(where, rank.aic_nextn_accept_rates, "nothing without aic_nextn")
        return
    if not 1 <= rank.aic_nextn <= MAX_DRAFT_TOKENS:
        refuse(f"{path}.aic_nextn", rank.aic_nextn, f"an integer from 1 to {MAX_DRAFT_TOKENS}")
    rates = []
    text = (rank.aic_nextn_accept_rates or "").strip()
    for part in text.split(",") if text else ():
        if not _FLOAT.fullmatch(part.strip()):
            refuse(where, rank.aic_nextn_accept_rates, "numbers separated by commas")
        rates.append(float(part))
    for rate in rates:
        if not 0.0 <= rate <= 1.0:
            refuse(where, rank.aic_nextn_accept_rates, "rates from 0 to 1")
    if rank.decode_speedup_ratio != 1.0:
        refuse(f"{path}.decode_speedup_ratio", rank.decode_speedup_ratio, "1.0 beside aic_nextn")


def _check_sglang(path: str, rank: RankConfig, dp_size: int) -> None:
    if rank.backend != "sglang":
        return
    if not rank.enable_chunked_prefill:
        refuse(f"{path}.enable_chunked_prefill", False, "true, as the backend is sglang")
    sglang = rank.sglang
    positive(f"{path}.sglang.max_prefill_tokens", sglang.max_prefill_tokens)
    positive(f"{path}.sglang.chunked_prefill_size", sglang.chunked_prefill_size)
    non_negative(f"{path}.sglang.schedule_conservativeness", sglang.schedule_conservativeness)
    if sglang.chunked_prefill_size % rank.block_tokens:
        expected = f"a multiple of block_size ({rank.block_tokens})"
        refuse(f"{path}.sglang.chunked_prefill_size", sglang.chunked_prefill_size, expected)
    if sglang.chunked_prefill_size < dp_size:
        expected = f"at least dp_size ({dp_size}): the ranks of a group share it"
        refuse(f"{path}.sglang.chunked_prefill_size", sglang.chunked_prefill_size, expected)


# --- cache groups and tiers -----------------------------------------------------------------------


def _check_groups(path: str, rank: RankConfig) -> None:
    where = f"{path}.kv_cache_groups"
    capacity = rank.kv_cache_capacity_bytes
    if not rank.kv_cache_groups:
        if capacity is not None:
            refuse(f"{path}.kv_cache_capacity_bytes", capacity, "nothing without kv_cache_groups")
        return
    names = [group.name for group in rank.kv_cache_groups]
    if rank.backend != "vllm" or rank.worker_type != "aggregated":
        refuse(where, names, "none but on an aggregated vllm worker")
    if rank.enable_prefix_caching:
        refuse(f"{path}.enable_prefix_caching", True, "false beside kv_cache_groups")
    if rank.native_host_offload is not None or rank.g3_offload is not None:
        refuse(where, names, "none beside native_host_offload or g3_offload")
    if rank.aic_nextn is not None:
        refuse(f"{path}.aic_nextn", rank.aic_nextn, "nothing beside kv_cache_groups")
    if rank.emit_kv_events:
        refuse(f"{path}.emit_kv_events", True, "false beside kv_cache_groups")
    for name in ("kv_cache_bytes_per_token", "kv_transfer_bytes_per_token"):
        if getattr(rank, name) is not None:
            refuse(f"{path}.{name}", getattr(rank, name), "nothing beside kv_cache_groups")
    expected = "an integer from 1 to 2**53 (bytes)"
    present(f"{path}.kv_cache_capacity_bytes", capacity, expected)
    if not 0 < capacity <= MAX_PAGE_BYTES:
        refuse(f"{path}.kv_cache_capacity_bytes", capacity, expected)
    for index, group in enumerate(rank.kv_cache_groups):
        _check_group(f"{where}[{index}]", group)
        if group.name in names[:index]:
            refuse(f"{where}[{index}].name", group.name, "a name that no other group has")


def _check_group(where: str, group: KvCacheGroup) -> None:
    if not group.name.strip():
        refuse(f"{where}.name", group.name, "a name")
    positive(f"{where}.num_layers", group.num_layers)
    positive(f"{where}.block_size_tokens", group.block_size_tokens)
    if not 0 < group.page_size_bytes <= MAX_PAGE_BYTES:
        refuse(f"{where}.page_size_bytes", group.page_size_bytes, "an integer from 1 to 2**53")
    optional_positive(f"{where}.sliding_window", group.sliding_window)
    if group.kind == "convolution":
        present(f"{where}.sliding_window", group.sliding_window, "a window of a convolution group")


def _check_g3(path: str, rank: RankConfig) -> None:
    if rank.g3_offload is None:
        return
    where = f"{path}.g3_offload"
    positive(f"{where}.num_g3_blocks", rank.g3_offload.num_g3_blocks)
    for name in (
        "latency_to_first_byte_ms",
        "read_bandwidth_gbps",
        "write_bandwidth_gbps",
        "shared_read_bandwidth_gbps",
        "shared_write_bandwidth_gbps",
    ):
        non_negative(f"{where}.{name}", getattr(rank.g3_offload, name))
    present(f"{path}.native_host_offload", rank.native_host_offload, "a host tier above g3_offload")


def _check_kvcr(path: str, rank: RankConfig) -> None:
    if rank.kvcr is None:
        return
    where = f"{path}.kvcr"
    non_negative(f"{where}.latency_to_first_byte_ms", rank.kvcr.latency_to_first_byte_ms)
    non_negative(f"{where}.bandwidth_gbps", rank.kvcr.bandwidth_gbps)
    host = rank.native_host_offload
    present(f"{path}.native_host_offload", host, "a host tier below kvcr")
    if host.scope != "dp_rank_local":
        refuse(f"{path}.native_host_offload.scope", host.scope, "'dp_rank_local' beside kvcr")
    if rank.g3_offload is not None:
        refuse(where, "kvcr", "nothing beside g3_offload")
    if rank.worker_type == "decode":
        refuse(where, "kvcr", "nothing on a decode worker")


def _check_host(path: str, rank: RankConfig) -> None:
    host = rank.native_host_offload
    if host is None:
        return
    where = f"{path}.native_host_offload"
    positive(f"{where}.num_host_blocks", host.num_host_blocks)
    rates = ["d2h_bandwidth_gbps", "h2d_bandwidth_gbps"]
    shared = ["shared_d2h_bandwidth_gbps", "shared_h2d_bandwidth_gbps"]
    for name in (*rates, *shared, "latency_to_first_byte_ms"):
        non_negative(f"{where}.{name}", getattr(host, name))
    if host.scope == "cluster_shared":
        if not (host.kv_layout_id or "").strip():
            refuse(f"{where}.kv_layout_id", host.kv_layout_id, "a name, as the scope is shared")
        rates += shared
    if rank.backend != "vllm":
        refuse(where, "a host tier", f"nothing, as the backend is {rank.backend}")
    if not rank.enable_prefix_caching:
        refuse(f"{path}.enable_prefix_caching", False, "true beside native_host_offload")
    if rank.aic_nextn is not None:
        refuse(f"{path}.aic_nextn", rank.aic_nextn, "nothing beside native_host_offload")
    per_token = rank.kv_cache_bytes_per_token
    present(f"{path}.kv_cache_bytes_per_token", per_token, "the bytes of a token on the host")
    if rank.block_tokens * per_token > MAX_UINT64:
        expected = "a block size in bytes (times block_size) below 2**64"
        refuse(f"{path}.kv_cache_bytes_per_token", per_token, expected)
    capacity = rank.block_tokens * per_token * host.num_host_blocks
    if capacity > MAX_UINT64:
        expected = "a host tier of less than 2**64 bytes"
        refuse(f"{where}.num_host_blocks", host.num_host_blocks, expected)
    for name in rates:
        rate = getattr(host, name)
        if rate > 0.0 and not math.isfinite(transfer_ms(capacity, rate)):
            refuse(f"{where}.{name}", rate, "a bandwidth that moves the tier in a finite time")


def _check_transfer(path: str, rank: RankConfig) -> None:
    bandwidth = rank.kv_transfer_bandwidth
    if bandwidth is None:
        return
    non_negative(f"{path}.kv_transfer_bandwidth", bandwidth)
    known = isinstance(rank.timing_model, RooflineTiming)
    if bandwidth > 0.0 and rank.worker_type == "prefill" and not known:
        where = f"{path}.kv_transfer_bytes_per_token"
        present(where, rank.kv_transfer_bytes_per_token, "bytes beside kv_transfer_bandwidth")


def transfer_ms(size: float, bandwidth: float) -> float:
    """Milliseconds to move `size` bytes at `bandwidth` decimal GB/s (> 0); infinite on overflow."""
    rate = bandwidth * 1e9
    seconds = float(size) / rate if rate > 0.0 else math.inf
    return seconds * 1000.0
