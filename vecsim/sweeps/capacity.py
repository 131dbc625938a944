"""Capacity answers: the smallest fleet for a load, and the largest load for a fleet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from vecsim.config.load import Source
from vecsim.config.roles import resolve
from vecsim.config.schema import AggregatedTopology, Payload
from vecsim.errors import InputError
from vecsim.run.replay import thread_count
from vecsim.sweeps.axes import SHORT_NAMES, Point, points_of
from vecsim.sweeps.evaluate import Evaluator, prepare
from vecsim.sweeps.frame import SweepFrame, pool_prices, sweep_frame
from vecsim.sweeps.ladder import Ladder
from vecsim.sweeps.verdict import Bound, read_slo, shortfall
from vecsim.timing.model import PassTiming, check_timing
from vecsim.workload.workload import Workload

Row = dict[str, Any]

_SHARE_OF_BRUTE_FORCE = 3
_MOST_AUDITS = 8
_FIRST_FACTOR = 2.0
_SPEEDUPS = (0.001, 1000.0)


@dataclass(frozen=True)
class Capacity:
    """What `capacity` found.

    Attributes:
        feasible: whether any candidate meets everything that was asked.
        axes: names of the columns that tell candidates apart: those of `fleet` or of `load`.
        answer: row of the best candidate (axes and report), or None.
        neighbour: row of the next candidate that is cheaper, or loaded more: replayed, and
            infeasible. None when the answer is the first of its range.
        nearest_miss: where nothing is feasible, the row that misses by least.
        breaches: sentences about decode runs where more capacity (or less load) was worse, among
        the
            candidates replayed; empty when their order held.
        points: all candidates that were replayed, one row each.
        candidates: how many there were to choose from.
    """

    feasible: bool
    axes: tuple[str, ...]
    answer: Row | None
    neighbour: Row | None
    nearest_miss: Row | None
    breaches: tuple[str, ...]
    points: SweepFrame
    candidates: int

    @property
    def monotone(self) -> bool:
        """Whether the order held among all candidates that were replayed."""
        return not self.breaches

    def __str__(self) -> str:
        replays = f"{len(self.points)} of {self.candidates} candidates replayed"
        if self.answer is None:
            lines = [f"no feasible point ({replays})"]
            if self.nearest_miss is not None:
                miss = self.nearest_miss
                lines.append(f"nearest miss: {self._named(miss)}: {why_not(miss)}")
        else:
            lines = [f"{self._named(self.answer)}, {self.answer['gpus']} GPUs ({replays})"]
            if self.neighbour is not None:
                lines.append(f"not {self._named(self.neighbour)}: {why_not(self.neighbour)}")
            else:
                lines.append("the range of candidates ends there")
        return "\n".join([*lines, *(f"not monotone: {breach}" for breach in self.breaches)])

    def _named(self, row: Row) -> str:
        return named(row, self.axes)

    def to_dict(self) -> dict[str, Any]:
        """Everything but `points`, as builtins."""
        names = ("feasible", "axes", "answer", "neighbour", "nearest_miss", "breaches")
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
    if row["backlog_growing"]:
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
    size: str | None = None,
    workload: Workload | None = None,
    constraints: Sequence[str] = (),
    gpu_budget: int | None = None,
    gpu_hour_price: float | Mapping[str, float] | None = None,
    tolerance: float = 0.01,
    saturation: bool = True,
    timing: PassTiming | None = None,
    prefill_timing: PassTiming | None = None,
    decode_timing: PassTiming | None = None,
    threads: int | None = None,
    progress: Callable[[Row], None] | None = None,
) -> Capacity:
    """The smallest fleet that serves a load within the SLO, or the largest load a fleet sustains.

    A candidate is feasible when something completed, every bound of the SLO is met (inclusive), no
    request was rejected, shed, failed or canceled, and, if `saturation` counts, the backlog did not
    grow until arrivals ended. Bisection assumes that more capacity, or less load, is never worse;
    spare replays, up to a third of all candidates, look for places where that is not so. Every
    answer's neighbour is replayed.

    Args:
        base: the spec.
        slo: report metric -> inclusive upper bound, or ">= number".
        fleet: axes of the fleet, as for `sweep`, to find the fewest GPUs (or, with
            `gpu_hour_price`, the least price an hour; ties: the first). One axis is bisected for
            every combination of the others that can still win.
        load: what to load the fleet with, to find the most: "arrival_speedup" or "concurrency"; or
            one axis `{name: values}`, where `{"between": [low, high]}` is searched in steps of
            `tolerance`.
        size: the axis of `fleet` to bisect; None = the last that is no bundle.
        workload: requests; None = those that the spec describes.
        constraints: expressions over the axes that candidates must meet.
        gpu_budget: most GPUs of a fleet.
        gpu_hour_price: price of a GPU-hour, or one for each pool; adds costs to the rows.
        tolerance: ratio minus 1 between neighbouring loads.
        saturation: whether a growing backlog makes a candidate infeasible.
        timing, prefill_timing, decode_timing: custom timing models, as for `replay`.
        threads: threads of each replay; None = one a core. The answer does not depend on it.
        progress: called with each row as it comes.

    Raises:
        InputError: malformed arguments, both or neither of `fleet` and `load`.
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
    evaluator = Evaluator(prepare(base, workload, points, timings, bounds, saturation))
    asked = _Asked(evaluator, bounds, thread_count(threads), progress)
    if fleet is not None:
        prices = None if gpu_hour_price is None else pool_prices(gpu_hour_price)
        rungs = _fleet_ladders(asked, points, _size_axis(fleet, size), gpu_budget, prices)
        answer, below = _cheapest(rungs)
    else:
        rungs = [_Rungs(points[::-1], [0.0] * len(points), asked)]
        answer, below = _heaviest(rungs[0], load)
    axes = tuple(points[0].labels) if fleet is None else tuple(fleet)
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
        neighbour=row_of(below),
        nearest_miss=row_of(asked.nearest_miss(points)) if answer is None else None,
        breaches=tuple(_breach(asked, axes, pair) for one in rungs for pair in one.breaches()),
        points=frame,
        candidates=sum(len(one.points) for one in rungs),
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


