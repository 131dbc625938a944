"""Where the reference stands still or refuses what vecsim reads: vecsim's own answers."""

import pytest

from tests.conformance.support import FIELDS, all_cases, files_of, name, unbuilt
from vecsim.errors import InputError
from vecsim.run.replay import replay

# status, reason, terminal time (ms), output length of the one request
STUCK_ENDED = {
    "config/extra_vllm_max_batched_bs_no_chunk": (
        "rejected",
        "prompt_exceeds_token_budget",
        0.0,
        0,
    ),
    # 60 prompt tokens in 4 blocks of 16: the pool is full with the fifth token's context.
    "config/extra_runtime_outgrows_pool_vllm": (
        "failed",
        "kv_capacity_exhausted",
        153.128777,
        5,
    ),
    # 300 prompt tokens in 5 blocks of 64; prefill 100 ms, then 20 decode passes of 10 ms.
    "runtime/agg_liveness_error_vllm": ("failed", "kv_capacity_exhausted", 300.0, 21),
    # One chunk of 20 tokens exceeds max_prefill_tokens = 10.
    "sglang/max_prefill_lt_prompt_livelock": (
        "rejected",
        "prompt_exceeds_token_budget",
        0.0,
        0,
    ),
    # An SGLang rank admits what leaves a token of the empty pool unreserved: 61 + 3 of 64 does not.
    "sglang/too_big_error": ("rejected", "prompt_exceeds_kv_capacity", 0.0, 0),
    # Its first chunk of 8192 tokens runs, the second does not fit.
    "sglang/default_pool_overflow": ("rejected", "prompt_exceeds_kv_capacity", 10.0, 0),
    "config/extra_runtime_too_big_sglang": ("rejected", "prompt_exceeds_kv_capacity", 0.0, 0),
    "config/extra_runtime_outgrows_pool_sglang": (
        "rejected",
        "prompt_exceeds_kv_capacity",
        0.0,
        0,
    ),
    "config/extra_runtime_exact_pool_sglang": ("rejected", "prompt_exceeds_kv_capacity", 0.0, 0),
}

# (status, terminal time (ms)) of all requests: those behind the one that cannot run go on
UNBLOCKED = {
    # r0 ends at 14.0; then r1 (100 tokens, pool 64) is rejected, and r2 runs: 10 + 1 ms.
    "sglang/too_big_head_blocks_others": (
        ("completed", 14.0),
        ("rejected", 14.0),
        ("completed", 25.0),
    ),
    # r0 alone leaves no room in 5 pages for r2, which is admitted when r0 ends, at 140.0.
    "runtime/agg_oversized_sglang_error": (
        ("completed", 140.0),
        ("rejected", 140.0),
        ("completed", 280.0),
    ),
}


def _cases(kind: str) -> dict:
    return {name(c): c for c in all_cases() if c["expect"]["error_kind"] == kind}


@pytest.mark.parametrize("case_name", STUCK_ENDED)
def test_the_request_concerned_is_settled(case_name):
    result = replay(_cases("standstill")[case_name]["payload"])
    status, reason, terminal_ms, output_length = STUCK_ENDED[case_name]
    row = result.requests.to_dicts()[0]
    assert row["terminal_status"] == status
    assert row["terminal_reason"] == reason
    assert row["terminal_time_ms"] == pytest.approx(terminal_ms, rel=1e-9)
    assert row["output_length"] == output_length
    assert result.report[f"{status}_requests"] == 1
    assert result.report["terminal_reasons"][reason] == 1
    assert result.report["completed_requests"] == 0


@pytest.mark.parametrize("case_name", UNBLOCKED)
def test_requests_behind_it_go_on(case_name):
    result = replay(_cases("standstill")[case_name]["payload"])
    rows = result.requests.select("terminal_status", "terminal_time_ms").rows()
    for row, (status, terminal_ms) in zip(rows, UNBLOCKED[case_name], strict=True):
        assert row == (status, pytest.approx(terminal_ms, rel=1e-9))
    assert result.report["terminal_reasons"]["prompt_exceeds_kv_capacity"] == 1


# Prefill 100 ms, decode 10 ms, transfers 5 ms, five decode blocks for prompts of two blocks and
# outputs that need a third. r0 and r1 decode from 105; at 115 each wants its third block, and r1 is
# preempted for r0, which ends at 135. By then r2 and r3 hold four blocks and stand behind r1, which
# needs three. Without r1 they decode from 140; r3 is preempted at 150 and goes on at 170.
DEADLOCK = "runtime/dis_decode_memory_pressure_vllm"


def test_a_deadlock_of_prefill_and_decode_ends_the_blocked_head():
    result = replay(_cases("standstill")[DEADLOCK]["payload"])
    columns = ("terminal_status", "terminal_reason", "terminal_time_ms", "output_length")
    assert result.requests.select(columns).rows() == [
        ("completed", None, 135.0, 3),
        ("failed", "deadlock", 140.0, 1),
        ("completed", None, 170.0, 3),
        ("completed", None, 190.0, 3),
    ]
    assert result.report["terminal_reasons"]["deadlock"] == 1


