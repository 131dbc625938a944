"""How many KV blocks a GPU holds beside a model (timing providers, section 5).

The rules, and the constants in them, are the reference's, byte for byte.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from vecsim.errors import InputError
from vecsim.timing.machine.hardware import BYTES, Gpu, Model
from vecsim.timing.machine.roofline import Parallel

DEFAULT_FRACTIONS = {
    "vllm": ("gpu_memory_utilization", 0.9),
    "trtllm": ("free_gpu_memory_fraction", 0.9),
    "sglang": ("mem_fraction_static", 0.88),
}
"""The memory fraction of each backend, and what it is when not given."""

_COLLECTIVES = {1: 0, 2: 358_612_992, 4: 411_041_792}  # buffers by tensor-parallel size, 4 and more
_ACTIVATIONS = {
    # bytes of activation per token and unit of width, by tensor-parallel size 1, 2, 4, 8
    "vllm": {"large": (22, 13, 10, 10), "llama": (11, 6.5, 5, 5), "other": (10, 6, 5, 5)},
    "sglang": {
        "large": (28, 17, 13, 13),
        "llama": (14, 8.5, 6.5, 6.5),
        "other": (13, 8, 6.5, 6.5),
    },
}
_LEAST_ACTIVATIONS = {"vllm": 70 * 2**20, "sglang": 90 * 2**20}
_SGLANG_ACTIVATIONS, _SGLANG_RESERVED = 1.15, 1.2
_VOCABULARY_BYTES = 2.0  # embedding and head stay in BF16, as does the router


@dataclass(frozen=True)
class KvCapacity:
    """An estimate of one rank's KV cache; bytes, unless the name says otherwise.

    Attributes:
        weights, activations, reserved, collectives, cuda_graphs: what is taken from the GPU.
        memory_fraction: the fraction the backend is given.
        kv_bytes_per_token: KV of one token on this rank.
        budget: bytes left for KV.
        tokens: tokens that fit.
        num_gpu_blocks: whole blocks of block_size tokens among them.
        block_size: tokens of a block.
        source: who estimated.
    """

    weights: int
    activations: int
    reserved: int
    collectives: int
    cuda_graphs: int
    memory_fraction: float
    kv_bytes_per_token: float
    budget: float
    tokens: int
    num_gpu_blocks: int
    block_size: int
    source: str = "vecsim"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def estimate(
    model: Model,
    gpu: Gpu,
    parallel: Parallel,
    *,
    backend: str,
    block_size: int,
    max_num_tokens: int,
    memory_fraction: float | None = None,
    cuda_graphs: int = 0,
    where: str = "num_gpu_blocks",
) -> KvCapacity:
    """The KV blocks of one rank.

    Args:
        model, gpu, parallel: the deployment.
        backend: "vllm", "trtllm" or "sglang".
        block_size: tokens of a block.
        max_num_tokens: tokens of the largest pass.
        memory_fraction: None = the backend's default.
        cuda_graphs: bytes set aside for them.
        where: field that errors name.

    Raises:
        InputError: nothing is left for KV.
    """
    sglang = backend == "sglang"
    fraction = DEFAULT_FRACTIONS[backend][1] if memory_fraction is None else memory_fraction
    weights = weight_bytes(model, parallel, backend)
    activations = _activation_bytes(model, parallel, backend, max_num_tokens)
    reserved = gpu.reserved_bytes * (_SGLANG_RESERVED if sglang else 1.0)
    collectives = _COLLECTIVES[min(_power_below(parallel.tp), 4)]
    if sglang:
        budget = (gpu.memory_bytes - reserved - collectives) * fraction - (weights + cuda_graphs)
    else:
        taken = weights + activations + reserved + collectives + cuda_graphs
        free = backend == "trtllm"
        budget = (
            (gpu.memory_bytes - taken) * fraction if free else gpu.memory_bytes * fraction - taken
        )
    tokens = _tokens(model, parallel, budget) if budget > 0 else 0
    if tokens < block_size:
        expected = (
            f"a GPU with room for {model.name}: of {gpu.memory_bytes / 2**30:.1f} GiB,"
            f" {weights / 2**30:.1f} are weights and {activations / 2**30:.1f} activations"
        )
        raise InputError(where, gpu.name, expected)
    return KvCapacity(
        weights=int(weights),
        activations=int(activations),
        reserved=int(reserved),
        collectives=collectives,
        cuda_graphs=cuda_graphs,
        memory_fraction=fraction,
        kv_bytes_per_token=kv_bytes_per_token(model, parallel),
        budget=budget,
        tokens=tokens,
        num_gpu_blocks=tokens // block_size,
        block_size=block_size,
    )


def kv_bytes_per_token(model: Model, parallel: Parallel) -> float:
    """KV bytes of one token on one rank, if all layers keep it."""
    kept = BYTES[model.kv_dtype]
    index = model.index_layers * model.index_bytes
    if model.kind == "mla":
        return model.attention_layers * (model.kv_lora_rank + model.rope_dim) * kept + index
    heads = math.ceil(model.kv_heads / parallel.tp)
    return 2 * heads * model.head_dim * model.attention_layers * kept + index


def _tokens(model: Model, parallel: Parallel, budget: float) -> int:
    """Tokens of one sequence that fit: windowed layers keep their last tokens only."""
    every = kv_bytes_per_token(model, parallel)
    windowed = every * model.window_layers / model.attention_layers
    if not windowed or windowed == every:
        return int(budget / every)
    return int((budget - model.window * windowed) / (every - windowed))


def weight_bytes(model: Model, parallel: Parallel, backend: str) -> float:
    """Bytes of one rank's weights; norms, biases and scales are not counted."""
    m, p = model, parallel
    b, b_a, b_e = (BYTES[t] for t in (m.weight_dtype, m.attention_dtype, m.expert_dtype))
    vocabulary = _VOCABULARY_BYTES * m.vocab * m.hidden
    router = _VOCABULARY_BYTES * m.hidden * m.experts
    experts = b_e * m.experts / p.moe_ep * 3 * m.hidden * m.moe_ffn / p.moe_tp
    ffn = b * 3 * m.hidden * m.ffn / p.tp
    shared = b * 3 * m.hidden * m.moe_ffn * m.shared_experts / p.tp
    if m.kind == "mla":
        # The reference takes all layers for MoE layers, except on SGLang.
        dense = m.dense_layers if backend == "sglang" or not m.experts else 0
        layers = m.attention_layers * b_a * _latent_attention(m, p)
        layers += m.linear_layers * b * m.linear_params / p.tp
        layers += dense * ffn + (m.layers - dense) * (shared + router + experts)
        embedding = vocabulary / p.tp if backend == "sglang" else vocabulary
        return layers + embedding + vocabulary / p.tp
    kv_heads = math.ceil(m.kv_heads / p.tp)
    queries = m.heads / p.tp * (1.5 if m.attention_gate else 1.0)
    attention = b_a * 2 * m.hidden * m.head_dim * (queries + kv_heads)
    layers = m.attention_layers * attention + m.linear_layers * b * m.linear_params / p.tp
    layers += m.dense_layers * ffn
    if m.kind == "moe":
        return layers + m.moe_layers * (router + experts + shared) + vocabulary / p.tp
    return layers + 2 * vocabulary / p.tp


