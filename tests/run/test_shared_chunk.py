"""Ranks of a group share a chunk: what a partial prompt leaves of it may be less than a page.
Prompts with nothing to compute still come in behind it. Times are those of the reference."""

import pytest

from tests.fuzz import trial
from tests.models import slow_disaggregated
from tests.support import answers
from tests.support.specs import r, spec
from vecsim.run.replay import replay

SGLANG = {"backend": "sglang", "block_size": 4, "num_gpu_blocks": 100}
CHUNKS_OF_SIX = {**SGLANG, "sglang": {"chunked_prefill_size": 12}}


@pytest.mark.parametrize(
    ("requests", "terminal_ms"),
    [
        ([(10, 3), (0, 3)], [32, 32]),
        ([(10, 3), (0, 3), (0, 2)], [32, 32, 31]),
        ([(10, 3), (0, 0)], [32, 10]),
        ([(10, 3), (0, 1), (5, 2)], [52, 10, 51]),
        ([(2, 3), (10, 3), (0, 3), (3, 2)], [52, 52, 52, 51]),
    ],
)
def test_empty_prompts_behind_a_partial_one(requests, terminal_ms):
    rows = [r(0, *lengths, dp_rank=0) for lengths in requests]
    payload = spec(*rows, dp_size=2, decode_ms=1, rank=CHUNKS_OF_SIX)
    assert replay(payload).requests["terminal_time_ms"].to_list() == terminal_ms
    assert trial.run(payload, "vecsim", None).lines == []


@pytest.mark.parametrize("policy", ["fifo", "lpm"])
def test_empty_prompts_behind_a_partial_one_of_a_source(policy):
    options = {"chunked_prefill_size": 12, "schedule_policy": policy}
    rows = [r(0, *lengths, dp_rank=0) for lengths in [(10, 3), (0, 3), (0, 0), (30, 2), (0, 5)]]
    payload = spec(*rows, dp_size=2, decode_ms=1, rank={**SGLANG, "sglang": options})
    pool = {"initial_workers": 1}
    payload["topology"] = {"kind": "disaggregated", "prefill": pool, "decode": pool}
    expected = answers.from_slow(payload, slow_disaggregated.simulate(payload))
    assert answers.differences(expected, answers.from_result(replay(payload))) == []
