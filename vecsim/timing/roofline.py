"""An analytic price of a pass: work over peak against bytes over bandwidth, operator by operator.

The formulas are those of timing providers, section 6.1; the constants (6.2) were fitted to the
reference's performance database, so that they hold launch gaps and the like. They do not know
tile sizes: measure, or use the database, where a few percent matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vecsim.timing.hardware import BYTES, Gpu, Model


@dataclass(frozen=True)
class Parallel:
    """How a rank's share of a model is cut: tensor parallelism of attention and dense layers, of
    experts, and expert parallelism."""

    tp: int = 1
    moe_tp: int = 1
    moe_ep: int = 1
    attention_dp: int = 1


@dataclass(frozen=True)
class Constants:
    """Fitted constants of a family of models.

    Attributes:
        gemm, gemm8: share of the BF16 and FP8 peak that dense products reach.
        att_p: the same of attention; att_d, att_d8: share of the bandwidth it reads a BF16, FP8 KV
            cache with.
        mem: share of the bandwidth that weights are read with.
        moe_c, moe_m: share of peak and bandwidth of experts.
        net, hop_s: share of the link's bandwidth, and seconds a collective takes at least.
        layer_prefill_s, layer_decode_s: seconds a layer takes at least.
        ewh, ewf: bytes that elementwise operators move, in units of hidden and FFN width.
        q: sharpness of the soft maximum of two times.
    """

    gemm: float
    gemm8: float
    att_p: float
    att_d: float
    att_d8: float
    mem: float
    moe_c: float
    moe_m: float
    net: float
    hop_s: float
    layer_prefill_s: float
    layer_decode_s: float
    ewh: float
    ewf: float
    q: float


CONSTANTS = {
    "dense": Constants(
        0.81, 0.65, 0.62, 0.92, 0.50, 0.70, 1.0, 1.0, 0.63, 0.37e-6, 33e-6, 30e-6, 0.1, 2.8, 2.3
    ),
    "moe": Constants(
        0.25, 0.5, 0.66, 1.0, 0.44, 1.0, 1.0, 1.0, 0.26, 7.1e-6, 94e-6, 85e-6, 0.1, 0.1, 1.0
    ),
    "mla": Constants(
        0.85, 0.2, 0.75, 0.9, 0.6, 0.66, 1.0, 0.91, 0.37, 20e-6, 94e-6, 120e-6, 17.0, 9.0, 8.0
    ),
}


class Roofline:
    """Prices of one rank of a deployment.

    Args:
        model, gpu: facts.
        parallel: how the model is cut.
        constants: fitted constants; None = those of the model's family.
    """

    def __init__(
        self, model: Model, gpu: Gpu, parallel: Parallel, constants: Constants | None = None
    ) -> None:
        self._m = model
        self._p = parallel
        self._c = constants or CONSTANTS[model.kind]
        self._heads = model.heads / parallel.tp
        self._kv_heads = max(model.kv_heads / parallel.tp, 1.0)
        self._bf16 = gpu.bf16_tflops * 1e12
        self._fp8 = gpu.fp8_tflops * 1e12
        self._bandwidth = gpu.hbm_tb_s * 1e12
        self._link = gpu.link_gb_s * 1e9

    def prefill_ms(self, batch: Any, isl: Any, prefix: Any) -> np.ndarray:
        """Price (ms) of a prefill of `batch` requests of isl - prefix new tokens each."""
        batch, isl, prefix = (np.asarray(a, np.float64) for a in (batch, isl, prefix))
        new = isl - prefix
        seconds = self._linear(batch * new, batch, self._c.layer_prefill_s)
        pairs = new * (prefix + (new + 1.0) / 2.0)
        windowed = new * np.minimum(self._m.window, prefix + (new + 1.0) / 2.0)
        read = np.minimum(self._m.window + new, isl)
        per_pair = self._m.rope_dim + self._m.nope_dim + self._m.v_dim
        seconds += self._attention(batch, pairs, isl, windowed, read, per_pair)
        return seconds * 1000.0

    def decode_ms(self, batch: Any, context: Any) -> np.ndarray:
        """Price (ms) of a token for each of `batch` sequences of `context` past tokens."""
        batch, context = (np.asarray(a, np.float64) for a in (batch, context))
        length = context + 1.0
        windowed = np.minimum(self._m.window, length)
        per_pair = 2 * self._m.kv_lora_rank + self._m.rope_dim
        seconds = self._linear(batch, batch, self._c.layer_decode_s)
        seconds += self._attention(batch, length, length, windowed, windowed, per_pair)
        return seconds * 1000.0

    def _soft_max(self, x: Any, y: Any) -> Any:
        return (x**self._c.q + y**self._c.q) ** (1.0 / self._c.q)

    def _peak(self, dtype: str) -> float:
        """Peak of the data type; what is narrower than FP8 is computed in BF16."""
        return self._fp8 if dtype == "fp8" else self._bf16

    def _product(self, params: float, tokens: Any) -> Any:
        """A product with `params` weights of this rank."""
        dtype, c = self._m.weight_dtype, self._c
        share = c.gemm8 if dtype == "fp8" else c.gemm
        return self._soft_max(
            2.0 * params * tokens / (share * self._peak(dtype)),
            params * BYTES[dtype] / (c.mem * self._bandwidth),
        )

    def _linear(self, tokens: Any, logits: Any, layer_s: float) -> Any:
        """Everything but attention itself."""
        m, p, c = self._m, self._p, self._c
        seconds = m.layers * self._product(self._attention_params(), tokens)
        if m.dense_layers:
            ffn = 3.0 * m.hidden * m.ffn / p.tp
            seconds = seconds + m.dense_layers * self._product(ffn, tokens)
        if m.experts:
            seconds = seconds + m.moe_layers * self._experts(tokens)
        head = m.hidden * m.vocab / p.tp
        seconds = seconds + self._soft_max(
            2.0 * logits * head / (c.gemm * self._bf16), head * 2.0 / (c.mem * self._bandwidth)
        )
        wide = (c.ewh * m.hidden + c.ewf * self._elementwise_width()) * 2.0
        seconds = seconds + m.layers * (tokens * wide / (c.mem * self._bandwidth) + layer_s)
        return seconds + self._network(tokens)

    def _attention_params(self) -> float:
        m = self._m
        if m.kind != "mla":
            return 2.0 * m.hidden * m.head_dim * (self._heads + self._kv_heads)
        key = m.nope_dim + m.rope_dim
        query = m.hidden * m.q_lora_rank + m.q_lora_rank * self._heads * key
        if not m.q_lora_rank:
            query = m.hidden * self._heads * key
        latent = m.hidden * (m.kv_lora_rank + m.rope_dim)
        latent += m.kv_lora_rank * self._heads * (m.nope_dim + m.v_dim)
        return query + latent + self._heads * m.v_dim * m.hidden

    def _experts(self, tokens: Any) -> Any:
        m, p, c = self._m, self._p, self._c
        width = 3.0 * m.hidden * m.moe_ffn
        work = 2.0 * tokens * m.experts_per_token * width / (p.moe_ep * p.moe_tp)
        used = 1.0 - (1.0 - m.experts_per_token / m.experts) ** tokens
        read = m.experts / p.moe_ep * used * width / p.moe_tp * BYTES[m.expert_dtype]
        peak = c.moe_c * self._peak(m.expert_dtype)
        seconds = self._soft_max(work / peak, read / (c.moe_m * self._bandwidth))
        if m.shared_experts:
            seconds = seconds + self._product(width * m.shared_experts / p.tp, tokens)
        return seconds + self._product(m.hidden * m.experts, tokens)

    def _elementwise_width(self) -> float:
        m, p = self._m, self._p
        moe = m.experts_per_token / (p.moe_ep * p.moe_tp) + m.shared_experts / p.tp
        ffn = (
            m.dense_layers * 3.0 * m.ffn / p.tp + m.moe_layers * 3.0 * m.moe_ffn * moe
        ) / m.layers
        return ffn + 1.25 * self._heads * m.head_dim

    def _network(self, tokens: Any) -> Any:
        p, c = self._p, self._c
        gpus = max(p.tp, p.moe_ep)
        if gpus == 1:
            return 0.0
        sent = 2.0 * (gpus - 1) / gpus * tokens * self._m.hidden * 2.0
        return 2.0 * self._m.layers * (c.hop_s + sent / (c.net * self._link))

    def _attention(
        self, batch: Any, pairs: Any, length: Any, windowed: Any, read: Any, per_pair: float
    ) -> Any:
        """Attention of all layers: `pairs` of a sequence and the KV `length` that is read, and both
        again as a window limits them; `per_pair`: flops a head and pair, halved, of MLA."""
        m, c = self._m, self._c
        kv_bytes = BYTES[m.kv_dtype]
        if m.kind == "mla":
            work = 2.0 * self._heads * per_pair
            entry = (m.kv_lora_rank + m.rope_dim) * kv_bytes
        else:
            work = 4.0 * self._heads * m.head_dim
            entry = 2.0 * self._kv_heads * m.head_dim * kv_bytes
        peak = c.att_p * self._bf16
        bandwidth = (c.att_d8 if kv_bytes == 1.0 else c.att_d) * self._bandwidth

        def layer(pairs: Any, length: Any) -> Any:
            return self._soft_max(batch * pairs * work / peak, batch * length * entry / bandwidth)

        seconds = (m.layers - m.window_layers) * layer(pairs, length)
        if m.window_layers:
            seconds = seconds + m.window_layers * layer(windowed, read)
        return seconds
