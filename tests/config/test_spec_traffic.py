"""The examples of the reference's traffic rules that no stored case holds, with their numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.trace_text import AGENTIC_HEADER, agentic, dynamo, edge, line, write
from vecsim.run.replay import replay

TRACES = os.environ.get("VECSIM_TRACES")


def spec(workers: int = 1, **more) -> dict:
    pool = {"kind": "aggregated", "workers": {"initial_workers": workers}}
    engine = {"rank": {"backend": "vllm", **more.pop("rank", {})}}
    return {"version": 1, "topology": pool, "engine": engine, "requests": [], **more}


def play(path: Path, rank: dict | None = None, **traffic) -> dict:
    """Columns of a replayed trace."""
    base = {"source_type": "trace", "load_type": "trace_timestamps", "trace_path": str(path)}
    payload = {"spec": spec(rank=rank or {}), "traffic": base | traffic}
    return replay(payload).requests.to_dict(as_series=False)


def test_a_cap_ignores_authored_arrivals() -> None:
    rows = [
        {"id": f"r{k}", "arrival_time_ms": 1000.0 * k, "input_tokens": 100, "output_tokens": 3}
        for k in range(5)
    ]
    got = replay(spec(max_in_flight=2) | {"requests": rows}).requests["arrival_time_ms"]
    second, third = 31.055858999999998, 62.111717999999996
    assert got.to_list() == [0.0, 0.0, second, second, third]


@pytest.mark.parametrize(
    ("rows", "block", "engine_block", "reused"),
    [
        ([(700, [5, 9]), (1024, [5, 9])], 512, 64, [0, 640]),
        ([(100, [5, 9, 11]), (1000, [5, 9, 11])], 512, 64, [0, 64]),
        ([(1000, [1, 2]), (1536, [1, 2, 3]), (700, [1, 2])], 512, 64, [0, 960, 640]),
        (
            [(1024, [1, 2]), (1024, [2, 1]), (1536, [1, 2, 1]), (1024, [1, 1])],
            512,
            64,
            [0, 0, 1024, 512],
        ),
        ([(48, [1, 2]), (48, [1, 3]), (72, [1, 2, 3])], 24, 16, [0, 16, 48]),
        ([(30, [1, 2]), (32, [1, 2])], 16, 16, [0, 16]),
    ],
)
def test_reuse_of_hash_ids(tmp_path, rows, block, engine_block, reused) -> None:
    text = "".join(
        line(timestamp=10_000 * k, input_length=tokens, hash_ids=ids, output_length=2)
        for k, (tokens, ids) in enumerate(rows)
    )
    got = play(write(tmp_path, text), {"block_size": engine_block}, trace_block_size=block)
    assert got["reused_input_tokens"] == reused


def test_arrivals_are_shifted_then_divided(tmp_path) -> None:
    text = "".join(line(timestamp=at) for at in (1000, 1500, 1300))
    got = play(write(tmp_path, text), arrival_speedup_ratio=2.0)
    assert got["arrival_time_ms"] == [0.0, 250.0, 150.0]


def test_a_later_turn_follows_the_end_of_the_turn_before(tmp_path) -> None:
    turn = {"session_id": "s", "input_length": 1000, "output_length": 8}
    text = line(**turn, hash_ids=[1, 2]) + line(**turn, hash_ids=[3, 4], timestamp=100)
    for speedup, delay in ((1.0, 100.0), (4.0, 25.0)):
        got = play(write(tmp_path, text), arrival_speedup_ratio=speedup)
        assert got["arrival_time_ms"][1] == got["terminal_time_ms"][0] + delay


@pytest.mark.parametrize(("speedup", "second"), [(1.0, 170.34673800000002), (4.0, 95.346738)])
def test_a_delay_is_added_to_the_end_of_the_turn_before(tmp_path, speedup, second) -> None:
    turn = {"session_id": "s", "input_length": 1000, "output_length": 1}
    text = line(**turn, hash_ids=[1, 2]) + line(**turn, hash_ids=[3, 4], timestamp=100)
    fixed = {"timing_model": {"type": "fixed", "prefill_ms": 70.346738, "decode_ms": 1.0}}
    got = play(write(tmp_path, text), fixed, arrival_speedup_ratio=speedup)
    assert got["terminal_time_ms"][0] == 70.346738
    assert got["arrival_time_ms"][1] == second


def test_a_cap_of_one_plays_one_session_after_another(tmp_path) -> None:
    def turn(session, tokens, ids, **more):
        return line(session_id=session, input_length=tokens, output_length=4, hash_ids=ids, **more)

    text = (
        turn("A", 600, [1, 2])
        + turn("B", 600, [1, 4])
        + turn("A", 1100, [1, 2, 3], timestamp=None, delay=100)
        + turn("B", 1100, [1, 4, 5], timestamp=None, delay=490)
        + turn("A", 1100, [1, 2, 3], timestamp=None, delay=50)
        + turn("B", 1100, [1, 4, 5], timestamp=None, delay=0)
        + turn("C", 1100, [1, 2, 3])
    )
    arrivals = play(write(tmp_path, text), replay_concurrency=1)["arrival_time_ms"]
    assert arrivals[::2] == pytest.approx([0, 143.076042, 235.039381, 870.304305], rel=1e-9)
    assert arrivals[1::2] == pytest.approx([269.113263, 794.267084, 836.230423], rel=1e-9)


def test_turns_that_grow(tmp_path) -> None:
    lengths = zip((600, 100, 100), ([1, 2], [3], [4]), strict=True)
    text = "".join(
        line(session_id="s", timestamp=None, input_length=n, hash_ids=ids, output_length=40)
        for n, ids in lengths
    )
    got = play(write(tmp_path, text), {"block_size": 16}, trace_format="mooncake-delta")
    assert got["input_length"] == [600, 740, 880]
    assert got["reused_input_tokens"] == [0, 624, 768]


def test_rounds_of_an_agent_reuse_their_own_prompt(tmp_path) -> None:
    row = {
        "num_turns": 2,
        "input_prompt_length": 700,
        "assistant_response_length": [20, 30],
        "tool_call_output_length": [100, 600],
        "tool_call_latency": [0.5, 0.0],
        "final_assistant_response_length": 5,
    }
    path = write(tmp_path, json.dumps(row))
    got = play(path, trace_format="applied_compute_agentic")
    assert got["input_length"] == [700, 820, 1450]
    assert got["reused_input_tokens"] == [0, 640, 768]
    assert got["arrival_time_ms"][1] == got["terminal_time_ms"][0] + 500.0


def test_a_graph_of_spawn_sequence_and_join(tmp_path) -> None:
    def row(name: str, ids: list[int], at: float, *edges: dict) -> str:
        length = {"input_length": 64 * len(ids), "output_length": 3, "hash_ids": ids}
        return agentic(request_id=name, not_before_ms=at, dependencies=list(edges), **length)

    spawn = edge("r0", relation="spawn", trigger="dispatch", delay_ms=5)
    joins = [edge("r1", delay_ms=10), edge("c0", relation="join", delay_ms=2000)]
    text = (
        AGENTIC_HEADER
        + row("r0", [1, 2], 1000)
        + row("c0", [9], 0, spawn)
        + row("r1", [1, 2, 3], 0, edge("r0", delay_ms=50))
        + row("r2", [1, 2, 3, 4], 0, *joins)
    )
    path = write(tmp_path, text)
    got = play(path, trace_format="agentic_mooncake", execution_model="m")
    assert got["terminal_time_ms"][:2] == [1047.4233700000002, 1053.1667690000002]
    assert got["arrival_time_ms"] == [1000.0, 1005.0, 1097.4233700000002, 3053.1667690000004]
    assert got["dispatched_at_ms"] == got["arrival_time_ms"]
    assert got["play_id"] == ["p"] * 4


def test_a_recorded_gap_of_an_agent_is_kept(tmp_path) -> None:
    rows = [
        dynamo(name, start, start + 10, session="s", replay=_prompt([k]))
        for k, (name, start) in enumerate([("a", 1000), ("b", 1200)])
    ]
    path = write(tmp_path, "".join(rows))
    got = play(path, trace_format="dynamo", execution_model="m")
    assert got["terminal_time_ms"][0] == pytest.approx(28.593706, abs=1e-9)
    assert got["arrival_time_ms"][1] == pytest.approx(218.593706, abs=1e-9)


def _prompt(ids: list[int]) -> dict:
    return {"input_length": 40, "input_sequence_hashes": ids}


@pytest.mark.skipif(not TRACES, reason="needs the public traces: set VECSIM_TRACES to their folder")
@pytest.mark.parametrize(
    ("name", "workers", "anchors"),
    [
        (
            "conversation_trace.jsonl",
            16,
            {
                "completed_requests": 12031,
                "duration_ms": 3541787.443695002,
                "mean_ttft_ms": 241.3522609569411,
                "p99_ttft_ms": 1756.2724929994438,
                "mean_tpot_ms": 6.59476970870482,
                "mean_e2e_latency_ms": 2518.9785397788396,
                "prefix_cache_reused_ratio": 0.0732530696423424,
            },
        ),
        (
            "synthetic_trace.jsonl",
            8,
            {
                "completed_requests": 3993,
                "duration_ms": 1022799.9253279996,
                "mean_ttft_ms": 301.5247030540558,
                "p99_ttft_ms": 1435.1417109995382,
                "mean_tpot_ms": 7.300388255816869,
                "mean_e2e_latency_ms": 1296.6702258792568,
                "prefix_cache_reused_ratio": 0.11174523358488264,
            },
        ),
    ],
)
def test_whole_public_traces(name, workers, anchors) -> None:
    traffic = {"source_type": "trace", "load_type": "trace_timestamps"}
    traffic["trace_path"] = str(Path(TRACES) / name)
    report = replay({"spec": spec(workers), "traffic": traffic}).report
    assert {key: report[key] for key in anchors} == pytest.approx(anchors, rel=1e-9)
