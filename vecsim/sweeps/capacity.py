"""Capacity answers: the smallest fleet for a load, and the largest load for a fleet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from vecsim.config.load import Source
from vecsim.config.roles import resolve
from vecsim.config.schema import AggregatedTopology, Payload
from vecsim.errors import InputError
from vecsim.run.replay import thread_count
from vecsim.sweeps.axes import SHORT_NAMES, Point, points_of
from vecsim.sweeps.evaluate import Evaluator, prepare
from vecsim.sweeps.frame import SweepFrame, pool_prices, sweep_frame
from vecsim.sweeps.search import Search
from vecsim.sweeps.steadiness import ROUNDS_REPLAYED, SATURATED, STABLE
from vecsim.sweeps.verdict import Bound, check_slo_metrics, read_slo, shortfall
from vecsim.timing.model import PassTiming, check_timing
from vecsim.workload.workload import Workload

Row = dict[str, Any]

DEFAULT_WORK = 2_000_000
"""Requests that are replayed at most where every candidate is; some 10 s on one core."""
LEAST_REPLAYS = 48
"""Candidates that are replayed whatever they cost."""
_LEAST_REQUESTS = 500  # what a replay costs besides its requests, in requests
_SHOWN_BREACHES = 3
_SPEEDUPS = (0.001, 1000.0)


@dataclass(frozen=True)
class Capacity:
    """What `capacity` found.

    Attributes:
        feasible: whether any candidate meets everything that was asked.
        axes: names of the columns that tell candidates apart: those of `fleet` or of `load`.
        answer: row of the best candidate (axes and report), or None.
        neighbour: row of the neighbour (next to the answer along one axis) that comes nearest to it
            among those that are cheaper, or loaded more: replayed, and infeasible. None when the
            answer is the first of its range.
        neighbours: rows of all its neighbours that were replayed, along every axis, both ways.
        nearest_miss: where nothing is feasible, the row that misses by least.
        breaches: sentences about decode runs where more capacity (or less load) was worse, among
        the
            candidates replayed; empty when their order held.
        points: all candidates that were replayed, one row each.
        candidates: how many there were to choose from.
        exact: whether every candidate that would beat the answer was replayed (without an answer:
            every candidate); else it rests on samples.
    """

    feasible: bool
    axes: tuple[str, ...]
    answer: Row | None
    neighbour: Row | None
    nearest_miss: Row | None
    breaches: tuple[str, ...]
    points: SweepFrame
    candidates: int
    neighbours: tuple[Row, ...] = ()
    exact: bool = True

    @property
    def monotone(self) -> bool:
        """Whether the order held among all candidates that were replayed."""
        return not self.breaches

    @property
    def rests_on(self) -> str:
        """Which candidates the answer rests on, in words."""
        replayed = len(self.points)
        if self.exact:
            better = "every candidate" if self.answer is None else "every one that would be better"
            return f"{replayed} of {self.candidates} candidates replayed, {better} among them"
        return (
            f"rests on {replayed} of {self.candidates} candidates: both ends and powers of two of "
            "each axis, and the neighbours of the answer; exhaustive replays all"
        )

    def __str__(self) -> str:
        if self.answer is None:
            none = "no feasible point"
            if not self.exact:
                none = f"none of the {len(self.points)} replayed of {self.candidates} is feasible"
            lines = [f"{none} ({self.rests_on})"]
            if self.nearest_miss is not None:
                miss = self.nearest_miss
                lines.append(f"nearest miss: {self._named(miss)}: {why_not(miss)}")
        else:
            lines = [f"{self._named(self.answer)}, {self.answer['gpus']} GPUs ({self.rests_on})"]
            if self.neighbour is not None:
                lines.append(f"not {self._named(self.neighbour)}: {why_not(self.neighbour)}")
            else:
                lines.append("the range of candidates ends there")
        lines += [f"not monotone: {breach}" for breach in self.breaches[:_SHOWN_BREACHES]]
        if len(self.breaches) > _SHOWN_BREACHES:
            lines.append(f"and {len(self.breaches) - _SHOWN_BREACHES} more such places")
        return "\n".join(lines)

    def _named(self, row: Row) -> str:
        return named(row, self.axes)

    def to_dict(self) -> dict[str, Any]:
        """Everything but `points`, as builtins."""
        names = ("feasible", "axes", "answer", "neighbour", "nearest_miss", "breaches")
        names += ("neighbours", "exact", "rests_on")
        return {
            **{name: getattr(self, name) for name in names},
            "candidates": self.candidates,
            "replayed": len(self.points),
        }


def named(row: Mapping[str, Any], axes: Sequence[str]) -> str:
    """The axes of a row as `name = value, ...`."""
    return ", ".join(
        f"{name} = {row[name]:.6g}" if isinstance(row[name], float) else f"{name} = {row[name]}"
        for name in axes
        if row.get(name) is not None
    )


def why_not(row: Mapping[str, Any]) -> str:
    """Why a row is infeasible, in words."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    reasons = [row["dropped"], row.get("slo_miss")]
    if row.get("load_state") not in (None, STABLE):
        reasons.append(
            f"the load is {row['load_state']}: repeated for ever "
            + ("and 5 % faster " if row["load_state"] == SATURATED else "")
            + "it makes an endless queue"
        )
    elif row["backlog_growing"]:
        reasons.append("the backlog still grows when arrivals end")
    if not row["completed_requests"]:
        reasons.append("nothing completed")
    return "; ".join(filter(None, reasons))


