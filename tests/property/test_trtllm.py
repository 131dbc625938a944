"""Compiled TensorRT-LLM ranks equal the slow model on random specs, with every other feature."""

import pytest

from tests.fuzz import specs, trial
from vecsim.run.replay import replay

SEEDS_PER_FEATURE = 60
WITH = (
    "belady",
    "caching_off",
    "chunking_off",
    "closed_loop",
    "dp",
    "empty_prompt",
    "max_model_len",
    "planned",
    "prefix",
    "small_pool",
    "speedup",
    "time_limit",
    "tokenization",
    "workers",
    "zero_time",
)


@pytest.mark.parametrize("feature", WITH)
def test_equals_the_slow_model(feature):
    start = 700_000 + 10_000 * WITH.index(feature)
    differing = {}
    for seed in range(start, start + SEEDS_PER_FEATURE):
        payload = specs.make(seed, ("trtllm", feature), ("refused",))
        lines = trial.run(payload, "vecsim", None).lines
        if lines:
            differing[seed] = lines
    assert differing == {}


def test_random_specs_meet_the_edges():
    """Otherwise the test above would show little."""
    met = {"evicted": 0, "rejected": 0, "standstill": 0, "length": 0, "unfinished": 0}
    sizes, chunking, clamped = set(), set(), 0
    for seed in range(600):
        payload = specs.make(seed, ("trtllm",), ("refused",))
        spec = payload.get("spec", payload)
        rank = spec["engine"]["rank"]
        sizes.add(rank["block_size"])
        chunking.add(rank.get("enable_chunked_prefill", True))
        capacity = rank["block_size"] * rank["num_gpu_blocks"]
        clamped += any(
            r["input_tokens"] < capacity < r["input_tokens"] + r["output_tokens"]
            for r in spec["requests"]
        )
        outcomes = trial.run(payload, "slow", None).outcomes
        assert "preempted" not in outcomes
        for outcome in met:
            met[outcome] += outcome in outcomes
    assert met["evicted"] >= 150
    assert met["rejected"] >= 100
    assert met["standstill"] >= 10
    assert met["length"] >= 10
    assert met["unfinished"] >= 10
    assert clamped >= 20
    assert sizes == {2, 3, 4, 8, 16}
    assert chunking == {True, False}


def test_a_whole_hit_comes_in_where_an_empty_prompt_took_more_than_was_left():
    """As the reference answers: the pool of one block is promised twice, and the repeated prompt
    needs no block of its own."""
    prompt = {"input_tokens": 3, "output_tokens": 0, "input_token_ids": [0, 0, 0]}
    empty = {"input_tokens": 0, "output_tokens": 1}
    timing = {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}
    rank = {"backend": "trtllm", "block_size": 3, "num_gpu_blocks": 1, "timing_model": timing}
    payload = {
        "version": 1,
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "engine": {"rank": rank},
        "requests": [
            {"id": f"r{k}", "arrival_time_ms": 0.0, **row}
            for k, row in enumerate((prompt, empty, prompt))
        ],
    }
    rows = replay(payload).requests.select("first_admit_ms", "reused_input_tokens").rows()
    assert rows == [(0.0, 0), (0.0, 0), (0.0, 3)]
