"""Models from the config.json files of Hugging Face.

Every key that is known to change memory or time is honoured, or refused by its name. Checkpoints
whose quantisation stands beside it, in hf_quant_config.json, are read with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vecsim.config.documents import parse_json
from vecsim.errors import MISSING, InputError
from vecsim.timing.machine.hardware import Model

_FAMILIES = {"llama": "llama", "qwen": "qwen", "deepseek": "deepseek", "kimi": "deepseek"}


def read_config(path: Path) -> Model:
    """The model of a config.json: dense, mixture of experts, latent, sparse, windowed, chunked or
    linear attention.

    Raises InputError: an unreadable file, a missing or odd key, one that is not modelled.
    """
    tree = _object(path)
    text = tree.get("text_config")
    merged = {**tree, **text} if isinstance(text, dict) else tree
    beside = path.with_name("hf_quant_config.json")
    if "quantization_config" not in merged and beside.is_file():
        merged["quantization_config"] = _object(beside).get("quantization") or {}
    config = _Config(merged, path.name)
    _refuse_unknown_shapes(config)
    hidden = config.number("hidden_size")
    heads = config.number("num_attention_heads")
    kind = f"{tree.get('model_type', '')} {tree.get('architectures', '')}".lower()
    facts: dict[str, Any] = {
        "family": next((v for k, v in _FAMILIES.items() if k in kind), "other"),
        "layers": config.number("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads", default=heads) or heads,
        "head_dim": config.number("head_dim", default=0) or hidden // heads,
        "vocab": config.number("vocab_size"),
        **_expert_facts(config),
        **_latent_facts(config),
        **_index_facts(config),
        **_layer_kinds(config),
        **_attention_flags(config),
        **_data_types(config),
    }
    return Model(name=str(tree.get("_name_or_path") or path), **facts)


def _object(path: Path) -> dict[str, Any]:
    try:
        tree = parse_json(path.read_bytes().decode("utf-8-sig"), path.name)
    except OSError as error:
        raise InputError(str(path), error.strerror, f"a readable {path.name}") from None
    except UnicodeDecodeError:
        raise InputError(str(path), "bytes", "UTF-8 text") from None
    if not isinstance(tree, dict):
        raise InputError(str(path), tree, f"the object of a {path.name}")
    return tree


class _Config:
    """The keys of a config.json."""

    def __init__(self, tree: dict[str, Any], name: str) -> None:
        self.tree = tree
        self.kind = str(tree.get("model_type", "")).lower()
        self.name = name

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of some keys that is there, a whole number of at least 1 (or `default`)."""
        for key in keys:
            value = self.tree.get(key)
            if value is None:
                continue
            least = 1 if default is None else 0
            if type(value) is not int or value < least:
                raise self.odd(key, value, f"a whole number from {least} on")
            return value
        if default is None:
            raise self.odd(keys[0], MISSING, "a whole number from 1 on")
        return default

    def layers(self, key: str) -> list[Any] | None:
        """A list with an entry for each layer, if the key is one; more of them are for layers that
        are no part of the decoder (multi-token prediction)."""
        value = self.tree.get(key)
        if not isinstance(value, list) or not value:
            return None
        count = self.number("num_hidden_layers")
        if len(value) < count:
            raise self.odd(key, f"{len(value)} entries", f"one for each of {count} layers")
        return value[:count]

    def odd(self, key: str, value: Any, expected: str) -> InputError:
        return InputError(f"{self.name}, {key}", value, expected)


# --- what is not modelled -------------------------------------------------------------------------

_OTHER_LAYERS = (
    "hybrid_override_pattern",
    "layers_block_type",
    "attn_layer_period",
    "attn_layer_indices",
    "ssm_cfg",
    "mamba_d_state",
    "state_size",
    "block_configs",
    "cross_attention_layers",
    "compress_ratios",
    "is_encoder_decoder",
    "moe_latent_size",
    "routed_expert_hidden_size",
    "num_kv_shared_layers",
    "index_kpool",
)
"""Keys of state-space, encoder, compressed and other layers, whose memory and time would be wrong;
none of them matters where it is false, zero or empty."""
_SECOND_SHAPES = {
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "global_head_dim": "head_dim",
    "num_global_key_value_heads": "num_key_value_heads",
}
"""Keys that give some layers other heads -> the key of the rest."""


def _refuse_unknown_shapes(config: _Config) -> None:
    for key in _OTHER_LAYERS:
        if config.tree.get(key):
            value = str(config.tree[key])[:40]
            expected = "no such layers: vecsim has no model of them; measure, or use type: aic"
            raise config.odd(key, value, expected)
    for key, usual in _SECOND_SHAPES.items():
        value = config.tree.get(key)
        if value is not None and value != config.tree.get(usual):
            expected = f"{config.tree.get(usual)!r}, as {usual}: layers of one shape"
            raise config.odd(key, value, expected)


