"""Facts about GPUs and models: the sheets in `vecsim.data`, files like them, and config.json files
of Hugging Face (`vecsim.timing.machine.configs`)."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import MISSING as MISSING_FIELD
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from vecsim.errors import MISSING, InputError

BYTES = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,
    "int8": 1.0,
    "w8a16": 1.0,
    "nvfp4": 0.5625,
    "mxfp4": 0.5,
    "w4a8": 0.5,
    "fp4": 0.5,
    "int4": 0.5,
}
"""Bytes a weight, or an entry of the KV cache, takes by data type. Scales are counted where they
are large: NVFP4 has one of a byte for each 16 weights. fp8, int8 and nvfp4 are computed in their
own type, w4a8 (MXFP4 weights, MXFP8 activations) in FP8, the others in BF16. fp8_block has a scale
for each block of weights, fp8 one for all; w8a16 is 8 bits of which only the weights make use."""


@dataclass(frozen=True)
class Gpu:
    """One GPU. Peaks are dense; bandwidths are one direction; bytes are whole GPUs'.

    Attributes:
        architecture: whose kernels it runs: "ampere", "ada", "hopper", "blackwell", "cdna3", ...
        bf16_tflops, fp8_tflops, fp4_tflops, int8_tflops: peaks of matrix products; 0 where there
            are none, which are then computed in BF16. fp8_tflops may also be the BF16 peak.
        hbm_tb_s: of the memory. link_gb_s: to the other GPUs of the node. network_gb_s: to other
            nodes.
        memory_bytes: what a process can use. reserved_bytes: of them, for runtime and framework.
    """

    name: str
    architecture: str
    bf16_tflops: float
    fp8_tflops: float
    hbm_tb_s: float
    link_gb_s: float
    memory_bytes: int
    reserved_bytes: int
    fp4_tflops: float = 0.0
    int8_tflops: float = 0.0
    network_gb_s: float = 0.0

    def peak_tflops(self, dtype: str) -> float:
        """Peak of products whose weights are of a data type."""
        peaks = {
            "fp8": self.fp8_tflops,
            "fp8_block": self.fp8_tflops,
            "w4a8": self.fp8_tflops,
            "nvfp4": self.fp4_tflops,
            "int8": self.int8_tflops or self.fp8_tflops,
        }
        return max(peaks.get(dtype, 0.0), self.bf16_tflops)


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
        linear_layers: layers with a state instead of a KV cache (linear attention); linear_params:
            weights of one; linear_state_bytes: its state, of a sequence.
        q_lora_rank, kv_lora_rank, rope_dim, nope_dim, v_dim: latent attention; 0 without.
        index_heads, index_dim, index_topk, index_layers: sparse attention: heads that choose
            `index_topk` tokens for each layer, their width, and layers that choose themselves.
        qk_norm: whether queries and keys are normalised.
        attention_gate: whether attention is gated by as wide a product as the queries'.
        weight_dtype, attention_dtype, expert_dtype, kv_dtype: data types, of dense and shared
            layers, of attention's products, of routed experts, of the KV cache.
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
    linear_layers: int = 0
    linear_params: int = 0
    linear_state_bytes: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    index_layers: int = 0
    qk_norm: bool = False
    attention_gate: bool = False
    weight_dtype: str = "bf16"
    attention_dtype: str = ""
    expert_dtype: str = ""
    kv_dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("attention_dtype", "expert_dtype"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.weight_dtype)
        if not self.experts:
            object.__setattr__(self, "dense_layers", self.layers)

    @property
    def kind(self) -> str:
        """ "dense", "moe" or "mla"."""
        if self.kv_lora_rank:
            return "mla"
        return "moe" if self.experts else "dense"

    @property
    def attention_layers(self) -> int:
        """Layers with a KV cache."""
        return self.layers - self.linear_layers

    @property
    def index_bytes(self) -> int:
        """Bytes a token of an index: FP8 keys, and a float scale for each 128 of them."""
        return self.index_dim + 4 * -(-self.index_dim // 128)

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers


_SOURCES = ("source", "memory_source", "network_source")


def gpu_of(name: str, where: str) -> Gpu:
    """The GPU of a system name, or of a TOML file of one's own: the keys of a GPU in gpus.toml.

    Raises InputError naming near ones, or the key of the file.
    """
    if name.endswith(".toml"):
        return _own_gpu(Path(name))
    sheet = _sheet("gpus.toml")
    if name not in sheet:
        what = "a GPU of vecsim's data/gpus.toml, or the path of a TOML file like it"
        raise InputError(where, name, near(name, sheet, what))
    return Gpu(name, **{k: v for k, v in sheet[name].items() if k not in _SOURCES})


def _own_gpu(path: Path) -> Gpu:
    """The GPU of a TOML file. Runtime and framework take 3.5 GiB unless it says otherwise."""
    try:
        facts = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise InputError(str(path), error.strerror, "a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(str(path), str(error), "a TOML file of GPU facts") from None
    facts = {"reserved_bytes": 3758096384, **facts}
    name = str(facts.pop("name", path.stem))
    known = {field.name: field for field in fields(Gpu) if field.name != "name"}
    for key, value in facts.items():
        if key in _SOURCES:
            continue
        if key not in known:
            raise InputError(f"{path.name}, {key}", value, near(key, known, "a fact about a GPU"))
        if key == "architecture":
            if not isinstance(value, str):
                raise InputError(f"{path.name}, {key}", value, "a name, such as hopper")
        elif type(value) not in (int, float) or not 0 <= value < 1e15:
            raise InputError(f"{path.name}, {key}", value, "a number from 0 on")
    for key, field in known.items():
        if field.default is MISSING_FIELD and not facts.get(key):
            raise InputError(f"{path.name}, {key}", facts.get(key, MISSING), "a positive number")
    return Gpu(name, **{k: v for k, v in facts.items() if k not in _SOURCES})


def model_of(name: str, where: str) -> Model:
    """The model of a name in the sheet, or of a config.json (or its folder) at that path.

    Raises InputError naming near ones, or the key of the config.json.
    """
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        from vecsim.timing.machine.configs import read_config

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


def link_gb_s(system: str, *, same_node: bool = False, where: str = "system") -> float:
    """GB/s, one direction, of one GPU of a system to those of its node, or to other nodes; 0 where
    no network is known. Raises InputError as `gpu_of`."""
    gpu = gpu_of(system, where)
    return gpu.link_gb_s if same_node else gpu.network_gb_s


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
