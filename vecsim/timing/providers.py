"""Making what prices the passes of a role, and estimating its KV blocks, kind by kind."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import polars as pl

from vecsim.config.defaults import AUTO
from vecsim.config.roles import Role
from vecsim.config.schema import (
    AicTiming,
    AllReduce,
    ExternalTiming,
    PythonTiming,
    RankConfig,
    RooflineTiming,
    TableTiming,
)
from vecsim.config.validate_timing import aic_config
from vecsim.errors import MISSING, InputError
from vecsim.timing import aic
from vecsim.timing.grids import Grid, sample
from vecsim.timing.machine.hardware import Gpu, Model, gpu_of, known_gpu, known_model, model_of
from vecsim.timing.machine.kv_capacity import (
    DEFAULT_FRACTIONS,
    KvCapacity,
    estimate,
    kv_bytes_per_token,
)
from vecsim.timing.machine.roofline import Parallel, Roofline
from vecsim.timing.model import CompiledTiming
from vecsim.timing.points import read_points
from vecsim.timing.resolve import TimingWarning
from vecsim.timing.table import TimingTable

_LEAST_SEQS, _MOST_SEQS, _EXACT_SEQS = 256, 16384, 1024
_LEAST_TOKENS, _MOST_TOKENS, _EXACT_TOKENS = 8192, 2**18, 16384


def timing_of(where: str, model: Any, role: Role) -> Any:
    """What prices the passes of a role with the timing model at `where`; None = the built-in
    models. Raises InputError."""
    if isinstance(model, TableTiming):
        return _read_table(where, model, role)
    if isinstance(model, ExternalTiming | AicTiming):
        config = _aic_config(where, model, role)
        key = msgspec.json.encode(config)
        return _aic_table(key, grid_of(role.rank), where)
    if isinstance(model, RooflineTiming):
        facts = _roofline_facts(where, model, role)
        return _roofline_table(*facts, str(role.rank.backend), grid_of(role.rank))
    if isinstance(model, PythonTiming):
        return _python(where, model, role)
    return None


def grid_of(rank: RankConfig) -> Grid:
    """Points that cover whatever passes a rank can make; few distinct grids, as tables are kept."""
    seqs = _power(rank.max_num_seqs or _MOST_SEQS, _LEAST_SEQS, _MOST_SEQS)
    tokens = rank.max_num_batched_tokens or _MOST_TOKENS
    if rank.backend == "sglang":
        tokens = max(rank.sglang.max_prefill_tokens, rank.sglang.chunked_prefill_size)
    tokens = _power(tokens, _LEAST_TOKENS, _MOST_TOKENS)
    return Grid(
        batches=min(seqs, _EXACT_SEQS),
        most_seqs=seqs,
        tokens=min(tokens, _EXACT_TOKENS),
        most_tokens=tokens,
    )


def _power(size: int, least: int, most: int) -> int:
    """The power of two that `size` fits in, within bounds."""
    return min(max(1 << (size - 1).bit_length(), least), most)


# --- tables ---------------------------------------------------------------------------------------


def _read_table(where: str, model: TableTiming, role: Role) -> TimingTable:
    path = Path(model.path)
    try:
        stamp = path.stat().st_mtime_ns, path.stat().st_size
    except OSError as error:
        raise InputError(f"{where}.path", model.path, f"a table ({error.strerror})") from None
    chosen = msgspec.json.encode(model.deployment)
    table = _read_cached(path, stamp, chosen, model.extrapolate_batch)
    _note_mismatch(table, role)
    if model.allreduce is None or role.tensor_parallel_size == 1:
        return table
    return _with_all_reduces(f"{where}.allreduce", table, model.allreduce, role)


def _with_all_reduces(where: str, table: TimingTable, given: AllReduce, role: Role) -> TimingTable:
    """The table with two all-reduces a layer, of all tokens of a pass, in each of its points; a
    ring sends everything twice, less its own share."""
    known = known_model(table.metadata.get("model", ""))
    layers, hidden = given.layers, given.hidden
    for name, size in (("layers", layers), ("hidden", hidden)):
        if size is None and known is None:
            expected = "a number: the table names no model that vecsim has facts about"
            raise InputError(f"{where}.{name}", MISSING, expected)
    layers, hidden = layers or known.layers, hidden or known.hidden
    tp = role.tensor_parallel_size
    new = pl.when(pl.col("role") == "prefill").then(pl.col("isl") - pl.col("prefix")).otherwise(1)
    sent = 2.0 * (tp - 1) / tp * (pl.col("batch_size") * new) * hidden * 2.0
    ms = 2.0 * layers * (given.latency_us * 1e-3 + sent / (given.gb_s * 1e6))
    points = table.points.with_columns(latency_ms=pl.col("latency_ms") + ms)
    source = f"{table.metadata.get('source', 'a table')}, with all-reduces of {tp} GPUs"
    return TimingTable(points, {**table.metadata, "source": source}, table.beyond_batches)


@lru_cache(maxsize=16)
def _read_cached(
    path: Path, _stamp: tuple[int, int], deployment: bytes, beyond_batches: bool
) -> TimingTable:
    table = TimingTable(*read_points(path, msgspec.json.decode(deployment)), beyond_batches)
    for note in table.notes:
        warnings.warn(f"{path.name}: {note}", TimingWarning, stacklevel=2)
    return table


def _note_mismatch(table: TimingTable, role: Role) -> None:
    """Warn where a table says that it was measured with other sizes than the role's."""
    for name, size in (("tp", role.tensor_parallel_size), ("backend", str(role.backend))):
        measured = table.metadata.get(name)
        if measured is not None and measured != str(size):
            field = "tensor_parallel_size" if name == "tp" else "rank.backend"
            message = f"the timing table is for {name} {measured}, {role.path}.{field} is {size}"
            warnings.warn(message, TimingWarning, stacklevel=2)