class _Rungs:
    """Points from least to most capable, with their costs, as a ladder."""

    def __init__(self, points: list[Point], costs: list[float], asked: _Asked) -> None:
        self.points = points
        self.costs = costs
        self.ladder = Ladder(len(points), lambda i: asked.feasible(points[i]))

    def breaches(self) -> list[tuple[Point, Point]]:
        return [(self.points[low], self.points[high]) for low, high in self.ladder.breaches]


def _breach(asked: _Asked, axes: tuple[str, ...], pair: tuple[Point, Point]) -> str:
    low, high = (asked.rows[point.index] for point in pair)
    return f"{named(low, axes)} is feasible, {named(high, axes)} is not ({why_not(high)})"


# --- smallest fleet -------------------------------------------------------------------------------


def _size_axis(fleet: Mapping[str, Any], size: str | None) -> str:
    plain_axes = [
        name
        for name, values in fleet.items()
        if not isinstance(values, Mapping) or set(values) & {"range", "log_range"}
    ]
    if size is None and plain_axes:
        return plain_axes[-1]
    if size not in plain_axes:
        raise InputError("size", size, f"an axis of fleet with values: {', '.join(plain_axes)}")
    return size


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


def _fleet_ladders(
    asked: _Asked,
    points: list[Point],
    size: str,
    gpu_budget: int | None,
    prices: dict[str, float] | None,
) -> list[_Rungs]:
    """One ladder for each combination of the axes other than `size`, by cost."""
    shapes: dict[tuple, list[tuple[float, Point]]] = {}
    for point in points:
        try:
            gpus = gpus_by_pool(asked.evaluator.payload(point))
        except InputError:
            asked.feasible(point)  # a row that says why
            continue
        if gpu_budget is not None and sum(gpus.values()) > gpu_budget:
            continue
        cost = sum(count * (prices[pool] if prices else 1.0) for pool, count in gpus.items())
        own = SHORT_NAMES.get(size, size)
        shape = tuple((k, v) for k, v in point.labels.items() if k not in (size, own))
        shapes.setdefault(shape, []).append((cost, point))
    rungs = []
    for members in shapes.values():
        members.sort(key=lambda member: (member[0], member[1].labels[size]))
        rungs.append(_Rungs([p for _, p in members], [c for c, _ in members], asked))
    return rungs


def _cheapest(rungs: list[_Rungs]) -> tuple[Point | None, Point | None]:
    """(cheapest feasible point, its infeasible neighbour) over all ladders."""
    best, best_cost, best_at = None, math.inf, 0
    for one in rungs:
        below = sum(cost < best_cost for cost in one.costs)
        found = one.ladder.lowest(below=below)
        if found is not None:
            best, best_cost, best_at = one, one.costs[found], found
    candidates = sum(len(one.points) for one in rungs)
    spare = candidates // _SHARE_OF_BRUTE_FORCE - sum(len(one.ladder.known) for one in rungs)
    if best is None:
        for one in sorted(rungs, key=lambda one: -len(one.points)):
            before = len(one.ladder.known)
            found = one.ladder.audit(None, min(spare, _MOST_AUDITS))
            spare -= len(one.ladder.known) - before
            if found is not None:
                best, best_at = one, found
                break
        else:
            return None, None
    best_at = best.ladder.audit(best_at, min(spare, _MOST_AUDITS))
    return best.points[best_at], _below(best, best_at)


def _below(rungs: _Rungs, at: int) -> Point | None:
    return rungs.points[at - 1] if at > 0 else None


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


def _heaviest(rungs: _Rungs, load: str | Mapping[str, Any]) -> tuple[Point | None, Point | None]:
    """(point of the largest load that is sustained, its infeasible neighbour)."""
    loads = [next(iter(point.labels.values())) for point in rungs.points]  # descending
    listed = not isinstance(load, str) and "between" not in next(iter(load.values()))
    start = None
    if not listed:
        start = min(range(len(loads)), key=lambda i: abs(math.log(loads[i])))
    before = len(rungs.ladder.known)
    found = _gallop(rungs.ladder, loads, start) if start is not None else rungs.ladder.lowest()
    spare = len(loads) // _SHARE_OF_BRUTE_FORCE - (len(rungs.ladder.known) - before)
    found = rungs.ladder.audit(found, min(spare, _MOST_AUDITS if listed else 2))
    if found is None:
        return None, None
    return rungs.points[found], _below(rungs, found)


def _gallop(ladder: Ladder, loads: list[float], start: int) -> int | None:
    """Bracket by factors of 2, 4, 16, ... from `start` on, then bisect."""
    factor, at = _FIRST_FACTOR, start
    wanted = ladder.feasible(start)
    while ladder.feasible(at) == wanted:
        target = loads[at] * factor if wanted else loads[at] / factor
        edge = 0 if wanted else len(loads) - 1
        if at == edge:
            return 0 if wanted else None
        further = [i for i in range(len(loads)) if (loads[i] >= target) == wanted]
        at = (max(further) if wanted else min(further)) if further else edge
        factor *= factor
    return ladder.lowest(below=(start if wanted else at) + 1)
