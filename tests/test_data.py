"""The sample trace that ships with vecsim."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np

from vecsim.data import sample, sample_path
from vecsim.traces import read_trace


def test_the_shipped_file_is_what_the_generator_writes(tmp_path) -> None:
    assert sample_path().read_text(encoding="utf-8") == sample.text(sample.rows())
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "vecsim.data.sample", str(target)]
    subprocess.run(command, check=True, timeout=60)
    assert target.read_bytes() == sample_path().read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_seed_and_count() -> None:
    few = sample.rows(50, seed=1)
    assert len(few) == 50
    assert few == sample.rows(50, seed=1)
    assert few != sample.rows(50, seed=2)


def test_rows_are_complete_and_in_order() -> None:
    rows = [json.loads(text) for text in sample_path().read_text().splitlines()]
    assert len(rows) == 1000
    for row in rows:
        assert list(row) == ["timestamp", "input_length", "output_length", "hash_ids"]
        assert len(row["hash_ids"]) == -(-row["input_length"] // 512)
        assert row["input_length"] > 0
        assert row["output_length"] > 0
    times = [row["timestamp"] for row in rows]
    assert times == sorted(times)
    assert times[0] == 0


def test_turns_share_prefixes() -> None:
    workload = read_trace(sample_path())
    assert len(workload) == 1000
    tree = workload.prefix_tree(64)
    assert 0.2 < tree.node_count / len(tree.nodes) < 0.5
    assert np.diff(tree.offsets).max() > 10
