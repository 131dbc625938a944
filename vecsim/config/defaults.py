"""Fields that a role takes from its timing model where they are left out (timing providers,
sections 1.1 and 5.1)."""

from __future__ import annotations

from typing import Any

from vecsim.config.schema import ALIASES, AicTiming

AUTO = "auto"
_EXTERNAL = ("external", "aic")
_SIZES = {"tensor_parallel_size": "tp", "dp_size": "attention_dp"}
"""Field of a role -> field of the timing model that gives it."""


def derive(spec: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """The spec with the fields set that follow from its timing models.

    Beside external timing `num_gpu_blocks` is "auto" where it is not written, unless
    `num_gpu_blocks_is_explicit` is true; where that is false it is "auto" whatever is written. GPU
    counts that are not written are those of the timing model.

    Args:
        spec: a spec tree of known types; not changed.
        written: the same tree with only what its author wrote.
    """
    engine, authored = spec.get("engine"), written.get("engine")
    if not isinstance(engine, dict) or not isinstance(authored, dict):
        return spec
    engine = _derive_role(engine, authored)
    for stage in ("prefill", "decode"):
        if isinstance(engine.get(stage), dict) and isinstance(authored.get(stage), dict):
            engine = {**engine, stage: _derive_role(engine[stage], authored[stage])}
    return {**spec, "engine": engine}


def _derive_role(role: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    rank = role.get("rank")
    timing = rank.get("timing_model") if isinstance(rank, dict) else None
    if not isinstance(timing, dict):
        return role
    kind = timing.get("type")
    if kind not in (*_EXTERNAL, "roofline"):
        return role
    config = timing.get("config") if kind == "external" else timing
    if isinstance(config, dict):
        other = {name: alias for alias, name in ALIASES[AicTiming].items()}
        for field, name in _SIZES.items():
            size = config.get(name, config.get(other[name]))
            if size is not None and field not in written:
                role = {**role, field: size}
    explicit = role.get("num_gpu_blocks_is_explicit")
    omitted = "num_gpu_blocks" not in (written.get("rank") or {})
    if kind in _EXTERNAL and explicit is not True and (omitted or explicit is False):
        role = {**role, "rank": {**rank, "num_gpu_blocks": AUTO}}
    return role