# A pool of 24 tokens on each of two decode ranks, all transfers 100 ms. r0 (rank 0, empty) decodes
# from 110 and wants its sixth block after 21 tokens; r1 holds one until 135. r0 is preempted and
# comes back at once, four tokens a pass, until it has to fail. All that time r2 (rank 1) waits for
# as many blocks, of which r3 holds one; preempted at 127, it stands before r3 and ends at 136.
TURNS = [(0, 0, 25, 0), (25, 4, 1, 0), (0, 4, 20, 1), (25, 4, 1, 1)]


def test_a_rank_that_waits_does_not_hasten_the_end_of_its_group():
    payload = _rank("vllm", [], block_size=4, num_gpu_blocks=6, max_num_batched_tokens=4)
    pool = {"initial_workers": 1}
    payload["engine"]["dp_size"] = 2
    payload["topology"] = {
        "kind": "disaggregated",
        "prefill": pool,
        "decode": pool,
        "handoff_latency_ms": 100,
    }
    names = ("arrival_time_ms", "input_tokens", "output_tokens", "dp_rank")
    payload["requests"] = [
        {"id": f"r{k}", **dict(zip(names, row, strict=True))} for k, row in enumerate(TURNS)
    ]
    columns = ("terminal_status", "terminal_reason", "terminal_time_ms", "output_length")
    assert replay(payload).requests.select(columns).rows() == [
        ("failed", "kv_capacity_exhausted", 131.0, 21),
        ("completed", None, 136.0, 1),
        ("failed", "deadlock", 136.0, 17),
        ("completed", None, 137.0, 1),
    ]


def test_every_standstill_has_an_answer_or_an_unbuilt_feature():
    built = {n for n, c in _cases("standstill").items() if not unbuilt(c)}
    assert built == set(STUCK_ENDED) | set(UNBLOCKED) | {DEADLOCK}


def _rank(backend, requests, **rank):
    timing = {"type": "fixed", "prefill_ms": 10, "decode_ms": 1}
    rows = [
        {"id": f"r{k}", "arrival_time_ms": 0, "input_tokens": isl, "output_tokens": osl}
        for k, (isl, osl) in enumerate(requests)
    ]
    return {
        "version": 1,
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "engine": {"rank": {"backend": backend, "timing_model": timing, **rank}},
        "requests": rows,
    }


# Empty prompts come in whatever blocks are left, and the reference never returns: the last one
# fails. (payload; status, output length, last token (ms), terminal time (ms) of each request)
OVERCOMMITTED = {
    # Two blocks of 2 tokens. Both have tokens at 1, 2 and 3 ms and then need a second block.
    "trtllm": (
        _rank("trtllm", [(0, 4), (0, 4)], block_size=2, num_gpu_blocks=2),
        [("completed", 4, 4.0, 4.0), ("failed", 3, 3.0, 3.0)],
    ),
    # r0 has blocks for all its 6 tokens reserved, and r1 takes one of the three.
    "trtllm_beside_a_prompt": (
        _rank("trtllm", [(2, 4), (0, 4)], block_size=2, num_gpu_blocks=3),
        [("completed", 4, 14.0, 14.0), ("failed", 3, 13.0, 13.0)],
    ),
    # One block: whoever comes in takes it from the other. With a budget of 2 tokens, 3 tokens need
    # two passes to be computed again, which nobody gets any more once both have that many.
    "vllm": (
        _rank("vllm", [(0, 8), (0, 8)], block_size=16, num_gpu_blocks=1, max_num_batched_tokens=2),
        [("failed", 2, 2.0, 3.0), ("completed", 8, 9.0, 9.0)],
    ),
}


@pytest.mark.parametrize("case_name", OVERCOMMITTED)
def test_one_of_several_empty_prompts_fails(case_name):
    payload, expected = OVERCOMMITTED[case_name]
    result = replay(payload)
    columns = ("terminal_status", "output_length", "last_token_ms", "terminal_time_ms")
    assert result.requests.select(columns).rows() == expected
    assert result.report["failed_requests"] == 1
    assert result.report["terminal_reasons"]["kv_capacity_exhausted"] == 1


DEVIATIONS = [c for c in all_cases() if "deviation" in c]


@pytest.mark.parametrize("case", [c for c in DEVIATIONS if unbuilt(c)], ids=name)
def test_deviations_not_built_yet(case):
    with pytest.raises(InputError) as refusal:
        replay(case["payload"])
    assert any(FIELDS[feature][0] in refusal.value.where for feature in unbuilt(case))


@pytest.mark.parametrize("case", [c for c in DEVIATIONS if not unbuilt(c)], ids=name)
@pytest.mark.filterwarnings("ignore:.*no hash_ids")
def test_files_that_only_vecsim_reads(case, tmp_path):
    with files_of(case, tmp_path) as payload:
        result = replay(payload)
    row = result.requests.to_dicts()[0]
    assert row["terminal_status"] == "completed"
    assert (row["arrival_time_ms"], row["input_length"], row["reused_input_tokens"]) == (0, 100, 0)
    assert row["ttft_ms"] == pytest.approx(18.023974, rel=1e-9)
