"""Descriptors: what one replay run is asked to do, as typed, immutable structs.

Field names, types and defaults live here and nowhere else. The structs say what parses; which
values make sense together is checked by `vecsim.config.validate`. Times are float milliseconds,
bandwidths are decimal gigabytes per second, sizes are bytes, lengths are tokens, capacities are
blocks.

`vecsim.config.load.load` turns a dict or a JSON or YAML file into a `Payload`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Backend = Literal["vllm", "sglang", "trtllm"]
Stage = Literal["aggregated", "prefill", "decode"]

UInt = Annotated[int, Meta(ge=0)]
"""Unsigned integer of at most 64 bits (the upper bound is checked by `vecsim.config.load`)."""
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]

DEFAULT_BLOCK_TOKENS = {"vllm": 64, "sglang": 1, "trtllm": 32}
"""KV block (page) size in tokens that a backend takes when `block_size` is not given."""


class _Closed(Struct, frozen=True, forbid_unknown_fields=True):
    """A descriptor in which an unknown key is an error."""


class _Open(Struct, frozen=True):
    """A descriptor in which the reference ignores unknown keys: they cause a warning."""


# --- timing models --------------------------------------------------------------------------------


class PolynomialTiming(_Open, tag_field="type", tag="polynomial"):
    """The built-in polynomial price of a prefill and of a decode pass."""


class FixedTiming(_Open, kw_only=True, tag_field="type", tag="fixed"):
    """Constant prices: `prefill_ms` a prefill pass, `decode_ms` a decode pass."""

    prefill_ms: float
    decode_ms: float


class ExternalTiming(_Open, kw_only=True, tag_field="type", tag="external"):
    """Prices from a named provider; `config` is whatever that provider reads."""

    provider: str
    config: Any = None


class AllReduce(_Closed, kw_only=True):
    """All-reduces that a table was measured without: bandwidth of one GPU's link (GB/s, one
    direction) and what each takes at least (us). `layers` and `hidden` (width) are those of the
    model that the table names, unless given."""

    gb_s: float
    latency_us: float = 0.0
    layers: U32 | None = None
    hidden: U32 | None = None


class TableTiming(_Closed, kw_only=True, tag_field="type", tag="table"):
    """Prices interpolated between the points of a Parquet or CSV file (`vecsim.timing.points`).

    `deployment` chooses among several deployments in one file by its columns. Decode batches beyond
    the largest one measured end the run, unless `extrapolate_batch`. `allreduce` adds to each pass
    the exchanges of tensor parallelism, where a table was measured without them.
    """

    path: str
    deployment: dict[str, Any] | None = None
    extrapolate_batch: bool = False
    allreduce: AllReduce | None = None


class AicTiming(_Closed, kw_only=True, tag_field="type", tag="aic"):
    """Prices from the reference's performance database (needs `pip install vecsim[aic]`).

    Also what `config` of the external provider "aic" holds. Names and meanings are the reference's;
    None means its default, for `backend` that of the rank, for `tp` and `attention_dp` the sizes of
    the engine. The memory fields concern the estimate of `num_gpu_blocks` only.
    """

    model: str
    system: str
    backend: Backend | None = None
    backend_version: str | None = None
    tp: U32 | None = None
    pp: U32 | None = None
    attention_dp: U32 | None = None
    moe_tp_size: U32 | None = None
    moe_ep_size: U32 | None = None
    cp_size: U32 | None = None
    dcp: U32 | None = None
    gemm_quant_mode: str | None = None
    moe_quant_mode: str | None = None
    fmha_quant_mode: str | None = None
    kvcache_quant_mode: str | None = None
    comm_quant_mode: str | None = None
    attention_backend: str | None = None
    moe_backend: str | None = None
    moe_kernel_source: str | None = None
    enable_eplb: bool | None = None
    wideep_num_slots: U32 | None = None
    nextn: U32 | None = None
    kv_block_size: UInt | None = None
    worker_type: Stage | None = None
    estimation_mode: str | None = None
    database_mode: str | None = None
    systems_path: str | None = None
    gpu_memory_utilization: float | None = None
    mem_fraction_static: float | None = None
    free_gpu_memory_fraction: float | None = None
    cuda_graph_reserved_bytes: UInt | None = None


_WeightType = Literal[
    "bf16", "fp8", "fp8_block", "nvfp4", "mxfp4", "fp4", "int8", "w8a16", "w4a8", "int4"
]


class RooflineTiming(_Closed, kw_only=True, tag_field="type", tag="roofline"):
    """Prices from an analytic model of the GPU and the model (`vecsim.timing.machine.roofline`).

    `model` is a name of `vecsim.data`'s models.toml, or the path of a Hugging Face config.json;
    `system` is a name of its gpus.toml, or the path of a TOML file of a GPU of one's own. The data
    types default to the model's own; `weight_dtype` is that of all weights, `expert_dtype` that of
    routed experts. `tp` and `attention_dp` default to the engine's sizes; experts are spread over
    all GPUs of a worker unless `moe_tp` or `moe_ep` says otherwise.
    """

    model: str
    system: str
    tp: U32 | None = None
    attention_dp: U32 | None = None
    moe_tp: U32 | None = None
    moe_ep: U32 | None = None
    weight_dtype: _WeightType | None = None
    expert_dtype: _WeightType | None = None
    kv_dtype: Literal["bf16", "fp8"] | None = None
    gpu_memory_utilization: float | None = None
    mem_fraction_static: float | None = None
    free_gpu_memory_fraction: float | None = None
    cuda_graph_reserved_bytes: UInt | None = None


class PythonTiming(_Closed, kw_only=True, tag_field="type", tag="python"):
    """Prices from two Python functions of a module, which is imported, or of a .py file, which is
    run: signatures as of `vecsim.CompiledTiming`.

    `mode` "compile" compiles them with Numba; "tabulate" asks them once at the points of a table,
    whatever they are made of; None compiles where that works.
    """

    module: str
    prefill: str = "prefill"
    decode: str = "decode"
    mode: Literal["compile", "tabulate"] | None = None


TimingModel = (
    PolynomialTiming
    | FixedTiming
    | ExternalTiming
    | TableTiming
    | AicTiming
    | RooflineTiming
    | PythonTiming
)


# --- parts of a rank ------------------------------------------------------------------------------


class SglangConfig(_Closed, kw_only=True):
    """Scheduler controls of an SGLang rank. Token counts, except `vlm_cache_bytes`."""

    schedule_policy: Literal["fifo", "lpm"] = "fifo"
    max_prefill_tokens: UInt = 16384
    chunked_prefill_size: UInt = 8192
    clip_max_new_tokens: UInt = 4096
    schedule_conservativeness: float = 1.0
    vlm_cache_bytes: UInt = 104857600
    host_loop: bool = False


class TrtllmConfig(_Closed, kw_only=True):
    """Scheduler controls of a TensorRT-LLM rank."""

    capacity_scheduler_policy: Literal["guaranteed_no_evict"] = "guaranteed_no_evict"


class HostOffload(_Closed, kw_only=True):
    """Host-memory (G2) cache tier. A bandwidth of zero makes that direction instantaneous."""

    scope: Literal["dp_rank_local", "cluster_shared"] = "dp_rank_local"
    num_host_blocks: UInt
    d2h_bandwidth_gbps: float = 32.0
    h2d_bandwidth_gbps: float = 32.0
    shared_d2h_bandwidth_gbps: float = 80.0
    shared_h2d_bandwidth_gbps: float = 80.0
    latency_to_first_byte_ms: float = 0.0
    kv_layout_id: str | None = None


class G3Offload(_Closed, kw_only=True):
    """Storage (G3) cache tier below the host tier."""

    scope: Literal["worker_local", "cluster_shared"]
    num_g3_blocks: UInt
    latency_to_first_byte_ms: float = 0.1
    read_bandwidth_gbps: float = 10.0
    write_bandwidth_gbps: float = 10.0
    shared_read_bandwidth_gbps: float = 80.0
    shared_write_bandwidth_gbps: float = 80.0


class Kvcr(_Closed, kw_only=True):
    """Pulls of KV blocks out of another worker's host tier."""

    latency_to_first_byte_ms: float = 1.0
    bandwidth_gbps: float = 50.0


