"""How fast single replays are, beside the reference.

    VECSIM_TRACES=... python -m tests.benchmarks.core [--reference PYTHON]

For each case: from the columns of a Workload to finished columns, requests frame and report, and to
the frame of KV events where they are observed, on one thread; "first" interns the prefixes anew,
"later" finds them interned. Beside it the time with all threads and, given the Python that has the
reference, the reference's own wall_time_ms in the same run, always without KV events. The least of
several rounds counts, because shared machines drift; ratios mean more than times.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.reference import Reference
from vecsim.run.replay import replay
from vecsim.traces import read_trace
from vecsim.workload.workload import Workload

ROUNDS = 8


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    workers: int
    hash_ids: bool = True
    rows: int | None = None
    rank: dict[str, Any] = dataclasses.field(default_factory=dict)
    observe: str | None = None


ROOFLINE = {"type": "roofline", "model": "meta-llama/Meta-Llama-3.1-8B", "system": "h100_sxm"}
"""Becomes a table of 250,000 points; the reference does not know it."""

CASES = (
    Case("16 workers, lengths only", 16, hash_ids=False),
    Case("16 workers, hash ids", 16),
    Case("16 workers, KV events", 16, observe="kv_events"),
    Case("4 workers, hash ids", 4),
    Case("overload: 3,000 rows, 1 worker", 1, rows=3000),
    Case("16 workers, block size 16", 16, rank={"block_size": 16, "num_gpu_blocks": 65536}),
    Case("16 workers, block size 512", 16, rank={"block_size": 512, "num_gpu_blocks": 2048}),
    Case("16 workers, TensorRT-LLM", 16, rank={"backend": "trtllm"}),
    Case("16 workers, SGLang", 16, rank={"backend": "sglang", "num_gpu_blocks": 1 << 20}),
    Case("16 workers, a timing table", 16, rank={"timing_model": ROOFLINE}),
)


def spec_of(case: Case) -> dict[str, Any]:
    """The descriptor, without requests."""
    return {
        "version": 1,
        "topology": {"kind": "aggregated", "workers": {"initial_workers": case.workers}},
        "engine": {"rank": case.rank},
        "requests": [],
        "record_per_request": False,
    }


def seconds(case: Case, workload: Workload, threads: int | None) -> float:
    """One replay with its frame and report."""
    started = time.perf_counter()
    result = replay(spec_of(case), workload=workload, threads=threads, observe=case.observe)
    assert result.requests.height == len(workload)
    assert case.observe is None or result.kv_events.height > len(workload)
    assert result.report["num_requests"] == len(workload)
    return time.perf_counter() - started


def measure(case: Case, workload: Workload) -> tuple[float, float, float]:
    """(first, later, all threads), in ms."""
    seconds(case, workload, 1)
    first = min(seconds(case, dataclasses.replace(workload, _trees={}), 1) for _ in range(4))
    later = min(seconds(case, workload, 1) for _ in range(ROUNDS))
    threaded = min(seconds(case, workload, None) for _ in range(ROUNDS))
    return first * 1e3, later * 1e3, threaded * 1e3


def reference_ms(reference: Reference, case: Case, workload: Workload, trace: Path) -> float:
    """The reference's wall_time_ms of the same run."""
    if not case.hash_ids:
        columns = zip(
            workload.arrival_ms.tolist(),
            workload.input_length.tolist(),
            workload.output_length.tolist(),
            strict=True,
        )
        requests = [
            {"id": str(k), "arrival_time_ms": at, "input_tokens": isl, "output_tokens": osl}
            for k, (at, isl, osl) in enumerate(columns)
        ]
        return reference.ask({**spec_of(case), "requests": requests})["wall_time_ms"]
    lines = trace.read_text().splitlines(keepends=True)[: case.rows]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as part:
        part.writelines(lines)
        part.flush()
        traffic = {
            "source_type": "trace",
            "load_type": "trace_timestamps",
            "trace_path": part.name,
            "trace_format": "mooncake",
            "trace_block_size": 512,
        }
        return reference.ask({"spec": spec_of(case), "traffic": traffic})["wall_time_ms"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.core")
    parser.add_argument("--reference", help="Python that has the reference installed")
    options = parser.parse_args()
    trace = Path(os.environ["VECSIM_TRACES"]) / "conversation_trace.jsonl"
    whole = read_trace(trace)
    reference = Reference(options.reference, limit_s=120.0) if options.reference else None
    print(f"{'':32}{'first':>10}{'later':>10}{'threads':>10}{'reference':>12}{'ratios':>14}")
    for case in CASES:
        workload = whole if case.rows is None else whole.limit(case.rows)
        if not case.hash_ids:
            workload = workload.lengths_only()
        first, later, threaded = measure(case, workload)
        line = f"{case.name:32}{first:>7.1f} ms{later:>7.1f} ms{threaded:>7.1f} ms"
        if reference is not None and "timing_model" not in case.rank:
            theirs = reference_ms(reference, case, workload, trace)
            later = min(later, min(seconds(case, workload, 1) for _ in range(ROUNDS)) * 1e3)
            line += f"{theirs:>9.0f} ms{theirs / first:>8.0f}{theirs / later:>6.0f}"
        print(line, flush=True)
    if reference is not None:
        reference.close()


if __name__ == "__main__":
    main()
