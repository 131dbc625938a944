"""How near tables come to the reference's own prices; by hand, where vecsim[aic] is installed.

python -m tests.benchmarks.aic points      # every deployment of aic_points.json, random passes
python -m tests.benchmarks.aic workloads   # seeded workloads through both engines
python -m tests.benchmarks.aic record      # write the small table and the recorded answers
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import vecsim
from tests.fuzz.reference import Reference
from tests.timing import recorded
from vecsim.config.schema import AicTiming
from vecsim.timing import aic
from vecsim.timing.grids import Grid
from vecsim.timing.points import write_points

SMALL = Grid(
    batches=64,
    most_seqs=64,
    tokens=2048,
    most_tokens=2048,
    prefill_batches=64,
    context=16384,
    batch_coarse=4,
    coarse=2,
)
QWEN = {
    "model": "Qwen/Qwen3-32B-FP8",
    "system": "h200_sxm",
    "backend": "vllm",
    "backend_version": "0.24.0",
    "tp": 1,
}
LLAMA = {"model": "meta-llama/Meta-Llama-3.1-8B", "system": "h100_sxm", "backend": "vllm", "tp": 1}
MOE = {
    "model": "Qwen/Qwen3-235B-A22B-FP8",
    "system": "h200_sxm",
    "backend": "vllm",
    "tp": 8,
    "moe_tp_size": 1,
    "moe_ep_size": 8,
}
SEEDS = range(10)
ROWS = 300
_BLOCK = 512


# --- prices ---------------------------------------------------------------------------------------


def configuration(**fields: Any) -> AicTiming:
    """A complete configuration of the estimator."""
    fields = {name: value for name, value in fields.items() if value is not None}
    tp = fields.get("tp", 1)
    return aic.complete(AicTiming(**fields), vecsim.config.schema.RankConfig(), tp, 1)


def random_passes(grid: Grid, count: int, seed: int) -> tuple[np.ndarray, ...]:
    """(batch, isl, prefix) of prefills and (batch, context) of decodes, log-uniform in a grid."""
    generator = np.random.default_rng(seed)

    def draw(last: int) -> np.ndarray:
        return np.floor(2.0 ** generator.uniform(0.0, np.log2(last + 1), count)).astype(np.int64)

    batch, tokens, prefix = draw(grid.prefill_batches), draw(grid.most_tokens), draw(grid.context)
    tokens = np.maximum(np.minimum(tokens, grid.most_tokens // batch), 1)
    prefix = np.minimum(prefix, np.maximum(1_000_000 // batch - tokens, 0))
    seqs, context = draw(grid.most_seqs), draw(grid.context)
    context = np.minimum(context, 2_000_000 // seqs)
    return batch, tokens + prefix, prefix, seqs, context


def errors(table: vecsim.TimingTable, config: AicTiming, grid: Grid, seed: int) -> np.ndarray:
    """Relative errors of a table at random passes: float64 [2, 4000], prefills and decodes."""
    prefill, decode = aic.direct(config, "timing")
    batch, isl, prefix, seqs, context = random_passes(grid, 4000, seed)
    truth = np.array([prefill(*size) for size in zip(batch, isl, prefix, strict=True)])
    both = [table.prefill_ms(batch, isl, prefix) / truth - 1.0]
    truth = np.array([decode(*size) for size in zip(seqs, context, strict=True)])
    both.append(table.decode_ms(seqs, context) / truth - 1.0)
    return np.abs(both)


def points() -> None:
    """Print the errors of every deployment of aic_points.json, in percent."""
    frame = recorded.aic_points()
    keys = ["model", "system", "backend", "backend_version", "tp", "moe_tp", "moe_ep"]
    grid = Grid(batches=1024, most_seqs=1024)
    listed, drawn = [], []
    for (model, system, backend, version, tp, moe_tp, moe_ep), rows in frame.group_by(
        keys, maintain_order=True
    ):
        config = configuration(
            model=model,
            system=system,
            backend=backend,
            backend_version=version,
            tp=tp,
            moe_tp_size=moe_tp,
            moe_ep_size=moe_ep,
        )
        started = time.perf_counter()
        table = aic.table(config, grid, "timing")
        seconds = time.perf_counter() - started
        prefill = rows.filter(pl.col("role") == "prefill")
        decode = rows.filter(pl.col("role") == "decode")
        found = np.concatenate(
            [
                table.prefill_ms(prefill["batch_size"], prefill["isl"], prefill["prefix"])
                / prefill["latency_ms"].to_numpy(),
                table.decode_ms(decode["batch_size"], decode["context"])
                / decode["latency_ms"].to_numpy(),
            ]
        )
        listed.append(np.abs(found - 1.0))
        drawn.append(errors(table, config, grid, seed=7))
        print(
            f"{model} {system} {backend} tp {tp}: {table.points.height} points, {seconds:.1f} s;"
            f" listed max {100 * listed[-1].max():.3f}; random prefill {_shown(drawn[-1][0])},"
            f" decode {_shown(drawn[-1][1])}",
            flush=True,
        )
    print(f"all listed points: {_shown(np.concatenate(listed))}")
    print(f"all random points: {_shown(np.concatenate([one.ravel() for one in drawn]))}")


def _shown(values: np.ndarray) -> str:
    p99, p50 = np.quantile(values, 0.99), np.median(values)
    return f"p50 {100 * p50:.4f} p99 {100 * p99:.3f} max {100 * values.max():.3f} %"


# --- workloads ------------------------------------------------------------------------------------


def write_workload(path: Path, seed: int, rate: float, longest: int) -> None:
    """A Mooncake trace: Poisson arrivals, lognormal lengths, some prefixes shared."""
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1000.0 / rate, ROWS)).astype(int)
    inputs = np.clip(generator.lognormal(np.log(1480.0), 0.8, ROWS), 32, longest).astype(int)
    outputs = np.clip(generator.lognormal(np.log(120.0), 0.7, ROWS), 2, 600).astype(int)
    groups = generator.integers(0, 12, ROWS)
    shared = generator.integers(0, 9, 12)
    rows = []
    for row in range(ROWS):
        blocks = -(-int(inputs[row]) // _BLOCK)
        common = min(int(shared[groups[row]]), blocks - 1)
        ids = [int(groups[row]) * 100 + k for k in range(common)]
        ids += [10_000 + 100 * row + k for k in range(blocks - common)]
        rows.append(
            {
                "timestamp": int(arrivals[row]),
                "input_length": int(inputs[row]),
                "output_length": int(outputs[row]),
                "hash_ids": ids,
            }
        )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def ask_reference(
    reference: Reference, path: Path, config: dict[str, Any], rank: dict[str, Any]
) -> dict[str, float]:
    """The reference's means for a workload under its own external timing."""
    timing = {"type": "external", "provider": "aic", "config": config}
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as plain:
        plain.write(gzip.decompress(path.read_bytes()))
        plain.flush()
        traffic = {
            "source_type": "trace",
            "trace_format": "mooncake",
            "trace_path": plain.name,
            "trace_block_size": _BLOCK,
        }
        answer = reference.ask({"spec": recorded.spec(timing, rank), "traffic": traffic})
    if "error" in answer:
        sys.exit(answer["error"])
    report = answer.get("report", answer)
    return {name: report[name] for name in ("mean_ttft_ms", "mean_tpot_ms")}