def capacity(
    base: Source,
    *,
    slo: Mapping[str, Any] | None = None,
    fleet: Mapping[str, Any] | None = None,
    load: str | Mapping[str, Any] | None = None,
    workload: Workload | None = None,
    constraints: Sequence[str] = (),
    gpu_budget: int | None = None,
    gpu_hour_price: float | Mapping[str, float] | None = None,
    tolerance: float = 0.01,
    saturation: bool = True,
    replays: int | None = None,
    exhaustive: bool = False,
    timing: PassTiming | None = None,
    prefill_timing: PassTiming | None = None,
    decode_timing: PassTiming | None = None,
    threads: int | None = None,
    progress: Callable[[Row], None] | None = None,
) -> Capacity:
    """The smallest fleet that serves a load within the SLO, or the largest load a fleet sustains.

    A candidate is feasible when something completed, every bound of the SLO is met (inclusive), no
    request was rejected, shed, failed or canceled, and, if `saturation` counts, the queue stays
    bounded: for a fleet, the backlog did not grow until arrivals ended; for a load, it is *stable*,
    which `vecsim.sweeps.steadiness` defines: repeated for ever, and 5 % faster, the same arrivals
    make no endless queue.

    Nothing is taken to be monotone. Candidates are replayed from the cheapest (or the largest load)
    on, up to the first that is feasible, wherever all of them together are within `replays`. Beyond
    that, both ends and powers of two of each axis are replayed, stretches between feasible and
    infeasible neighbours are halved, and the answer says what it rests on (`exact`, `rests_on`).
    The order in which axes and values are written changes nothing.

    Args:
        base: the spec.
        slo: report metric -> inclusive upper bound, or ">= number".
        fleet: axes of the fleet, as for `sweep`, to find the fewest GPUs (or, with
            `gpu_hour_price`, the least price an hour; ties: the lower value on the axis whose name
            comes first).
        load: what to load the fleet with, to find the most: "arrival_speedup" or "concurrency"; or
            one axis `{name: values}`, where `{"between": [low, high]}` is searched in steps of
            `tolerance`.
        workload: requests; None = those that the spec describes.
        constraints: expressions over the axes that candidates must meet.
        gpu_budget: most GPUs of a fleet.
        gpu_hour_price: price of a GPU-hour, or one for each pool; adds costs to the rows.
        tolerance: ratio minus 1 between neighbouring loads.
        saturation: whether a load that is not sustained makes a candidate infeasible.
        replays: candidates to replay at most; None = as many as `DEFAULT_WORK` requests allow
            (candidates x requests of the workload, five times that for loads, each replay counted
            as 500 requests at least), and `LEAST_REPLAYS` whatever they cost.
        exhaustive: replay all candidates that could be better than the answer, however many.
        timing, prefill_timing, decode_timing: custom timing models, as for `replay`.
        threads: threads of each replay; None = one a core. The answer does not depend on it.
        progress: called with each row as it comes.

    Raises:
        InputError: malformed arguments, both or neither of `fleet` and `load`, a budget that no
            candidate is within.
    """
    timings = {
        "timing": timing,
        "prefill_timing": prefill_timing,
        "decode_timing": decode_timing,
    }
    for name, model in timings.items():
        check_timing(name, model)
    if (fleet is None) == (load is None):
        raise InputError("fleet", fleet, "either fleet or load, not both")
    bounds = read_slo(slo)
    if fleet is not None:
        points = points_of(fleet, constraints=constraints)
    else:
        points = _loads(load, base, workload, tolerance, constraints)
    if not points:
        raise InputError("constraints", list(constraints), "at least one candidate that meets them")
    _check_limits(gpu_budget, replays)
    setup = prepare(base, workload, points, timings, bounds, saturation, load is not None)
    check_slo_metrics(bounds, setup.tree, points)
    asked = _Asked(Evaluator(setup), bounds, thread_count(threads), progress)
    if fleet is not None:
        prices = None if gpu_hour_price is None else pool_prices(gpu_hour_price)
        ranked = _by_cost(asked, points, gpu_budget, prices, tuple(fleet))
    else:
        ranked = _Ranked(points[::-1], tuple(load if isinstance(load, Mapping) else (load,)))
    search = ranked.search(asked)
    best = _best(search, ranked, asked, replays, exhaustive, load is not None)
    answer = None if best is None else ranked.points[best]
    beside = [] if best is None else [i for i in search.neighbours(best) if i in search.known]
    below = max((i for i in beside if i < best), default=None)
    axes = ranked.axes
    frame = sweep_frame(list(asked.rows.values()), points, gpu_hour_price)

    def row_of(point: Point | None) -> Row | None:
        return (
            None
            if point is None
            else frame.row(by_predicate=pl.col("point") == point.index, named=True)
        )

    return Capacity(
        feasible=answer is not None,
        axes=axes,
        answer=row_of(answer),
        neighbour=None if below is None else row_of(ranked.points[below]),
        neighbours=tuple(row_of(ranked.points[i]) for i in beside),
        nearest_miss=row_of(asked.nearest_miss(points)) if answer is None else None,
        breaches=tuple(
            _breach(asked, axes, (ranked.points[low], ranked.points[high]))
            for low, high in search.breaches
        ),
        points=frame,
        candidates=len(ranked.points),
        exact=search.rests_on_all,
    )


