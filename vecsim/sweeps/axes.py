"""Axes of a sweep, and the points they span.

An axis is a field path, a workload knob or a short name, with the values it takes; or a free name
with named bundles, each of which sets several fields together (a tensor-parallel size with its
timing and its block count).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vecsim.config.diagnostics import plain
from vecsim.config.load import check_path
from vecsim.errors import InputError
from vecsim.sweeps.expressions import parse_expression

SHORT_NAMES = {
    "workers": "topology.workers.initial_workers",
    "prefill_workers": "topology.prefill.initial_workers",
    "decode_workers": "topology.decode.initial_workers",
    "tp": "engine.tensor_parallel_size",
    "dp": "engine.dp_size",
    "arrival_speedup": "workload.arrival_speedup",
    "concurrency": "workload.concurrency",
    "limit": "workload.limit",
}
"""Names that stand for a longer path."""

KNOBS = ("workload.arrival_speedup", "workload.concurrency", "workload.limit")
"""What a point may do to the workload: divide the gaps between arrivals, keep so many requests in
flight (closed loop), take the first rows only."""

TIMINGS = ("timing", "prefill_timing", "decode_timing")
"""Custom timing models (`vecsim.CompiledTiming`) that a point may bring along."""

COMBINATIONS = ("grid", "zip")
_MOST_POINTS = 10_000_000


@dataclass(frozen=True)
class Point:
    """One configuration of a sweep.

    Attributes:
        index: position among the points.
        labels: column -> what the row shows: a scalar, or JSON text of what is none.
        fields: path -> value to set; knobs of `KNOBS` and models of `TIMINGS` included.
    """

    index: int
    labels: dict[str, Any]
    fields: dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """One position of an axis: what its column shows, and what it sets."""

    label: Any
    fields: dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """A named list of choices."""

    name: str
    choices: tuple[Choice, ...]


def read_axis(name: str, values: Any) -> Axis:
    """An axis from a list, a range, a log range, or named bundles.

    Args:
        name: field path, knob or short name; with bundles any name.
        values: a sequence of values; a Python `range`; `{"range": [start, stop]}` or
            `{"range": [start, stop, step]}`, stop included; `{"log_range": [start, stop, count]}`,
            equal ratios, both ends included, rounded to whole numbers where both ends are whole;
            or `{label: {path: value, ...}, ...}`, named bundles.

    Raises:
        InputError: an unknown path, no values, an impossible range.
    """
    where = f"axes.{name}"
    if isinstance(values, Mapping) and not _is_range(values):
        return _bundles(name, where, values)
    path = _path(where, name)
    listed = _values(where, values)
    if not listed:
        raise InputError(where, values, "at least one value")
    return Axis(name, tuple(Choice(label(value), {path: value}) for value in listed))


def _is_range(values: Mapping) -> bool:
    return len(values) == 1 and next(iter(values)) in ("range", "log_range")


def _bundles(name: str, where: str, values: Mapping) -> Axis:
    if not values:
        raise InputError(where, values, "at least one value")
    choices = []
    for tag, bundle in values.items():
        if not isinstance(bundle, Mapping) or not bundle:
            expected = "values, a range, a log_range, or bundles {label: {path: value}}"
            raise InputError(f"{where}.{tag}", bundle, expected)
        fields = {_path(f"{where}.{tag}", path): plain(value) for path, value in bundle.items()}
        choices.append(Choice(str(tag), fields))
    return Axis(name, tuple(choices))


def _path(where: str, name: str) -> str:
    if not isinstance(name, str) or not name:
        raise InputError(where, name, "a field path")
    path = SHORT_NAMES.get(name, name)
    if path in KNOBS or path in TIMINGS:
        return path
    if path.startswith("workload."):
        raise InputError(where, name, f"one of {', '.join(KNOBS)}")
    check_path(where, path)
    return path


def _values(where: str, values: Any) -> list[Any]:
    if isinstance(values, Mapping):
        ((kind, bounds),) = values.items()
        return (_range if kind == "range" else _log_range)(f"{where}.{kind}", bounds)
    if isinstance(values, str | bytes):
        raise InputError(where, values, "a list of values")
    if hasattr(values, "to_list"):  # a Polars series
        return values.to_list()
    values = plain(values)
    if isinstance(values, Iterable):
        return [plain(value) for value in values]
    return [values]


def _numbers(where: str, bounds: Any, least: int, most: int, expected: str) -> list[float]:
    fits = isinstance(bounds, Sequence) and least <= len(bounds) <= most
    if not fits or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in bounds
    ):
        raise InputError(where, bounds, expected)
    return list(bounds)


def _range(where: str, bounds: Any) -> list[float]:
    expected = "[start, stop] or [start, stop, step]: finite numbers, step above 0, stop >= start"
    start, stop, *step = _numbers(where, bounds, 2, 3, expected)
    step = step[0] if step else 1
    if step <= 0 or stop < start or (stop - start) / step >= _MOST_POINTS:
        raise InputError(where, bounds, expected)
    count = math.floor((stop - start) / step + 1e-9) + 1
    return [start + k * step for k in range(count)]


def _log_range(where: str, bounds: Any) -> list[float]:
    expected = "[start, stop, count]: 0 < start <= stop, count a whole number of 2 or more"
    start, stop, count = _numbers(where, bounds, 3, 3, expected)
    whole_count = isinstance(count, int) and 2 <= count <= _MOST_POINTS
    if not whole_count or start <= 0 or stop < start:
        raise InputError(where, bounds, expected)
    inner = [start * (stop / start) ** (k / (count - 1)) for k in range(1, count - 1)]
    values = [start, *inner, stop]
    if isinstance(start, int) and isinstance(stop, int):
        values = [round(value) for value in values]
    return list(dict.fromkeys(values))


def label(value: Any) -> Any:
    """What a column shows for a value: scalars as they are, the rest as JSON text or its repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError:
        return type(value).__name__


