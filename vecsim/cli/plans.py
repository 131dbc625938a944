"""Commands over many replays and over finished results: sweep, capacity, compare, report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vecsim.errors import InputError

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table

    from vecsim.sweeps.capacity import Capacity
    from vecsim.sweeps.frame import SweepFrame

_SHOWN = (
    "status",
    "feasible",
    "gpus",
    "median_ttft_ms",
    "p99_ttft_ms",
    "p99_itl_ms",
    "output_throughput_tok_s",
    "cost_per_million_tokens",
)
_PLAIN_WIDTH = 160  # columns of a table that is not printed to a terminal
_MOST_SHOWN = 200
_POINTS_FAILED = 1
_INFEASIBLE = 1


class Executor(StrEnum):
    """Where the points of a sweep run."""

    threads = "threads"
    ray = "ray"


class TableFormat(StrEnum):
    """What is printed."""

    table = "table"
    json = "json"


_Output = Annotated[
    Path | None, typer.Option(help="Parquet file for the rows; nothing is written without it.")
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier file.")]
_Threads = Annotated[
    int | None, typer.Option(help="Results do not depend on it.", show_default="all cores")
]
_Format = Annotated[TableFormat, typer.Option("--format", help="What to print.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    for command in (sweep, capacity, compare, report):
        app.command()(command)


def sweep(
    plan: Annotated[Path, typer.Argument(help="The sweep as YAML or JSON.")],
    output: _Output = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the finished rows of OUTPUT and go on.")
    ] = False,
    overwrite: _Overwrite = False,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML report here (needs vecsim\\[plot]).")
    ] = None,
    executor: Annotated[Executor, typer.Option(help="Where points run.")] = Executor.threads,
    threads: _Threads = None,
    format_: _Format = TableFormat.table,
) -> None:
    """Replay every point of a plan: one row a point.

    Exit code 1 when some point did not run; its row says why. Ctrl-C keeps finished rows.
    """
    from vecsim.files import check_writable
    from vecsim.sweeps.plan_files import SWEEP_KEYS, read_plan
    from vecsim.sweeps.run import SweepInterrupted, SweepNotWritten
    from vecsim.sweeps.run import sweep as run_sweep

    _check_parquet(output)
    _check_free(html, overwrite)
    arguments = read_plan(plan, SWEEP_KEYS)
    if html is not None:
        check_writable(html)
    _announce_compilation()
    not_written = None
    try:
        frame = run_sweep(
            **arguments,
            executor=executor.value,
            threads=threads,
            progress=sys.stderr.isatty(),
            output=output,
            resume=resume,
            overwrite=overwrite,
        )
    except SweepInterrupted as stopped:
        kept = f", kept in {output}" if output is not None else ""
        print(f"vecsim: {stopped.frame.height} points finished{kept}", file=sys.stderr)
        raise
    except SweepNotWritten as error:
        frame, not_written = error.frame, error
    axes = arguments["axes"]
    if frame.is_empty():
        raise InputError("axes", axes, "at least one point that meets the constraints")
    _print_sweep(frame, list(axes) if isinstance(axes, dict) else frame.axes, format_)
    if not_written is not None:
        raise not_written
    if html is not None:
        from vecsim.plots.html_report import write_report

        write_report(frame, html, overwrite)
    missed = frame.filter(frame["status"].cast(str) != "ok")
    if missed.height:
        first = missed["reason"][0]
        message = f"{missed.height} of {frame.height} points did not run; the first: {first}"
        print(f"vecsim: {message}", file=sys.stderr)
        raise typer.Exit(_POINTS_FAILED)


def capacity(
    plan: Annotated[Path, typer.Argument(help="The question as YAML or JSON.")],
    output: _Output = None,
    overwrite: _Overwrite = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Replay all that could be better, however many.")
    ] = False,
    threads: _Threads = None,
    format_: _Format = TableFormat.table,
) -> None:
    """The smallest fleet for a load, or the largest load for a fleet, within an SLO.

    Exit code 1 when no candidate is feasible.
    """
    from vecsim.files import check_writable, json_text, replace_file
    from vecsim.sweeps.capacity import capacity as find_capacity
    from vecsim.sweeps.plan_files import CAPACITY_KEYS, read_plan

    _check_parquet(output)
    _check_free(output, overwrite)
    arguments = read_plan(plan, CAPACITY_KEYS)
    if exhaustive:
        arguments["exhaustive"] = True
    _announce_compilation()
    if output is not None:
        check_writable(output)
    found = find_capacity(**arguments, threads=threads, progress=_probe_line(arguments))
    if format_ is TableFormat.json:
        print(json_text(found.to_dict()), end="")
    else:
        _print_capacity(found)
    sys.stdout.flush()
    if output is not None:
        replace_file(output, found.points.write_parquet)
    if not found.feasible:
        raise typer.Exit(_INFEASIBLE)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A result folder or report file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    all_: Annotated[bool, typer.Option("--all", help="Every metric, not only the main ones.")] = (
        False
    ),
    format_: _Format = TableFormat.table,
) -> None:
    """Two results side by side."""
    from vecsim.files import json_text
    from vecsim.results.compare import compare as compare_results

    frame = compare_results(a, b, all_metrics=all_)
    if format_ is TableFormat.json:
        print(json_text(frame.to_dicts()), end="")
        return
    present = frame.filter(frame["a"].is_not_null() | frame["b"].is_not_null())
    _print(_table(present.rename({"a": str(a), "b": str(b)})))


def report(
    source: Annotated[
        Path, typer.Argument(help="A result folder, or the Parquet file of a sweep.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")],
    overwrite: _Overwrite = False,
) -> None:
    """Write one self-contained HTML file (needs vecsim\\[plot])."""
    from vecsim.plots.html_report import write_report

    print(write_report(source, output, overwrite))


# --- printing -------------------------------------------------------------------------------------


def _check_parquet(path: Path | None) -> None:
    """Refuse a name that promises another format than Parquet."""
    if path is not None and path.suffix.lower() in (".csv", ".json", ".jsonl", ".html", ".xlsx"):
        raise InputError("--output", str(path), "a name that ends in .parquet: it holds Parquet")


def _check_free(path: Path | None, overwrite: bool) -> None:
    """Refuse an occupied file before the run, not after it."""
    if path is not None and path.exists() and not overwrite:
        raise InputError("output", str(path), "a name that is not in use, or --overwrite")


def _announce_compilation() -> None:
    from vecsim.kernels.compile.cache import on_compile, where_kept

    announced: list[str] = []

    def announce(name: str) -> None:
        if not announced:
            print(f"vecsim: compiling kernels; {where_kept()}", file=sys.stderr)
        announced.append(name)

    on_compile(announce)


def _probe_line(arguments: Mapping[str, Any]) -> Any:
    """A line on stderr for each candidate, on a terminal."""
    if not sys.stderr.isatty():
        return None
    from vecsim.sweeps.capacity import why_not

    names = list(arguments.get("fleet") or arguments.get("load") or ())
    names = [arguments["load"]] if isinstance(arguments.get("load"), str) else names

    def show(row: Mapping[str, Any]) -> None:
        shown = ", ".join(f"{name} = {row.get(name)}" for name in names)
        verdict = "feasible" if row.get("feasible") else why_not(row)
        print(f"vecsim: {shown}: {verdict}", file=sys.stderr)

    return show


def _print_sweep(frame: SweepFrame, axes: list[str], form: TableFormat) -> None:
    from vecsim.files import json_text

    if form is TableFormat.json:
        print(json_text(frame.with_columns(status=frame["status"].cast(str)).to_dicts()), end="")
        return
    columns = [name for name in (*axes, *_SHOWN) if name in frame.columns]
    shown = frame.select(name for name in columns if frame[name].null_count() < frame.height)
    _print(_table(shown.head(_MOST_SHOWN)))
    if frame.height > _MOST_SHOWN:
        print(f"the first {_MOST_SHOWN} of {frame.height} points")


def _print_capacity(found: Capacity) -> None:
    print(found)
    names = (*found.axes, *_SHOWN[:2], "load_state", *_SHOWN[2:])
    columns = [name for name in names if name in found.points.columns]
    kept = [name for name in columns if found.points[name].null_count() < found.points.height]
    _print(_table(found.points.select(kept)))


def _table(frame: pl.DataFrame) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name, dtype in frame.schema.items():
        right = dtype.is_numeric()
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in frame.iter_rows():
        table.add_row(*map(_cell, row))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10_000 else f"{value:,.1f}"
    return str(value)


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(table, markup=False)