class _Asked:
    """Rows of the candidates replayed so far."""

    def __init__(
        self,
        evaluator: Evaluator,
        bounds: tuple[Bound, ...],
        threads: int,
        progress: Callable[[Row], None] | None,
    ) -> None:
        self.evaluator = evaluator
        self.rows: dict[int, Row] = {}
        self._bounds = bounds
        self._threads = threads
        self._progress = progress

    def feasible(self, point: Point) -> bool:
        if point.index not in self.rows:
            row = self.rows[point.index] = self.evaluator.row(point, self._threads)
            if self._progress is not None:
                self._progress(row)
        return bool(self.rows[point.index].get("feasible"))

    def nearest_miss(self, points: list[Point]) -> Point | None:
        replayed = [point for point in points if point.index in self.rows]
        rows = self.rows
        return min(replayed, key=lambda p: shortfall(rows[p.index], self._bounds), default=None)


class _Ranked:
    """Candidates in order of preference, and where they stand on their axes."""

    def __init__(self, points: list[Point], axes: tuple[str, ...]) -> None:
        self.points = points
        self.axes = axes

    def search(self, asked: _Asked) -> Search:
        """A search over them. Places on an axis go by its values, not by the order written."""
        places, values = [], []
        for name in sorted(self.axes):
            labels = [point.labels[name] for point in self.points]
            ordered = sorted(set(labels), key=_by_value)
            at = {label: place for place, label in enumerate(ordered)}
            places.append([at[label] for label in labels])
            values.append(ordered)
        grid = np.array(places, np.int64).T
        return Search(grid, values, lambda i: asked.feasible(self.points[i]))


def _by_value(label: Any) -> tuple[int, float, str]:
    """Numbers by size, before everything else by its text."""
    if isinstance(label, int | float):
        return (0, label, "")
    return (1, 0.0, str(label))


def _check_limits(gpu_budget: Any, replays: Any) -> None:
    for name, value in (("gpu_budget", gpu_budget), ("replays", replays)):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not whole or value < 1):
            raise InputError(name, value, "a whole number of 1 or more")