# --- points ---------------------------------------------------------------------------------------


def points_of(
    axes: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    combine: str = "grid",
    constraints: Sequence[str] = (),
) -> list[Point]:
    """The points that axes span.

    Args:
        axes: name -> values, as `read_axis` takes them; or explicit points, each a mapping of paths
            to values.
        combine: "grid" takes every combination, the last axis varying fastest; "zip" takes the
            axes side by side. Explicit points are taken as they are.
        constraints: expressions over the columns of a point; a point that fails one is left out.

    Raises:
        InputError: a malformed axis, axes of different lengths under "zip", two axes that set one
            field, a malformed constraint.
    """
    if combine not in COMBINATIONS:
        raise InputError("combine", combine, f"one of {', '.join(COMBINATIONS)}")
    if isinstance(constraints, str):
        constraints = [constraints]
    rules = [parse_expression(f"constraints[{i}]", text) for i, text in enumerate(constraints)]
    if isinstance(axes, Mapping):
        combined = _combine([read_axis(name, values) for name, values in axes.items()], combine)
    elif isinstance(axes, Sequence) and not isinstance(axes, str):
        combined = [_explicit(i, point) for i, point in enumerate(axes)]
    else:
        raise InputError("axes", axes, "a mapping of axes, or a list of points")
    points: list[Point] = []
    for choices in combined:
        point = _point(len(points), choices)
        if all(rule.holds(_names(point)) for rule in rules):
            points.append(point)
    return points


def _combine(axes: list[Axis], combine: str) -> Iterable[tuple[tuple[str, Choice], ...]]:
    named = [[(axis.name, choice) for choice in axis.choices] for axis in axes]
    if combine == "grid":
        count = math.prod(len(choices) for choices in named)
        if count > _MOST_POINTS:
            raise InputError("axes", f"{count} points", f"at most {_MOST_POINTS}")
        return itertools.product(*named)
    lengths = {axis.name: len(axis.choices) for axis in axes}
    if len(set(lengths.values())) > 1:
        raise InputError("axes", lengths, "axes of equal length under zip")
    return zip(*named, strict=True)


def _explicit(index: int, point: Any) -> tuple[tuple[str, Choice], ...]:
    where = f"axes[{index}]"
    if not isinstance(point, Mapping):
        raise InputError(where, point, "a mapping of field paths to values")
    return tuple(
        (name, Choice(label(plain(value)), {_path(f"{where}.{name}", name): plain(value)}))
        for name, value in point.items()
    )


def _point(index: int, choices: Iterable[tuple[str, Choice]]) -> Point:
    labels: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for name, choice in choices:
        labels[name] = choice.label
        for path, value in choice.fields.items():
            if path in fields:
                raise InputError(f"axes.{name}", path, "a field that no other axis sets")
            fields[path] = value
            if path != SHORT_NAMES.get(name, name):
                labels.setdefault(path, label(value))
    return Point(index, labels, fields)


def _names(point: Point) -> dict[str, Any]:
    """What a constraint may speak of: columns, fields, and short names of the fields."""
    names = {**point.fields, **point.labels}
    names.update({s: point.fields[path] for s, path in SHORT_NAMES.items() if path in point.fields})
    return names
