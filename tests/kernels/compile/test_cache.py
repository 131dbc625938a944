"""The kernel cache: keyed by all sources, shared by processes, never in the way."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import vecsim
from tests.support.signatures import assert_one_a_combination
from vecsim.kernels.compile.cache import KERNELS, sources_digest
from vecsim.kernels.compile.mode import DISABLED

# One small entry over `timing`; prints the duration of a raw price of 1 ms, and what was compiled.
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from vecsim.kernels.compile.cache import on_compile, where_kept
on_compile(print)
from vecsim.kernels.probe import price
print(price(1.0, 1.0))
print(where_kept(), file=sys.stderr)
"""
PROBE = """
from vecsim.kernels.compile.jit import entry
from vecsim.kernels.timing.durations import duration_ms


@entry
def price(raw, ratio):
    return duration_ms(raw, ratio)
"""
COMPILED = "vecsim.kernels.probe.price"
KEPT = "later runs find them in the cache\n"


@pytest.fixture
def copy(tmp_path):
    """A copy of the package with a probe among its kernels."""
    package = tmp_path / "copy" / "vecsim"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copytree(KERNELS, package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "kernels" / "probe.py").write_text(PROBE)
    return package


def start(copy, cache, script=SCRIPT, **environment):
    usual = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment = {**usual, "VECSIM_CACHE_DIR": str(cache), **environment}
    return subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", script, str(copy.parent)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(copy, cache, script=SCRIPT, **environment):
    """What the script printed, and what it told besides."""
    process = start(copy, cache, script, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split(), err


def double(source):
    """Edit a copy of `timing`: durations are twice what they were."""
    text = source.read_text()
    assert "return seconds * 1000.0" in text
    source.write_text(text.replace("return seconds * 1000.0", "return seconds * 2000.0"))


def test_an_edited_callee_is_noticed(copy, tmp_path):
    cache = tmp_path / "cache"
    assert run(copy, cache) == ([COMPILED, "1.0"], KEPT)
    assert run(copy, cache) == (["1.0"], KEPT)
    double(copy / "kernels" / "timing" / "durations.py")
    assert run(copy, cache)[0] == [COMPILED, "2.0"]


def test_another_locator_of_numba_does_not_bring_back_stale_kernels(copy, tmp_path):
    """Numba's own caches look at the file of the entry point alone."""
    cache, others = tmp_path / "cache", {"NUMBA_CACHE_LOCATOR_CLASSES": "InTreeCacheLocator"}
    assert run(copy, cache, **others)[0] == [COMPILED, "1.0"]
    double(copy / "kernels" / "timing" / "durations.py")
    assert run(copy, cache, **others)[0] == [COMPILED, "2.0"]


def test_an_edit_of_any_kernel_file_changes_the_digest(copy):
    kernels = copy / "kernels"
    before = sources_digest(kernels)
    files = list(kernels.rglob("*.py"))
    assert kernels / "compile" / "fast" / "lowering.py" in files
    assert kernels / "timing" / "durations.py" in files
    for file in files:
        text = file.read_bytes()
        file.write_bytes(text + b"# edited")
        assert sources_digest(kernels) != before, file
        file.write_bytes(text)
    assert sources_digest(kernels) == before
    (kernels / "timing" / "durations.py").rename(kernels / "compile" / "timing.py")
    assert sources_digest(kernels) != before


def test_each_way_of_compiling_has_kernels_of_its_own(copy, tmp_path):
    cache = tmp_path / "cache"
    for way in ({"VECSIM_NUMBA": "fast"}, {"VECSIM_NUMBA": "plain"}, {"NUMBA_BOUNDSCHECK": "1"}):
        way = {"VECSIM_NUMBA": "", **way}
        assert run(copy, cache, **way)[0] == [COMPILED, "1.0"]
        assert run(copy, cache, **way)[0] == ["1.0"]


TWINS = """
import sys
sys.path.insert(0, sys.argv[1])
from vecsim.kernels.one.twin import add as add_one
from vecsim.kernels.two.twin import add as add_two
print(add_one(1), add_two(1))
"""


def test_modules_of_one_name_in_two_folders_are_not_one(copy, tmp_path):
    for folder, term in (("one", 10), ("two", 20)):
        (copy / "kernels" / folder).mkdir()
        (copy / "kernels" / folder / "twin.py").write_text(
            "from vecsim.kernels.compile.jit import entry\n\n\n"
            f"@entry\ndef add(x):\n    return x + {term}\n"
        )
    for _ in range(2):
        assert run(copy, tmp_path / "cache", TWINS)[0] == ["11", "21"]


HANDED_ON = """
import sys
sys.path.insert(0, sys.argv[1])
from vecsim.kernels.compile.cache import on_compile
on_compile(print)
from vecsim.kernels.handing import run
print(run(20))
"""
HANDING = """
from vecsim.kernels.compile.jit import entry, inner


@inner
def double(x):
    return 2 * x


@inner
def mix(f, x):
    for k in range(x):
        LONG
    return x


@entry
def run(x):
    return mix(double, x) + mix(double, x + 1) + mix(double, x + 2)
""".replace("LONG", "\n        ".join(40 * ["x = (x + f(k)) % 1_000_003"]))


def test_a_kernel_that_is_handed_on_is_found_again(copy, tmp_path):
    """Plain Numba passes its address besides, which is another in another process."""
    (copy / "kernels" / "handing.py").write_text(HANDING)
    for way in ("fast", "plain"):
        for compiled in (["vecsim.kernels.handing.run"], []):
            out, err = run(copy, tmp_path / "cache", HANDED_ON, VECSIM_NUMBA=way)
            assert out == [*compiled, "50543"]
            assert "Cannot cache" not in err


def test_a_damaged_cache_is_rebuilt(copy, tmp_path):
    cache = tmp_path / "cache"
    run(copy, cache)
    for file in cache.rglob("*.nb*"):
        file.write_bytes(b"garbage")
    assert run(copy, cache)[0] == [COMPILED, "1.0"]
    assert run(copy, cache)[0] == ["1.0"]


def test_without_a_place_for_the_cache_kernels_are_compiled_in_memory(copy, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    out, err = run(copy, blocked)
    assert out == [COMPILED, "1.0"]
    assert err == f"no cache: {blocked}: Not a directory\n"


@pytest.mark.skipif(os.name == "nt", reason="folders have no modes")
def test_nothing_is_taken_from_a_folder_that_others_may_write_to(copy, tmp_path):
    cache = tmp_path / "cache"
    run(copy, cache)
    (folder,) = cache.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    for unsafe, mode in ((folder, 0o777), (folder, 0o770), (cache, 0o777)):
        usual = unsafe.stat().st_mode
        unsafe.chmod(mode)
        out, err = run(copy, cache)
        assert out == [COMPILED, "1.0"]
        assert err.endswith(f"no cache: other users may write to {unsafe}\n")
        assert f"RuntimeWarning: no cache of kernels: other users may write to {unsafe}" in err
        unsafe.chmod(usual)
    assert run(copy, cache) == (["1.0"], KEPT)


def test_two_processes_may_start_on_an_empty_cache(copy, tmp_path):
    both = [start(copy, tmp_path / "cache") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.split()[-1] == "1.0"


@pytest.mark.skipif(DISABLED, reason="kernels are not compiled")
def test_every_entry_point_has_one_signature():
    """Whatever the workload and the configuration: columns are normalised before the call."""
    from vecsim.kernels import entries_vllm
    from vecsim.kernels.cache import sharing
    from vecsim.kernels.fleet import placement

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
    kernels = (sharing.analyse, placement.tokenize_all)
    assert [len(kernel.signatures) for kernel in kernels] == [1, 1]
    assert_one_a_combination(entries_vllm.run_independent, entries_vllm.run_fleet)
