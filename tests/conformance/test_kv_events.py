"""KV events equal those that the reference's artifacts hold."""

import json
from pathlib import Path

import pytest

from tests.support import kv_events
from vecsim.run.replay import replay

CASES = json.loads((Path(__file__).parent / "kv_events.json").read_text())["cases"]


def has(case, kind: str) -> bool:
    return any(kind in entry["event"]["data"] for entry in case["expect"])


def test_the_cases_show_enough():
    planned = [c for c in CASES if all("output_token_ids" in r for r in requests_of(c))]
    assert len(planned) == len(CASES) >= 20
    for backend in ("vllm", "trtllm", "sglang"):
        of_backend = [c for c in CASES if c["name"].startswith(backend)]
        assert sum(has(c, "removed") for c in of_backend) >= 3
    assert len({c["name"] for c in CASES}) == len(CASES)


def requests_of(case):
    return case["payload"].get("spec", case["payload"])["requests"]


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_equals_the_reference(case):
    got = kv_events.of_result(replay(case["payload"], observe="kv_events"))
    assert got == kv_events.of_reference({"kv_events": case["expect"]})
