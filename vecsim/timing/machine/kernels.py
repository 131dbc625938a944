"""How near kernels come to the data sheet: the constants of the roofline.

`vecsim.data`'s kernels.toml has them by architecture and sort of kernel, and says what they were
fitted to. What was not measured on an architecture is taken from the nearest that has it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from vecsim.timing.machine.hardware import Gpu

STREAMED = 0.8
"""Share of the bandwidth that elementwise kernels reach."""
LAUNCH_S = 3e-6
"""Seconds that an elementwise kernel takes at least: launch and tail."""

_NEAREST = {
    "volta": ("ampere", "hopper"),
    "ampere": ("hopper",),
    "ada": ("hopper",),
    "hopper": ("blackwell",),
    "blackwell": ("hopper",),
    "cdna3": ("hopper",),
    "cdna4": ("blackwell", "hopper"),
}
"""Architectures to ask in turn for a kernel that an architecture has no constants of."""
_ALIKE = {
    "fp8": ("fp8", "fp8_block", "bf16"),
    "fp8_block": ("fp8_block", "fp8", "bf16"),
    "int8": ("fp8", "fp8_block", "bf16"),
    "w8a16": ("bf16",),
    "w4a8": ("w4a8", "fp8", "fp8_block", "bf16"),
    "nvfp4": ("nvfp4", "fp8", "bf16"),
    "fp4": ("mxfp4", "bf16"),
    "mxfp4": ("mxfp4", "bf16"),
    "int4": ("mxfp4", "bf16"),
    "bf16": ("bf16",),
}
"""Weight types whose kernels stand in for one another."""


@dataclass(frozen=True)
class Kernel:
    """A sort of kernel.

    Attributes:
        peak, bandwidth: shares of the GPU's that it reaches at best.
        launch_us: what it takes beside its work.
        sharp: exponent of the soft maximum of its two times; 1 adds them.
        fill: how much longer it computes where a GPU is not filled, a unit of `unfilled`.
    """

    peak: float
    bandwidth: float
    launch_us: float = 0.0
    sharp: float = 1.0
    fill: float = 0.0

    def seconds(
        self, flops: Any, peak: float, moved: Any, bandwidth: float, unfilled: Any = 0.0
    ) -> Any:
        """Seconds for work (FLOPs) and bytes `moved`, by a GPU of so many FLOP/s and bytes/s."""
        computing = flops / (self.peak * peak) * (1.0 + self.fill * unfilled)
        moving = moved / (self.bandwidth * bandwidth)
        soft_max = (computing**self.sharp + moving**self.sharp) ** (1.0 / self.sharp)
        return soft_max + self.launch_us * 1e-6


@dataclass(frozen=True)
class Collective:
    """A sort of communication between GPUs.

    Attributes:
        link: share of a GPU's link that it reaches at best.
        least_us: what it takes for a few bytes.
        sharp: exponent of the soft sum of the two.
    """

    link: float
    least_us: float
    sharp: float

    def seconds(self, sent: Any, link: float) -> Any:
        """Seconds for bytes `sent` by a GPU over a link of so many bytes/s."""
        least = (self.least_us * 1e-6) ** self.sharp
        return (least + (sent / (self.link * link)) ** self.sharp) ** (1.0 / self.sharp)


@dataclass(frozen=True)
class Latent:
    """Latent attention: its kernel, and its products in units of plain ones, which the norms,
    rotations and quantisations between them lengthen."""

    attention: Kernel
    products: float


class Kernels:
    """The kernels of a backend on an architecture.

    Args:
        tables: kernels.toml, or one like it.
    """

    def __init__(self, tables: dict[str, Any], architecture: str, backend: str) -> None:
        order = (architecture, *_NEAREST.get(architecture, ("hopper",)))
        self._tables = [tables[name] for name in order if name in tables]
        self._backend = backend
        self.narrow_dispatch = backend == "trtllm" and architecture == "blackwell"
        """Whether tokens go to the experts in the experts' data type. As in the reference's
        database: TensorRT-LLM on Blackwell quantises before it sends."""
        self.query_norm = Kernel(**self._found("query_norm"))
        self.all_reduce = Collective(**self._found("all_reduce", backend))
        self.all_gather = Collective(**self._found("all_gather"))

    def product(self, dtype: str) -> Kernel:
        """Matrix products with weights of a type."""
        return Kernel(**self._of_type(dtype, "product"))

    def experts(self, dtype: str) -> Kernel:
        """Grouped products of experts with weights of a type."""
        return Kernel(**self._of_type(dtype, "experts", self._backend))

    def attention(self, decoding: bool, narrow: bool) -> Kernel:
        """Attention over a KV cache of 2 bytes a value, or 1 (`narrow`)."""
        phase = "decode" if decoding else "prefill"
        return Kernel(**self._found("attention", f"{phase}_{'narrow' if narrow else 'wide'}"))

    def latent(self, decoding: bool) -> Latent:
        """Multi-head latent attention."""
        found = dict(self._found("latent", self._backend, "decode" if decoding else "prefill"))
        products = found.pop("products")
        return Latent(Kernel(**found), products)

    def _of_type(self, dtype: str, *path: str) -> dict[str, float]:
        for alike in _ALIKE[dtype]:
            for table in self._tables:
                found = _dig(table, (*path, alike))
                if found is not None:
                    return found
        raise KeyError((*path, dtype))

    def _found(self, *path: str) -> dict[str, Any]:
        for table in self._tables:
            found = _dig(table, path)
            if found is not None:
                return found
        raise KeyError(path)


def _dig(table: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    found: Any = table
    for name in path:
        found = found.get(name)
        if found is None:
            return None
    return found


@cache
def _tables() -> dict[str, Any]:
    text = resources.files("vecsim.data").joinpath("kernels.toml").read_text("utf-8")
    return tomllib.loads(text)


@cache
def _kernels_of(architecture: str, backend: str) -> Kernels:
    return Kernels(_tables(), architecture, backend)


def kernels_of(gpu: Gpu, backend: str) -> Kernels:
    """The kernels of a backend on a GPU."""
    return _kernels_of(gpu.architecture, backend)
