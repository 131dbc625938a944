"""The command line. Heavy modules are imported inside the commands, so that start-up stays short.

Exit codes: 0 done; 1 the run could not be finished; 2 bad input (one line on stderr); 130 Ctrl-C.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vecsim.cli.plans import add_commands
from vecsim.cli.timing import app as timing_app
from vecsim.cli.trace import app as trace_app
from vecsim.errors import InputError, VecsimError

if TYPE_CHECKING:
    from vecsim.results.result import Result
    from vecsim.workload.workload import Workload

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(trace_app, name="trace")
app.add_typer(timing_app, name="timing")

_UsageError: type[Exception] = typer.BadParameter.__base__  # not exported by name
_PROGRESS_AFTER_S = 1.0
_PLAIN_WIDTH = 120  # columns of a table that is not printed to a terminal


class OutputFormat(StrEnum):
    """What `vecsim replay` prints."""

    table = "table"
    json = "json"


class RequestsFormat(StrEnum):
    """File format of the request rows."""

    parquet = "parquet"
    csv = "csv"
    jsonl = "jsonl"


def main() -> None:
    """Run the command line on `sys.argv` and exit."""
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="vecsim", standalone_mode=False) or 0
        sys.stdout.flush()
    except _UsageError as error:
        code = _fail(" ".join(error.format_message().split()) or "expected a command", 2)
    except InputError as error:
        code = _fail(str(error), 2)
    except VecsimError as error:
        code = _fail(str(error), 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        code = _fail(str(error), 1)
    except MemoryError as error:
        code = _fail(f"out of memory: {error}" if str(error) else "out of memory", 1)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail("interrupted", 130)
    except typer.Exit as done:
        code = done.exit_code
    # The interpreter would look for garbage in all that was imported and compiled before it ends.
    gc.freeze()
    sys.exit(code)


def _fail(message: str, code: int) -> int:
    print(f"vecsim: {message}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"vecsim: warning: {message}", file=sys.stderr)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"vecsim {version('vecsim')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Simulator of LLM-serving fleets: replays traces in virtual time."""


@app.command()
def schema() -> None:
    """Print the JSON Schema of a replay spec."""
    from vecsim.config.load import json_schema
    from vecsim.files import json_text

    print(json_text(json_schema()), end="")


_TRACE, _FLEET, _OUTPUT = "Trace", "Fleet", "Output"


