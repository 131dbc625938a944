"""Workloads of one's own whose requests wait for others, through the front door."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import polars as pl
import pytest

import vecsim
from tests.support.signatures import assert_one_a_combination
from tests.support.trace_text import AGENTIC_HEADER, agentic, edge, line, write
from vecsim.errors import InputError
from vecsim.kernels.compile.jit import DISABLED
from vecsim.workload.dependencies import Dependencies, Sessions

BACKENDS = ("vllm", "sglang", "trtllm")


def fleet(backend: str = "vllm", workers: int = 2, **rank) -> dict:
    rank = {"backend": backend, "num_gpu_blocks": 4000, **rank}
    if backend == "sglang":
        rank = {"block_size": 16, **rank}
    return {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": workers}},
        "engine": {"rank": rank},
        "requests": [],
    }


def conversations(**more) -> vecsim.Workload:
    description = {
        "input_tokens": {"kind": "uniform", "low": 20, "high": 90},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 30},
        "arrivals": {"kind": "poisson", "rate": 40},
        "turns": 4,
        "think_time_ms": 12.5,
        "shared_prefix": {"ratio": 0.5, "groups": 2},
        "block_tokens": 16,
    }
    return vecsim.synthesize(25, **{**description, **more})


def bare(result: vecsim.Result) -> tuple:
    return result.requests, json.dumps(result.report, sort_keys=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_conversations_reuse_what_was_said(backend) -> None:
    got = vecsim.replay(fleet(backend, workers=1), workload=conversations()).requests
    assert set(got["terminal_status"]) == {"completed"}
    before = got.filter(pl.col("turn_index") < 3)
    after = got.filter(pl.col("turn_index") > 0)
    ready = before["terminal_time_ms"] + 12.5
    assert (after["arrival_time_ms"] == ready).all()
    said = before["input_length"] + before["output_length"]
    assert (after["input_length"] >= said + 20).all()
    # All of it but the last token, which has no KV yet, in whole blocks.
    block = {"vllm": 64, "sglang": 16, "trtllm": 32}[backend]
    whole = (said - 1) // block * block
    assert (after["reused_input_tokens"] >= whole).all()


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize("cap", [None, 3])
def test_a_saved_workload_replays_identically(tmp_path, suffix, cap) -> None:
    made = conversations(concurrency=cap)
    made.write(tmp_path / f"w{suffix}")
    read = vecsim.read_trace(tmp_path / f"w{suffix}")
    spec = fleet()
    frame, report = bare(vecsim.replay(spec, workload=made))
    again, same = bare(vecsim.replay(spec, workload=read))
    assert again.equals(frame)
    assert same == report


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_change_nothing(backend) -> None:
    workload = conversations()
    first, report = bare(vecsim.replay(fleet(backend), workload=workload, threads=1))
    for threads in (2, 5):
        again, same = bare(vecsim.replay(fleet(backend), workload=workload, threads=threads))
        assert again.equals(first)
        assert same == report


def test_a_described_workload_is_the_synthesized_one() -> None:
    tree = {"requests": 6, "input_tokens": 40, "output_tokens": 5, "turns": 3, "concurrency": 2}
    described = vecsim.replay({"spec": fleet(), "workload": tree}).requests
    made = vecsim.synthesize(6, input_tokens=40, output_tokens=5, turns=3, concurrency=2)
    assert described.equals(vecsim.replay(fleet(), workload=made).requests)
    in_flight = [
        described.filter(
            (pl.col("arrival_time_ms") <= at) & (pl.col("terminal_time_ms") > at)
        ).height
        for at in described["arrival_time_ms"]
    ]
    assert max(in_flight) == 2


def test_max_in_flight_counts_sessions() -> None:
    spec = fleet()
    capped = vecsim.replay({**spec, "max_in_flight": 3}, workload=conversations())
    same = vecsim.replay(spec, workload=conversations(concurrency=3))
    assert capped.requests.equals(same.requests)


def test_a_time_limit_keeps_later_turns_from_arriving() -> None:
    got = vecsim.replay({**fleet(), "max_sim_time_ms": 200.0}, workload=conversations())
    statuses = got.requests["terminal_status"].to_list()
    assert {"completed", "not_arrived"} <= set(statuses)
    late = got.requests.filter(pl.col("terminal_status") == "not_arrived")
    assert late["arrival_time_ms"].null_count() == late.height
    assert got.report["not_arrived_requests"] == late.height
    assert got.report["workload_requests"] == 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_conversation_that_outgrows_the_model(backend) -> None:
    workload = vecsim.synthesize(1, input_tokens=40, output_tokens=20, turns=4)
    got = vecsim.replay(fleet(backend, max_model_len=110), workload=workload).requests
    assert got["input_length"].to_list() == [40, 100, 150, 190]
    assert got["output_length"].to_list() == [20, 10, 0, 0]
    assert got["terminal_reason"].to_list() == [
        None,
        "length",
        "prompt_exceeds_max_model_len",
        "prompt_exceeds_max_model_len",
    ]
    # A rejected turn counts as ended, and adds nothing.
    assert got["arrival_time_ms"].is_sorted()


def test_plays_are_reported(tmp_path) -> None:
    rows = [
        agentic(),
        agentic(request_id="b", dependencies=[edge()]),
        agentic(request_id="c", play_id="q", input_length=6400, hash_ids=list(range(100))),
        agentic(request_id="d", play_id="q", dependencies=[edge("c")]),
    ]
    workload = vecsim.read_trace(write(tmp_path, AGENTIC_HEADER + "".join(rows)))
    result = vecsim.replay(fleet(max_model_len=4000), workload=workload)
    got = result.requests
    assert got["play_id"].to_list() == ["p", "p", "q", "q"]
    assert got["terminal_status"].to_list() == ["completed", "completed", "rejected", "not_arrived"]
    report = result.report
    counts = [report[f"{name}_trajectories"] for name in ("total", "completed", "incomplete")]
    assert counts == [2, 1, 1]
    took = got["terminal_time_ms"][1] - got["arrival_time_ms"][0]
    assert report["mean_trajectory_e2e_latency_ms"] == took
    failed = result.reference_report()["agentic_play_outcomes"][1]
    assert failed["status"] == "failed"
    assert failed["failure_request_id"] == "c"
    assert failed["settled_at_ms"] == got["terminal_time_ms"][2]


def test_what_does_not_go_together(tmp_path) -> None:
    belady = fleet()
    belady["engine"]["kv_eviction_policy"] = "belady"
    with pytest.raises(InputError, match=r"engine.kv_eviction_policy: got 'belady', expected lru"):
        vecsim.replay(belady, workload=conversations())
    graph = vecsim.read_trace(write(tmp_path, AGENTIC_HEADER + agentic()))
    with pytest.raises(InputError, match=r"max_in_flight: got 2, expected none"):
        vecsim.replay({**fleet(), "max_in_flight": 2}, workload=graph)


def test_rows_in_any_order_are_the_same_sessions(tmp_path) -> None:
    """Rows of sessions that interleave come out in the order of the file."""
    turns = [("a", 1), ("b", 2), ("a", 3), ("c", 4), ("b", 5), ("a", 6)]
    text = "".join(
        line(session_id=name, timestamp=None, hash_ids=[k], delay=None if k in (1, 2, 4) else 3)
        for name, k in turns
    )
    path = write(tmp_path, text)
    got = vecsim.replay(fleet(workers=1), workload=vecsim.read_trace(path)).requests
    assert got["session_id"].to_list() == [name for name, _ in turns]
    assert got["turn_index"].to_list() == [0, 0, 1, 0, 1, 2]
    for row, before in ((2, 0), (5, 2), (4, 1)):
        assert got["arrival_time_ms"][row] == got["terminal_time_ms"][before] + 3.0


@pytest.mark.skipif(DISABLED, reason="kernels are not compiled")
def test_every_entry_point_has_one_signature(tmp_path) -> None:
    from vecsim.kernels import entries_sglang, entries_vllm
    from vecsim.kernels.cache import sharing

    text = "".join(line(session_id="s", timestamp=None, output_length=0) for _ in range(2))
    full = vecsim.read_trace(write(tmp_path, text))
    delta = vecsim.read_trace(write(tmp_path, text), format="mooncake-delta")
    graph = vecsim.read_trace(write(tmp_path, AGENTIC_HEADER + agentic()))
    private = vecsim.synthesize(2, turns=2, input_tokens=9, output_tokens=3)
    for workload in (full, delta, graph, private, private.lengths_only(), conversations()):
        for backend in ("vllm", "sglang"):
            for rank in ({}, {"enable_prefix_caching": False}):
                vecsim.replay(fleet(backend, **rank), workload=workload)
    fifo = fleet(preemption_mode="fifo")
    assert len(vecsim.replay(fifo, workload=conversations()).requests) == 100
    kernels = (sharing.analyse, entries_vllm.run_fleet, entries_sglang.run_fleet)
    assert_one_a_combination(*kernels)


def test_one_turn_of_a_session_at_a_time() -> None:
    got = vecsim.replay(fleet(workers=3), workload=conversations()).requests
    for _, turns in got.group_by("session_id"):
        turns = turns.sort("turn_index")
        ends = turns["terminal_time_ms"].to_numpy()[:-1]
        assert np.all(turns["arrival_time_ms"].to_numpy()[1:] >= ends)


# --- workloads put together by hand ---------------------------------------------------------------


def by_hand(**changes) -> vecsim.Workload:
    columns = {
        "session": np.array([0, 1, 0], np.int32),
        "turn": np.array([0, 0, 1], np.int32),
        "delay_ms": np.array([0.0, 0.0, 5.0]),
        "count": 2,
    }
    plain = vecsim.Workload.from_columns([0.0, 1.0, 0.0], [8, 9, 3], [5, 4, 2])
    return dataclasses.replace(plain, sessions=Sessions(**{**columns, **changes}))


def graph_by_hand(**changes) -> vecsim.Workload:
    columns = {
        "offsets": np.array([0, 0, 1, 2]),
        "source": np.array([0, 1], np.int32),
        "on_completion": np.array([True, False]),
        "delay_ms": np.array([1.0, 2.0]),
        "not_before_ms": np.zeros(3),
        "node": np.arange(3, dtype=np.int32),
        "play": np.zeros(3, np.int32),
        "play_id": pl.Series(["p"]),
    }
    plain = vecsim.Workload.from_columns([0.0, 0.0, 0.0], [8, 9, 3], [5, 4, 2])
    return dataclasses.replace(plain, dependencies=Dependencies(**{**columns, **changes}))


def test_columns_of_other_types_are_converted() -> None:
    right = vecsim.replay(fleet(), workload=by_hand()).requests
    lists = by_hand(session=[0, 1, 0], turn=[0.0, 0.0, 1.0], delay_ms=[0, 0, 5])
    assert vecsim.replay(fleet(), workload=lists).requests.equals(right)
    right = vecsim.replay(fleet(), workload=graph_by_hand()).requests
    lists = graph_by_hand(offsets=[0, 0, 1, 2], source=[0, 1], on_completion=[1, 0], play=[0] * 3)
    assert vecsim.replay(fleet(), workload=lists).requests.equals(right)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"session": [0, 1]}, r"workload.sessions.session: got '2 values'"),
        ({"session": [0, 2, 0]}, r"workload.sessions.session\[1\]: got 2, expected a session"),
        ({"turn": [0, 0, 2]}, r"workload.sessions.turn\[2\]: got 2, expected 0, 1, 2"),
        ({"turn": [0, 0, 0]}, r"workload.sessions.turn\[2\]: got 0, expected 0, 1, 2"),
        ({"delay_ms": [0.0, 3.0, 5.0]}, r"workload.sessions.delay_ms\[1\]: got 3.0, expected 0"),
        ({"delay_ms": [0.0, 0.0, -1.0]}, r"workload.sessions.delay_ms\[2\]: got -1.0"),
        ({"delay_ms": [0.0, 0.0, np.nan]}, r"workload.sessions.delay_ms\[2\]: got nan"),
        ({"count": 3}, r"workload.sessions.count: got 3"),
    ],
)
def test_sessions_that_do_not_fit(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        vecsim.replay(fleet(), workload=by_hand(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": [0, 0, 2, 1]}, r"workload.dependencies.offsets: got \[0, 0, 2, 1\]"),
        ({"source": [0, 7]}, r"workload.dependencies.source\[1\]: got 7"),
        ({"source": [1, 1]}, r"workload.dependencies.source of row 1: got 'a cycle'"),
        ({"node": [0, 1, 1]}, r"workload.dependencies.node: got 'a place twice'"),
        ({"play": [0, 0, 1]}, r"workload.dependencies.play\[2\]: got 1"),
        (
            {"play": [0, 0, 1], "play_id": pl.Series(["p", "q"])},
            r"workload.dependencies.source\[1\]: got 1, expected a row of the same play",
        ),
        ({"lanes": 0}, r"workload.dependencies.lanes: got 0"),
        ({"not_before_ms": [0.0, np.inf, 0.0]}, r"workload.dependencies.not_before_ms\[1\]"),
    ],
)
def test_graphs_that_do_not_fit(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        vecsim.replay(fleet(), workload=graph_by_hand(**changes))


def test_sessions_or_a_graph() -> None:
    both = dataclasses.replace(by_hand(), dependencies=graph_by_hand().dependencies)
    with pytest.raises(InputError, match=r"workload.dependencies: got 'beside sessions'"):
        vecsim.replay(fleet(), workload=both)


def test_time_series_and_windows_of_sessions() -> None:
    whole = vecsim.replay(fleet(), workload=conversations(), timeline=True)
    series = whole.timeline(bucket_ms=50.0)
    tokens = whole.report["total_output_tokens"]
    assert series["output_tokens"].sum() == pytest.approx(tokens, rel=1e-9)
    part = vecsim.replay(fleet(), workload=conversations(), warmup_ms=200.0)
    start = whole.requests["arrival_time_ms"].min() + 200.0
    late = whole.requests.filter(pl.col("arrival_time_ms") >= start)
    assert part.report["completed_requests"] == late.height
    assert part.report["total_input_tokens"] == late["input_length"].sum()
