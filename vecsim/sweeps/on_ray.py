"""Points of a sweep on a Ray cluster: one actor a core, each with its own copy of the workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from vecsim.errors import VecsimError
from vecsim.sweeps.axes import Point
from vecsim.sweeps.evaluate import Evaluator, Setup
from vecsim.workload.workload import Workload


class _Runner:
    """The actor: runs points of one setup in a process of its own."""

    def __init__(self, setup: Setup) -> None:
        # Arrays from Ray's object store are read-only, for which kernels would be compiled anew.
        workload = None if setup.workload is None else writable(setup.workload)
        self._evaluator = Evaluator(dataclasses.replace(setup, workload=workload))

    def row(self, point: Point) -> dict[str, Any]:
        return self._evaluator.row(point)


def writable(workload: Workload) -> Workload:
    """A copy whose arrays may be written to; its prefix trees are built anew."""
    copies = {
        name: value.copy()
        for name, value in vars(workload).items()
        if isinstance(value, np.ndarray)
    }
    return dataclasses.replace(workload, **copies, _trees={})


def run_on_ray(
    setup: Setup, points: list[Point], threads: int, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Run points on the cluster that Ray is connected to, else on a local one of `threads` cores.

    A point whose process dies becomes a failed row; the process is replaced.

    Raises:
        VecsimError: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise VecsimError("executor 'ray' needs Ray: pip install 'vecsim[ray]'") from None
    own = not ray.is_initialized()
    if own:
        ray.init(num_cpus=threads, include_dashboard=False, log_to_driver=False)
    try:
        _run(ray, setup, points, keep)
    finally:
        if own:
            ray.shutdown()


def _run(
    ray: Any, setup: Setup, points: list[Point], keep: Callable[[dict[str, Any]], None]
) -> None:
    if setup.workload is not None:
        bare = dataclasses.replace(setup.workload, _trees={})
        setup = dataclasses.replace(setup, workload=bare)
    shared = ray.put(setup)
    runner = ray.remote(num_cpus=1)(_Runner)
    cores = int(ray.cluster_resources().get("CPU", 1))
    waiting = list(reversed(points))
    in_flight: dict[Any, tuple[Any, Point]] = {}
    actors = [runner.remote(shared) for _ in range(max(1, min(cores, len(points))))]

    def give(actor: Any) -> None:
        if waiting:
            point = waiting.pop()
            in_flight[actor.row.remote(point)] = (actor, point)

    try:
        for actor in actors:
            give(actor)
        while in_flight:
            (answer,), _ = ray.wait(list(in_flight), num_returns=1)
            actor, point = in_flight.pop(answer)
            try:
                row = ray.get(answer)
            except ray.exceptions.RayActorError as error:
                reason = f"its process died: {' '.join(str(error).split())[:200]}"
                row = {"point": point.index, **point.labels, "status": "failed", "reason": reason}
                actor = runner.remote(shared)
                actors.append(actor)
            keep(row)
            give(actor)
    finally:
        for actor in actors:
            ray.kill(actor)
