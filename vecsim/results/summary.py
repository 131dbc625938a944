"""The tables that people read after a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vecsim.kernels.state import status as S

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_SUMMARY_DISTRIBUTIONS = (
    ("TTFT", "ms", "ttft", "_ms"),
    ("queue time", "ms", "queue_time", "_ms"),
    ("TTST", "ms", "ttst", "_ms"),
    ("TPOT", "ms", "tpot", "_ms"),
    ("ITL", "ms", "itl", "_ms"),
    ("E2E latency", "ms", "e2e_latency", "_ms"),
    ("output per user", "tok/s", "output_token_throughput_per_user", ""),
)
_SUMMARY_STATISTICS = ("mean", "median", "p90", "p99", "max")
_SUMMARY_SCALARS = (
    ("completed", "requests", "completed_requests", ",d"),
    ("duration", "ms", "duration_ms", ",.3f"),
    ("request throughput", "req/s", "request_throughput_rps", ",.3f"),
    ("input throughput", "tok/s", "input_throughput_tok_s", ",.1f"),
    ("output throughput", "tok/s", "output_throughput_tok_s", ",.1f"),
    ("goodput", "req/s", "goodput_request_throughput_rps", ",.3f"),
    ("goodput ratio", "of requests", "goodput_ratio", ".5f"),
    ("reuse ratio", "of prompt tokens", "prefix_cache_reused_ratio", ".5f"),
    ("preemptions", "", "preemptions", ",d"),
    ("prefill pool busy", "of the time", "prefill_pool_busy_ratio", ".5f"),
    ("prefill KV use", "of the blocks", "prefill_pool_mean_kv_usage", ".5f"),
    ("pool busy", "of the time", "decode_pool_busy_ratio", ".5f"),
    ("KV use", "of the blocks", "decode_pool_mean_kv_usage", ".5f"),
    ("GPU hours", "h", "gpu_hours", ",.4f"),
    ("prefill KV blocks, derived", "a rank", "prefill_derived_num_gpu_blocks", ",d"),
    ("KV blocks, derived", "a rank", "decode_derived_num_gpu_blocks", ",d"),
    ("prefills outside the table", "look-ups", "outside_table_prefill_lookups", ",d"),
    ("decodes outside the table", "look-ups", "outside_table_decode_lookups", ",d"),
)


def summary_of(report: dict) -> Group:
    from rich.console import Group

    latencies = _table("metric", "unit", *_SUMMARY_STATISTICS)
    for label, unit, name, suffix in _SUMMARY_DISTRIBUTIONS:
        values = [report[f"{statistic}_{name}{suffix}"] for statistic in _SUMMARY_STATISTICS]
        if values[0] is not None:
            latencies.add_row(label, unit, *map(_short, values))
    scalars = _table("metric", "unit", "value")
    for row in _summary_scalars(report):
        scalars.add_row(*row)
    return Group(latencies, scalars) if latencies.row_count else Group(scalars)


def _table(label: str, unit: str, *numbers: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(label, overflow="fold")
    table.add_column(unit, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", overflow="fold")
    return table


def _short(value: float) -> str:
    return f"{value:,.3f}" if abs(value) < 10_000 else f"{value:,.1f}"


def _summary_scalars(report: dict) -> list[tuple[str, str, str]]:
    rows = [
        (label, unit, format(report[name], form))
        for label, unit, name, form in _SUMMARY_SCALARS
        if report.get(name) is not None
    ]
    counts = {name: report[f"{name}_requests"] for name in S.STATUS_NAMES[1:]}
    counts.update({f"  {name}": count for name, count in report["terminal_reasons"].items()})
    rows += [
        (name.replace("_", " "), "requests", f"{count:,d}")
        for name, count in counts.items()
        if count
    ]
    if report["backlog_growing"]:
        rows.append(("backlog growing", "when arrivals ended", "yes"))
    return rows