@app.command()
def replay(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A trace (also .gz and .zst; a folder or a quoted glob of shards), "
            "or a replay spec (JSON or YAML).",
        ),
    ],
    workers: Annotated[
        int | None, typer.Option(help="Workers of the fleet.", rich_help_panel=_FLEET)
    ] = None,
    prefill_workers: Annotated[
        int | None,
        typer.Option(
            help="Workers that prefill only; a prefill/decode fleet.", rich_help_panel=_FLEET
        ),
    ] = None,
    decode_workers: Annotated[
        int | None, typer.Option(help="Workers that decode only.", rich_help_panel=_FLEET)
    ] = None,
    handoff_latency_ms: Annotated[
        float | None,
        typer.Option(
            help="Time of a KV transfer from a prefill to a decode worker.", rich_help_panel=_FLEET
        ),
    ] = None,
    dp: Annotated[
        int | None,
        typer.Option(help="Attention-DP ranks per worker.", rich_help_panel=_FLEET),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Scheduler semantics: vllm, sglang or trtllm.", rich_help_panel=_FLEET),
    ] = None,
    num_gpu_blocks: Annotated[
        int | None, typer.Option(help="KV blocks of one rank.", rich_help_panel=_FLEET)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of one KV block.", rich_help_panel=_FLEET)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Set any field of the spec, e.g. engine.rank.max_num_seqs=64. May be repeated.",
            rich_help_panel=_FLEET,
        ),
    ] = None,
    arrival_speedup: Annotated[
        float | None,
        typer.Option(help="Divide the gaps between arrivals by this.", rich_help_panel=_TRACE),
    ] = None,
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            help="Closed loop: keep this many requests in flight, ignoring arrival times.",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Take only the first rows.", rich_help_panel=_TRACE)
    ] = None,
    time_unit: Annotated[
        str | None,
        typer.Option(help="Unit of the time stamps: s, ms, us, ns.", rich_help_panel=_TRACE),
    ] = None,
    trace_format: Annotated[
        str | None,
        typer.Option(
            help="Format of the trace.", show_default="by content", rich_help_panel=_TRACE
        ),
    ] = None,
    trace_block_size: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens that one hash id stands for.",
            show_default="512",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    sla_ttft_ms: Annotated[
        float | None, typer.Option(help="Goodput bound: TTFT (ms).", rich_help_panel=_OUTPUT)
    ] = None,
    sla_itl_ms: Annotated[
        float | None,
        typer.Option(help="Goodput bound: a request's mean gap (ms).", rich_help_panel=_OUTPUT),
    ] = None,
    sla_e2e_ms: Annotated[
        float | None,
        typer.Option(help="Goodput bound: end-to-end latency (ms).", rich_help_panel=_OUTPUT),
    ] = None,
    warmup_ms: Annotated[
        float,
        typer.Option(
            help="Leave requests out of the metrics that arrive less than this after the first.",
            rich_help_panel=_OUTPUT,
        ),
    ] = 0.0,
    cooldown_ms: Annotated[
        float,
        typer.Option(help="The same, before the last arrival (ms).", rich_help_panel=_OUTPUT),
    ] = 0.0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for requests, report.json and config.json.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    requests_format: Annotated[
        RequestsFormat,
        typer.Option(help="File format of the request rows.", rich_help_panel=_OUTPUT),
    ] = RequestsFormat.parquet,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace earlier results.", rich_help_panel=_OUTPUT),
    ] = False,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline", help="Record time series: timeline.parquet.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    kv_events: Annotated[
        bool,
        typer.Option(
            "--kv-events", help="Record KV events: kv_events.parquet.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    format_: Annotated[
        OutputFormat, typer.Option("--format", help="What to print.", rich_help_panel=_OUTPUT)
    ] = OutputFormat.table,
    threads: Annotated[
        int | None,
        typer.Option(help="Results do not depend on it.", show_default="all cores"),
    ] = None,
) -> None:
    """Replay a trace, or whatever a spec describes, and print the report.

    An explicit option beats the spec file, which beats the default.
    """
    settings = {
        "topology.workers.initial_workers": workers,
        "engine.dp_size": dp,
        "engine.rank.backend": backend,
        "engine.rank.num_gpu_blocks": num_gpu_blocks,
        "engine.rank.block_size": block_size,
        "sla.ttft_ms": sla_ttft_ms,
        "sla.itl_ms": sla_itl_ms,
        "sla.e2e_ms": sla_e2e_ms,
    }
    trace = {
        "arrival_speedup": arrival_speedup,
        "limit": limit,
        "time_unit": time_unit,
        "trace_format": trace_format,
        "trace_block_size": trace_block_size,
    }
    if output is not None:
        _check_output(output, overwrite)
    tree, workload, origin = _read_source(source, trace, max_in_flight)
    pools = {"prefill": prefill_workers, "decode": decode_workers}
    _set_pools(tree, pools, handoff_latency_ms, workers)
    _apply(tree, settings, set_ or [])
    options = {
        "threads": threads,
        "timeline": timeline,
        "observe": "kv_events" if kv_events else None,
        "warmup_ms": warmup_ms,
        "cooldown_ms": cooldown_ms,
    }
    result = _run(tree, workload, origin, options)
    if output is not None:
        result.write(output, requests_format.value, overwrite)
    _print_result(result, format_)


add_commands(app)


def _check_output(folder: Path, overwrite: bool) -> None:
    """Refuse an occupied output folder before the run, not after it."""
    from vecsim.files import check_target
    from vecsim.results.result import RESULT_FILES

    check_target(folder, RESULT_FILES, overwrite)


# --- inputs ---------------------------------------------------------------------------------------


def _read_source(
    source: Path, trace: dict[str, Any], max_in_flight: int | None
) -> tuple[dict[str, Any], Workload | None, dict[str, Any]]:
    """The spec tree to run, the workload if the source is a trace, and what to record of it."""
    from vecsim.cli.sources import is_trace, read_spec

    if not is_trace(source):
        tree = read_spec(source)
        for key, command in (("axes", "sweep"), ("fleet", "capacity"), ("load", "capacity")):
            if key in tree:
                raise InputError(
                    f"{source.name}, {key}", key, f"a spec; vecsim {command} reads plans"
                )
        _set_traffic(tree, trace, max_in_flight)
        return tree, None, {"spec_path": str(source)}
    from vecsim.traces import read_trace

    options = {
        "time_unit": trace["time_unit"],
        "format": trace["trace_format"],
        "limit": trace["limit"],
        "block_size": trace["trace_block_size"],
        "arrival_speedup_ratio": trace["arrival_speedup"],
    }
    given = {name: value for name, value in options.items() if value is not None}
    workload = read_trace(source, **given)
    tree = {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "requests": [],
    }
    if max_in_flight is not None:
        tree["max_in_flight"] = max_in_flight
    return tree, workload, {"trace_path": str(source), **given}


