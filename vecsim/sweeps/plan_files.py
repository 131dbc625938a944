"""Sweep and capacity plans as YAML or JSON files: what `vecsim sweep` and `vecsim capacity` read.

Paths in a plan are relative to its folder.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from vecsim.config.documents import read_document
from vecsim.errors import MISSING, InputError
from vecsim.workload.workload import Workload

_COMMON = ("spec", "trace", "constraints", "slo", "gpu_hour_price")
SWEEP_KEYS = (*_COMMON, "axes", "combine")
CAPACITY_KEYS = (
    *_COMMON,
    "fleet",
    "load",
    "gpu_budget",
    "tolerance",
    "saturation",
    "replays",
    "exhaustive",
)
_TRACE_KEYS = ("path", "format", "time_unit", "block_size", "limit", "arrival_speedup_ratio")
_DEFAULT_SPEC = {
    "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
    "requests": [],
}


def read_plan(path: str | os.PathLike[str], keys: tuple[str, ...]) -> dict[str, Any]:
    """Keyword arguments of `vecsim.sweep` or `vecsim.capacity` from a file.

    Args:
        path: a .yaml, .yml or .json file with some of `keys`. `spec` is a spec or the path of
            one, by default a single aggregated worker; `trace` is a path, or `path` with the
            options of `vecsim.read_trace`.
        keys: `SWEEP_KEYS` or `CAPACITY_KEYS`.

    Returns:
        The keys that are there, with `base` and `workload` in place of `spec` and `trace`.

    Raises:
        InputError: an unreadable file, an unknown or missing key, a malformed trace.
    """
    path = Path(path)
    tree = read_document(path)
    if not isinstance(tree, dict):
        raise InputError(path.name, tree, f"a mapping with some of {', '.join(keys)}")
    _check_keys(path.name, tree, keys)
    tree = _with_table_paths(tree, path.parent)
    if "axes" in keys and "axes" not in tree:
        raise InputError(f"{path.name}, axes", MISSING, "axes, or a list of points")
    if tree.get("spec") is None and tree.get("trace") is None:
        raise InputError(f"{path.name}, trace", MISSING, "a trace, or a spec with requests")
    arguments = {name: tree[name] for name in keys if name in tree and name not in _COMMON[:2]}
    arguments["base"] = _spec(path, tree.get("spec", _DEFAULT_SPEC))
    arguments["workload"] = None if tree.get("trace") is None else _trace(path, tree["trace"])
    return arguments


def _check_keys(where: str, tree: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in tree:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1, cutoff=0.0)[0]
            raise InputError(f"{where}, {key}", tree[key], f"a known key; the nearest is {near}")


def _with_table_paths(tree: Any, folder: Path) -> Any:
    """The plan with the paths of timing tables taken from its folder."""
    if isinstance(tree, list):
        return [_with_table_paths(value, folder) for value in tree]
    if not isinstance(tree, dict):
        return tree
    tree = {name: _with_table_paths(value, folder) for name, value in tree.items()}
    for name, value in tree.items():
        of_table = name == "path" and tree.get("type") == "table"
        if not of_table and not str(name).endswith("timing_model.path"):
            continue
        if isinstance(value, str):
            tree[name] = str(folder / value)
        elif isinstance(value, list):
            tree[name] = [str(folder / one) if isinstance(one, str) else one for one in value]
    return tree


def _spec(path: Path, spec: Any) -> Any:
    if isinstance(spec, str):
        return str(path.parent / spec)
    if not isinstance(spec, dict):
        raise InputError(f"{path.name}, spec", spec, "a replay spec, or the path of one")
    return spec


def _trace(path: Path, trace: Any) -> Workload:
    from vecsim.traces import read_trace

    options = {"path": trace} if isinstance(trace, str) else trace
    if not isinstance(options, dict) or not isinstance(options.get("path"), str):
        raise InputError(f"{path.name}, trace", trace, "a path, or a mapping with `path`")
    _check_keys(f"{path.name}, trace", options, _TRACE_KEYS)
    return read_trace(**{**options, "path": path.parent / options["path"]})