# --- experts --------------------------------------------------------------------------------------

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "top_k_experts",
    "moe_k",
    "moe_topk",
)
_SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)


def _expert_facts(config: _Config) -> dict[str, Any]:
    experts = config.number(*_EXPERTS, default=0)
    if not experts or config.tree.get("enable_moe_block") is False:
        return {"ffn": config.number("intermediate_size")}
    moe_ffn = config.number("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    shared = config.number(
        "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0
    )
    width = config.number(*_SHARED_WIDTH, default=0)
    if config.kind.startswith("llama4"):  # has one, and no key that says so
        shared = 1
    return {
        # Llama 4 calls the width of its experts intermediate_size, that of its dense layers _mlp.
        "ffn": config.number("intermediate_size_mlp", "intermediate_size", default=0),
        "experts": experts,
        "experts_per_token": config.number(*_CHOSEN),
        "moe_ffn": moe_ffn,
        "shared_experts": width / moe_ffn if width else shared * 1.0,
        "dense_layers": _dense_layers(config),
    }


def _dense_layers(config: _Config) -> int:
    """Layers without experts, as whichever key says it."""
    count = config.number("num_hidden_layers")
    kinds = config.layers("mlp_layer_types")
    if kinds is not None:
        return sum(str(kind) == "dense" for kind in kinds)
    frequency = config.layers("moe_layer_freq")
    if frequency is not None:
        return sum(not flag for flag in frequency)
    listed = config.tree.get("moe_layers")
    if isinstance(listed, list):
        return count - len(listed)
    first = config.number("first_k_dense_replace", "moe_layer_start_index", default=0)
    step = config.number(
        "interleave_moe_layer_step",
        "decoder_sparse_step",
        "moe_layer_freq",
        "moe_layer_interval",
        default=1,
    )
    plain = config.tree.get("mlp_only_layers") or []
    if config.kind.startswith("deepseek") or "moe_layer_freq" in config.tree:
        sparse = [k for k in range(count) if k >= first and k % max(step, 1) == 0]
    else:
        sparse = [k for k in range(count) if k >= first and (k + 1) % max(step, 1) == 0]
    return count - len([k for k in sparse if k not in plain])


# --- attention ------------------------------------------------------------------------------------


def _latent_facts(config: _Config) -> dict[str, Any]:
    if not config.number("kv_lora_rank", default=0):
        return {}
    facts = {
        "kv_lora_rank": config.number("kv_lora_rank"),
        "q_lora_rank": config.number("q_lora_rank", default=0),
        "rope_dim": config.number("qk_rope_head_dim"),
        "nope_dim": config.number("qk_nope_head_dim"),
        "v_dim": config.number("v_head_dim"),
    }
    return {**facts, "head_dim": facts["rope_dim"] + facts["nope_dim"]}


def _index_facts(config: _Config) -> dict[str, Any]:
    """The indexer of sparse attention. Layers that share one keep no index of their own."""
    if not config.number("index_n_heads", default=0):
        return {}
    kinds = config.layers("indexer_types")
    own = config.number("num_hidden_layers")
    return {
        "index_heads": config.number("index_n_heads"),
        "index_dim": config.number("index_head_dim"),
        "index_topk": config.number("index_topk"),
        "index_layers": own if kinds is None else sum(str(kind) == "full" for kind in kinds),
    }


_PATTERNS = {"gemma2": 2, "gemma3": 6, "cohere2": 4}
"""Of so many layers one attends to everything, where a config.json does not say."""


def _layer_kinds(config: _Config) -> dict[str, Any]:
    """Which layers attend to a window, to a chunk, or have a state instead."""
    count = config.number("num_hidden_layers")
    kinds = config.layers("layer_types")
    if kinds is not None:
        named = [str(kind) for kind in kinds]
        linear = sum("linear" in kind for kind in named)
        sliding = sum("sliding" in kind or "chunked" in kind for kind in named)
        others = {k for k in named if not re.search("full|sliding|chunked|linear|attention", k)}
        if others:
            raise config.odd("layer_types", sorted(others)[0], "attention of a known kind")
    else:
        linear, sliding = _linear_layers(config, count), _windowed_layers(config, count)
    facts: dict[str, Any] = _window(config, sliding)
    if linear:
        facts.update(linear_layers=linear, **_linear_facts(config))
    return facts