def _set_traffic(tree: dict[str, Any], trace: dict[str, Any], max_in_flight: int | None) -> None:
    """Apply the workload options to a spec: to its `traffic`, where it has one."""
    from vecsim.config.load import set_path

    has_traffic = isinstance(tree.get("traffic"), dict)
    if max_in_flight is not None:
        cap = "traffic.replay_concurrency" if has_traffic else "max_in_flight"
        set_path(tree, cap, max_in_flight)
    fields = {
        "arrival_speedup": "traffic.arrival_speedup_ratio",
        "trace_format": "traffic.trace_format",
        "trace_block_size": "traffic.trace_block_size",
    }
    for name, value in trace.items():
        if value is None:
            continue
        if not has_traffic or name not in fields:
            raise InputError(f"--{name.replace('_', '-')}", value, "a trace file as SOURCE")
        set_path(tree, fields[name], value)


def _set_pools(
    tree: dict[str, Any], pools: dict[str, int | None], latency_ms: float | None, both: int | None
) -> None:
    """Make the topology one of a prefill and a decode pool, where their options are given."""
    from vecsim.config.load import set_path

    given = {name: workers for name, workers in pools.items() if workers is not None}
    spec = tree.get("spec", tree)
    topology = spec.get("topology") if isinstance(spec, dict) else None
    split = isinstance(topology, dict) and topology.get("kind") == "disaggregated"
    if given and not split:
        for name in pools:
            if name not in given:
                expected = f"--{name}-workers beside it"
                raise InputError(f"--{next(iter(given))}-workers", *given.values(), expected)
        if both is not None:
            raise InputError("--workers", both, "nothing beside --prefill-workers")
        set_path(tree, "topology", {"kind": "disaggregated"})
        split = True
    for name, workers in given.items():
        set_path(tree, f"topology.{name}.initial_workers", workers)
    if latency_ms is not None:
        if not split:
            raise InputError("--handoff-latency-ms", latency_ms, "a prefill/decode fleet")
        set_path(tree, "topology.handoff_latency_ms", latency_ms)


def _apply(tree: dict[str, Any], settings: dict[str, Any], assignments: list[str]) -> None:
    """Set the fields of the given options, then those of --set, in order."""
    from vecsim.config.documents import parse_yaml
    from vecsim.config.load import check_path, set_path

    spec = tree.get("spec", tree)
    topology = spec.get("topology") if isinstance(spec, dict) else None
    workers = settings["topology.workers.initial_workers"]
    if workers is not None and isinstance(topology, dict) and topology.get("kind") != "aggregated":
        raise InputError(
            "--workers",
            workers,
            "an aggregated topology (else --prefill-workers, --decode-workers)",
        )
    for path, value in settings.items():
        if value is not None:
            set_path(tree, path, value)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise InputError("--set", assignment, "PATH=VALUE")
        check_path("--set", path)
        set_path(tree, path, parse_yaml(text, f"--set {path}"))


# --- running --------------------------------------------------------------------------------------


def _run(
    tree: dict[str, Any],
    workload: Workload | None,
    origin: dict[str, Any],
    options: dict[str, Any],
) -> Result:
    """Replay in a thread of its own: Ctrl-C and the progress bar need not wait for kernels."""
    from dataclasses import replace

    from vecsim.kernels.compile.cache import on_compile
    from vecsim.run.replay import replay as run_replay

    progress = _Progress()
    on_compile(progress.announce_compilation)
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(run_replay(tree, workload=workload, progress=progress.update, **options))
        except BaseException as error:
            outcome.append(error)
        finally:
            finished.set()

    finished = threading.Event()
    threading.Thread(target=work, daemon=True).start()
    try:
        with progress:
            while not finished.wait(0.1):
                progress.refresh()
    except KeyboardInterrupt:
        _fail("interrupted", 130)
        sys.stdout.flush()
        os._exit(130)  # a kernel cannot be interrupted; nothing has been written yet
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    given = {name: options[name] for name in ("warmup_ms", "cooldown_ms") if options[name]}
    return replace(outcome[0], source={**origin, **given})


class _Progress:
    """A bar on stderr, from the moment a run has taken a second, and the notice of compilation."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._state = (0, 0)
        self._bar: Any = None
        self._announced = False

    def update(self, done: int, total: int) -> None:
        """Called by the replay with the number of finished requests."""
        self._state = (done, total)

    def announce_compilation(self, _name: str) -> None:
        """Called before a kernel is compiled."""
        from vecsim.kernels.compile.cache import where_kept

        if not self._announced:
            self._announced = True
            print(f"vecsim: compiling kernels; {where_kept()}", file=sys.stderr)

    def refresh(self) -> None:
        """Called every tenth of a second while the run goes on."""
        done, total = self._state
        if self._bar is None:
            late = time.monotonic() - self._started > _PROGRESS_AFTER_S
            if not (late and total and sys.stderr.isatty()):
                return
            self._bar = _progress_bar(total)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _progress_bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        "requests",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task("requests", total=total)
    bar.start()
    return bar


def _print_result(result: Result, form: OutputFormat) -> None:
    if form is OutputFormat.json:
        from vecsim.files import json_text

        print(json_text(result.report), end="")
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(result.headline(), markup=False)
    console.print(result.summary())