def _best(
    search: Search,
    ranked: _Ranked,
    asked: _Asked,
    replays: int | None,
    exhaustive: bool,
    for_load: bool,
) -> int | None:
    """The best feasible candidate, among all where `replays` allows it."""
    count = len(ranked.points)
    if not exhaustive and replays is None:
        requests = max(_requests_of(search, ranked, asked), _LEAST_REQUESTS)
        rounds = ROUNDS_REPLAYED if for_load else 1
        replays = max(DEFAULT_WORK // (requests * rounds), LEAST_REPLAYS)
    if exhaustive or replays >= count:
        return search.in_order()
    return search.sampled(replays)


def _requests_of(search: Search, ranked: _Ranked, asked: _Asked) -> int:
    """Requests of the first candidate that runs."""
    for i, point in enumerate(ranked.points):
        search.feasible(i)
        row = asked.rows[point.index]
        if row["status"] == "ok":
            return row["workload_requests"]
    return 0


def _breach(asked: _Asked, axes: tuple[str, ...], pair: tuple[Point, Point]) -> str:
    low, high = (asked.rows[point.index] for point in pair)
    return f"{named(low, axes)} is feasible, {named(high, axes)} is not ({why_not(high)})"


# --- smallest fleet -------------------------------------------------------------------------------


def gpus_by_pool(payload: Payload) -> dict[str, int]:
    """Modelled GPUs of each pool; an aggregated pool counts as decode."""
    topology = payload.spec.topology
    roles = {role.stage: role for role in resolve(payload.spec)}
    if isinstance(topology, AggregatedTopology):
        workers = topology.workers.initial_workers
        return {"prefill": 0, "decode": workers * roles["aggregated"].gpus_per_worker}
    return {
        "prefill": topology.prefill.initial_workers * roles["prefill"].gpus_per_worker,
        "decode": topology.decode.initial_workers * roles["decode"].gpus_per_worker,
    }


def _by_cost(
    asked: _Asked,
    points: list[Point],
    gpu_budget: int | None,
    prices: dict[str, float] | None,
    axes: tuple[str, ...],
) -> _Ranked:
    """The candidates within the budget, the cheapest first. Those that cannot run leave a row.

    Raises:
        InputError: all that could run are beyond the budget.
    """
    costs: list[tuple[float, Point]] = []
    least = None
    for point in points:
        try:
            gpus = gpus_by_pool(asked.evaluator.payload(point))
        except InputError:
            asked.feasible(point)
            continue
        total = sum(gpus.values())
        least = total if least is None else min(least, total)
        if gpu_budget is not None and total > gpu_budget:
            continue
        costs.append(
            (sum(n * (prices[pool] if prices else 1.0) for pool, n in gpus.items()), point)
        )
    if not costs and least is not None:
        raise InputError("gpu_budget", gpu_budget, f"{least} or more, the GPUs of the least fleet")
    names = sorted(axes)
    costs.sort(key=lambda one: (one[0], [_by_value(one[1].labels[name]) for name in names]))
    return _Ranked([point for _, point in costs], axes)


# --- largest load ---------------------------------------------------------------------------------


def _loads(
    load: str | Mapping[str, Any],
    base: Source,
    workload: Workload | None,
    tolerance: float,
    constraints: Sequence[str],
) -> list[Point]:
    """Points of ascending load."""
    if isinstance(load, str):
        if SHORT_NAMES.get(load, load) == "workload.concurrency":
            load = {load: {"between": [1, _requests(base, workload)]}}
        else:
            load = {load: {"between": list(_SPEEDUPS)}}
    if not isinstance(load, Mapping) or len(load) != 1:
        raise InputError("load", load, "arrival_speedup, concurrency, or one axis")
    ((name, values),) = load.items()
    if isinstance(values, Mapping) and set(values) == {"between"}:
        values = _between(f"load.{name}", values["between"], tolerance)
    points = points_of({name: values}, constraints=constraints)
    loads = [point.labels[name] for point in points]
    if any(not isinstance(value, int | float) for value in loads):
        raise InputError(f"load.{name}", loads, "numbers")
    points.sort(key=lambda point: point.labels[name])
    return points


def _requests(base: Source, workload: Workload | None) -> int:
    if workload is None:
        workload = prepare(base, None, [], {}).workload
    if workload is None:
        raise InputError("load", "concurrency", "{concurrency: {between: [low, high]}} here")
    return max(len(workload), 1)


def _between(where: str, bounds: Any, tolerance: float) -> list[float]:
    """Ascending loads: every whole number between two whole bounds; otherwise the bounds and,
    between them, the powers of 1 + `tolerance`."""
    numbers = isinstance(bounds, Sequence) and len(bounds) == 2
    if not numbers or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in bounds
    ):
        raise InputError(where, bounds, "[low, high], finite numbers")
    low, high = bounds
    if not 0 < low <= high:
        raise InputError(where, bounds, "0 < low <= high")
    if not isinstance(tolerance, int | float) or not 1e-6 <= tolerance <= 1.0:
        raise InputError("tolerance", tolerance, "a number from 1e-6 to 1")
    if isinstance(low, int) and isinstance(high, int):
        return list(range(low, high + 1))
    first = math.ceil(math.log(low) / math.log1p(tolerance) - 1e-9)
    last = math.floor(math.log(high) / math.log1p(tolerance) + 1e-9)
    inner = [(1.0 + tolerance) ** k for k in range(first, last + 1)]
    return [low, *(x for x in inner if low < x < high), *([high] if high > low else [])]
