"""Every stored case whose features are built comes out as the reference had it."""

from collections import Counter

import pytest

from tests.conformance.support import TRACES, all_cases, differences, name, unbuilt

CASES = [c for c in all_cases() if c["expect"]["ok"] and not unbuilt(c) and "deviation" not in c]
pytestmark = pytest.mark.filterwarnings("ignore:keys without effect")


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_the_reference(case, tmp_path):
    if case.get("rows") and not TRACES:
        pytest.skip("needs the public traces: set VECSIM_TRACES to their folder")
    assert differences(case, tmp_path) == []


def test_every_file_takes_part():
    """Counts of the time of writing; they grow with what is built."""
    counts = Counter(c["file"] for c in CASES)
    least = {
        "config": 84,
        "mooncake": 6,
        "report": 8,
        "runtime": 21,
        "timing": 121,
        "traffic": 86,
        "trtllm": 19,
        "vllm": 51,
    }
    assert {f: n for f, n in least.items() if counts[f] < n} == {}