class StateCache(_Closed, kw_only=True):
    """Cache of recurrent state: `bytes_per_request` bytes of the KV pool for each request."""

    bytes_per_request: UInt


class KvCacheGroup(_Closed, kw_only=True):
    """One group of layers of a hybrid KV cache; `sliding_window` in tokens."""

    name: str
    kind: Literal["attention", "convolution"]
    num_layers: UInt
    block_size_tokens: UInt
    page_size_bytes: UInt
    sliding_window: UInt | None = None


class FrontendStage(_Closed, kw_only=True):
    """One station of the request frontend: `workers` servers, `service_ms` each.

    `concurrency_scale[k]` multiplies the service time when k + 1 servers are busy; empty: never.
    """

    workers: UInt = 1
    service_ms: float
    concurrency_scale: tuple[float, ...] = ()


class Frontend(_Closed, kw_only=True):
    """Stations that every request passes before an SGLang scheduler sees it."""

    stages: tuple[FrontendStage, ...]


class RankConfig(_Closed, kw_only=True):
    """One scheduler rank: its backend, KV pool, batch limits, timing and cache tiers.

    `block_size` None means the backend's default (`block_tokens`). `max_num_seqs` and
    `max_num_batched_tokens` None mean unlimited. `worker_type` and `emit_kv_events` are overwritten
    when roles are resolved. `num_gpu_blocks` "auto" is estimated from the timing model's GPU and
    model; left out beside external timing it means that too.
    """

    backend: Backend = "vllm"
    num_gpu_blocks: UInt | Literal["auto"] = 16384
    block_size: UInt | None = None
    max_model_len: UInt | None = None
    max_num_seqs: UInt | None = 256
    max_num_batched_tokens: UInt | None = 8192
    prefill_schedule_interval: UInt = 1
    prefill_decode_interval: UInt = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    aic_nextn: UInt | None = None
    aic_nextn_accept_rates: str | None = None
    aic_mtp_seed: UInt = 42
    worker_type: Stage = "aggregated"
    preemption_mode: Literal["lifo", "fifo"] = "lifo"
    emit_kv_events: bool = False
    emit_kv_token_ids: bool = False
    kv_transfer_bytes_per_token: UInt | None = None
    kv_transfer_bandwidth: float | None = None
    kv_transfer_timing_mode: Literal["full_prompt", "destination_missing"] = "full_prompt"
    kv_cache_bytes_per_token: UInt | None = None
    kv_cache_groups: tuple[KvCacheGroup, ...] = ()
    kv_cache_capacity_bytes: UInt | None = None
    native_host_offload: HostOffload | None = None
    g3_offload: G3Offload | None = None
    kvcr: Kvcr | None = None
    state_cache: StateCache | None = None
    prefix_match_unit: UInt | None = None
    timing_model: TimingModel = PolynomialTiming()
    sglang: SglangConfig = SglangConfig()
    trtllm: TrtllmConfig = TrtllmConfig()
    frontend: Frontend | None = None
    vision: bool = False

    @property
    def block_tokens(self) -> int:
        """KV block size in tokens: `block_size`, or the backend's default."""
        if self.block_size is None:
            return DEFAULT_BLOCK_TOKENS[self.backend]
        return self.block_size


