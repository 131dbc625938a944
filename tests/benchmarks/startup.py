"""Seconds of `vecsim replay` on the bundled sample: with an empty kernel cache, and afterwards.

    python -m tests.benchmarks.startup [OPTION ...]

Options are handed to `vecsim replay`, for example `--backend trtllm` or `--max-in-flight 32`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from vecsim.data import sample_path

WARM_RUNS = 5


def main() -> None:
    """Print the cold and the warm time."""
    command = [sys.executable, "-m", "vecsim", "replay", str(sample_path()), *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "VECSIM_CACHE_DIR": cache}
        times = []
        for _ in range(1 + WARM_RUNS):
            started = time.perf_counter()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            times.append(time.perf_counter() - started)
    print(f"cold {times[0]:.1f} s, warm {min(times[1:]):.2f} s")


if __name__ == "__main__":
    main()
