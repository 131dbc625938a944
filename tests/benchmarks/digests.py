"""Digests of 60 fixed runs: what must not change when only the code does.

    python -m tests.benchmarks.digests > before.txt

One line a run: its name, and a digest of its report, requests, admissions and, where they are
observed, KV events and time series. Compare the output of two versions with `diff`. Floats count to
the last bit, so that the same machine and the same packages are needed; `--rounded` leaves out the
moments of the report, which are sums in an order that may change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import vecsim

BACKENDS = ("vllm", "trtllm", "sglang")
N = 240
BLOCK = 16
_WITHOUT = ("wall_time_ms", "vecsim_version")


def shared_workload(seed: int, gap_ms: float) -> vecsim.Workload:
    """Prompts of 1 to 24 blocks of 16 tokens; their beginnings come from a few documents."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 24 * BLOCK, N)
    ids, fresh = [], 1 << 20
    for length in lengths.tolist():
        blocks = -(-length // BLOCK)
        common = int(rng.integers(0, blocks + 1))
        document = int(rng.integers(0, 6)) * 1000
        ids += [document + k for k in range(common)]
        ids += range(fresh, fresh + blocks - common)
        fresh += blocks
    offsets = np.concatenate([[0], np.cumsum(-(-lengths // BLOCK))])
    return vecsim.Workload.from_columns(
        np.round(rng.exponential(gap_ms, N).cumsum(), 3),
        lengths,
        rng.integers(0, 60, N),
        block_offsets=offsets,
        block_ids=np.array(ids),
        block_tokens=BLOCK,
    )


def sessions() -> vecsim.Workload:
    """Conversations of several turns whose prompts grow."""
    return vecsim.synthesize(
        requests=60,
        arrivals={"kind": "poisson", "rate": 20},
        input_tokens={"kind": "uniform", "low": 10, "high": 200},
        output_tokens={"kind": "uniform", "low": 1, "high": 50},
        turns=4,
        think_time_ms=50,
        seed=5,
    )


def graph(folder: Path) -> vecsim.Workload:
    """Requests that wait for one or two others."""
    rng = np.random.default_rng(11)
    rows = []
    for k in range(120):
        length = int(rng.integers(1, 12 * BLOCK))
        document = int(rng.integers(0, 4)) * 100
        ids = [document + i for i in range(-(-length // BLOCK))]
        row: dict[str, Any] = {"request_id": f"r{k:03}", "timestamp": float(k), "hash_ids": ids}
        row |= {"input_length": length, "output_length": int(rng.integers(1, 40))}
        if k % 10:
            first = k - k % 10
            sources = rng.choice(np.arange(first, k), min(2, k - first), replace=False)
            row |= {"wait_for": [f"r{s:03}" for s in sources], "tool_wait_ms": 5.0}
        rows.append(json.dumps(row))
    path = folder / "graph.jsonl"
    path.write_text("\n".join(rows))
    return vecsim.read_trace(path, "agentic_mooncake", block_size=BLOCK)


def spec_of(backend: str, topology: str, blocks: int, dp: int = 1, **fields: Any) -> dict[str, Any]:
    """The descriptor; `fields` go to the top level."""
    pool = {"initial_workers": 3}
    shape = {"kind": "aggregated", "workers": pool}
    if topology == "disaggregated":
        shape = {"kind": topology, "prefill": pool, "decode": pool, "handoff_latency_ms": 2.5}
    rank = {"backend": backend, "num_gpu_blocks": blocks, "block_size": BLOCK}
    rank |= {"max_num_seqs": 12, "max_num_batched_tokens": 512}
    if backend == "sglang":
        del rank["max_num_batched_tokens"]
        rank["sglang"] = {"chunked_prefill_size": 256, "schedule_policy": "lpm"}
    spec = {"version": 1, "topology": shape, "engine": {"rank": rank, "dp_size": dp}}
    return {**spec, "requests": [], **fields}


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, payload, arguments of `vecsim.replay`)."""
    dense, sparse = shared_workload(1, 4.0), shared_workload(2, 60.0)
    talks, jobs = sessions(), graph(folder)
    for backend in BACKENDS:
        for topology in ("aggregated", "disaggregated"):

            def spec(blocks: int = 90, _of: tuple = (backend, topology), **fields: Any) -> dict:
                return spec_of(*_of, blocks, **fields)

            runs = {
                "lengths": (spec(), {"workload": dense.lengths_only()}),
                "shared, sparse": (spec(400), {"workload": sparse}),
                "shared, short of memory": (spec(60), {"workload": dense}),
                "closed loop": (spec(max_in_flight=10), {"workload": dense}),
                "sessions": (spec(120), {"workload": talks}),
                "graph": (spec(), {"workload": jobs, "timeline": True}),
                "events": (spec(70), {"workload": dense, "observe": "kv_events"}),
                "attention-DP": (spec(dp=2), {"workload": dense, "observe": "kv_events"}),
                "tokenization, time limit": (
                    {
                        "spec": spec(max_sim_time_ms=500.0),
                        "tokenization": {"base_ms": 1.5, "per_input_token_ms": 0.01},
                    },
                    {"workload": dense, "timeline": True},
                ),
                "session events": (spec(120), {"workload": talks, "observe": "kv_events"}),
            }
            if topology == "aggregated":
                belady = spec(60)
                belady["engine"]["kv_eviction_policy"] = "belady"
                runs["session events"] = (belady, {"workload": dense})
            for name, (payload, arguments) in runs.items():
                yield f"{backend}, {topology}, {name}", payload, arguments


def digest_of(result: vecsim.Result, arguments: dict[str, Any], rounded: bool) -> str:
    """A digest of all that a run returned."""
    digest = hashlib.sha256()
    report = {k: v for k, v in result.report.items() if k not in _WITHOUT}
    if rounded:
        report = {k: v for k, v in report.items() if not k.startswith(("mean_", "std_"))}
    digest.update(json.dumps(report, sort_keys=True, default=str).encode())
    frames = [result.requests, result.admissions]
    if "observe" in arguments:
        frames.append(result.kv_events)
    if "timeline" in arguments:
        frames.append(result.timeline(100.0))
    for frame in frames:
        digest.update(repr(frame.columns).encode())
        digest.update(frame.write_csv(float_precision=None).encode())
    return digest.hexdigest()[:16]


def main() -> None:
    """Print a line a run."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.digests")
    parser.add_argument("--rounded", action="store_true", help="without moments of the report")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for name, payload, arguments in cases(Path(folder)):
            if options.only in name:
                try:
                    result = vecsim.replay(payload, **arguments)
                    line = digest_of(result, arguments, options.rounded)
                except vecsim.VecsimError as error:
                    line = f"{type(error).__name__}: {error}"
                print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
