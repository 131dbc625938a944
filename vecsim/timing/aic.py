"""Prices and KV capacity from the reference's performance database (`pip install vecsim[aic]`).

The estimator is asked once, at the points of a grid; the table is kept in the cache folder under a
name that everything it depends on goes into. A replay never calls the estimator.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vecsim.config.schema import AicTiming, RankConfig
from vecsim.errors import InputError
from vecsim.files import json_text, replace_file
from vecsim.kernels.compile.cache import cache_parent
from vecsim.timing.grids import Grid, sample
from vecsim.timing.machine.hardware import near
from vecsim.timing.machine.kv_capacity import DEFAULT_FRACTIONS, KvCapacity
from vecsim.timing.points import read_points, write_points
from vecsim.timing.table import TimingTable

PACKAGE = "aisimulate"
_FORMAT = 1
"""Raised when the way of sampling changes, so that tables of an older way are not taken."""

_MEMORY = (
    "gpu_memory_utilization",
    "mem_fraction_static",
    "free_gpu_memory_fraction",
    "cuda_graph_reserved_bytes",
)
_NOT_PRICED = (*_MEMORY, "worker_type", "estimation_mode", "model", "system", "backend")
_ARGUMENTS = {"tp": "tp_size", "pp": "pp_size", "attention_dp": "attention_dp_size"}
_METADATA = {
    "model": "model",
    "system": "system",
    "backend": "backend",
    "backend_version": "backend_version",
    "tp": "tp",
    "pp": "pp",
    "dp": "attention_dp",
    "moe_tp": "moe_tp_size",
    "moe_ep": "moe_ep_size",
    "kv_dtype": "kvcache_quant_mode",
    "weight_dtype": "gemm_quant_mode",
}
"""Metadata of a table -> field of the estimator's configuration."""


def complete(config: AicTiming, rank: RankConfig, tp: int, attention_dp: int) -> AicTiming:
    """The configuration with its sizes filled in. Experts that are not cut otherwise are spread
    over all GPUs of a worker."""
    config = msgspec.structs.replace(
        config,
        backend=str(config.backend or rank.backend),
        tp=config.tp or tp,
        attention_dp=config.attention_dp or attention_dp,
    )
    if config.moe_ep_size is None:
        gpus = config.tp * config.attention_dp
        config = msgspec.structs.replace(config, moe_tp_size=1, moe_ep_size=gpus)
    return config


def table(config: AicTiming, grid: Grid, where: str) -> TimingTable:
    """The table of a complete configuration, from the cache or from the estimator.

    Raises InputError: no extra, an unknown or impossible model, system, version or topology.
    """
    path = _cache_path(config, "parquet", {"grid": asdict(grid)}, where)
    if path.exists():
        with contextlib.suppress(InputError, OSError):  # what cannot be read is made anew
            return TimingTable(*read_points(path), beyond_batches=True)
    made = build(config, grid, where)
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        write_points(path, made.points, made.metadata)
    return made


def build(config: AicTiming, grid: Grid, where: str) -> TimingTable:
    """The table of a complete configuration, from the estimator. Raises what `table` raises."""
    _version(where)
    with _explained(config, where):
        from aisimulate_core.sdk import EngineHandle

        handle = EngineHandle.compile(
            config.model, config.system, str(config.backend), **_arguments(config)
        )
        points = sample(
            grid,
            lambda *sizes: _ask(handle.predict_prefill_latency, *sizes),
            lambda batch, context, _: _ask(handle.predict_decode_latency, batch, context),
        )
    described = msgspec.to_builtins(config)
    values = {name: described.get(field) for name, field in _METADATA.items()}
    kept = {name: str(value) for name, value in values.items() if value is not None}
    kept["source"] = f"{PACKAGE} {_version(where)}, operator-level estimator"
    return TimingTable(points, kept, beyond_batches=True)


def direct(config: AicTiming, where: str) -> Any:
    """(prefill, decode) functions that ask the estimator of a complete configuration itself:
    (batch, isl, prefix) -> ms and (batch, context) -> ms. Raises what `table` raises."""
    _version(where)
    with _explained(config, where):
        from aisimulate_core.sdk import EngineHandle

        handle = EngineHandle.compile(
            config.model, config.system, str(config.backend), **_arguments(config)
        )
    return handle.predict_prefill_latency, handle.predict_decode_latency


