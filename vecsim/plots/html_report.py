"""One self-contained HTML file for a run or a sweep: no script, no network, pictures as SVG.

Each picture stands beside its Vega-Lite spec, data included, in a JSON block, so that it can be
redrawn.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from vecsim.config.documents import parse_json
from vecsim.errors import InputError
from vecsim.files import replace_file
from vecsim.plots.charts import ResultPlots, SweepPlots, to_svg
from vecsim.plots.labels import title
from vecsim.results.result import Result
from vecsim.sweeps.frame import SweepFrame

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto;
       padding: 0 1em; }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; }
th, td { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1.5em 0; } figcaption { color: #666; }
.wide { overflow-x: auto; } pre { background: #f6f6f6; padding: 1em; overflow-x: auto; }
"""
_NAMESPACES = re.compile(r"\sxmlns(:\w+)?=\"[^\"]*\"")
_SWEEP_COLUMNS = (
    "status",
    "reason",
    "feasible",
    "slo_miss",
    "dropped",
    "gpus",
    "completed_requests",
    "median_ttft_ms",
    "p99_ttft_ms",
    "p99_itl_ms",
    "p99_e2e_latency_ms",
    "output_throughput_tok_s",
    "output_throughput_tok_s_per_gpu",
    "cost_per_million_tokens",
)
_MOST_ROWS = 2000


def write_report(
    source: Result | pl.DataFrame | str | os.PathLike[str],
    path: str | os.PathLike[str],
    overwrite: bool = False,
) -> Path:
    """Write the report of a run or a sweep.

    Args:
        source: a result, the frame of a sweep, a folder that `Result.write` filled with Parquet
            rows, or a sweep's Parquet file.
        path: HTML file to write.
        overwrite: replace an existing file.

    Raises:
        InputError: nothing to report on there, or `path` is in use.
        VecsimError: Altair or vl-convert is missing.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise InputError("report", str(path), "a name that is not in use, or --overwrite")
    page = _page(source)
    replace_file(path, lambda file: file.write_text(page, encoding="utf-8"))
    return path


def _page(source: Any) -> str:
    if isinstance(source, Result):
        series = source.timeline() if source.outcome.has_segments else None
        return _run_page(source.report, source.effective_config, source.requests, series)
    if isinstance(source, pl.DataFrame):
        return _sweep_page(source)
    path = Path(source)
    if path.is_dir():
        return _folder_page(path)
    try:
        frame = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):
        raise InputError("report", str(path), "a result folder or a sweep's Parquet file") from None
    return _sweep_page(frame)


def _folder_page(folder: Path) -> str:
    from vecsim.results.compare import read_report

    report = read_report(folder)
    requests, series = folder / "requests.parquet", folder / "timeline.parquet"
    if not requests.exists():
        raise InputError("report", str(folder), "request rows as Parquet: requests.parquet")
    config = folder / "config.json"
    return _run_page(
        report,
        parse_json(config.read_text(encoding="utf-8"), config.name) if config.exists() else {},
        pl.read_parquet(requests),
        pl.read_parquet(series) if series.exists() else None,
    )


def _run_page(
    report: Mapping[str, Any],
    config: Mapping[str, Any],
    requests: pl.DataFrame,
    series: pl.DataFrame | None,
) -> str:
    charts = ResultPlots(requests, series).all()
    rows = [
        (title(name), _cell(value))
        for name, value in report.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    counts = [(name, _cell(count)) for name, count in report["terminal_reasons"].items() if count]
    head = f"{report['completed_requests']:,} of {report['workload_requests']:,} requests completed"
    return _document(
        "vecsim replay",
        head,
        _figures(charts),
        "<h2>Report</h2>" + _table(("metric", "value"), [*rows, *counts]),
        "<h2>Configuration</h2><details><summary>what ran</summary><pre>"
        + html.escape(json.dumps(config, indent=2))
        + "</pre></details>",
    )


def _sweep_page(frame: pl.DataFrame) -> str:
    if "status" not in frame.columns or "point" not in frame.columns:
        raise InputError("report", frame.columns[:5], "the frame of a sweep")
    ran = frame.filter(pl.col("status").cast(pl.String) == "ok").height
    axes = SweepFrame(frame).axes
    columns = [
        name
        for name in dict.fromkeys(["point", *axes, *_SWEEP_COLUMNS])
        if name in frame.columns and (name in axes or frame[name].null_count() < frame.height)
    ]
    rows = [tuple(_cell(value) for value in row) for row in frame.select(columns).iter_rows()]
    more = "" if len(rows) <= _MOST_ROWS else f"<p>The first {_MOST_ROWS:,} rows.</p>"
    return _document(
        "vecsim sweep",
        f"{ran:,} of {frame.height:,} points ran",
        _figures(SweepPlots(frame).all()),
        "<h2>Points</h2>" + more,
        _table([title(name) for name in columns], rows[:_MOST_ROWS]),
    )


def _document(heading: str, lead: str, *parts: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{heading}</h1><p>{html.escape(lead)}</p>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _figures(charts: Mapping[str, Any]) -> str:
    return "\n".join(_figure(name, chart) for name, chart in charts.items())


def _figure(name: str, chart: Any) -> str:
    spec = chart.to_dict()
    spec.pop("$schema", None)  # a URL
    text = json.dumps(spec).replace("<", "\\u003c")  # neither </script> nor <!-- can stand there
    svg = _own_ids(name, _NAMESPACES.sub("", to_svg(chart)))
    return (
        f'<figure id="{name}">{svg}</figure>'
        f'<script type="application/json" id="{name}-spec">{text}</script>'
    )


def _own_ids(name: str, svg: str) -> str:
    """Ids that are numbered from 1 in each picture: the converter counts on over all it makes."""
    numbers: dict[str, str] = {}
    for found in re.findall(r'\sid="([^"]+)"', svg):
        numbers.setdefault(found, f"{name}-{len(numbers) + 1}")
    for old, new in numbers.items():
        svg = svg.replace(f'id="{old}"', f'id="{new}"').replace(f"#{old})", f"#{new})")
    return svg


def _table(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "\n".join(f"<tr>{''.join(map(_data, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>\n{body}</table></div>'


def _data(text: str) -> str:
    numeric = re.fullmatch(r"-?[\d,.]+(e[-+]\d+)?", text) is not None
    kind = ' class="number"' if numeric else ""
    return f"<td{kind}>{html.escape(text)}</td>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1e6 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
