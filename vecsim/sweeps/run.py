"""Sweeps: many points over one workload, on threads or on Ray, into one frame."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from vecsim.config.load import Source
from vecsim.errors import InputError, VecsimError
from vecsim.files import check_writable, replace_file
from vecsim.run.replay import thread_count
from vecsim.sweeps.axes import Point, points_of
from vecsim.sweeps.evaluate import Evaluator, Setup, prepare
from vecsim.sweeps.frame import SweepFrame, pool_prices, sweep_frame
from vecsim.sweeps.memory import freed_memory_kept
from vecsim.sweeps.verdict import check_slo_metrics, read_slo
from vecsim.timing.model import CompiledTiming, PassTiming, check_timing
from vecsim.timing.table import TimingTable
from vecsim.workload.workload import Workload

EXECUTORS = ("threads", "ray")

Row = dict[str, Any]
Report = Callable[[int, int], None]

_SAVE_EVERY_S = 1.0
_SAVING_SHARE = 0.05  # of the time may go into saving, at most
_POLL_S = 0.1
_FINGERPRINT = "vecsim.sweep"


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep.

    Attributes:
        frame: the rows that were finished.
    """

    def __init__(self, frame: SweepFrame) -> None:
        super().__init__("sweep interrupted")
        self.frame = frame


class SweepNotWritten(VecsimError):
    """The output of a finished sweep could not be written.

    Attributes:
        frame: all rows.
    """

    def __init__(self, frame: SweepFrame, reason: str) -> None:
        super().__init__(reason)
        self.frame = frame


