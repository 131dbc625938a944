"""Compiled SGLang ranks equal the slow model on random specs, with every other feature."""

import subprocess
import sys

import pytest

from tests.fuzz import specs, trial
from vecsim.run.replay import replay

SEEDS_PER_FEATURE = 60
WITH = (
    "belady",
    "caching_off",
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
    "rush",
)


@pytest.mark.parametrize("feature", WITH)
def test_equals_the_slow_model(feature):
    start = 500_000 + 10_000 * WITH.index(feature)
    differing = {}
    for seed in range(start, start + SEEDS_PER_FEATURE):
        payload = specs.make(seed, ("sglang", feature), ("refused",))
        lines = trial.run(payload, "vecsim", None).lines
        if lines:
            differing[seed] = lines
    assert differing == {}


PROMPT = [31, 4, 45, 28, 45, 37, 22, 19, 8, 7, 35, 26, 38, 17, 38, 39, 6, 7]
"""What r8 asks, and r1 goes on from."""

SHARED_IN_A_BATCH = {
    "version": 1,
    "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
    "engine": {
        "rank": {
            "backend": "sglang",
            "block_size": 1,
            "num_gpu_blocks": 38,
            "sglang": {"clip_max_new_tokens": 4},
        }
    },
    "requests": [
        {
            "id": "r1",
            "arrival_time_ms": 1021,
            "input_tokens": 26,
            "output_tokens": 7,
            "input_token_ids": [*PROMPT, 6, 7, 7, 39, 31, 42, 32, 21],
        },
        {
            "id": "r8",
            "arrival_time_ms": 1193,
            "input_tokens": 18,
            "output_tokens": 1,
            "input_token_ids": PROMPT,
        },
        {"id": "r9", "arrival_time_ms": 1010, "input_tokens": 1, "output_tokens": 7},
    ],
}


def test_pages_computed_twice_make_room_for_first_tokens():
    """At 1220.163800 ms r8, which ends with its first token, and the retracted r1 share a batch and
    a full pool. The 7 pages that both compute leave room for r1's token only because r8's are in
    the tree by then. Times are the reference's."""
    requests = replay(SHARED_IN_A_BATCH).requests
    expected = [1270.0290829999997, 1237.0602739999997, 1220.1637999999998]
    assert requests["last_token_ms"].to_list() == pytest.approx(expected, rel=1e-12)
    assert trial.run(SHARED_IN_A_BATCH, "vecsim", None).lines == []


def test_random_specs_meet_the_edges():
    """Otherwise the test above would show little."""
    met = {"preempted": 0, "evicted": 0, "rejected": 0, "standstill": 0, "failed": 0}
    pages, policies = set(), set()
    for seed in range(600):
        payload = specs.make(seed, ("sglang",), ("refused",))
        rank = payload.get("spec", payload)["engine"]["rank"]
        pages.add(rank["block_size"])
        policies.add(rank["sglang"]["schedule_policy"])
        outcomes = trial.run(payload, "slow", None).outcomes
        for outcome in met:
            met[outcome] += outcome in outcomes
    assert met["preempted"] >= 30
    assert met["evicted"] >= 150
    assert met["rejected"] >= 50
    assert met["standstill"] >= 50
    assert met["failed"] >= 1
    assert pages == {1, 4, 16, 64}
    assert policies == {"fifo", "lpm"}


COMPILED = """
import sys
from vecsim.kernels import entries_sglang, entries_vllm
from vecsim.kernels.cache import block_pool, radix_tree
from vecsim.kernels.sched import sglang, vllm
from vecsim.run.replay import replay

backend = sys.argv[1]
replay({
    "version": 1,
    "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
    "engine": {"rank": {"backend": backend}},
    "requests": [
        {"id": "r", "arrival_time_ms": 0, "input_tokens": 100, "output_tokens": 3}
    ],
})
used = [m for m in (entries_vllm, entries_sglang) if m.run_independent.signatures]
assert used == [entries_sglang if backend == "sglang" else entries_vllm], used
assert not entries_vllm.run_fleet.signatures and not entries_sglang.run_fleet.signatures
idle = (vllm, block_pool) if backend == "sglang" else (sglang, radix_tree)
for module in idle:
    for name, kernel in vars(module).items():
        if getattr(kernel, "__module__", None) == module.__name__:
            assert not getattr(kernel, "signatures", ()), (module.__name__, name)
"""


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_a_run_compiles_its_own_backend_only(backend):
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, backend],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