def capacity(config: AicTiming, rank: RankConfig, where: str) -> KvCapacity:
    """The reference's own estimate of the KV blocks of a rank, kept in the cache.

    Raises what `table` raises, and InputError where nothing is left for KV.
    """
    asked = {
        "block_size": rank.block_tokens,
        "max_num_batched_tokens": rank.max_num_batched_tokens or 2**62,
        "max_num_sequences": 1 if rank.max_num_seqs is None else rank.max_num_seqs,
    }
    path = _cache_path(config, "json", asked, where, memory=True)
    with contextlib.suppress(OSError, ValueError, TypeError):
        return KvCapacity(**json.loads(path.read_text("utf-8")))
    found: dict[str, Any] = {}
    with _explained(config, where):
        from aisimulate.capacity import estimate_num_gpu_blocks

        blocks = estimate_num_gpu_blocks(
            backend_name=str(config.backend),
            system=config.system,
            model_path=config.model,
            diagnostics=found,
            **asked,
            **_capacity_arguments(config),
        )
    taken = found["memory_breakdown"]
    name, default = DEFAULT_FRACTIONS[str(config.backend)]
    given = getattr(config, name)
    estimated = KvCapacity(
        weights=taken["weights_bytes"],
        activations=taken["activations_bytes"],
        reserved=taken["runtime_overhead_bytes"],
        collectives=taken["comm_overhead_bytes"],
        cuda_graphs=taken["cuda_graph_reserved_bytes"],
        memory_fraction=default if given is None else given,
        kv_bytes_per_token=found["kv_size_per_token_bytes"],
        budget=found["total_kv_size_bytes"],
        tokens=found["total_kv_size_tokens"],
        num_gpu_blocks=blocks,
        block_size=rank.block_tokens,
        source=f"{PACKAGE} {_version(where)}",
    )
    with contextlib.suppress(OSError):
        text = json_text(estimated.to_dict())
        replace_file(path, lambda target: target.write_text(text, encoding="utf-8"))
    return estimated


def _ask(function: Any, *sizes: np.ndarray) -> np.ndarray:
    columns = (column.tolist() for column in sizes)
    return np.fromiter(map(function, *columns), np.float64, len(sizes[0]))


def _arguments(config: AicTiming) -> dict[str, Any]:
    fields = msgspec.to_builtins(config)
    return {
        {**_ARGUMENTS, "dcp": "dcp_size"}.get(name, name): value
        for name, value in fields.items()
        if value is not None and name not in (*_NOT_PRICED, "type")
    }


def _capacity_arguments(config: AicTiming) -> dict[str, Any]:
    fields = msgspec.to_builtins(config)
    names = {
        **_ARGUMENTS,
        **{f"{kind}_quant_mode": f"{kind}_dtype" for kind in ("gemm", "moe", "fmha", "comm")},
        "kvcache_quant_mode": "kv_cache_dtype",
        **{
            name: name
            for name in (
                "backend_version",
                "moe_tp_size",
                "moe_ep_size",
                "moe_backend",
                "moe_kernel_source",
                "attention_backend",
                "enable_eplb",
                "wideep_num_slots",
                "systems_path",
                *_MEMORY,
            )
        },
    }
    return {new: fields[name] for name, new in names.items() if fields.get(name) is not None}


# --- the cache ------------------------------------------------------------------------------------


def _cache_path(
    config: AicTiming, suffix: str, more: dict[str, Any], where: str, memory: bool = False
) -> Path:
    """Where an answer about a configuration is kept."""
    fields = msgspec.to_builtins(config)
    left_out = ("worker_type", "estimation_mode", *(() if memory else _MEMORY))
    kept = {name: value for name, value in fields.items() if name not in left_out}
    key = json.dumps([_FORMAT, _version(where), kept, more], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:20]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{config.model}-{config.system}-{config.backend}")
    return cache_parent() / "timing" / f"{name}-{digest}.{suffix}"


def _version(where: str) -> str:
    """The version of the estimator. Raises InputError where it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        expected = (
            "the reference's estimator (pip install 'vecsim[aic]'), a table (vecsim timing build"
            " writes one where it is installed), or type: roofline"
        )
        raise InputError(where, "aic", expected) from None


# --- errors ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _explained(config: AicTiming, where: str) -> Iterator[None]:
    """Turns the estimator's failures into one line, and keeps its log and notes quiet."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except InputError:
        raise
    except Exception as error:
        _explain(config, where, " ".join(str(error).split()))
    finally:
        logging.disable(before)


def _explain(config: AicTiming, where: str, reason: str) -> None:
    from aisimulate_core.sdk.common import SupportedSystems, SupportMatrixHFModels

    backend = str(config.backend)
    if "no KV budget" in reason:
        raise InputError(f"{where}.model", config.model, f"a model that fits: {reason}") from None
    if config.system not in SupportedSystems:
        expected = near(config.system, SupportedSystems, "a system of the database")
        raise InputError(f"{where}.system", config.system, expected) from None
    passing = _passing(config.system, backend)
    if not passing:
        others = sorted(s for s in SupportedSystems if s != config.system and _passing(s, backend))
        expected = f"a system with measurements for {backend}: {', '.join(others)}"
        raise InputError(f"{where}.system", config.system, expected) from None
    if config.model not in SupportMatrixHFModels or config.model not in passing:
        pair = f"a model of the database for {backend} on {config.system}"
        expected = near(config.model, passing, pair)
        raise InputError(f"{where}.model", config.model, expected) from None
    short = reason if len(reason) <= 300 else reason[:297] + "..."
    raise InputError(where, config.model, f"what the estimator accepts ({short})") from None


def _passing(system: str, backend: str) -> list[str]:
    """Models that the estimator's support matrix passes on a system and backend."""
    folder = resources.files("aisimulate_core") / "systems" / "fpe_support_matrix"
    try:
        text = (folder / f"{system}.csv").read_text("utf-8")
    except OSError:
        return []
    rows = csv.DictReader(text.splitlines())
    return sorted(
        {
            row["HuggingFaceID"]
            for row in rows
            if row["Backend"] == backend and row["Status"] == "PASS"
        }
    )