def _aic_config(where: str, model: ExternalTiming | AicTiming, role: Role) -> AicTiming:
    config = aic_config(where, model)
    return aic.complete(config, role.rank, role.tensor_parallel_size, role.dp_size)


@lru_cache(maxsize=16)
def _aic_table(config: bytes, grid: Grid, where: str) -> TimingTable:
    return aic.table(msgspec.json.decode(config, type=AicTiming), grid, where)


# --- roofline -------------------------------------------------------------------------------------


def _roofline_facts(where: str, model: RooflineTiming, role: Role) -> tuple[Model, Gpu, Parallel]:
    facts = model_of(model.model, f"{where}.model")
    gpu = gpu_of(model.system, f"{where}.system")
    changes = dict.fromkeys(("weight_dtype", "attention_dtype"), model.weight_dtype)
    changes["expert_dtype"] = model.expert_dtype or model.weight_dtype
    changes["kv_dtype"] = model.kv_dtype
    changes = {name: value for name, value in changes.items() if value is not None}
    facts = replace(facts, **changes)
    tp = model.tp or role.tensor_parallel_size
    parallel = _parallel(where, tp, model.attention_dp or role.dp_size, model.moe_tp, model.moe_ep)
    if facts.heads % tp:
        raise InputError(f"{where}.tp", tp, f"a divisor of the {facts.heads} attention heads")
    if facts.experts and facts.experts % parallel.moe_ep:
        expected = f"a divisor of the {facts.experts} experts"
        raise InputError(f"{where}.moe_ep", parallel.moe_ep, expected)
    return facts, gpu, parallel


