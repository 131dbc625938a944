"""Compiled prefill/decode pools equal the slow model on random specs, with every other feature."""

import pytest

from tests.fuzz import specs, trial

SEEDS_PER_FEATURE = 40
WITH = (
    "caching_off",
    "chunking_off",
    "closed_loop",
    "dp",
    "empty_prompt",
    "fifo",
    "max_model_len",
    "planned",
    "prefill_schedule_interval",
    "prefix",
    "small_pool",
    "speedup",
    "time_limit",
    "tokenization",
    "workers",
    "zero_time",
)


@pytest.mark.parametrize(
    ("backend", "feature"),
    [
        (backend, feature)
        for backend in ("vllm", "trtllm", "sglang")
        for feature in WITH
        if backend == "vllm" or feature != "prefill_schedule_interval"
    ],
)
def test_equals_the_slow_model(backend, feature):
    forced = ("disagg", feature) if backend == "vllm" else ("disagg", backend, feature)
    start = 700_000 + 10_000 * WITH.index(feature)
    differing = {}
    for seed in range(start, start + SEEDS_PER_FEATURE):
        payload = specs.make(seed, forced, ("refused",))
        lines = trial.run(payload, "vecsim", None).lines
        if lines:
            differing[seed] = lines
    assert differing == {}


def test_random_specs_meet_the_edges():
    """Otherwise the test above would show little."""
    met = dict.fromkeys(("preempted", "rejected", "failed", "standstill", "deadlock"), 0)
    for seed in range(600):
        payload = specs.make(seed, ("disagg",), ("refused",))
        outcomes = trial.run(payload, "slow", None).outcomes
        for outcome in met:
            met[outcome] += outcome in outcomes
    assert met["preempted"] >= 60
    assert met["rejected"] >= 60
    assert met["failed"] >= 30
    assert met["standstill"] >= 60
    assert met["deadlock"] >= 10
