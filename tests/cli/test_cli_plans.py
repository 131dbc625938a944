"""The commands sweep, capacity, compare and report, on the example files that ship with vecsim."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
import yaml

import vecsim
from tests.cli.test_cli import run  # noqa: F401 (a fixture)
from vecsim.data import sample_path
from vecsim.sweeps.plan_files import CAPACITY_KEYS, SWEEP_KEYS, read_plan

DATA = sample_path().parent


def small(tmp_path, name, **changes):
    """An example file with 200 rows of the trace, changed."""
    plan = yaml.safe_load((DATA / name).read_text())
    options = plan["trace"] if isinstance(plan["trace"], dict) else {}
    plan["trace"] = {**options, "path": str(DATA / "sample.jsonl"), "limit": 200}
    path = tmp_path / name
    path.write_text(yaml.safe_dump({**plan, **changes}))
    return path


def test_sweep_of_the_example(run, tmp_path):  # noqa: F811
    out, page = tmp_path / "rows.parquet", tmp_path / "sweep.html"
    code, text, err = run("sweep", DATA / "sweep.yaml", "--output", out, "--html", page)
    assert (code, err) == (0, "")
    frame = pl.read_parquet(out)
    assert frame.height == 15
    assert frame["feasible"].any()
    assert not frame["feasible"].all()
    assert "p99_ttft_ms" in text
    assert "two GPUs" in text
    assert "://" not in page.read_text()
    direct = vecsim.sweep(**read_plan(DATA / "sweep.yaml", SWEEP_KEYS))
    assert pl.DataFrame(direct).equals(frame)


def test_one_bad_point_of_three_is_a_row_and_an_exit_code__vllm_57305(run, tmp_path):  # noqa: F811
    plan = small(tmp_path, "sweep.yaml", axes={"workers": [1, 0, 2]}, constraints=[])
    code, text, err = run("sweep", plan, "--format", "json")
    assert code == 1
    assert [row["status"] for row in json.loads(text)] == ["ok", "invalid", "ok"]
    assert re.fullmatch(r"vecsim: 1 of 3 points did not run; the first: .*got 0.*\n", err)


def test_output_is_kept_and_resumed(run, tmp_path):  # noqa: F811
    plan, out = small(tmp_path, "sweep.yaml"), tmp_path / "rows.parquet"
    assert run("sweep", plan, "--output", out)[0] == 0
    before = out.read_bytes()
    code, _, err = run("sweep", plan, "--output", out)
    assert code == 2
    assert "output" in err
    assert run("sweep", plan, "--output", out, "--resume")[0] == 0
    assert out.read_bytes() == before
    changed = small(tmp_path, "sweep.yaml", slo={"p99_ttft_ms": 1})
    code, _, err = run("sweep", changed, "--output", out, "--resume")
    assert code == 2
    assert "resume" in err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_keeps_rows(tmp_path):
    axes = {"workers": {"range": [1, 400]}, "arrival_speedup": [1, 2, 4, 8]}
    plan, out = small(tmp_path, "sweep.yaml", axes=axes, constraints=[]), tmp_path / "rows.parquet"
    code = "from vecsim.sweeps import run; run._SAVE_EVERY_S = 0.2\n"
    code += "from vecsim.cli.main import main; main()"
    command = [sys.executable, "-c", code, "sweep", str(plan), "--output", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    deadline = time.monotonic() + 90
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    kept = pl.read_parquet(out).height
    assert 0 < kept < 1600
    assert f"{kept} points finished, kept in" in err


def test_capacity_of_the_examples(run):  # noqa: F811
    code, text, _ = run("capacity", DATA / "capacity.yaml", "--format", "json")
    found = json.loads(text)
    assert code == 0
    assert found["answer"]["shape"] == "two GPUs"
    assert found["answer"]["gpus"] == 2
    assert found["replayed"] <= found["candidates"] / 3
    code, text, _ = run("capacity", DATA / "load.yaml")
    assert code == 0
    assert text.startswith("arrival_speedup = 4.8")
    assert "not arrival_speedup = 4.9" in text


def test_no_feasible_point_is_an_exit_code(run, tmp_path):  # noqa: F811
    plan, out = small(tmp_path, "capacity.yaml", slo={"p99_ttft_ms": 1}), tmp_path / "p.parquet"
    code, text, err = run("capacity", plan, "--output", out)
    assert code == 1
    assert err == ""
    assert text.startswith("no feasible point")
    assert "nearest miss" in text
    assert pl.read_parquet(out)["feasible"].any() is False


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"axis": {}}, "axis"),
        ({"spec": 3}, "spec"),
        ({"trace": {"file": "x"}}, "trace"),
        ({"trace": {"path": "sample.jsonl", "speed": 2}}, "speed"),
        ({"axes": {"wrokers": [1]}}, "wrokers"),
        ({"slo": {"p99": 1}}, "p99"),
    ],
)
def test_a_malformed_plan_is_one_line(run, tmp_path, change, where):  # noqa: F811
    path = tmp_path / "plan.yaml"
    plan = {"axes": {"workers": [1]}, "trace": str(DATA / "sample.jsonl"), **change}
    path.write_text(yaml.safe_dump(plan))
    code, _, err = run("sweep", path)
    assert code == 2
    assert where in err
    assert len(err.splitlines()) == 1


def test_a_plan_may_name_a_spec_file_and_leave_out_the_rest(tmp_path):
    (tmp_path / "spec.yaml").write_text(
        yaml.safe_dump(
            {"topology": {"kind": "aggregated", "workers": {"initial_workers": 3}}, "requests": []}
        )
    )
    path = tmp_path / "plan.yaml"
    path.write_text("spec: spec.yaml\nload: concurrency\n")
    plan = read_plan(path, CAPACITY_KEYS)
    assert Path(plan["base"]) == tmp_path / "spec.yaml"
    assert plan["workload"] is None
    assert plan["load"] == "concurrency"


def test_compare_and_report(run, tmp_path):  # noqa: F811
    for name, workers in (("a", 1), ("b", 2)):
        code, _, err = run(
            "replay",
            DATA / "sample.jsonl",
            "--limit",
            100,
            "--workers",
            workers,
            "--timeline",
            "--output",
            tmp_path / name,
        )
        assert code == 0, err
    code, text, _ = run("compare", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "p99_ttft_ms" in text
    code, text, _ = run("compare", tmp_path / "a", tmp_path / "b", "--all", "--format", "json")
    rows = {row["metric"]: row for row in json.loads(text)}
    assert rows["decode_worker_seconds"]["b"] > rows["decode_worker_seconds"]["a"]
    series = pl.read_parquet(tmp_path / "a" / "timeline.parquet")
    assert series["completions"].sum() == 100
    page = tmp_path / "a.html"
    assert run("report", tmp_path / "a", "-o", page)[0] == 0
    assert 'id="kv_usage-spec"' in page.read_text()
    assert run("report", tmp_path / "a", "-o", page)[0] == 2
    assert run("compare", tmp_path / "a", tmp_path / "nothing")[0] == 2
