"""The kernels as plain Python: the same answers, so that types are cast and not inferred."""

import os
import subprocess
import sys
from pathlib import Path


def test_small_cases_agree():
    run = subprocess.run(
        [sys.executable, "-m", "tests.conformance", "1000"],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    *differing, count = run.stdout.splitlines()
    assert differing == []
    assert int(count.split()[0]) >= 200
