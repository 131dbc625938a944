"""Radix trees grow in time: no worker finds the nodes used up that it was promised.

The programs run without JIT, where an index past the end of an array is an error, with as few
nodes to begin with as the fleet gets along with, and with the least room for KV events.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import vecsim
from vecsim.run import kv_events
from vecsim.run.lower import ranks

ranks._FIRST_NODES = 1
kv_events._SLACK_WORDS = 0
row = {"arrival_time_ms": 0, "input_tokens": 9, "output_tokens": 12}
requests = [
    {"id": f"r{k}", **row, "input_token_ids": [1] * 8 + [2 + k % 4]} for k in range(4 * WORKERS)
]
timing = {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}
rank = {"backend": "sglang", "block_size": 1, "max_num_seqs": 2, "timing_model": timing}
spec = {
    "version": 1,
    "topology": TOPOLOGY,
    "engine": {"rank": rank},
    "requests": requests,
    "max_in_flight": 4 * WORKERS,
    **MORE,
}
requests = vecsim.replay(spec, observe=OBSERVE).requests
counts = requests["terminal_status"].value_counts().rows()
print(dict(sorted(counts)), requests["terminal_time_ms"].max())
"""

POOL = {"initial_workers": 24}
AGGREGATED = {"kind": "aggregated", "workers": POOL}
DISAGGREGATED = {"kind": "disaggregated", "prefill": POOL, "decode": POOL}


@pytest.mark.parametrize("observe", [None, "kv_events"])
@pytest.mark.parametrize(
    ("topology", "more", "printed"),
    [
        # Two waves of two requests a worker: 10 ms and 11 more tokens each.
        (AGGREGATED, {}, "{'completed': 96} 42.0"),
        (AGGREGATED, {"max_sim_time_ms": 21.5}, "{'completed': 48, 'unfinished': 48} 21.0"),
        # The second wave is prefilled while the first decodes, 12 tokens of 1 ms.
        (DISAGGREGATED, {}, "{'completed': 96} 34.0"),
    ],
)
def test_all_finish_at_once(topology, more, printed, observe):
    fleet = f"WORKERS = 24\nTOPOLOGY = {topology}\nMORE = {more}\nOBSERVE = {observe!r}\n"
    assert output_of(fleet + PROGRAM) == printed


# A cached prompt, and a queue of prompts longer than the pool that leave it at depths of their own.
REFUSED = """
import vecsim
from vecsim.run.lower import ranks

ranks._FIRST_NODES = 1
cached = list(range(60))
row = {"arrival_time_ms": 100, "input_tokens": 70, "output_tokens": 1}
requests = [
    {"id": f"r{k}", **row, "input_token_ids": cached[: 55 - k] + [100 + k] * (15 + k)}
    for k in range(50)
]
first = {**row, "id": "a", "arrival_time_ms": 0, "input_tokens": 60, "input_token_ids": cached}
timing = {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}
rank = {"backend": "sglang", "num_gpu_blocks": 64, "max_num_seqs": 1, "timing_model": timing}
spec = {
    "version": 1,
    "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
    "engine": {"rank": rank},
    "requests": [first, *requests],
}
print(*vecsim.replay(spec).report["terminal_reasons"].items())
"""


def test_a_queue_of_refused_prompts_splits_a_node_for_each():
    assert "('prompt_exceeds_kv_capacity', 50)" in output_of(REFUSED)


# A pass starts with an empty log, and finds just the room that it was promised.
CONVERSATIONS = """
import vecsim
from vecsim.run import kv_events
from vecsim.run.lower import ranks

ranks._FIRST_NODES = 1
kv_events._SLACK_WORDS = 0
new_log = kv_events.new_log


def least_log(*sizes, **options):
    log = new_log(*sizes, **options)
    return log._replace(words=log.words[: len(log.words) // 2])


kv_events.new_log = least_log
workload = vecsim.synthesize(
    4 * WORKERS, input_tokens=9, output_tokens=12, turns=2, block_tokens=1,
    shared_prefix={"ratio": 0.5, "groups": 2},
)
timing = {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}
rank = {"backend": "sglang", "num_gpu_blocks": PAGES, "max_num_seqs": 2, "timing_model": timing}
spec = {"topology": TOPOLOGY, "engine": {"rank": {"block_size": 1, **rank}}, "requests": []}
result = vecsim.replay(spec, workload=workload, observe="kv_events")
counts = result.requests["terminal_status"].value_counts().rows()
kinds = result.kv_events["kind"].value_counts().rows()
print(dict(sorted(counts)), dict(sorted(kinds)), result.requests["terminal_time_ms"].max())
"""


@pytest.mark.parametrize(
    ("topology", "pages", "printed"),
    [
        # Two waves of first turns, two of second ones, of 21 ms each.
        (AGGREGATED, 4096, "{'completed': 192} {'stored': 3767} 84.0"),
        (AGGREGATED, 50, "{'completed': 192} {'removed': 4125, 'stored': 5325} 126.0"),
        # A decode rank reserves pages for one prompt a pass, so that those of second turns are
        # done at 33, 43 and 53; the last one gets its slot at 55.
        (DISAGGREGATED, 4096, "{'completed': 192} {'stored': 6382} 67.0"),
        (DISAGGREGATED, 50, "{'completed': 192} {'removed': 6558, 'stored': 8958} 142.0"),
    ],
)
def test_conversations(topology, pages, printed):
    """All pools of 50 pages are full of known ones in the end."""
    fleet = f"WORKERS = 24\nTOPOLOGY = {topology}\nPAGES = {pages}\n"
    assert output_of(fleet + CONVERSATIONS) == printed


def output_of(program: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
