"""The kernel cache: keyed by all sources, shared by processes, never in the way."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import vecsim
from vecsim.kernels import timing
from vecsim.kernels.compile.mode import DISABLED

ROOT = Path(vecsim.__file__).parent
KERNELS = Path(timing.__file__).parent

# One small entry over `timing`; prints the duration of a raw price of 1 ms, and what was compiled.
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from vecsim.kernels.compile.cache import on_compile
on_compile(lambda name: print("compiled"))
from vecsim.kernels.probe import price
print(price(1.0, 1.0))
"""
PROBE = """
from vecsim.kernels.compile.jit import entry
from vecsim.kernels.timing import duration_ms


@entry
def price(raw, ratio):
    return duration_ms(raw, ratio)
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the package with a probe among its kernels."""
    package = tmp_path / "copy" / "vecsim"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copytree(KERNELS, package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "kernels" / "probe.py").write_text(PROBE)
    return package


def start(copy, cache):
    environment = {**os.environ, "VECSIM_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_DISABLE_JIT", None)
    return subprocess.Popen(
        [sys.executable, "-I", "-c", SCRIPT, str(copy.parent)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(copy, cache):
    process = start(copy, cache)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split()


def test_an_edited_callee_is_noticed(copy, tmp_path):
    cache = tmp_path / "cache"
    assert run(copy, cache) == ["compiled", "1.0"]
    assert run(copy, cache) == ["1.0"]
    source = copy / "kernels" / "timing.py"
    text = source.read_text()
    assert "return seconds * 1000.0" in text
    source.write_text(text.replace("return seconds * 1000.0", "return seconds * 2000.0"))
    assert run(copy, cache) == ["compiled", "2.0"]


def test_a_damaged_cache_is_rebuilt(copy, tmp_path):
    cache = tmp_path / "cache"
    run(copy, cache)
    for file in cache.rglob("*.nb*"):
        file.write_bytes(b"garbage")
    assert run(copy, cache) == ["compiled", "1.0"]
    assert run(copy, cache) == ["1.0"]


def test_without_a_place_for_the_cache_kernels_are_compiled_in_memory(copy, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert run(copy, blocked) == ["compiled", "1.0"]


def test_two_processes_may_start_on_an_empty_cache(copy, tmp_path):
    both = [start(copy, tmp_path / "cache") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.split()[-1] == "1.0"


@pytest.mark.skipif(DISABLED, reason="kernels are not compiled")
def test_every_entry_point_has_one_signature():
    """Whatever the workload and the configuration: columns are normalised before the call."""
    from vecsim.kernels import aggregated, placement

    rank = {"num_gpu_blocks": 12, "block_size": 4}
    spec = {
        "version": 1,
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 2}},
        "engine": {"rank": rank},
        "requests": [],
    }
    plain = vecsim.Workload.from_columns([0.0, 1.0, 0.5], [8, 9, 3], [5, 0, 2])
    shared = vecsim.Workload.from_columns(
        np.array([0.0, 1.0]), [8, 8], [4, 4], block_offsets=[0, 2, 4], block_ids=[1, 2, 1, 3]
    )
    for workload in (plain, shared):
        for change in ({}, {"max_in_flight": 1}):
            vecsim.replay({**spec, **change}, workload=workload)
    tokenized = {"spec": spec, "tokenization": {"base_ms": 1.0}}
    vecsim.replay(tokenized, workload=plain)
    entries = (
        aggregated.prepare,
        aggregated.run_independent,
        aggregated.run_coupled,
        placement.tokenize_all,
    )
    for kernel in entries:
        assert len(kernel.signatures) == 1, kernel