def _parallel(
    where: str, tp: int, attention_dp: int, moe_tp: int | None, moe_ep: int | None
) -> Parallel:
    """Experts that are not cut otherwise are spread over all GPUs of a worker."""
    gpus = tp * attention_dp
    if moe_ep is None:
        moe_ep = gpus if moe_tp is None else max(gpus // moe_tp, 1)
    if moe_tp is None:
        moe_tp = max(gpus // moe_ep, 1)
    if moe_tp * moe_ep != gpus:
        expected = f"{gpus} in all, as tp x attention_dp"
        raise InputError(f"{where}.moe_ep", f"moe_tp x moe_ep = {moe_tp * moe_ep}", expected)
    return Parallel(tp, moe_tp, moe_ep, attention_dp)


@lru_cache(maxsize=16)
def _roofline_table(
    facts: Model, gpu: Gpu, parallel: Parallel, backend: str, grid: Grid
) -> TimingTable:
    roofline = Roofline(facts, gpu, parallel, backend)
    points = sample(
        grid, roofline.prefill_ms, lambda batch, context, _: roofline.decode_ms(batch, context)
    )
    metadata = {
        "model": facts.name,
        "system": gpu.name,
        "backend": backend,
        "tp": str(parallel.tp),
        "dp": str(parallel.attention_dp),
        "moe_tp": str(parallel.moe_tp),
        "moe_ep": str(parallel.moe_ep),
        "kv_dtype": facts.kv_dtype,
        "weight_dtype": facts.weight_dtype,
        "source": "vecsim roofline",
    }
    return TimingTable(points, metadata, beyond_batches=True)


# --- transfers ---


def transfer_bytes(where: str, model: RooflineTiming, role: Role) -> int:
    """KV bytes of a token that one GPU of a prefill worker sends. Raises InputError."""
    facts, _, parallel = _roofline_facts(where, model, role)
    return math.ceil(kv_bytes_per_token(facts, parallel))


def free_transfer(where: str, model: RooflineTiming, role: Role) -> str:
    """What a free transfer leaves out, in words. Raises InputError."""
    gpu = gpu_of(model.system, f"{where}.system")
    size = f"{transfer_bytes(where, model, role):,} bytes a token and GPU"
    links = [(gpu.link_gb_s, "to its node"), (gpu.network_gb_s, "to other nodes")]
    speeds = " and ".join(f"{speed:g} GB/s {what}" for speed, what in links if speed)
    return f"the model has {size}, a GPU of {gpu.name} {speeds}"


# --- KV capacity ----------------------------------------------------------------------------------


def capacity_of(where: str, model: Any, role: Role, timing: Any) -> KvCapacity:
    """The KV blocks of a role that says "auto". Raises InputError."""
    rank = role.rank
    blocks = f"{role.path}.rank.num_gpu_blocks"
    if isinstance(model, ExternalTiming | AicTiming):
        return aic.capacity(_aic_config(where, model, role), rank, where)
    fraction, graphs = None, 0
    if isinstance(model, RooflineTiming):
        facts, gpu, parallel = _roofline_facts(where, model, role)
        fraction = getattr(model, DEFAULT_FRACTIONS[str(rank.backend)][0])
        graphs = model.cuda_graph_reserved_bytes or 0
    else:
        measured = getattr(timing, "metadata", {})
        if "num_gpu_blocks" in measured:
            return _stated(measured, rank, blocks)
        facts, gpu = known_model(measured.get("model", "")), known_gpu(measured.get("system", ""))
        if facts is None or gpu is None:
            expected = (
                "a number of blocks: the timing model names no num_gpu_blocks, and no model and"
                " system that vecsim has facts about"
            )
            raise InputError(blocks, AUTO, expected)
        sizes = {name: _size(measured, name) for name in ("tp", "dp", "moe_tp", "moe_ep")}
        tp, dp = sizes["tp"] or role.tensor_parallel_size, sizes["dp"] or role.dp_size
        parallel = _parallel(where, tp, dp, sizes["moe_tp"], sizes["moe_ep"])
    return estimate(
        facts,
        gpu,
        parallel,
        backend=str(rank.backend),
        block_size=rank.block_tokens,
        max_num_tokens=rank.max_num_batched_tokens or _MOST_TOKENS,
        memory_fraction=fraction,
        cuda_graphs=graphs,
        where=blocks,
    )


def stated_capacity(metadata: dict[str, str], capacity: KvCapacity) -> dict[str, str]:
    """What a table has to state of a capacity, so that it can be had without its estimator: nothing
    where vecsim has facts about model and GPU."""
    if known_model(metadata.get("model", "")) and known_gpu(metadata.get("system", "")):
        return {}
    sizes = {"num_gpu_blocks": capacity.num_gpu_blocks, "block_size": capacity.block_size}
    return {name: str(size) for name, size in sizes.items()}


def _stated(measured: dict[str, str], rank: RankConfig, where: str) -> KvCapacity:
    """The block count that a table states, in blocks of the rank's size."""
    blocks = _size(measured, "num_gpu_blocks")
    if not blocks:
        raise InputError(where, measured["num_gpu_blocks"], "a number of blocks in the table")
    blocks = blocks * (_size(measured, "block_size") or rank.block_tokens) // rank.block_tokens
    return KvCapacity(
        **dict.fromkeys(("weights", "activations", "reserved", "collectives", "cuda_graphs"), 0),
        memory_fraction=math.nan,
        kv_bytes_per_token=math.nan,
        budget=math.nan,
        tokens=blocks * rank.block_tokens,
        num_gpu_blocks=blocks,
        block_size=rank.block_tokens,
        source=measured.get("source", "the timing table"),
    )


def _size(metadata: dict[str, str], name: str) -> int | None:
    text = metadata.get(name, "")
    return int(text) if text.isdigit() and int(text) > 0 else None


# --- Python functions -----------------------------------------------------------------------------


def _python(where: str, model: PythonTiming, role: Role) -> Any:
    module = _module(where, model.module)
    functions = [_function(where, module, getattr(model, name)) for name in ("prefill", "decode")]
    compiled = CompiledTiming(*functions)
    if model.mode != "tabulate":
        try:
            compiled.bind()
        except InputError:
            if model.mode == "compile":
                raise
        else:
            return compiled
    from vecsim.timing.tabulate import tabulate

    capacity = role.rank.num_gpu_blocks * role.rank.block_tokens
    return tabulate(*functions, capacity_tokens=capacity, grid=grid_of(role.rank))


def _module(where: str, name: str) -> ModuleType:
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(f"_timing_{Path(name).stem}", name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{where}.module", name, f"a module that imports ({reason})") from None


def _function(where: str, module: ModuleType, name: str) -> Callable[..., float]:
    function = getattr(module, name, None)
    if not callable(function):
        found = os.path.basename(module.__file__ or module.__name__)
        raise InputError(f"{where}.{name}", name, f"a function of {found}")
    return function
