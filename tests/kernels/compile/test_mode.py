"""Which way kernels are compiled, and what each way promises."""

import os
import subprocess
import sys

import pytest

from vecsim.kernels.compile.mode import TESTED, choose


@pytest.mark.parametrize(
    ("wanted", "version", "checked", "fast"),
    [
        (None, TESTED[0], False, True),
        (None, (*TESTED[1], 7), False, True),
        ("", (0, 65, 1), False, True),
        ("plain", (0, 65, 1), False, False),
        (None, (0, 65, 1), True, False),
        ("fast", (0, 65, 1), True, False),
        ("fast", (0, 99, 0), False, True),
    ],
)
def test_a_way_that_needs_no_remark(wanted, version, checked, fast):
    assert choose(wanted, version, checked) == (fast, None)


@pytest.mark.parametrize("version", [(0, 60, 0), (0, 69, 0), (1, 0, 0)])
def test_another_numba_compiles_plainly_and_the_user_is_told(version):
    fast, notice = choose(None, version, False)
    assert not fast
    assert f"Numba {'.'.join(map(str, version))} is outside 0.61 to 0.68" in notice


def test_a_wish_that_is_not_known():
    assert choose("slow", (0, 65, 1), False) == (
        False,
        "VECSIM_NUMBA=slow: expected plain or fast; taken as plain",
    )


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    others = ("NUMBA_DISABLE_JIT", "NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "VECSIM_NUMBA")
    kept = {name: value for name, value in os.environ.items() if name not in others}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# Numba as it were of another series; prints whether the fast way was taken, or even loaded.
SERIES = """
import sys
import numba
numba.version_info = numba.version_info._replace(major=int(sys.argv[1]), minor=int(sys.argv[2]))
from vecsim.kernels.timing import durations as timing
from vecsim.kernels.compile import jit, mode

@jit.entry
def price(raw, ratio):
    return timing.duration_ms(raw, ratio)

print(price(1.5, 2.0), mode.FAST, any("compile.fast" in name for name in sys.modules))
"""


def test_one_line_of_warning_outside_the_range():
    done = run(SERIES, "0", "69")
    assert done.stdout == "0.75 False False\n", done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert "is outside 0.61 to 0.68" in done.stderr


def test_no_warning_where_plain_is_wanted():
    done = run(SERIES, "0", "69", VECSIM_NUMBA="plain")
    assert (done.stdout, done.stderr) == ("0.75 False False\n", "")


def test_the_fast_way_is_loaded_when_something_is_compiled(tmp_path):
    for loaded in (True, False):
        done = run(SERIES, "0", "68", VECSIM_CACHE_DIR=str(tmp_path))
        assert (done.stdout, done.stderr) == (f"0.75 True {loaded}\n", "")


BOUNDS = """
import numpy as np
from vecsim.kernels.compile.jit import entry, inner

@inner
def item(table, i, j):
    return table[i, j]

@entry
def read(table, i, j):
    return item(table, i, j) + table[i][j]

table = np.ones((2, 3))
print(read(table, 1, 2))
try:
    read(table, 1, 3)
except IndexError as error:
    print(error)
"""


def test_bounds_are_checked_where_numba_is_told_to():
    assert run(BOUNDS, NUMBA_BOUNDSCHECK="1").stdout == "2.0\nindex is out of bounds\n"


def test_plain_python_checks_bounds_as_well():
    done = run(BOUNDS, NUMBA_DISABLE_JIT="1")
    assert done.stdout == "2.0\nindex 3 is out of bounds for axis 1 with size 3\n"


def test_debug_information_is_left_to_plain_numba():
    done = run(SERIES, "0", "68", NUMBA_DEBUGINFO="1")
    assert done.stdout == "0.75 False False\n", done.stderr
