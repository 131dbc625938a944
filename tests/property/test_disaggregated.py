"""Compiled prefill/decode pools equal the slow model on random specs, with every other feature."""

import pytest

from tests.fuzz import specs, trial
from vecsim.replaying import replay

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


RUN_DRY = {
    "version": 1,
    "topology": {
        "kind": "disaggregated",
        "prefill": {"initial_workers": 1},
        "decode": {"initial_workers": 1},
    },
    "engine": {
        "rank": {
            "backend": "sglang",
            "block_size": 4,
            "num_gpu_blocks": 20,
            "timing_model": {"type": "fixed", "prefill_ms": 5, "decode_ms": 1},
            "prefill_decode_interval": 7,
        }
    },
    "requests": [
        {"id": "r0", "arrival_time_ms": 1001, "input_tokens": 1, "output_tokens": 1},
        {"id": "r2", "arrival_time_ms": 1003, "input_tokens": 5, "output_tokens": 2},
        {
            "id": "r4",
            "arrival_time_ms": 1001,
            "input_tokens": 21,
            "output_tokens": 4,
            "input_token_ids": [21, 29, 20, 16] + [0] * 17,
        },
        {"id": "r6", "arrival_time_ms": 1000, "input_tokens": 17, "output_tokens": 0},
        {
            "id": "r7",
            "arrival_time_ms": 1001,
            "input_tokens": 13,
            "output_tokens": 4,
            "input_token_ids": [21, 29, 20, 16] + [0] * 9,
        },
        {"id": "r9", "arrival_time_ms": 1000.2171462707915, "input_tokens": 36, "output_tokens": 6},
    ],
}
"""The last runner ends at the instant at which another one comes; r4 was retracted, and waits for
the end of the countdown."""


def test_a_countdown_goes_on_with_those_who_come_when_nothing_runs():
    assert trial.run(RUN_DRY, "vecsim", None).lines == []
    requests = replay(RUN_DRY).requests
    # The reference's answer.
    assert requests.filter(request_id="r4")["last_token_ms"].to_list() == [1022.0]