# --- engine ---------------------------------------------------------------------------------------


class RoleDescriptor(_Closed, kw_only=True):
    """A worker of one stage: its attention-DP ranks, its GPUs, and what every rank is like."""

    dp_size: U32 = 1
    tensor_parallel_size: U32 = 1
    prefill_context_parallel_size: U32 = 1
    num_gpu_blocks_is_explicit: bool | None = None
    rank: RankConfig = RankConfig()


class EngineDescriptor(RoleDescriptor, kw_only=True):
    """The engine of all workers.

    `prefill` and `decode`, where given, replace the shared role whole: fields are not merged.
    """

    kv_eviction_policy: Literal["lru", "belady"] = "lru"
    prefill: RoleDescriptor | None = None
    decode: RoleDescriptor | None = None


# --- fleet ----------------------------------------------------------------------------------------


class PoolDescriptor(_Open, kw_only=True):
    """A pool of workers.

    `startup_delay_ms` concerns workers added later; the initial ones serve from 0.
    """

    initial_workers: UInt
    startup_delay_ms: float = 0.0


class AggregatedTopology(_Open, kw_only=True, tag_field="kind", tag="aggregated"):
    """One pool whose workers do prefill and decode."""

    workers: PoolDescriptor


class DisaggregatedTopology(_Open, kw_only=True, tag_field="kind", tag="disaggregated"):
    """A prefill and a decode pool.

    `handoff_latency_ms` is the transfer time when no bandwidth is given.
    """

    prefill: PoolDescriptor
    decode: PoolDescriptor
    handoff_latency_ms: float = 0.0


class PlacementAdapter(_Open, kw_only=True):
    """Who decides which worker gets a request."""

    provider: str
    config: Any = None


class ScalingAdapter(_Open, kw_only=True):
    """Who decides how many workers there are."""

    provider: str
    config: Any = None


class Adapters(_Open, kw_only=True):
    """Policies around the engine."""

    placement: PlacementAdapter = PlacementAdapter(provider="round_robin")
    scaling: ScalingAdapter = ScalingAdapter(provider="none")


class Sla(_Open, kw_only=True):
    """Goodput bounds (ms). `e2e_ms` excludes the other two."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None


class EncoderShape(_Open, kw_only=True):
    """Size of one image for the vision encoder."""

    sequences: UInt
    patch_tokens: UInt
    transformer_tokens: UInt
    output_tokens: UInt


class Encoder(_Open, kw_only=True):
    """A pool of vision encoders in front of the language workers."""

    instances: UInt
    max_batch: UInt
    gpus_per_instance: UInt
    images_per_request: UInt
    shape: EncoderShape
    preprocess_ms_per_image: float
    transfer_bytes_per_image: UInt
    transfer_bandwidth_gb_s: float
    timing_model: TimingModel | None = None


# --- requests -------------------------------------------------------------------------------------


class KvHints(_Open, kw_only=True):
    """Where another copy of the request's prefix lives."""

    source_worker: UInt
    source_dp_rank: U32


