"""Facts about GPUs and models: the sheets in `vecsim.data`, and Hugging Face config.json files."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from vecsim.config.documents import parse_json
from vecsim.errors import MISSING, InputError

BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "int4": 0.5}
"""Bytes a weight, or an entry of the KV cache, takes by data type; scales are not counted."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Peaks are dense; `link_gb_s` is one direction; bytes are whole GPUs'."""

    name: str
    bf16_tflops: float
    fp8_tflops: float
    hbm_tb_s: float
    link_gb_s: float
    memory_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Model:
    """The shape of a decoder. Widths, counts and tokens; data types are names of `BYTES`.

    Attributes:
        family: "llama", "qwen", "deepseek", ... or "other": the reference sizes activations by it.
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab: the usual; ffn of dense layers.
        experts, experts_per_token, moe_ffn: experts of a layer, 0 without; width of one.
        shared_experts: width of what all tokens use, in units of moe_ffn.
        dense_layers: layers without experts (all of them in a dense model).
        window, window_layers: layers that attend to the last `window` tokens only.
        q_lora_rank, kv_lora_rank, rope_dim, nope_dim, v_dim: latent attention; 0 without.
        weight_dtype, expert_dtype, kv_dtype: data types.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int = 0
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0
    shared_experts: float = 0
    dense_layers: int = 0
    window: int = 0
    window_layers: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    v_dim: int = 0
    weight_dtype: str = "bf16"
    expert_dtype: str = ""
    kv_dtype: str = "bf16"

    def __post_init__(self) -> None:
        if not self.expert_dtype:
            object.__setattr__(self, "expert_dtype", self.weight_dtype)
        if not self.experts:
            object.__setattr__(self, "dense_layers", self.layers)

    @property
    def kind(self) -> str:
        """ "dense", "moe" or "mla"."""
        if self.kv_lora_rank:
            return "mla"
        return "moe" if self.experts else "dense"

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers


def gpu_of(name: str, where: str) -> Gpu:
    """The GPU of a system name. Raises InputError naming near ones."""
    sheet = _sheet("gpus.toml")
    if name not in sheet:
        raise InputError(where, name, near(name, sheet, "a GPU of vecsim's data/gpus.toml"))
    facts = {k: v for k, v in sheet[name].items() if k not in ("source", "memory_source")}
    return Gpu(name, **facts)


def model_of(name: str, where: str) -> Model:
    """The model of a name in the sheet, or of a config.json (or its folder) at that path.

    Raises InputError naming near ones, or the key of the config.json.
    """
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return read_config(path / "config.json" if path.is_dir() else path)
    found = known_model(name)
    if found is None:
        sheet = _sheet("models.toml")
        names = [n for known, facts in sheet.items() for n in (known, *facts.get("aliases", ()))]
        what = "a model of vecsim's data/models.toml, or the path of its config.json"
        raise InputError(where, name, near(name, names, what))
    return found


def known_model(name: str) -> Model | None:
    """The model of the sheet with this name or alias, if there is one."""
    for known, facts in _sheet("models.toml").items():
        if name == known or name in facts.get("aliases", ()):
            kept = {k: v for k, v in facts.items() if k not in ("source", "aliases")}
            return Model(known, **kept)
    return None


def known_gpu(name: str) -> Gpu | None:
    """The GPU of the sheet with this system name, if there is one."""
    return gpu_of(name, "") if name in _sheet("gpus.toml") else None


@cache
def _sheet(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("vecsim.data").joinpath(name).read_text("utf-8"))


def near(name: str, names: Iterable[str], what: str) -> str:
    """`what`, followed by the names most like `name`, whatever their case and owner."""
    names = list(names)
    short = {known.rpartition("/")[2].lower(): known for known in names}
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), short, n=3, cutoff=0.4)
    shown = [short[match] for match in close] or sorted(names)[:8]
    return f"{what}; {'near ones' if close else 'some'}: {', '.join(shown)}"


# --- config.json ----------------------------------------------------------------------------------

_FAMILIES = {"llama": "llama", "qwen": "qwen", "deepseek": "deepseek", "kimi": "deepseek"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token")
_QUANTISED = {
    "fp8": "fp8",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
    "modelopt_fp4": "fp4",
    "awq": "int4",
    "gptq": "int4",
    "w8a8": "int8",
}


def read_config(path: Path) -> Model:
    """The model of a Hugging Face config.json: dense, mixture of experts, or latent attention.

    Raises InputError: an unreadable file, a missing or odd key.
    """
    try:
        tree = parse_json(path.read_bytes().decode("utf-8-sig"), path.name)
    except OSError as error:
        raise InputError(str(path), error.strerror, "a readable config.json") from None
    except UnicodeDecodeError:
        raise InputError(str(path), "bytes", "UTF-8 text") from None
    if not isinstance(tree, dict):
        raise InputError(str(path), tree, "the object of a config.json")
    text = tree.get("text_config")
    config = _Config({**tree, **text} if isinstance(text, dict) else tree, path.name)
    heads = config.number("num_attention_heads")
    hidden = config.number("hidden_size")
    kind = f"{tree.get('model_type', '')} {tree.get('architectures', '')}".lower()
    facts: dict[str, Any] = {
        "family": next((v for k, v in _FAMILIES.items() if k in kind), "other"),
        "layers": config.number("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.number("num_key_value_heads", default=heads),
        "head_dim": config.number("head_dim", default=hidden // heads),
        "vocab": config.number("vocab_size"),
        **_expert_facts(config),
        **_attention_facts(config),
        **_data_types(config.tree),
    }
    return Model(name=str(tree.get("_name_or_path") or path), **facts)


class _Config:
    """The keys of a config.json."""

    def __init__(self, tree: dict[str, Any], name: str) -> None:
        self.tree = tree
        self._name = name

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of some keys that is there, a whole number of at least 1 (or `default`)."""
        for key in keys:
            value = self.tree.get(key)
            if value is None:
                continue
            least = 1 if default is None else 0
            if type(value) is not int or value < least:
                raise InputError(f"{self._name}, {key}", value, f"a whole number from {least} on")
            return value
        if default is None:
            raise InputError(f"{self._name}, {keys[0]}", MISSING, "a whole number from 1 on")
        return default


