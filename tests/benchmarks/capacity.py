"""Capacity answers against brute force, and how many replays they take.

    python -m tests.benchmarks.capacity [--problems 60]

Kinds: fleets whose order is monotone, fleets where it is not (prefix caches and round robin under
prompts of a period), loads. Prints answers that are not the best of all, and the replays used.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

from tests.sweeps.test_capacity import all_rows, base, problem
from vecsim.sweeps.capacity import capacity
from vecsim.workload.workload import Workload


def broken(seed: int) -> tuple[dict, dict]:
    """A fleet problem with long prompts that come back every few requests."""
    random = np.random.default_rng(seed)
    period, rows = int(random.integers(2, 7)), 200
    lengths = np.resize([int(random.integers(3000, 9000)), *[100] * (period - 1)], rows)
    gap = float(random.uniform(20.0, 60.0))
    workload = Workload.from_columns(np.arange(rows) * gap, lengths, np.full(rows, 40))
    fleet = base(num_gpu_blocks=1500, block_size=64, max_num_seqs=64)
    del fleet["engine"]["rank"]["timing_model"]
    axes = {"workers": {"range": [1, 24]}}
    slo = {"p99_ttft_ms": float(random.uniform(100.0, 500.0))}
    return {"base": fleet, "workload": workload, "slo": slo, "fleet": axes}, axes


def is_monotone(rows: list[dict], axes: dict) -> bool:
    shapes = {row.get("shape") for row in rows}
    orders = [[row["feasible"] for row in rows if row.get("shape") == one] for one in shapes]
    return all(order == sorted(order) for order in orders)


def problems(kind: str):
    for seed in itertools.count():
        given, axes = broken(seed) if kind == "other fleets" else problem(seed)
        if ("load" in given) != (kind == "loads"):
            continue
        rows = all_rows(given, axes)
        if kind == "loads" or is_monotone(rows, axes) == (kind == "monotone fleets"):
            yield given, axes, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=60)
    count = parser.parse_args().problems
    for kind in ("monotone fleets", "other fleets", "loads"):
        wrong = replays = candidates = answered = 0
        for given, axes, rows in itertools.islice(problems(kind), count):
            found = capacity(**given)
            good = [row for row in rows if row["feasible"]]
            key = (lambda row: -row[next(iter(axes))]) if kind == "loads" else lambda r: r["gpus"]  # noqa: B023
            best = min(map(key, good), default=None)
            wrong += (None if found.answer is None else key(found.answer)) != best
            answered += found.feasible
            replays += len(found.points)
            candidates += found.candidates
        print(
            f"{kind}: {count} problems, {answered} feasible, {wrong} wrong, "
            f"{replays} of {candidates} candidates replayed"
        )


if __name__ == "__main__":
    main()