def _window(config: _Config, layers: int) -> dict[str, Any]:
    chunk = config.number("attention_chunk_size", default=0) if _is_chunked(config) else 0
    window = chunk or config.number("sliding_window", "sliding_window_size", default=0)
    if not window or not layers or config.tree.get("use_sliding_window") is False:
        return {}
    return {"window": window, "window_layers": layers}


def _is_chunked(config: _Config) -> bool:
    return config.kind.startswith("llama4")


def _windowed_layers(config: _Config, count: int) -> int:
    """Layers with a window or chunk, without layer_types."""
    pattern = config.layers("hybrid_layer_pattern")
    if pattern is not None:
        return sum(bool(flag) for flag in pattern)
    if _is_chunked(config):
        rotated = config.layers("no_rope_layers")  # 1: rotary embeddings, and chunks
        if rotated:
            return sum(bool(flag) for flag in rotated)
        return count - count // config.number("no_rope_layer_interval", default=4)
    usual = next((n for kind, n in _PATTERNS.items() if config.kind.startswith(kind)), 0)
    every = config.number("sliding_window_pattern", "_sliding_window_pattern", default=usual)
    if every:
        return count - count // every
    if config.tree.get("use_sliding_window") and "max_window_layers" in config.tree:
        return count - min(config.number("max_window_layers", default=0), count)
    return count


def _linear_layers(config: _Config, count: int) -> int:
    every = config.number("full_attention_interval", default=0)
    if every:
        return count - count // every
    nested = config.tree.get("linear_attn_config")
    if isinstance(nested, dict):
        return len(nested.get("kda_layers") or []) or count - len(nested["full_attn_layers"])
    return 0


def _linear_facts(config: _Config) -> dict[str, Any]:
    """Weights and state of a gated delta net or of Kimi's delta attention; states are kept in
    FP32, the last inputs of the convolution in BF16."""
    hidden = config.number("hidden_size")
    nested = config.tree.get("linear_attn_config")
    if isinstance(nested, dict):
        inner = _Config(nested, f"{config.name}, linear_attn_config")
        keys = values = inner.number("num_heads")
        key_dim = value_dim = inner.number("head_dim")
        kernel = inner.number("short_conv_kernel_size", default=4)
    else:
        keys, values = (config.number(f"linear_num_{k}_heads") for k in ("key", "value"))
        key_dim, value_dim = (config.number(f"linear_{k}_head_dim") for k in ("key", "value"))
        kernel = config.number("linear_conv_kernel_dim", default=4)
    mixed = 2 * keys * key_dim + values * value_dim
    gates = values * value_dim + 2 * values
    return {
        "linear_params": hidden * (mixed + gates + values * value_dim),
        "linear_state_bytes": 4 * values * key_dim * value_dim + 2 * mixed * (kernel - 1),
    }


_NORMED = ("qwen3", "gemma3", "gemma4", "olmo2", "olmo3")
_GATED = ("qwen3_next", "qwen3_5")
"""Models that normalise queries and keys, or gate attention, without a key that says so."""


def _attention_flags(config: _Config) -> dict[str, bool]:
    gates = [config.tree.get(k) for k in ("attn_output_gate", "attention_output_gate")]
    gate = next((flag for flag in gates if flag is not None), config.kind.startswith(_GATED))
    norms = [config.tree.get(k) for k in ("use_qk_norm", "qk_norm", "qk_layernorm")]
    norm = next((flag for flag in norms if flag is not None), config.kind.startswith(_NORMED))
    return {"qk_norm": bool(norm), "attention_gate": bool(gate)}


# --- data types -----------------------------------------------------------------------------------

_BY_NAME = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "fp8_pb_wo": "fp8_block",
    "fp8_block_scales": "fp8_block",
    "nvfp4": "nvfp4",
    "w4a4": "nvfp4",
    "w4a16_nvfp4": "int4",
    "modelopt_fp4": "nvfp4",
    "int4_awq": "int4",
    "w4a16_awq": "int4",
    "w4a8_awq": "int4",
    "w8a8_sq_per_channel": "int8",
    "int8_sq": "int8",
    "w8a16": "w8a16",
    "w8a8": "int8",
}
_WEIGHT_ONLY = ("gptq", "awq", "auto-round", "auto_round", "autoround", "hqq", "gptq_marlin")
"""Methods whose activations stay in BF16: the number of bits says all."""
_EXCLUDED = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")


