"""`python -m tests.conformance SMALL`: prints the stored cases of few tokens that differ.

`tests.conformance.test_without_jit` runs it with NUMBA_DISABLE_JIT=1.
"""

import sys
import tempfile
import warnings
from pathlib import Path

from tests.conformance.support import all_cases, differences, name, unbuilt


def _tokens(case: dict) -> int:
    payload = case["payload"]
    spec = payload if "requests" in payload else payload["spec"]
    return sum(r["input_tokens"] + r["output_tokens"] for r in spec["requests"])


def main(ceiling: int) -> None:
    warnings.simplefilter("ignore")
    ran = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in all_cases():
            if not case["expect"]["ok"] or unbuilt(case) or "deviation" in case or "rows" in case:
                continue
            if case["file"] != "traffic" and _tokens(case) > ceiling:
                continue
            ran += 1
            lines = differences(case, Path(folder), threads=1)
            if lines:
                print(name(case), lines[0])
    print(f"{ran} cases")


if __name__ == "__main__":
    main(int(sys.argv[1]))