def sweep(
    base: Source,
    axes: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    workload: Workload | None = None,
    combine: str = "grid",
    constraints: Sequence[str] = (),
    slo: Mapping[str, Any] | None = None,
    gpu_hour_price: float | Mapping[str, float] | None = None,
    timing: PassTiming | None = None,
    prefill_timing: PassTiming | None = None,
    decode_timing: PassTiming | None = None,
    executor: str = "threads",
    threads: int | None = None,
    progress: bool | Report = False,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> SweepFrame:
    """Replay every point of a grid (or list) of configurations, and return one row a point.

    A row holds the axes, `status` and `reason` (`ok`; or why the point did not run: it never ends
    the sweep), what it missed, and the whole report, which equals that of the same single replay.

    Args:
        base: the spec that points change: a dict, the path of a file, or descriptors.
        axes: field path, knob (`workload.arrival_speedup`, `.concurrency`, `.limit`) or short name
            -> values, ranges or named bundles (`vecsim.sweeps.axes.read_axis`); or a list of
            explicit points.
        workload: requests of every point; None = those that the spec describes.
        combine: "grid", or "zip" for axes side by side.
        constraints: expressions over the axes, such as "workers * tp <= 64"; points that fail one
            are left out.
        slo: report metric -> inclusive upper bound, or ">= number"; fills `feasible`, `slo_miss`.
        gpu_hour_price: price of a GPU-hour, or one for each pool; adds costs.
        timing, prefill_timing, decode_timing: custom timing models, as for `replay`.
        executor: "threads", or "ray" (needs `pip install vecsim[ray]`): a local cluster, or the one
            that `ray.init` was called for.
        threads: points at a time; None = one a core. The result does not depend on it.
        progress: True shows a bar on stderr; a function is called with (finished, points).
        output: Parquet file to keep finished rows in, written about every
            second (less often where that takes long) and at the end.
        resume: take the finished rows of `output` over, if it is there.
        overwrite: replace an `output` that is there.

    Raises:
        InputError: malformed arguments, an `output` in use, or one of another configuration.
        SweepInterrupted: Ctrl-C; holds the finished rows, which are in `output` too.
        SweepNotWritten: all points ran, but `output` could not be written; holds the rows.
        VecsimError: `output` cannot be written, found before the first point.
    """
    timings = {
        "timing": timing,
        "prefill_timing": prefill_timing,
        "decode_timing": decode_timing,
    }
    for name, model in timings.items():
        check_timing(name, model)
    points = points_of(axes, combine, constraints)
    if executor not in EXECUTORS:
        raise InputError("executor", executor, f"one of {', '.join(EXECUTORS)}")
    if gpu_hour_price is not None:
        pool_prices(gpu_hour_price)
    bounds = read_slo(slo)
    setup = prepare(base, workload, points, timings, bounds)
    check_slo_metrics(bounds, setup.tree, points)
    store = _Store(setup, points, gpu_hour_price, output, resume, overwrite)
    todo = store.todo()
    with _shown(progress, len(points)) as report:
        report(len(store.rows), len(points))

        def keep(row: Row) -> None:
            store.keep(row)
            report(len(store.rows), len(points))

        try:
            with freed_memory_kept():
                _run(executor, setup, todo, thread_count(threads), keep)
        except KeyboardInterrupt:
            store.save()
            raise SweepInterrupted(store.frame()) from None
    try:
        store.save()
    except VecsimError as error:
        raise SweepNotWritten(store.frame(), str(error)) from None
    return store.frame()


def _run(
    executor: str, setup: Setup, points: list[Point], threads: int, keep: Callable[[Row], None]
) -> None:
    if executor == "ray":
        from vecsim.sweeps.on_ray import run_on_ray

        run_on_ray(setup, points, threads, keep)
    else:
        run_on_threads(Evaluator(setup), points, threads, keep)


def run_on_threads(
    evaluator: Evaluator, points: list[Point], threads: int, keep: Callable[[Row], None]
) -> None:
    """Run points on threads, one replay a thread; `keep` gets each row in the calling thread.

    Kernels release the interpreter, so threads run side by side. Ctrl-C waits for the replays in
    flight; a second one does not.
    """
    keys = [evaluator.workload_key(point) for point in points]
    evaluator.expect(keys)
    order = sorted(range(len(points)), key=lambda i: keys[i])
    waiting: queue.SimpleQueue[Point] = queue.SimpleQueue()
    for i in order:
        waiting.put(points[i])
    done: queue.SimpleQueue[Row | BaseException] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                point = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put(evaluator.row(point))
            except BaseException as error:
                done.put(error)
                return

    workers = [
        threading.Thread(target=work, daemon=True) for _ in range(max(1, min(threads, len(points))))
    ]
    for worker in workers:
        worker.start()
    missing = len(points)
    try:
        while missing:
            with contextlib.suppress(queue.Empty):
                row = done.get(timeout=_POLL_S)
                if isinstance(row, BaseException):
                    raise row
                missing -= 1
                keep(row)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        while not done.empty():
            row = done.get()
            if not isinstance(row, BaseException):
                keep(row)


# --- keeping rows ---------------------------------------------------------------------------------


class _Store:
    """Finished rows, in memory and in a Parquet file that names the configuration it is of."""

    def __init__(
        self,
        setup: Setup,
        points: list[Point],
        gpu_hour_price: float | Mapping[str, float] | None,
        output: str | os.PathLike[str] | None,
        resume: bool,
        overwrite: bool,
    ) -> None:
        self.rows: dict[int, Row] = {}
        self._points = points
        self._price = gpu_hour_price
        self._path = None if output is None else Path(output)
        self._saved = time.monotonic()
        self._pause_s = _SAVE_EVERY_S
        if self._path is None:
            if resume:
                raise InputError("resume", True, "an output file to resume")
            return
        self._fingerprint = fingerprint(setup, points, gpu_hour_price)
        if self._path.exists():
            if resume:
                self.rows = self._earlier_rows()
            elif not overwrite:
                expected = (
                    "no earlier result, or --overwrite (overwrite=True) or --resume (resume=True)"
                )
                raise InputError("output", str(self._path), expected)
        check_writable(self._path)

    def _earlier_rows(self) -> dict[int, Row]:
        try:
            written = pl.read_parquet_metadata(self._path).get(_FINGERPRINT)
        except (OSError, pl.exceptions.PolarsError):
            written = None
        if written is None:
            raise InputError("resume", str(self._path), "a Parquet file that a sweep wrote")
        if written != self._fingerprint:
            expected = "rows of the same spec, axes, workload, SLO, price and version"
            raise InputError("resume", str(self._path), expected)
        return {row["point"]: row for row in pl.read_parquet(self._path).iter_rows(named=True)}

    def todo(self) -> list[Point]:
        return [point for point in self._points if point.index not in self.rows]

    def keep(self, row: Row) -> None:
        self.rows[row["point"]] = row
        started = time.monotonic()
        if started - self._saved > self._pause_s:
            with contextlib.suppress(VecsimError):  # the last save says what is wrong
                self.save()
            self._pause_s = max(_SAVE_EVERY_S, (time.monotonic() - started) / _SAVING_SHARE)
            self._saved = time.monotonic()

    def frame(self) -> SweepFrame:
        return sweep_frame(list(self.rows.values()), self._points, self._price)

    def save(self) -> None:
        if self._path is None:
            return
        frame, metadata = self.frame(), {_FINGERPRINT: self._fingerprint}
        replace_file(self._path, lambda path: frame.write_parquet(path, metadata=metadata))
        self._saved = time.monotonic()


def fingerprint(
    setup: Setup, points: Sequence[Point], gpu_hour_price: float | Mapping[str, float] | None
) -> str:
    """Hex digest of everything that the rows of a sweep depend on."""
    digest = hashlib.sha256()
    described = {
        "version": version("vecsim"),
        "tree": setup.tree,
        "points": [[point.labels, point.fields] for point in points],
        "bounds": [[bound.metric, bound.limit, bound.upper] for bound in setup.bounds],
        "timings": setup.timings,
        "price": gpu_hour_price,
    }
    digest.update(json.dumps(described, sort_keys=True, default=_describe).encode())
    if setup.workload is not None:
        for name, value in sorted(vars(setup.workload).items()):
            if isinstance(value, np.ndarray):
                digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
        digest.update(str(setup.workload.block_tokens).encode())
    for name in sorted(_table_paths(described["tree"]) | _table_paths(described["points"])):
        if Path(name).is_file():
            digest.update(Path(name).read_bytes())
    traffic = setup.tree.get("traffic") or {}
    for name in [traffic.get("trace_path"), *(traffic.get("trace_paths") or [])]:
        if name is not None and Path(name).is_file():
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()


def _table_paths(tree: Any) -> set[str]:
    """Paths of the timing tables anywhere in a tree, or given by a field path of their own."""
    found: set[str] = set()
    if isinstance(tree, Mapping):
        if tree.get("type") == "table":
            found.add(str(tree.get("path")))
        for name, value in tree.items():
            if isinstance(value, str) and str(name).endswith("timing_model.path"):
                found.add(value)
            found |= _table_paths(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            found |= _table_paths(value)
    return found


def _describe(value: Any) -> Any:
    if isinstance(value, CompiledTiming):
        return [_code(value.prefill), _code(value.decode)]
    if isinstance(value, TimingTable):
        return value.digest
    return repr(value)


def _code(function: Any) -> str:
    code = getattr(function, "py_func", function).__code__
    return f"{code.co_code.hex()} {code.co_consts!r} {code.co_names!r}"


# --- progress -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _shown(progress: bool | Report, total: int) -> Iterator[Report]:
    """A function that shows (finished, points): the caller's own, a bar on stderr, or nothing."""
    if not progress:
        yield lambda finished, points: None
        return
    if progress is not True:
        yield progress
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    rate = TextColumn("{task.fields[rate]}")
    columns = ("points", BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    started, earlier = time.monotonic(), None
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("points", total=total, rate="")

        def show(finished: int, points: int) -> None:
            nonlocal earlier
            earlier = finished if earlier is None else earlier
            rate = (finished - earlier) / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=finished, rate=f"{rate:,.1f} points/s")

        yield show