def _latent_attention(m: Model, p: Parallel) -> float:
    """Weights of one latent-attention layer on one rank."""
    key = m.nope_dim + m.rope_dim
    cut = m.kv_lora_rank * m.heads * (m.nope_dim + m.v_dim) + m.heads * m.v_dim * m.hidden
    cut += (m.q_lora_rank or m.hidden) * m.heads * key
    index = m.index_heads * m.index_dim * (m.q_lora_rank or m.hidden) + m.index_dim * m.hidden
    whole = m.hidden * (m.kv_lora_rank + m.rope_dim) + m.hidden * m.q_lora_rank
    # An indexer is held whole by each rank; layers that share one have none.
    return whole + cut / p.tp + index * m.index_layers / m.layers


def _activation_bytes(model: Model, parallel: Parallel, backend: str, tokens: int) -> float:
    kind = "sglang" if backend == "sglang" else "vllm"
    family = "llama" if model.family in ("llama", "qwen") else "other"
    coefficients = _ACTIVATIONS[kind]["large" if model.kind != "dense" else family]
    coefficient = coefficients[min(int(math.log2(parallel.tp)), 3)]
    width = model.hidden if model.kind == "mla" else model.heads * model.head_dim
    needed = 2 * tokens * width * coefficient
    if model.kind == "mla" and model.experts:
        chosen = model.experts * model.experts_per_token / parallel.moe_ep / 128
        needed += tokens * model.hidden * parallel.attention_dp * chosen * 4
    needed = max(_LEAST_ACTIVATIONS[kind], needed)
    return needed * _SGLANG_ACTIVATIONS if backend == "sglang" else needed


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)