class ReplayRequest(_Open, kw_only=True):
    """One authored request.

    `input_token_ids`, where given, has `input_tokens` entries. The length of `output_token_ids`,
    where given, replaces `output_tokens`. `dp_rank` pins the attention-DP rank (decode rank when
    disaggregated, prefill rank too unless `prefill_dp_rank` says otherwise).
    """

    id: str
    arrival_time_ms: float
    input_tokens: UInt
    output_tokens: UInt
    input_token_ids: list[U32] | None = None
    output_token_ids: list[U32] | None = None
    dp_rank: U32 | None = None
    prefill_dp_rank: U32 | None = None
    session_id: str | None = None
    turn_index: UInt | None = None
    metadata: Any = None
    kv_hints: KvHints | None = None


class ReplaySpec(_Open, kw_only=True):
    """One replay run: fleet, engine, policies, limits and inline requests.

    `max_sim_time_ms` is a soft cut of virtual time: events at exactly that time still happen.
    `max_in_flight` turns open-loop arrivals into a closed loop of that many requests.
    """

    version: U32 = 1
    topology: AggregatedTopology | DisaggregatedTopology
    engine: EngineDescriptor = EngineDescriptor()
    adapters: Adapters = Adapters()
    max_sim_time_ms: float | None = None
    max_in_flight: UInt | None = None
    record_per_request: bool = True
    sla: Sla = Sla()
    encoder: Encoder | None = None
    requests: list[ReplayRequest]


# --- envelope -------------------------------------------------------------------------------------


class Tokenization(_Closed, kw_only=True):
    """A FIFO pool of `workers` tokenizers in front of admission.

    Service time (ms) of a request: base_ms + per_input_token_ms * input tokens.
    """

    workers: UInt = 1
    base_ms: float = 0.0
    per_input_token_ms: float = 0.0


class Traffic(_Closed, kw_only=True):
    """Where requests come from when they are not inline: a trace file or a generator.

    Of a trace: `trace_path` (or `trace_paths`), `trace_format`, `trace_block_size` (tokens of one
    hash id), `arrival_speedup_ratio` (divides arrival times), `replay_concurrency` (closed loop of
    so many sessions), and for agentic formats `execution_model` and `agentic_lanes`. The other
    fields describe synthetic load: lengths `isl` and `osl` (tokens), `request_rate` per second.
    None means the default of the format or of the generator.
    """

    source_type: str
    load_type: str | None = None
    trace_path: str | None = None
    trace_paths: list[str] | None = None
    trace_format: str | None = None
    trace_block_size: UInt | None = None
    arrival_speedup_ratio: float | None = None
    replay_concurrency: UInt | None = None
    max_sim_time_ms: float | None = None
    execution_model: str | None = None
    agentic_lanes: UInt | None = None
    weka_nested_timestamp_basis: Literal["auto", "absolute", "relative"] | None = None
    isl: UInt | None = None
    osl: UInt | None = None
    request_count: UInt | None = None
    num_request_ratio: float | None = None
    request_rate: float | None = None
    arrival_interval_ms: float | None = None
    arrival_seed: UInt | None = None
    concurrency: UInt | None = None
    kv_load_ratio: float | None = None
    turns_per_session: UInt | None = None
    inter_turn_delay_ms: float | None = None
    shared_prefix_ratio: float | None = None
    num_prefix_groups: UInt | None = None
    cached_prefix_tokens: UInt | None = None


class Payload(_Open, kw_only=True):
    """A spec with what surrounds it. `traffic`, where given, replaces the inline requests; so does
    `workload`, a description of a synthetic workload (`vecsim.synthetic.description`)."""

    spec: ReplaySpec
    traffic: Traffic | None = None
    workload: Any = None
    tokenization: Tokenization | None = None
    determinism: Literal["random", "canonical_v1"] = "random"
    capture_performance_diagnostics: bool = False


ALIASES: dict[type, dict[str, str]] = {
    RankConfig: {"kv_bytes_per_token": "kv_transfer_bytes_per_token"},
    AicTiming: {
        "model_path": "model",
        "tp_size": "tp",
        "pp_size": "pp",
        "attention_dp_size": "attention_dp",
        "gemm_dtype": "gemm_quant_mode",
        "moe_dtype": "moe_quant_mode",
        "fmha_dtype": "fmha_quant_mode",
        "kv_cache_dtype": "kvcache_quant_mode",
        "comm_dtype": "comm_quant_mode",
    },
}
"""Other names under which a field of a struct may be written."""
