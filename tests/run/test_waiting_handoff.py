"""Requests that wait for others in prefill/decode fleets, through the front door."""

from __future__ import annotations

import pytest

import vecsim
from tests.support.signatures import assert_one_a_combination
from tests.support.trace_text import AGENTIC_HEADER, agentic, line, write
from vecsim.kernels.compile.jit import DISABLED

BACKENDS = ("vllm", "trtllm", "sglang")


def fleet(backend: str = "vllm", workers: int = 1, dp_size: int = 1, **rank) -> dict:
    fixed = {"type": "fixed", "prefill_ms": 100, "decode_ms": 10}
    rank = {"backend": backend, "block_size": 16, "timing_model": fixed, **rank}
    pool = {"initial_workers": workers}
    return {
        "topology": {
            "kind": "disaggregated",
            "prefill": pool,
            "decode": pool,
            "handoff_latency_ms": 5,
        },
        "engine": {"rank": rank, "dp_size": dp_size},
        "requests": [],
    }


def conversations(**more) -> vecsim.Workload:
    return vecsim.synthesize(
        12, **{"input_tokens": 40, "output_tokens": 9, "turns": 3, "block_tokens": 16, **more}
    )


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_lane_does_not_wait_for_held_blocks(backend, tmp_path) -> None:
    """Two lanes; the source of "a" is held by a pass until 200, its play ends at 115. The
    reference's times."""
    whole = {"input_length": 16, "output_length": 1}
    rows = [
        agentic(request_id="a", play_id="p", hash_ids=[1], **whole),
        agentic(request_id="b", play_id="q", hash_ids=[2], not_before_ms=10, **whole),
        agentic(request_id="c", play_id="q", hash_ids=[3], not_before_ms=50, **whole),
        agentic(request_id="d", play_id="r", hash_ids=[4], **whole),
    ]
    write(tmp_path, AGENTIC_HEADER + "".join(rows))
    traffic = {
        "source_type": "trace",
        "trace_path": str(tmp_path / "trace.jsonl"),
        "trace_format": "agentic_mooncake",
        "load_type": "trace_timestamps",
        "execution_model": "m",
        "agentic_lanes": 2,
    }
    result = vecsim.replay({"spec": {"version": 1, **fleet(backend)}, "traffic": traffic})
    got = result.requests
    assert got["arrival_time_ms"].to_list() == [0.0, 0.0, 40.0, 115.0]
    assert got["terminal_time_ms"].to_list() == [115.0, 115.0, 215.0, 315.0]
    assert got["source_released_ms"].to_list() == [200.0, 200.0, 300.0, 305.0]
    plays = result.reference_report()["agentic_play_outcomes"]
    assert [play["causal_terminal_ms"] for play in plays] == [115.0, 215.0, 315.0]
    assert [play["settled_at_ms"] for play in plays] == [200.0, 300.0, 315.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_grown_prompts_are_found_in_the_prefill_pool(backend) -> None:
    """A prefill worker keeps prompts only: what was generated is prompt to the next turn."""
    got = vecsim.replay(fleet(backend), workload=conversations(concurrency=1)).requests
    assert got["input_length"].to_list() == [40, 89, 138] * 12
    assert got["reused_input_tokens"].to_list() == [0, 32, 80] * 12
    assert got["arrival_time_ms"].to_list() == [0.0, *got["terminal_time_ms"][:-1]]


@pytest.mark.parametrize(
    ("backend", "refused"), [("vllm", "rejected"), ("trtllm", "rejected"), ("sglang", "failed")]
)
def test_a_prompt_that_grew_too_long_is_refused_where_it_comes_first(backend, refused) -> None:
    """By the prefill pool, or by a destination that is asked for before there is a prompt."""
    got = vecsim.replay(fleet(backend, max_model_len=100), workload=conversations()).requests
    assert got["terminal_status"].to_list() == ["completed", "completed", refused] * 12
    assert got["arrival_time_ms"][2] == got["terminal_time_ms"][1]


def test_a_turn_that_the_prefill_pool_rejects_counts_as_ended() -> None:
    """Its destination has blocks by then, and its session goes on when they are given back."""
    spec = fleet("sglang")
    rank = spec["engine"]["rank"]
    spec["engine"]["prefill"] = {"rank": {**rank, "max_model_len": 60}, "dp_size": 1}
    got = vecsim.replay(spec, workload=conversations(concurrency=1)).requests
    assert got["terminal_status"].to_list() == ["completed", "rejected", "rejected"] * 12
    assert got["input_length"].to_list() == [40, 89, 129] * 12
    assert got["arrival_time_ms"].to_list() == [0.0, *got["terminal_time_ms"][:-1]]
    assert got["source_released_ms"].null_count() == 24
    assert got["decode_worker_id"].null_count() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_destination_ends_its_session(backend) -> None:
    spec = fleet(backend)
    rank = spec["engine"]["rank"]
    spec["engine"]["decode"] = {"rank": {**rank, "num_gpu_blocks": 5}, "dp_size": 1}
    got = vecsim.replay(spec, workload=conversations(concurrency=2)).requests
    assert got["terminal_status"].to_list() == ["completed", "failed", "not_arrived"] * 12
    assert got["terminal_reason"][1] == "prompt_exceeds_kv_capacity"


@pytest.mark.skipif(DISABLED, reason="kernels are not compiled")
def test_every_entry_point_has_one_signature(tmp_path) -> None:
    from vecsim.kernels import entries_sglang, entries_vllm

    text = "".join(line(session_id="s", timestamp=None, output_length=0) for _ in range(2))
    full = vecsim.read_trace(write(tmp_path, text))
    delta = vecsim.read_trace(write(tmp_path, text), format="mooncake-delta")
    graph = vecsim.read_trace(write(tmp_path, AGENTIC_HEADER + agentic()))
    private = conversations().lengths_only()
    for workload in (full, delta, graph, private, conversations()):
        for backend in BACKENDS:
            for rank in ({}, {"enable_prefix_caching": False}, {"preemption_mode": "fifo"}):
                spec = {"spec": fleet(backend, **rank)}
                vecsim.replay(spec, workload=workload)
                spec["tokenization"] = {"workers": 1, "base_ms": 1, "per_input_token_ms": 0}
                vecsim.replay(spec, workload=workload)
            vecsim.replay(fleet(backend, workers=2, dp_size=2), workload=workload)
    assert_one_a_combination(entries_vllm.run_fleet, entries_sglang.run_fleet)
