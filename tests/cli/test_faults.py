"""Faults around the command: full disks, folders that cannot be written, signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
import yaml

from vecsim.data import sample_path
from vecsim.files import replace_file

VECSIM = [sys.executable, "-c", "from vecsim.cli.main import main; main()"]
LIMITED = [
    sys.executable,
    "-c",
    "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    "import vecsim.kernels.compile.jit;"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192));"
    "from vecsim.cli.main import main; main()",
]
"""A process that cannot write more than 8 KiB into a file: what a full disk looks like."""


def plan(tmp_path, points=60):
    tree = {
        "trace": {"path": str(sample_path()), "limit": 200},
        "spec": {
            "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
            "engine": {"rank": {"block_size": 64, "num_gpu_blocks": 4000}},
            "requests": [],
        },
        "axes": {"workers": {"range": [1, points]}},
    }
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def run(*arguments, command=VECSIM):
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    run("sweep", plan(tmp_path_factory.mktemp("warm"), 1))


def test_a_full_disk_costs_the_file_and_not_the_table(tmp_path):
    out = tmp_path / "rows.parquet"
    code, text, err = run("sweep", plan(tmp_path), "--output", out, command=LIMITED)
    assert code == 1
    assert len(text.splitlines()) > 60
    assert len(err.splitlines()) == 1
    assert "rows.parquet: cannot be written" in err
    assert sorted(os.listdir(tmp_path)) == ["plan.yaml"]
    code, _, err = run("replay", sample_path(), "--output", tmp_path / "o", command=LIMITED)
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "cannot be written" in err


@pytest.mark.parametrize("option", ["--output", "--html"])
def test_what_cannot_be_written_is_said_before_the_first_point(tmp_path, option):
    below = tmp_path / "plan.yaml" / "rows.html"
    started = time.monotonic()
    code, text, err = run("sweep", plan(tmp_path, 20_000), option, below)
    assert code in (1, 2)
    assert text == ""
    assert len(err.splitlines()) == 1
    assert "rows.html" in err
    assert time.monotonic() - started < 30.0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_ended_keeps_its_points(tmp_path, how):
    out = tmp_path / "rows.parquet"
    command = [*VECSIM, "sweep", str(plan(tmp_path, 3000)), "--output", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120.0
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(how)
    _, err = process.communicate(timeout=120)
    assert process.returncode == (-how if how == signal.SIGKILL else 130)
    assert "Traceback" not in err
    kept = pl.read_parquet(out)
    assert 0 < kept.height < 3000
    left = tmp_path / f".rows.parquet.{process.pid}.tmp"
    left.write_bytes(b"half")
    replace_file(tmp_path / "rows.parquet", lambda path: path.write_bytes(out.read_bytes()))
    assert not left.exists()
    assert not list(Path(tmp_path).glob(".*.tmp"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("replay", sample_path(), "--set", "engin.rank.max_num_seqs=4"), "engine"),
        (("replay", sample_path().parent / "sweep.yaml"), "vecsim sweep"),
        (("replay", sample_path().parent / "capacity.yaml"), "vecsim capacity"),
        (("sweep", sample_path().parent / "sweep.yaml", "--output", "r.csv"), ".parquet"),
        (("capacity", sample_path().parent / "load.yaml", "--output", "r.csv"), ".parquet"),
    ],
)
def test_mistakes_that_once_went_unnoticed(arguments, says):
    code, text, err = run(*arguments)
    assert code == 2
    assert text == ""
    assert len(err.splitlines()) == 1
    assert says in err


def test_plans_without_requests_and_sweeps_without_points(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("axes: {workers: [1]}\n")
    assert "trace" in run("sweep", path)[2]
    tree = yaml.safe_load(plan(tmp_path, 2).read_text())
    path.write_text(yaml.safe_dump({**tree, "constraints": ["workers > 2"]}))
    code, _, err = run("sweep", path)
    assert code == 2
    assert "at least one point" in err
    assert run("-h")[0] == 0
    assert "vecsim[plot]" in run("sweep", "-h")[1]
    assert "vecsim[plot]" in run("report", "-h")[1]
