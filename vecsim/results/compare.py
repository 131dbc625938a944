"""Two results side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from vecsim.config.documents import parse_json
from vecsim.errors import InputError
from vecsim.results.result import Result

Compared = Result | Mapping[str, Any] | str | os.PathLike[str]

MAIN_METRICS = (
    "workload_requests",
    "completed_requests",
    "rejected_requests",
    "failed_requests",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "mean_e2e_latency_ms",
    "p99_e2e_latency_ms",
    "request_throughput_rps",
    "output_throughput_tok_s",
    "goodput_request_throughput_rps",
    "prefix_cache_reused_ratio",
    "preemptions",
    "decode_pool_busy_ratio",
    "decode_pool_mean_kv_usage",
    "gpu_hours",
)
"""What a short comparison shows."""


def compare(a: Compared, b: Compared, all_metrics: bool = True) -> pl.DataFrame:
    """Every numeric metric of two reports.

    Args:
        a, b: results, reports, folders that `Result.write` filled, or report files.
        all_metrics: False leaves only those of `MAIN_METRICS`.

    Returns:
        Columns `metric`, `a`, `b`, `difference` (b - a) and `ratio` (b / a, null where a is 0);
        null where one has no value. Counts by reason are named `terminal_reasons.<reason>`.

    Raises:
        InputError: neither a result nor the place of one.
    """
    left, right = _metrics("a", a), _metrics("b", b)
    names = [name for name in dict.fromkeys([*left, *right]) if all_metrics or name in MAIN_METRICS]
    frame = pl.DataFrame(
        {
            "metric": names,
            "a": [left.get(name) for name in names],
            "b": [right.get(name) for name in names],
        },
        schema={"metric": pl.String, "a": pl.Float64, "b": pl.Float64},
    )
    a_, b_ = pl.col("a"), pl.col("b")
    return frame.with_columns(
        (b_ - a_).alias("difference"), pl.when(a_ != 0).then(b_ / a_).alias("ratio")
    )


def _metrics(where: str, compared: Compared) -> dict[str, float | None]:
    report = compared
    if isinstance(compared, Result):
        report = compared.report
    elif isinstance(compared, str | os.PathLike):
        report = read_report(compared)
    if not isinstance(report, Mapping):
        raise InputError(where, compared, "a result, a report, or the place of one")
    flat: dict[str, float | None] = {}
    for name, value in report.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{key}": float(count) for key, count in value.items()})
        elif value is None or isinstance(value, bool | int | float):
            flat[name] = None if value is None else float(value)
    return flat


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The report in a result folder or a report file. Raises InputError."""
    path = Path(path)
    file = path / "report.json" if path.is_dir() else path
    try:
        report = parse_json(file.read_text(encoding="utf-8"), file.name)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), str(error), "a result folder or a report file") from None
    if not isinstance(report, dict) or "completed_requests" not in report:
        raise InputError(str(path), "something else", "a result folder or a report file")
    return report
