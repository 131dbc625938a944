"""`vecsim trace`: looking at traces and converting them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vecsim.errors import InputError

if TYPE_CHECKING:
    from vecsim.workload.workload import Workload

app = typer.Typer(no_args_is_help=True, help="Look at traces and convert them.")

_PLAIN_WIDTH = 120


class InfoFormat(StrEnum):
    """What `vecsim trace info` prints."""

    table = "table"
    json = "json"


_Source = Annotated[str, typer.Argument(metavar="TRACE", help="A file, a folder, or a glob.")]
_Format = Annotated[str, typer.Option("--trace-format", help="Format of the trace.")]
_TimeUnit = Annotated[
    str | None, typer.Option("--time-unit", help="Unit of the time stamps: s, ms, us, ns.")
]
_Block = Annotated[
    int | None,
    typer.Option("--trace-block-size", help="Prompt tokens that one hash id stands for."),
]
_Limit = Annotated[int | None, typer.Option("--limit", help="Take only the first rows.")]
_Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="NAME=COLUMN",
        help="Of any other table: the column of arrival, input_length, output_length, "
        "session_id, delay, request_id, hash_ids. May be repeated.",
    ),
]
_Failed = Annotated[
    str,
    typer.Option("--failed-rows", help="Requests that failed in the source: drop, keep, error."),
]


def _read(
    source: str,
    form: str,
    time_unit: str | None,
    block: int | None,
    limit: int | None,
    columns: list[str] | None,
    failed: str,
) -> Workload:
    from vecsim.traces import read_trace

    mapping = None
    if columns:
        mapping = {}
        for text in columns:
            name, equals, column = text.partition("=")
            if not equals or not column:
                raise InputError("--column", text, "NAME=COLUMN")
            mapping[name] = column
    return read_trace(
        source,
        form,
        time_unit=time_unit,
        block_size=block,
        limit=limit,
        columns=mapping,
        failed_rows=failed,
    )


@app.command()
def info(
    trace: _Source,
    form: _Format = "auto",
    time_unit: _TimeUnit = None,
    trace_block_size: _Block = None,
    limit: _Limit = None,
    column: _Columns = None,
    failed_rows: _Failed = "drop",
    output: Annotated[InfoFormat, typer.Option("--format", help="What to print.")] = (
        InfoFormat.table
    ),
) -> None:
    """Print rows, span, rates, lengths and prefix sharing of a trace."""
    from vecsim.workload.describe import describe

    workload = _read(trace, form, time_unit, trace_block_size, limit, column, failed_rows)
    facts = describe(workload)
    if output is InfoFormat.json:
        from vecsim.files import json_text

        print(json_text(facts), end="")
        return
    _print(workload, facts)


def _print(workload: Workload, facts: dict[str, Any]) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from vecsim.workload.describe import histogram

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    scalars = Table(box=None, show_header=False)
    for name, value in facts.items():
        if not isinstance(value, dict) and value is not None:
            scalars.add_row(name, _shown(value))
    for reason, count in facts.get("dropped", {}).items():
        scalars.add_row("dropped", f"{count}: {reason}")
    console.print(scalars)
    rows = {
        "input_tokens": workload.input_length,
        "output_tokens": workload.output_length,
        "gap_ms": np.diff(np.sort(workload.arrival_ms)),
    }
    shown = {name: facts[name] for name in rows if facts[name] is not None}
    if not shown:
        return
    table = Table(box=None)
    table.add_column("")
    for name in next(iter(shown.values())):
        table.add_column(name, justify="right")
    table.add_column("from min to max")
    for name, values in shown.items():
        table.add_row(name, *(_shown(v) for v in values.values()), histogram(rows[name]))
    console.print(table)
    arrivals = histogram(workload.arrival_ms)
    console.print(f"arrivals over time  {arrivals}", markup=False)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@app.command()
def convert(
    trace: _Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .parquet, .csv or .jsonl file.")],
    form: _Format = "auto",
    time_unit: _TimeUnit = None,
    trace_block_size: _Block = None,
    limit: _Limit = None,
    column: _Columns = None,
    failed_rows: _Failed = "drop",
    speedup: Annotated[
        float | None, typer.Option(help="Divide gaps between arrivals, and delays, by this.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Speed up or slow down to so many requests per second.")
    ] = None,
    window: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Keep what arrives from the first to before the second (ms)."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    """Write a trace as a workload file of vecsim, which replays identically."""
    workload = _read(trace, form, time_unit, trace_block_size, limit, column, failed_rows)
    if window is not None:
        workload = workload.window(*window)
    if speedup is not None:
        workload = workload.speedup(speedup)
    if rate is not None:
        workload = workload.rescale_rate(rate)
    workload.write(out, overwrite=overwrite)
