"""What the reference answered, recorded by `tests.benchmarks.aic` in the files beside this one."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

FOLDER = Path(__file__).parent
TABLE = FOLDER / "qwen3-32b-fp8_h200_vllm.parquet"
"""A small table of Qwen3-32B-FP8 on one H200: decode batches to 64, prefills to 2,048 tokens,
contexts and prefixes to 16,384."""
RANDOM = FOLDER / "qwen3-32b-fp8_h200_vllm_random.parquet"
"""Random passes within that table's range, priced by the estimator itself."""
WORKLOADS = sorted((FOLDER / "workloads").glob("*.jsonl.gz"))
"""Ten seeded workloads of 300 requests, as Mooncake traces."""
ANSWERS = FOLDER / "workloads" / "answers.json"
"""For each workload the reference's mean TTFT and TPOT (ms) under its own external timing."""

RANK = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
"""The rank of the recorded answers, timing apart."""


@cache
def aic_points() -> pl.DataFrame:
    """The reference prices of timing providers, `cases/aic_points.json`: 15 deployments."""
    tree = json.loads((FOLDER / "aic_points.json").read_text())
    return pl.DataFrame(tree["points"], infer_schema_length=None)


def spec(timing: dict[str, Any], rank: dict[str, Any] | None = None) -> dict[str, Any]:
    """One worker of one rank with this timing model, without requests."""
    return {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "engine": {"rank": {**RANK, **(rank or {}), "timing_model": timing}},
        "requests": [],
    }