def _expert_facts(config: _Config) -> dict[str, Any]:
    experts = config.number(*_EXPERTS, default=0)
    if not experts:
        return {"ffn": config.number("intermediate_size")}
    ffn = config.number("intermediate_size", default=0)
    moe_ffn = config.number("moe_intermediate_size", "intermediate_size")
    shared = config.number("n_shared_experts", "num_shared_experts", default=0) * 1.0
    width = config.number("shared_expert_intermediate_size", default=0)
    return {
        "ffn": ffn,
        "experts": experts,
        "experts_per_token": config.number(*_CHOSEN),
        "moe_ffn": moe_ffn,
        "shared_experts": width / moe_ffn if width else shared,
        "dense_layers": config.number("first_k_dense_replace", default=0),
    }


def _attention_facts(config: _Config) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if config.number("kv_lora_rank", default=0):
        facts = {
            "kv_lora_rank": config.number("kv_lora_rank"),
            "q_lora_rank": config.number("q_lora_rank", default=0),
            "rope_dim": config.number("qk_rope_head_dim"),
            "nope_dim": config.number("qk_nope_head_dim"),
            "v_dim": config.number("v_head_dim"),
        }
        facts["head_dim"] = facts["rope_dim"] + facts["nope_dim"]
    window = config.number("sliding_window", default=0)
    kinds = config.tree.get("layer_types")
    if isinstance(kinds, list):
        windowed = sum("sliding" in str(kind) for kind in kinds)
    else:
        windowed = config.number("num_hidden_layers")
    if window and windowed and config.tree.get("use_sliding_window", True):
        facts.update(window=window, window_layers=windowed)
    return facts


def _data_types(tree: dict[str, Any]) -> dict[str, str]:
    quantised = tree.get("quantization_config") or {}
    method = str(quantised.get("quant_method", "")).lower()
    if method in ("modelopt", "compressed-tensors"):
        method = str(quantised.get("quant_algo") or quantised.get("format") or "fp8").lower()
        method = next((name for name in ("nvfp4", "fp8", "w8a8") if name in method), "awq")
    if not method:
        return {}
    dtype = _QUANTISED.get(method)
    if dtype is None:
        expected = f"one of {', '.join(_QUANTISED)}"
        raise InputError("quantization_config.quant_method", method, expected)
    if method == "mxfp4":  # experts only
        return {"expert_dtype": dtype}
    return {"weight_dtype": dtype, "kv_dtype": "fp8" if dtype == "fp8" else "bf16"}
