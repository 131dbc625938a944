"""How fast sweeps are, beside the single-thread replays of the same points.

    VECSIM_TRACES=... python -m tests.benchmarks.sweeps [PLAN]

prints, for the plan of this folder: seconds of the single replays and of the sweep on one and on
two threads, points per second, their ratio, and peak memory. Single replays and sweeps take turns,
because shared machines drift; the least of three rounds counts.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from vecsim.results.frames import REQUESTS_SCHEMA
from vecsim.run.replay import replay
from vecsim.sweeps.axes import points_of
from vecsim.sweeps.evaluate import Evaluator, prepare
from vecsim.sweeps.plan_files import SWEEP_KEYS, read_plan
from vecsim.sweeps.run import sweep
from vecsim.traces import read_trace

ROUNDS = 3


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_mb() -> float:
    """Peak resident memory of this process (MB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def sweeps(plan_path: Path) -> None:
    """Time the sweep against its single replays."""
    plan = read_plan(plan_path, SWEEP_KEYS)
    trace = Path(os.environ["VECSIM_TRACES"]) / "conversation_trace.jsonl"
    plan["workload"] = workload = read_trace(trace)
    points = points_of(plan["axes"])
    evaluator = Evaluator(prepare(plan["base"], workload, points, {}))
    trees = [evaluator.tree(point) for point in points]
    speeds = [point.fields.get("workload.arrival_speedup", 1.0) for point in points]
    arrivals = {speed: workload.speedup(speed) for speed in set(speeds)}
    replay(trees[0], workload=workload, threads=1)
    print(f"{len(points)} points, {len(workload)} requests; {peak_mb():.0f} MB before")

    def singles() -> None:
        for tree, speed in zip(trees, speeds, strict=True):
            assert replay(tree, workload=arrivals[speed], threads=1).report

    runs: dict[str, Callable[[], object]] = {
        "single replays": singles,
        "sweep, 1 thread": lambda: sweep(**plan, threads=1),
        "sweep, 2 threads": lambda: sweep(**plan, threads=2),
    }
    best: dict[str, tuple[float, float]] = {}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            best[name] = min(best.get(name, (1e9, 0.0)), timed(run))
    for name, (wall, cpu) in best.items():
        rate = len(points) / wall
        print(f"{name}: {wall:.2f} s wall, {cpu:.2f} s CPU, {rate:.1f} points/s")
    ratio = best["sweep, 2 threads"][0] / best["single replays"][0]
    print(f"ratio {ratio:.2f}; peak {peak_mb():.0f} MB")


def million_rows(folder: Path) -> None:
    """Time writing a million request rows."""
    count = 1_000_000
    random = np.random.default_rng(1)
    columns = {}
    for name, dtype in REQUESTS_SCHEMA.items():
        if dtype == pl.Float64:
            columns[name] = pl.Series(random.uniform(0, 1e6, count))
        elif dtype == pl.Int32:
            columns[name] = pl.Series(random.integers(0, 10_000, count), dtype=dtype)
        else:
            columns[name] = pl.Series([None], dtype=dtype).new_from_index(0, count)
    frame = pl.DataFrame(columns)
    path = folder / "requests.parquet"
    wall, _ = timed(lambda: frame.write_parquet(path))
    print(f"a million request rows to Parquet: {wall:.2f} s, {path.stat().st_size / 1e6:.0f} MB")
    path.unlink()


if __name__ == "__main__":
    import tempfile

    default = Path(__file__).with_name("sweep_200.yaml")
    sweeps(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
    with tempfile.TemporaryDirectory() as temporary:
        million_rows(Path(temporary))
