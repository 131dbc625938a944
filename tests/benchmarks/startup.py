"""Seconds of `vecsim replay` on the bundled sample: with an empty kernel cache, and afterwards.

    python -m tests.benchmarks.startup [OPTION ...]

Options are handed to `vecsim replay`, for example `--backend trtllm`, `--max-in-flight 32` or
`--prefill-workers 1 --decode-workers 1`. Processor seconds stand beside: they vary less on a
machine that others use as well.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time

from vecsim.data import sample_path

WARM_RUNS = 5


def processor_seconds() -> float:
    """Processor time of the commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print the cold and the warm time."""
    command = [sys.executable, "-m", "vecsim", "replay", str(sample_path()), *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "VECSIM_CACHE_DIR": cache}
        times = []
        for _ in range(1 + WARM_RUNS):
            started, used = time.perf_counter(), processor_seconds()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            times.append((time.perf_counter() - started, processor_seconds() - used))
    cold, warm = times[0], (min(column) for column in zip(*times[1:], strict=True))
    print("cold {:.1f} s ({:.1f} of a processor), ".format(*cold), end="")
    print("warm {:.2f} s ({:.2f} of a processor)".format(*warm))


if __name__ == "__main__":
    main()
