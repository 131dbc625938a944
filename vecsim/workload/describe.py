"""What a workload looks like: rows, span, rates, lengths, prefix sharing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from vecsim.workload.workload import Workload

_QUANTILES = {
    "min": 0.0,
    "p25": 25.0,
    "median": 50.0,
    "p75": 75.0,
    "p95": 95.0,
    "p99": 99.0,
    "max": 100.0,
}
_BARS = 24
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def describe(workload: Workload) -> dict[str, Any]:
    """Facts about a workload; None where there is nothing to measure.

    Keys: `requests`, `sessions`, `plays`, `span_s` (first to last arrival), `mean_rate_rps`
    ((requests - 1) / span), `peak_rate_rps` (most arrivals in one of the seconds after the
    first), `input_tokens`, `output_tokens` and `gap_ms` (mean and quantiles: the sorted value
    at index (n - 1) q, rounded half up), `total_input_tokens`, `total_output_tokens`,
    `shareable_input_ratio` (part of the prompt tokens that repeat an earlier prefix, by
    content blocks), `private_rows`, and of a trace file `format`, `files`, `time_unit`,
    `block_size`, `dropped`. Arrivals of later turns and of dependent requests are lower bounds.
    """
    n = len(workload)
    arrivals = np.sort(workload.arrival_ms)
    span = float(arrivals[-1] - arrivals[0]) / 1000.0 if n else 0.0
    sessions, graph, origin = workload.sessions, workload.dependencies, workload.origin
    facts: dict[str, Any] = {
        "requests": n,
        "sessions": None if sessions is None else sessions.count,
        "plays": None if graph is None else len(graph.play_id),
        "span_s": span,
        "mean_rate_rps": (n - 1) / span if span > 0 else None,
        "peak_rate_rps": _peak(arrivals),
        "input_tokens": quantiles(workload.input_length),
        "output_tokens": quantiles(workload.output_length),
        "gap_ms": quantiles(np.diff(arrivals)),
        "total_input_tokens": int(workload.input_length.sum(dtype=np.int64)),
        "total_output_tokens": int(workload.output_length.sum(dtype=np.int64)),
        "shareable_input_ratio": _shareable(workload),
        "private_rows": _private(workload),
    }
    if origin is not None:
        facts |= {
            "format": origin.format,
            "files": list(origin.files),
            "time_unit": origin.unit,
            "block_size": origin.block_size,
            "dropped": dict(origin.dropped),
        }
    return facts


def quantiles(values: np.ndarray) -> dict[str, float] | None:
    """Mean and quantiles by name; None of nothing."""
    if len(values) == 0:
        return None
    ordered = np.sort(values)
    result = {"mean": float(values.mean(dtype=np.float64))}
    for name, percent in _QUANTILES.items():
        result[name] = ordered[int(np.floor((len(ordered) - 1) * percent / 100.0 + 0.5))].item()
    return result


def _peak(arrivals: np.ndarray) -> float | None:
    if len(arrivals) == 0:
        return None
    seconds = np.floor((arrivals - arrivals[0]) / 1000.0)
    return float(np.unique(seconds, return_counts=True)[1].max())


def _private(workload: Workload) -> int:
    """Rows with a prompt that share a prefix with none."""
    if workload.block_offsets is None:
        return len(workload)
    empty = np.diff(workload.block_offsets) == 0
    return int(np.count_nonzero(empty & (workload.input_length > 0)))


def _shareable(workload: Workload) -> float | None:
    """Share of prompt tokens in content blocks whose whole path occurred in an earlier row."""
    total = int(workload.input_length.sum(dtype=np.int64))
    if workload.block_offsets is None or total == 0:
        return None
    tree = replace(workload, output_offsets=None, output_token_ids=None, _trees={}).prefix_tree(
        workload.block_tokens
    )
    row = np.repeat(np.arange(len(workload)), np.diff(tree.offsets))
    position = np.arange(len(tree.nodes)) - np.repeat(tree.offsets[:-1], np.diff(tree.offsets))
    left = workload.input_length[row] - position * workload.block_tokens
    covered = np.minimum(workload.block_tokens, left)
    order = np.arange(len(tree.nodes))
    first = np.full(tree.node_count, len(order))
    np.minimum.at(first, tree.nodes, order)
    repeated = order > first[tree.nodes]
    return float(covered[repeated].sum(dtype=np.int64) / total)


def histogram(values: np.ndarray) -> str:
    """One line of bars over equal steps from the smallest value to the largest."""
    if len(values) == 0:
        return ""
    counts = np.histogram(values, bins=_BARS)[0]
    levels = np.ceil(counts / counts.max() * (len(_EIGHTHS) - 1)).astype(int)
    return "".join(_EIGHTHS[level] for level in levels)
