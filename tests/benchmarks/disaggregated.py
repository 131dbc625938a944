"""How fast prefill/decode replays are, beside the reference.

    VECSIM_TRACES=... python -m tests.benchmarks.disaggregated [--reference PYTHON]

The Mooncake conversation trace with its hash ids on 8 prefill and 8 decode workers, one thread;
from the columns of a Workload to finished frames and report (see core.py for what is measured).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from tests.fuzz.reference import Reference
from vecsim.run.replay import replay
from vecsim.traces import read_trace
from vecsim.workload.workload import Workload

ROUNDS = 8
# SGLang has as many tokens in pages of one as the others have in blocks.
RANKS = {"vllm": {}, "trtllm": {}, "sglang": {"num_gpu_blocks": 1 << 20}}


def spec_of(backend: str) -> dict[str, Any]:
    """The descriptor, without requests."""
    pool = {"initial_workers": 8}
    return {
        "version": 1,
        "topology": {"kind": "disaggregated", "prefill": pool, "decode": pool},
        "engine": {"rank": {"backend": backend, **RANKS[backend]}},
        "requests": [],
        "record_per_request": False,
    }


def seconds(backend: str, workload: Workload) -> float:
    """One replay with its frame and report."""
    started = time.perf_counter()
    result = replay(spec_of(backend), workload=workload, threads=1)
    assert result.requests.height == len(workload)
    assert result.report["num_requests"] == len(workload)
    return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.disaggregated")
    parser.add_argument("--reference", help="Python that has the reference installed")
    options = parser.parse_args()
    trace = Path(os.environ["VECSIM_TRACES"]) / "conversation_trace.jsonl"
    workload = read_trace(trace)
    reference = Reference(options.reference, limit_s=300.0) if options.reference else None
    for backend in RANKS:
        seconds(backend, workload)
        first = min(
            seconds(backend, dataclasses.replace(workload, _trees={})) for _ in range(ROUNDS)
        )
        later = min(seconds(backend, workload) for _ in range(ROUNDS))
        line = f"8 + 8 workers, {backend:8}{first * 1e3:>8.1f} ms first{later * 1e3:>8.1f} ms later"
        if reference is not None:
            traffic = {
                "source_type": "trace",
                "load_type": "trace_timestamps",
                "trace_path": str(trace),
                "trace_format": "mooncake",
                "trace_block_size": 512,
            }
            theirs = reference.ask({"spec": spec_of(backend), "traffic": traffic})["wall_time_ms"]
            line += f"{theirs:>9.0f} ms reference, {theirs / first / 1e3:.0f} x"
        print(line, flush=True)
    if reference is not None:
        reference.close()


if __name__ == "__main__":
    main()
