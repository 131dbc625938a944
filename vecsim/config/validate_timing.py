"""What a timing model that describes a machine must satisfy beside its rank and role."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import inspect

from vecsim.config.checks import optional_positive, refuse
from vecsim.config.diagnostics import Inspection
from vecsim.config.roles import Role
from vecsim.config.schema import (
    AicTiming,
    AllReduce,
    ExternalTiming,
    RooflineTiming,
    TableTiming,
)
from vecsim.errors import NotSupportedYetError

_AIC = inspect.type_info(AicTiming)
_FRACTIONS = ("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction")
_COUNTS = {
    AicTiming: ("tp", "pp", "attention_dp", "moe_tp_size", "moe_ep_size", "cp_size", "dcp"),
    RooflineTiming: ("tp", "attention_dp", "moe_tp", "moe_ep"),
}
_UNBUILT = {
    "estimation_mode": (None, "op_level", "auto"),
    "cp_size": (None, 1),
    "dcp": (None, 1),
}
"""Fields with the values whose prices are known to be those of the operators' sum."""
_OTHER_ESTIMATORS = (
    "fpm_fmha_dtype",
    "fpm_fmha_quant_mode",
    "speculation",
    "forward_model",
    "fpm_profile",
    "fpm_interpolation",
    "fpm_parquet_path",
    "decoder_replay",
    "encoder_parallel",
    "fallback_policy",
    "estimator_config",
    "transfer_policy",
    "systems_paths",
    "enable_shared_layer",
    "shared_layer",
    "strict_provenance",
)
"""Keys of the reference's config that ask for estimators or data that vecsim does not sample."""


def aic_config(where: str, model: ExternalTiming | AicTiming) -> AicTiming:
    """The estimator's configuration, from the short form or from the config of the external one.

    Raises:
        InputError: an unknown key or a wrong type, named below `where`.
        NotSupportedYetError: a key of an estimator that is not built.
    """
    if isinstance(model, AicTiming):
        return model
    where = f"{where}.config"
    for name in _OTHER_ESTIMATORS:
        if model.config.get(name) is not None:
            raise NotSupportedYetError(f"{where}.{name}")
    if "type" in model.config:
        refuse(f"{where}.type", model.config["type"], "no such key")
    config = {k: v for k, v in model.config.items() if k not in _OTHER_ESTIMATORS}
    inspection = Inspection(into_requests=False)
    tree = inspection.visit(config, _AIC, where)
    if inspection.problems:
        raise inspection.problems[0]
    return msgspec.convert({"type": "aic", **tree}, AicTiming)


def check_timing_model(where: str, role: Role) -> None:
    """Check a timing model of the reference's database, or of the roofline, against its role.

    Raises InputError.
    """
    model = role.rank.timing_model
    if isinstance(model, ExternalTiming | AicTiming):
        external = isinstance(model, ExternalTiming)
        model = aic_config(where, model)
        where = f"{where}.config" if external else where
        _check_aic(where, model, role)
        if external and model.tp is None:
            model = msgspec.structs.replace(model, tp=1)
    elif isinstance(model, TableTiming):
        _check_all_reduce(f"{where}.allreduce", model.allreduce)
        return
    elif not isinstance(model, RooflineTiming):
        return
    for name in _COUNTS[type(model)]:
        optional_positive(f"{where}.{name}", getattr(model, name))
    for name in _FRACTIONS:
        value = getattr(model, name)
        if value is not None and not 0.0 < value <= 1.0:
            refuse(f"{where}.{name}", value, "a fraction above 0, at most 1")
    _check_size(f"{role.path}.tensor_parallel_size", role.tensor_parallel_size, model.tp, "tp")
    _check_size(f"{role.path}.dp_size", role.dp_size, model.attention_dp, "attention_dp")


def _check_all_reduce(where: str, given: AllReduce | None) -> None:
    if given is None:
        return
    if not 0.0 < given.gb_s < math.inf:
        refuse(f"{where}.gb_s", given.gb_s, "a bandwidth above 0 (GB/s)")
    if not 0.0 <= given.latency_us < 1e9:
        refuse(f"{where}.latency_us", given.latency_us, "microseconds from 0 on")
    for name in ("layers", "hidden"):
        optional_positive(f"{where}.{name}", getattr(given, name))


def _check_size(where: str, size: int, given: int | None, name: str) -> None:
    if given is not None and size != given:
        refuse(where, size, f"{given}, the {name} of the timing model")


def _check_aic(where: str, model: AicTiming, role: Role) -> None:
    rank = role.rank
    if model.backend is not None and model.backend != rank.backend:
        refuse(f"{where}.backend", model.backend, f"the rank's backend, {str(rank.backend)!r}")
    if (model.moe_tp_size is None) != (model.moe_ep_size is None):
        missing = "moe_tp_size" if model.moe_tp_size is None else "moe_ep_size"
        refuse(f"{where}.{missing}", None, "moe_tp_size and moe_ep_size together")
    nextn = rank.aic_nextn or 0
    if (model.nextn or 0) != nextn:
        refuse(f"{where}.nextn", model.nextn, f"the rank's aic_nextn, {nextn}")
    block = model.kv_block_size
    if block is not None and block != rank.block_tokens:
        refuse(f"{where}.kv_block_size", block, f"the rank's block size, {rank.block_tokens}")
    if model.worker_type is not None and model.worker_type != role.stage:
        refuse(f"{where}.worker_type", str(model.worker_type), f"the role, {str(role.stage)!r}")
    for name, values in _UNBUILT.items():
        value: Any = getattr(model, name)
        if value not in values:
            raise NotSupportedYetError(f"{where}.{name}", str(value))