def differences(
    path: Path, timing: Any, rank: dict[str, Any], truth: dict[str, float]
) -> dict[str, float]:
    """Relative differences (%) of vecsim's means from the reference's."""
    workload = vecsim.read_trace(path)
    report = vecsim.replay(recorded.spec(timing, rank), workload=workload).report
    return {name: 100.0 * (report[name] / value - 1.0) for name, value in truth.items()}


def workloads() -> None:
    """Ten workloads for each of five deployments, through both engines."""
    reference = Reference(sys.executable, limit_s=120.0)
    deployments = [(QWEN, 4.0), (LLAMA, 10.0), (MOE, 5.0)]
    deployments += [({**LLAMA, "backend": backend}, 10.0) for backend in ("sglang", "trtllm")]
    with tempfile.TemporaryDirectory() as folder:
        for config, rate in deployments:
            rank = {"backend": config["backend"], "max_num_seqs": 256}
            rank["max_num_batched_tokens"] = 8192
            found = []
            for seed in SEEDS:
                path = Path(folder) / f"{seed}.jsonl.gz"
                write_workload(path, 100 + seed, rate, longest=20_000)
                truth = ask_reference(reference, path, config, rank)
                timing = {"type": "external", "provider": "aic", "config": config}
                found.append(differences(path, timing, rank, truth))
            print_differences(f"{config['model']} {config['backend']}", found)
    reference.close()


def print_differences(name: str, found: list[dict[str, float]]) -> None:
    """One line for each metric: the mean over the seeds, and the worst of them."""
    for metric in found[0]:
        values = np.array([one[metric] for one in found])
        worst = values[np.abs(values).argmax()]
        print(f"{name} {metric}: mean {values.mean():+.3f} %, worst {worst:+.3f} %", flush=True)


def record() -> None:
    """Write the files that `tests.timing.recorded` names, and print how well they fit."""
    config = configuration(**QWEN)
    table = aic.build(config, SMALL, "timing")
    write_points(recorded.TABLE, table.points, table.metadata)
    prefill, decode = aic.direct(config, "timing")
    batch, isl, prefix, seqs, context = random_passes(SMALL, 1000, seed=3)
    frames = []
    for role, sizes, price in (
        ("prefill", {"batch_size": batch, "isl": isl, "prefix": prefix}, prefill),
        ("decode", {"batch_size": seqs, "context": context}, decode),
    ):
        prices = [price(*size) for size in zip(*sizes.values(), strict=True)]
        frames.append(pl.DataFrame({"role": role, **sizes, "latency_ms": prices}))
    both = pl.concat(frames, how="diagonal")
    both.select("role", "batch_size", "isl", "prefix", "context", "latency_ms").write_parquet(
        recorded.RANDOM, compression="zstd"
    )
    reference = Reference(sys.executable, limit_s=120.0)
    answers, found = {}, []
    for seed in SEEDS:
        path = recorded.FOLDER / "workloads" / f"{seed}.jsonl.gz"
        write_workload(path, seed, rate=3.0, longest=6_000)
        answers[path.name] = ask_reference(reference, path, QWEN, recorded.RANK)
        timing = {"type": "table", "path": str(recorded.TABLE)}
        rank = {**recorded.RANK, "num_gpu_blocks": "auto"}
        found.append(differences(path, timing, rank, answers[path.name]))
    reference.close()
    recorded.ANSWERS.write_text(json.dumps(answers, indent=2) + "\n")
    print_differences("small table", found)


if __name__ == "__main__":
    {"points": points, "workloads": workloads, "record": record}[sys.argv[1]]()
