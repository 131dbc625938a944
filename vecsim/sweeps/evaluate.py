"""Running one point: the base spec and workload with its fields set, and what comes of it as a row.

A point goes through `vecsim.replay`, so its numbers are those of the same single replay. What does
not change between points is shared: workloads are parsed once, and their prefix trees built once.

The status of a point: "ok", it ran; "invalid", its descriptor or workload is impossible;
"unsupported", it needs a feature that is not built; "failed", the run could not be finished.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vecsim.config.load import Source, authored, ignored_keys, load, set_path
from vecsim.config.schema import Payload
from vecsim.errors import InputError, NotSupportedYetError, VecsimError
from vecsim.results.result import Result
from vecsim.run.outcome import Outcome
from vecsim.run.replay import authored_workload, replay
from vecsim.sweeps.axes import KNOBS, TIMINGS, Point
from vecsim.sweeps.steadiness import STABLE, can_be_repeated, load_state
from vecsim.sweeps.verdict import Bound, dropped, slo_miss
from vecsim.workload.workload import Workload

_SPEEDUP, _CONCURRENCY, _LIMIT = KNOBS
_RUN_ONLY = ("replay_concurrency", "max_sim_time_ms")  # of `traffic`: these leave a trace as it is


@dataclass(frozen=True)
class Setup:
    """What all points of a sweep have in common; picklable if its timing models are.

    Attributes:
        tree: the base spec as builtins, inline requests left out if `workload` holds them.
        workload: requests for every point; None = what each point's `traffic` describes.
        timings: custom timing models by argument name of `replay`.
        bounds: SLO bounds that every row is held against.
        saturation_counts: a backlog that still grows when arrivals end makes a row infeasible.
        steadiness: rows say whether their load is sustained (`load_state`), which then takes the
            place of the backlog.
    """

    tree: dict[str, Any]
    workload: Workload | None
    timings: dict[str, Any] = field(default_factory=dict)
    bounds: tuple[Bound, ...] = ()
    saturation_counts: bool = True
    steadiness: bool = False


def prepare(
    base: Source,
    workload: Workload | None,
    points: Sequence[Point],
    timings: dict[str, Any],
    bounds: tuple[Bound, ...] = (),
    saturation_counts: bool = True,
    steadiness: bool = False,
) -> Setup:
    """The common part of a sweep. Inline requests become one workload, unless a point changes them.

    Raises:
        InputError: a base or a workload of the wrong kind, inline requests out of range.
    """
    tree = authored(base)
    if workload is not None and not isinstance(workload, Workload):
        raise InputError("workload", workload, "a vecsim.Workload")
    paths = {path for point in points for path in point.fields}
    touched = any(path.removeprefix("spec.").startswith(("requests", "traffic")) for path in paths)
    spec = tree.get("spec", tree)
    if workload is None and "traffic" not in tree and not touched:
        workload = authored_workload(load(tree))
    if workload is not None and isinstance(spec, dict) and spec.get("requests"):
        spec["requests"] = []
    return Setup(tree, workload, timings, bounds, saturation_counts, steadiness)


class Evaluator:
    """Runs points of one setup, on any number of threads."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._shared: dict[str, _Shared] = {}
        self._ignored: dict[tuple, list[str]] = {}
        self._lock = threading.Lock()

    def tree(self, point: Point) -> dict[str, Any]:
        """The spec of a point. Raises InputError where a path does not fit the base."""
        tree = copy.deepcopy(self.setup.tree)
        for path, value in point.fields.items():
            if path == _CONCURRENCY:
                path = "traffic.replay_concurrency" if tree.get("traffic") else "max_in_flight"
            elif path in KNOBS or path in TIMINGS:
                continue
            set_path(tree, path, copy.deepcopy(value))
        self._check_effect(point, tree)
        return tree

    def _check_effect(self, point: Point, tree: dict[str, Any]) -> None:
        """Refuse fields that the rest of the point's spec turns into keys without effect, such as
        the size of a pool that its topology does not have."""
        topology = tree.get("spec", tree).get("topology")
        kind = topology.get("kind") if isinstance(topology, dict) else None
        key = (*point.fields, kind)
        if key not in self._ignored:
            earlier = ignored_keys(self.setup.tree)
            self._ignored[key] = [name for name in ignored_keys(tree) if name not in earlier]
        if self._ignored[key]:
            raise InputError("axes", self._ignored[key][0], f"fields of a spec with kind {kind!r}")

    def payload(self, point: Point) -> Payload:
        """The descriptor of a point. Raises InputError."""
        return load(self.tree(point))

    def result(self, point: Point, threads: int = 1) -> Result:
        """Replay one point. Raises what `vecsim.replay` raises."""
        tree = self.tree(point)
        workload = self._workload(point, tree)
        return replay(tree, workload=workload, threads=threads, **self._timings(point))

    def row(self, point: Point, threads: int = 1) -> dict[str, Any]:
        """Replay one point; whatever happens, a row comes of it: the point's labels, `status`,
        `reason`, and, if it ran, its fleet's GPUs, its misses and its report."""
        row: dict[str, Any] = {"point": point.index, **point.labels, "status": "ok", "reason": None}
        try:
            result = self.result(point, threads)
            state = self._load_state(point, result, threads) if self.setup.steadiness else None
            row.update(self._findings(result, state))
        except NotSupportedYetError as error:
            row.update(status="unsupported", reason=str(error))
        except InputError as error:
            row.update(status="invalid", reason=str(error))
        except VecsimError as error:
            row.update(status="failed", reason=str(error))
        except Exception as error:  # one point must not end the others
            row.update(status="failed", reason=f"{type(error).__name__}: {error}")
        return row

    def _findings(self, result: Result, state: str | None) -> dict[str, Any]:
        report = result.report
        findings: dict[str, Any] = {
            "gpus": sum(pool.workers * pool.gpus_per_worker for pool in result.outcome.pools),
            "dropped": dropped(report),
        }
        bounds = self.setup.bounds
        if bounds:
            findings["slo_miss"] = slo_miss(report, bounds)
        if self.setup.steadiness:
            findings["load_state"] = state
        growing = bool(report["backlog_growing"]) if state is None else state != STABLE
        saturated = self.setup.saturation_counts and growing
        missed = findings["dropped"] or findings.get("slo_miss") or saturated
        findings["feasible"] = not missed and report["completed_requests"] > 0
        return {**findings, **report}

    def _load_state(self, point: Point, result: Result, threads: int) -> str | None:
        """Whether the load of a point is sustained; None where its arrivals are not the
        workload's own, so that it cannot be repeated."""
        latency_ms = result.report["p90_e2e_latency_ms"]
        if result.report["backlog_growing"] is None or latency_ms is None:
            return None
        if not can_be_repeated(result.workload):
            return None
        tree = self.tree(point)
        for part in (tree, tree.get("spec"), tree.get("traffic")):
            if isinstance(part, dict):
                part.pop("max_sim_time_ms", None)
        timings = self._timings(point)

        def run(workload: Workload) -> Outcome:
            return replay(tree, workload=workload, threads=threads, **timings).outcome

        return load_state(result.workload, latency_ms, run)

    def _timings(self, point: Point) -> dict[str, Any]:
        own = {name: point.fields[name] for name in TIMINGS if name in point.fields}
        return {**self.setup.timings, **own}

    # --- workloads --------------------------------------------------------------------------------

    def workload_key(self, point: Point) -> str:
        """Points of one key share a workload; running them one after another keeps few alive."""
        if self.setup.workload is not None:
            return ""
        try:
            return self._traffic_key(self.payload(point))
        except InputError:
            return ""

    def expect(self, keys: Sequence[str]) -> None:
        """Say which workloads will be asked for, and how often: each is dropped after that."""
        for key in keys:
            if key not in self._shared:
                self._shared[key] = _Shared(self.setup.workload)
            self._shared[key].uses += 1

    def _workload(self, point: Point, tree: dict[str, Any]) -> Workload:
        payload = None if self.setup.workload is not None else load(tree)
        key = "" if payload is None else self._traffic_key(payload)
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _Shared(self.setup.workload)
        try:
            limit, ratio = point.fields.get(_LIMIT), point.fields.get(_SPEEDUP)
            workload = shared.get(limit, lambda: authored_workload(payload))
            return workload if ratio is None else workload.speedup(ratio)
        finally:
            with self._lock:
                shared.uses -= 1
                if shared.uses == 0 and self.setup.workload is None:
                    self._shared.pop(key, None)

    @staticmethod
    def _traffic_key(payload: Payload) -> str:
        traffic = msgspec.to_builtins(payload.traffic)
        if traffic is None or traffic["source_type"] != "trace":
            # Generated load may depend on the engine, such as its KV capacity.
            return msgspec.json.encode((payload.traffic, payload.spec)).decode()
        kept = {name: value for name, value in traffic.items() if name not in _RUN_ONLY}
        return json.dumps(kept, sort_keys=True)


class _Shared:
    """One workload, made by the first who asks, and its heads; all with their prefix trees."""

    def __init__(self, workload: Workload | None) -> None:
        self.uses = 0
        self._lock = threading.Lock()
        self._made: dict[int | None, Workload] = {} if workload is None else {None: workload}
        self._error: VecsimError | None = None

    def get(self, limit: int | None, make: Callable[[], Workload]) -> Workload:
        """The first `limit` rows of the workload, or all of it. Raises what `make` raises."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if None not in self._made:
                try:
                    self._made[None] = make()
                except VecsimError as error:
                    self._error = error
                    raise
            if limit not in self._made:
                self._made[limit] = self._made[None].limit(limit)
            return self._made[limit]