def _data_types(config: _Config) -> dict[str, str]:
    """Types of weights and KV cache, by the numbers of the quantisation where it has them."""
    quantised = config.tree.get("quantization_config") or config.tree.get("compression_config")
    if not isinstance(quantised, dict) or not quantised:
        return {}
    method = str(quantised.get("quant_method", "")).lower()
    if method == "mxfp4":
        dtype = "mxfp4"
    elif method == "bitsandbytes":
        dtype = "int4" if quantised.get("load_in_4bit", True) else "w8a16"
    elif method in _WEIGHT_ONLY:
        dtype = _of_bits(config, quantised.get("bits", quantised.get("w_bit", 4)), "int", True)
    elif quantised.get("config_groups"):
        dtype = _of_groups(config, quantised)
    elif method == "fp8" and quantised.get("weight_block_size"):
        dtype = "fp8_block"
    else:
        dtype = _of_name(config, quantised, method)
    excluded = [str(name) for key in _EXCLUDED for name in quantised.get(key) or []]
    types = {"weight_dtype": dtype, "expert_dtype": dtype, "attention_dtype": dtype}
    if method == "mxfp4" or _covers(excluded, "self_attn", config):
        types["attention_dtype"] = "bf16"
    experts = config.number(*_EXPERTS, default=0) > 0
    if method == "mxfp4" or (experts and _covers(excluded, r"mlp\S*shared|shared_exp", config)):
        types["weight_dtype"] = "bf16"
    if not experts:
        types["expert_dtype"] = types["weight_dtype"]
    return {**types, "kv_dtype": _kv_type(quantised, dtype)}


def _of_name(config: _Config, quantised: dict[str, Any], method: str) -> str:
    """The type of a method or algorithm that has a name and no numbers."""
    name = str(quantised.get("quant_algo") or method).lower()
    if name == "mixed_precision":
        name = str(quantised.get("moe_quant_algo") or name).lower()
    for key in (name, method):
        if key in _BY_NAME:
            return _BY_NAME[key]
    layout = str(quantised.get("format", "")).lower()
    for part, dtype in (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("float", "fp8"), ("int", "int8")):
        if part in layout:
            return dtype
    where = "quantization_config.quant_method" if method else "quantization_config.quant_algo"
    known = ", ".join([*_BY_NAME, "mxfp4", "compressed-tensors", "bitsandbytes", *_WEIGHT_ONLY])
    raise config.odd(where, name, f"one of {known}")


def _of_groups(config: _Config, quantised: dict[str, Any]) -> str:
    """The narrowest of the groups: that of the layers with the most weights."""
    found = []
    for group in quantised["config_groups"].values():
        weights = (group or {}).get("weights") or {}
        kind = str(weights.get("type", "int")).lower()
        bits = weights.get("num_bits")
        plain = not group.get("input_activations")
        layout = str(group.get("format") or quantised.get("format") or "").lower()
        if "mxfp4" in layout or (bits == 4 and kind == "float" and weights.get("group_size") == 32):
            dtype = "mxfp4"
        elif weights.get("strategy") == "block" and kind == "float" and bits == 8:
            dtype = "fp8_block"
        else:
            dtype = _of_bits(config, bits, kind, plain)
        found.append((bits, dtype))
    return min(found, key=lambda one: one[0])[1]


def _of_bits(config: _Config, bits: Any, kind: str, weight_only: bool) -> str:
    """The type of a number of bits: `kind` "int" or "float", activations in BF16 or as narrow."""
    types = {
        (4, "int", True): "int4",
        (4, "int", False): "int4",
        (8, "int", True): "w8a16",
        (8, "int", False): "int8",
        (8, "float", True): "w8a16",
        (8, "float", False): "fp8",
        (4, "float", False): "nvfp4",
        (4, "float", True): "mxfp4",
    }
    dtype = types.get((bits, kind, weight_only))
    if dtype is None:
        raise config.odd("quantization_config, bits", bits, "4 or 8 (others: weight_dtype)")
    return dtype


def _covers(excluded: Iterable[str], part: str, config: _Config) -> bool:
    """Whether names or patterns of modules cover such a part in most layers."""
    layers = set()
    for name in excluded:
        if not re.search(part, name) or re.search(r"norm|indexer", name):
            continue
        numbered = re.search(r"layers\.(\d+)\.", name)
        if numbered is None:
            return True
        layers.add(int(numbered.group(1)))
    return 2 * len(layers) > config.number("num_hidden_layers")


def _kv_type(quantised: dict[str, Any], dtype: str) -> str:
    """As the checkpoint says; without a word FP8 and NVFP4 ones have it in FP8, as the reference
    takes them."""
    stated = quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")
    if isinstance(stated, dict):
        return "fp8" if stated.get("num_bits") == 8 else "bf16"
    if isinstance(stated, str):
        return "fp8" if "fp8" in stated.lower() else "bf16"
    return "fp8" if dtype in ("fp8", "fp8_block", "nvfp4") else "bf16"
