"""An analytic price of a pass: operator by operator, work over peak against bytes over bandwidth.

Each operator is a function below: the work (FLOPs) and the bytes that it moves follow from the
shape of the model, peaks and bandwidths from the data sheet of the GPU, and a `Kernel` says how
near to them kernels of that sort come, and how long they take at least. The kernels' constants
(`vecsim.timing.machine.kernels`) were fitted operator by operator; no constant belongs to a model.
Tile sizes are not modelled: measure, or use the database, where a few percent matter.

Williams, Waterman, Patterson: Roofline, an insightful visual performance model, CACM 52 (4), 2009.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vecsim.timing.machine.hardware import BYTES, Gpu, Model
from vecsim.timing.machine.kernels import LAUNCH_S, STREAMED, Kernels, kernels_of

_BF16 = BYTES["bf16"]
_GROUP_FILL, _TILE_FILL = 128.0, 1e6
"""Tokens of an expert, and outputs of a product, below which kernels leave much of a GPU idle."""


@dataclass(frozen=True)
class Parallel:
    """How a rank's share of a model is cut: tensor parallelism of attention and dense layers, of
    experts, expert parallelism, and ranks that each hold all of attention."""

    tp: int = 1
    moe_tp: int = 1
    moe_ep: int = 1
    attention_dp: int = 1


@dataclass(frozen=True)
class Pass:
    """What is asked for: float64 arrays of one shape.

    Attributes:
        batch: sequences; new: tokens of each to compute; past: tokens of each in the KV cache.
        decoding: whether this is a decode pass: new is 1, and latent attention is absorbed.
    """

    batch: np.ndarray
    new: np.ndarray
    past: np.ndarray
    decoding: bool

    @property
    def tokens(self) -> np.ndarray:
        """Tokens to compute, on this rank."""
        return self.batch * self.new


class Roofline:
    """Prices of one rank of a deployment.

    Args:
        model, gpu: facts.
        parallel: how the model is cut.
        backend: whose kernels: "vllm", "sglang" or "trtllm".
        kernels: other ones.
    """

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        parallel: Parallel,
        backend: str = "vllm",
        kernels: Kernels | None = None,
    ) -> None:
        self._m = model
        self._p = parallel
        self._k = kernels or kernels_of(gpu, backend)
        self._heads = model.heads / parallel.tp
        self._kv_heads = max(model.kv_heads / parallel.tp, 1.0)
        self._gpu = gpu
        self._bf16 = gpu.bf16_tflops * 1e12
        self._bandwidth = gpu.hbm_tb_s * 1e12
        self._link = gpu.link_gb_s * 1e9

    def prefill_ms(self, batch: Any, isl: Any, prefix: Any) -> np.ndarray:
        """Price (ms) of a prefill of `batch` requests of isl - prefix new tokens each."""
        batch, isl, prefix = (np.asarray(a, np.float64) for a in (batch, isl, prefix))
        return self._price(Pass(batch, isl - prefix, prefix, decoding=False))

    def decode_ms(self, batch: Any, context: Any) -> np.ndarray:
        """Price (ms) of a token for each of `batch` sequences of `context` past tokens."""
        batch, context = (np.asarray(a, np.float64) for a in (batch, context))
        return self._price(Pass(batch, np.ones_like(context), context, decoding=True))

    def operators_ms(self, work: Pass) -> dict[str, np.ndarray]:
        """Price (ms) of each sort of operator, over all layers."""
        prices: dict[str, Any] = {}
        for name, seconds in self._operators(work):
            prices[name] = prices.get(name, 0.0) + seconds * 1000.0
        return prices

    def _price(self, work: Pass) -> np.ndarray:
        return sum(seconds for _, seconds in self._operators(work)) * 1000.0

    def _operators(self, work: Pass) -> Iterator[tuple[str, Any]]:
        m = self._m
        tokens = work.tokens
        yield "embedding", self._streamed(2.0 * tokens * m.hidden)
        yield "norms", m.layers * 2.0 * self._streamed(4.0 * tokens * m.hidden)
        attention = m.layers - m.linear_layers
        yield "attention products", attention * self._attention_products(work)
        yield "attention", (attention - m.window_layers) * self._attention(work, None)
        if m.window_layers:
            yield "attention", m.window_layers * self._attention(work, m.window)
        if m.index_heads:
            yield "index", m.index_layers * self._index(work)
        if m.linear_layers:
            yield "linear attention", m.linear_layers * self._linear_attention(work)
        if m.dense_layers:
            yield "ffn", m.dense_layers * self._ffn(tokens, m.ffn, m.weight_dtype)
        if m.moe_layers:
            yield "router", m.moe_layers * self._product(tokens, m.experts, m.hidden, "bf16")
            yield "experts", m.moe_layers * self._experts(tokens * self._p.attention_dp)
            # The shared experts of a decode pass run beside the dispatch.
            if m.shared_experts and not work.decoding:
                width = m.shared_experts * m.moe_ffn
                yield "shared experts", m.moe_layers * self._ffn(tokens, width, m.weight_dtype)
            yield "dispatch", m.moe_layers * self._dispatch(tokens)
        yield "logits", self._product(work.batch, m.vocab / self._p.tp, m.hidden, "bf16")
        yield "all-reduce", (2.0 * m.layers + 1.0) * self._all_reduce(tokens)

    # --- dense work ---

    def _streamed(self, values: Any) -> Any:
        """An elementwise kernel that reads and writes so many BF16 values of a pass."""
        return values * _BF16 / (STREAMED * self._bandwidth) + LAUNCH_S

    def _peak(self, dtype: str) -> float:
        """Peak (FLOP/s) of products whose weights are of a type: that of their activations."""
        return self._gpu.peak_tflops(dtype) * 1e12

    def _product(self, tokens: Any, outputs: Any, inputs: Any, dtype: str) -> Any:
        """A matrix product, tokens x inputs by inputs x outputs, on this rank."""
        moved = inputs * outputs * BYTES[dtype] + tokens * (inputs + outputs) * _BF16
        return self._k.product(dtype).seconds(
            2.0 * tokens * inputs * outputs,
            self._peak(dtype),
            moved,
            self._bandwidth,
            _TILE_FILL / (np.maximum(tokens, 1.0) * outputs),
        )

    def _ffn(self, tokens: Any, width: float, dtype: str) -> Any:
        """A gated feed-forward layer: gate and up, the activation, down."""
        m = self._m
        own = width / self._p.tp
        seconds = self._product(tokens, 2.0 * own, m.hidden, dtype)
        seconds = seconds + self._streamed(3.0 * tokens * own)
        return seconds + self._product(tokens, m.hidden, own, dtype)

    # --- experts ---

    def _experts(self, tokens: Any) -> Any:
        """The routed experts of this rank, for the tokens of all attention-DP ranks: grouped
        products that read an expert as soon as one token has chosen it."""
        m, p = self._m, self._p
        own = m.experts / p.moe_ep
        chosen = tokens * m.experts_per_token / p.moe_ep
        used = own * (1.0 - (1.0 - m.experts_per_token / m.experts) ** tokens)
        width = m.moe_ffn / p.moe_tp
        weights = 3.0 * m.hidden * width
        moved = used * weights * BYTES[m.expert_dtype]
        moved = moved + chosen * (2.0 * m.hidden + 3.0 * width) * _BF16
        kernel = self._k.experts(m.expert_dtype)
        fill = _GROUP_FILL * np.maximum(used, 1e-9) / np.maximum(chosen, 1e-9)
        return kernel.seconds(
            2.0 * chosen * weights, self._peak(m.expert_dtype), moved, self._bandwidth, fill
        )

    # --- attention ---

    def _attention_products(self, work: Pass) -> Any:
        m = self._m
        if m.kind == "mla":
            return self._latent_products(work)
        queries = self._heads * m.head_dim * (2.0 if m.attention_gate else 1.0)
        keys = 2.0 * self._kv_heads * m.head_dim
        dtype = m.weight_dtype
        seconds = self._product(work.tokens, queries + keys, m.hidden, dtype)
        return seconds + self._product(work.tokens, m.hidden, self._heads * m.head_dim, dtype)

    def _latent_products(self, work: Pass) -> Any:
        """Projections of latent attention, down to the latents and up to the heads. A prefill has
        the keys and values of its past made anew; a decode works on the latents themselves."""
        m = self._m
        dtype = m.attention_dtype
        tokens = work.tokens
        latent = m.kv_lora_rank + m.rope_dim
        queries = self._heads * (m.nope_dim + m.rope_dim)
        seconds = self._product(tokens, m.q_lora_rank + latent, m.hidden, dtype)
        seconds = seconds + self._product(tokens, queries, m.q_lora_rank or m.hidden, dtype)
        seconds = seconds + self._product(tokens, m.hidden, self._heads * m.v_dim, dtype)
        if work.decoding:
            for width in (m.nope_dim, m.v_dim):
                up = self._product(tokens, self._heads * width, m.kv_lora_rank, "bf16")
                seconds = seconds + up
        else:
            made = work.batch * (work.past + work.new)
            up = self._product(made, self._heads * (m.nope_dim + m.v_dim), m.kv_lora_rank, dtype)
            seconds = seconds + up
        return seconds * self._k.latent(work.decoding).products

    def _attention(self, work: Pass, window: int | None) -> Any:
        """Attention of one layer, over all tokens before or over a window of the last ones."""
        limit = window if window is not None else self._m.index_topk or None
        pairs = work.past + (work.new + 1.0) / 2.0
        read = work.past + work.new
        if limit is not None:
            pairs = np.minimum(pairs, limit)
            read = np.minimum(read, limit if window is None else limit + work.new - 1.0)
        pairs = work.batch * work.new * pairs
        if self._m.kind == "mla":
            return self._latent_attention(work, pairs, work.batch * read)
        return self._grouped_attention(work, pairs, work.batch * read)

    def _grouped_attention(self, work: Pass, pairs: Any, read: Any) -> Any:
        m = self._m
        kv = BYTES[m.kv_dtype]
        kernel = self._k.attention(work.decoding, narrow=kv < _BF16)
        moved = read * 2.0 * self._kv_heads * m.head_dim * kv
        moved = moved + 2.0 * work.tokens * self._heads * m.head_dim * _BF16
        flops = 4.0 * pairs * self._heads * m.head_dim
        seconds = kernel.seconds(flops, self._bf16, moved, self._bandwidth)
        return seconds + self._query_norm(work.tokens) if m.qk_norm else seconds

    def _query_norm(self, tokens: Any) -> Any:
        """Normalised and rotated queries and keys, by kernels of their own."""
        values = tokens * (self._heads + self._kv_heads) * self._m.head_dim
        return self._k.query_norm.seconds(0.0, self._bf16, values * _BF16, self._bandwidth)

    def _latent_attention(self, work: Pass, pairs: Any, read: Any) -> Any:
        """Latent attention: a decode reads latents once for all heads and works in their width; a
        prefill works in the width of the heads."""
        m = self._m
        wide = m.nope_dim + m.rope_dim + m.v_dim
        if work.decoding:
            wide = 2 * m.kv_lora_rank + m.rope_dim
        kernel = self._k.latent(work.decoding).attention
        moved = read * (m.kv_lora_rank + m.rope_dim) * BYTES[m.kv_dtype]
        return kernel.seconds(2.0 * pairs * self._heads * wide, self._bf16, moved, self._bandwidth)

    def _index(self, work: Pass) -> Any:
        """The indexer of sparse attention: scores of all pairs by small FP8 heads (not cut by
        tensor parallelism), which read their own keys."""
        m = self._m
        pairs = work.batch * work.new * (work.past + (work.new + 1.0) / 2.0)
        kernel = self._k.attention(work.decoding, narrow=True)
        read = work.batch * (work.past + work.new) * m.index_bytes
        flops = 2.0 * pairs * m.index_heads * m.index_dim
        scores = kernel.seconds(flops, self._peak("fp8"), read, self._bandwidth)
        inputs = m.q_lora_rank or m.hidden
        return scores + self._product(
            work.tokens, m.index_heads * m.index_dim, inputs, m.attention_dtype
        )

    def _linear_attention(self, work: Pass) -> Any:
        """A layer with a state instead of a KV cache: projections, and the state read and written
        once for each chunk of 64 tokens."""
        m, p = self._m, self._p
        width = m.linear_params / m.hidden / p.tp
        steps = work.batch * np.ceil(work.new / 64.0)
        state = 2.0 * steps * m.linear_state_bytes / p.tp / _BF16
        return self._product(work.tokens, width, m.hidden, m.weight_dtype) + self._streamed(state)

    # --- between GPUs ---

    def _all_reduce(self, tokens: Any) -> Any:
        """The sum of a layer's output over the tensor-parallel ranks: a ring sends everything
        twice, less its own share (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009)."""
        tp = self._p.tp
        if tp == 1:
            return 0.0
        sent = 2.0 * (tp - 1.0) / tp * tokens * self._m.hidden * _BF16
        return self._k.all_reduce.seconds(sent, self._link)

    def _dispatch(self, tokens: Any) -> Any:
        """Tokens of all attention-DP ranks to the experts, and their sums back."""
        ranks = self._p.attention_dp
        if ranks == 1:
            return 0.0
        sent = (ranks - 1.0) * tokens * self._m.hidden * _BF16
        narrowed = BYTES[self._m.expert_dtype] / _BF16 if self._k.narrow_dispatch else 1.0
        there = self._k.all_gather.seconds(sent * narrowed, self._link)
        return there + self._k.all_gather.seconds(sent, self._link)
