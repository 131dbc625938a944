"""Engine time and memory of large synthetic replays.

    python -m tests.benchmarks.scale

One million and two million requests (1,000 in, 200 out, Poisson arrivals) on 256 workers, at a rate
that keeps about 8 requests running per worker, each in a process of its own, on one thread. Prints
seconds of the replay, seconds with requests frame and report, peak memory of the whole process, and
the ratio of the two sizes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import numpy as np

from vecsim.run.replay import replay
from vecsim.workload.workload import Workload

WORKERS = 256
RATE_PER_S = 1400.0
SIZES = (1_000_000, 2_000_000)


def run(requests: int) -> dict[str, float | bool]:
    """Figures of one replay in this process."""
    generator = np.random.default_rng(1)
    workload = Workload.from_columns(
        np.cumsum(generator.exponential(1000.0 / RATE_PER_S, requests)),
        np.full(requests, 1000, np.int32),
        np.full(requests, 200, np.int32),
    )
    spec = {
        "version": 1,
        "topology": {"kind": "aggregated", "workers": {"initial_workers": WORKERS}},
        "requests": [],
    }
    replay(spec, workload=workload.limit(1000), threads=1)
    started = time.perf_counter()
    result = replay(spec, workload=workload, threads=1)
    engine_s = time.perf_counter() - started
    report, frame = result.report, result.requests
    residence = frame["last_token_ms"] - frame["first_admit_ms"]
    return {
        "engine_s": engine_s,
        "with_frame_s": time.perf_counter() - started,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "running_per_worker": residence.sum() / report["makespan_ms"] / WORKERS,
        "backlog_growing": report["backlog_growing"],
    }


def main() -> None:
    """Run each size in its own process and print the figures."""
    figures = []
    for size in SIZES:
        command = [sys.executable, "-m", "tests.benchmarks.scale", str(size)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        figures.append(json.loads(answer))
        print(f"{size:>10,} requests: {figures[-1]}", flush=True)
    for name in ("engine_s", "peak_gib"):
        print(f"{name}: ratio {figures[1][name] / figures[0][name]:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(run(int(sys.argv[1]))))
    else:
        main()
