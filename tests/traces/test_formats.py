"""What each trace format says, in every dress; shards; workloads written and read back."""

from __future__ import annotations

import gzip
import json
import re
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.support.trace_text import (
    AGENTIC_HEADER,
    AZURE_2023,
    MOONCAKE,
    ROUNDS,
    SAMPLES,
    agentic,
    dynamo,
    edge,
    line,
    write,
    zstd_frame,
)
from vecsim.errors import InputError
from vecsim.traces import FORMATS, read_trace
from vecsim.workload.workload import Workload

README = (Path(__file__).parents[2] / "README.md").read_text()


def read_sample(folder: Path, name: str, data: bytes | None = None, **more) -> Workload:
    file, text, arguments = SAMPLES[name]
    path = write(folder, text.encode() if data is None else data, file)
    return read_trace(path, **{**arguments, **more})


def assert_equal(a: Workload, b: Workload) -> None:
    """Every column of two workloads, apart from what they were recognised as."""
    for name, value in vars(a).items():
        if name not in ("_trees", "origin"):
            _assert_equal(name, value, getattr(b, name))


def _assert_equal(name, one, other) -> None:
    assert type(one) is type(other), name
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, name
        assert one.tolist() == other.tolist(), name
    elif isinstance(one, pl.Series):
        assert one.to_list() == other.to_list(), name
    elif hasattr(one, "__dataclass_fields__"):
        for field in one.__dataclass_fields__:
            _assert_equal(f"{name}.{field}", getattr(one, field), getattr(other, field))
    else:
        assert one == other, name


# --- dresses --------------------------------------------------------------------------------------

DRESSES = {
    "gzip": gzip.compress,
    "zstd": zstd_frame,
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "no final newline": lambda data: data.rstrip(b"\n"),
    "blank lines": lambda data: data.replace(b"\n", b"\n\n  \n"),
    "all": lambda data: gzip.compress(
        b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n\r\n").rstrip(b"\r\n")
    ),
}


def without_lines(workload: Workload) -> Workload:
    """The same with session names that do not depend on line numbers."""
    from dataclasses import replace

    names = workload.session_id.str.replace(r"^(request_|.*_session_)\d+$", "own")
    return replace(workload, session_id=names)


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_dress_changes_nothing(tmp_path, name, dress) -> None:
    plain = read_sample(tmp_path, name)
    text = SAMPLES[name][1].encode()
    dressed = read_sample(tmp_path, name, DRESSES[dress](text))
    if dress in ("blank lines", "all"):
        plain, dressed = without_lines(plain), without_lines(dressed)
    assert_equal(dressed, plain)


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"weka"}))  # its request ids hold the name
def test_a_name_says_nothing(tmp_path, name) -> None:
    _, text, arguments = SAMPLES[name]
    plain = read_sample(tmp_path, name)
    for file in ("t", "t.gz", "t.zst", "t.csv", "t.jsonl"):
        assert_equal(read_trace(write(tmp_path, text, file), **arguments), plain)


# --- what was recognised --------------------------------------------------------------------------

RECOGNISED = {
    "mooncake": ("mooncake", "ms", 512, 5),
    "mooncake-delta": ("mooncake-delta", "ms", 512, 2),
    "agentic_mooncake": ("agentic_mooncake", "ms", 64, 2),
    "legacy agentic": ("agentic_mooncake", "ms", 512, 2),
    "applied_compute_agentic": ("applied_compute_agentic", "none", 512, 4),
    "dynamo": ("dynamo", "ms", 64, 2),
    "dynamo agents": ("dynamo", "ms", 64, 2),
    "weka": ("weka", "ms", 64, 2),
    "azure": ("azure", "ISO 8601", None, 3),
    "azure 2024": ("azure", "ISO 8601", None, 3),
    "burstgpt": ("burstgpt", "s", None, 3),
    "vidur": ("vidur", "s", None, 3),
    "splitwise": ("splitwise", "s", None, 2),
    "vecsim csv": ("vecsim", "ms", None, 3),
    "tokens and ns": ("vecsim", "ns", 1, 2),
    "table": ("table", "us", None, 2),
    "json table": ("table", "ISO 8601", 16, 2),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_what_was_recognised_is_reported(tmp_path, name) -> None:
    origin = read_sample(tmp_path, name).origin
    assert (origin.format, origin.unit, origin.block_size, origin.rows) == RECOGNISED[name]
    assert origin.dropped == {}
    assert [Path(file).name for file in origin.files] == [SAMPLES[name][0]]


def test_readme_lists_the_formats() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| .* \| ([^|]+) \| ([^|]+) \|$", README, re.M)
    listed = {name: (times.strip(), waits.strip()) for name, times, waits in rows}
    listed = {name: facts for name, facts in listed.items() if name in FORMATS}
    assert listed == {name: (form.times, form.waits) for name, form in FORMATS.items()}


# --- columns --------------------------------------------------------------------------------------


def test_delta_rows_accumulate(tmp_path) -> None:
    workload = read_sample(tmp_path, "mooncake-delta")
    assert workload.sessions.accumulate
    assert workload.input_length.tolist() == [100, 100]
    assert workload.sessions.delay_ms.tolist() == [0.0, 9.0]


def test_applied_compute_rounds(tmp_path) -> None:
    """Reference: traffic, section 4.1: 700 -> 820 -> 1450 tokens."""
    row = ROUNDS | {
        "num_turns": 2,
        "assistant_response_length": [20, 30],
        "tool_call_output_length": [100, 600],
        "tool_call_latency": [0.05, 0.2],
    }
    workload = read_trace(write(tmp_path, json.dumps(row)))
    assert workload.input_length.tolist() == [700, 820, 1450]
    assert workload.output_length.tolist() == [20, 30, 10]
    assert workload.sessions.delay_ms.tolist() == [0.0, 50.0, 200.0]
    assert workload.block_ids.tolist() == [0, 1, 0, 1, 0, 1, 2]
    assert workload.session_id[0] == "applied_compute_agentic_session_1"
    two = read_trace(write(tmp_path, (json.dumps(row) + "\n") * 2), limit=1)
    assert len(two) == 3


def test_agentic_graph_columns(tmp_path) -> None:
    rows = [
        agentic(request_id="z", not_before_ms=1000),
        agentic(request_id="y", dependencies=[edge("z", trigger="dispatch", relation="spawn")]),
        agentic(request_id="b", play_id="o", not_before_ms=500),
        agentic(request_id="a", dependencies=[edge("z", delay_ms=50), edge("y", relation="join")]),
    ]
    path = write(tmp_path, AGENTIC_HEADER + "".join(rows))
    graph = read_trace(path, agentic_lanes=2).dependencies
    assert graph.offsets.tolist() == [0, 0, 1, 1, 3]
    assert graph.source.tolist() == [0, 0, 1]
    assert graph.on_completion.tolist() == [False, True, True]
    assert graph.delay_ms.tolist() == [5.0, 50.0, 5.0]
    assert graph.not_before_ms.tolist() == [1000.0, 0.0, 500.0, 0.0]
    assert graph.node.tolist() == [3, 2, 1, 0]
    assert graph.play.tolist() == [1, 1, 0, 1]
    assert graph.play_id.to_list() == ["o", "p"]
    assert graph.lanes == 2
    faster = read_trace(path, arrival_speedup_ratio=2.0).dependencies
    assert faster.delay_ms.tolist() == [2.5, 25.0, 2.5]
    assert faster.not_before_ms.tolist() == [500.0, 0.0, 250.0, 0.0]


def test_the_smallest_time_of_a_graph_is_zero(tmp_path) -> None:
    rows = agentic(not_before_ms=500) + agentic(
        request_id="b", not_before_ms=900, dependencies=[edge()]
    )
    graph = read_trace(write(tmp_path, AGENTIC_HEADER + rows)).dependencies
    assert graph.not_before_ms.tolist() == [0.0, 400.0]


def test_play_ordinals_give_the_order(tmp_path) -> None:
    rows = agentic(request_id="k", play_id="p", source_play_ordinal=1) + agentic(
        request_id="l", play_id="q", source_play_ordinal=0
    )
    graph = read_trace(write(tmp_path, AGENTIC_HEADER + rows)).dependencies
    assert graph.play.tolist() == [1, 0]
    assert graph.play_id.to_list() == ["q", "p"]


def test_legacy_agentic_rows(tmp_path) -> None:
    """Reference: traffic, section 4.3: an edge on completion with delay + tool_wait_ms."""
    workload = read_sample(tmp_path, "legacy agentic")
    graph = workload.dependencies
    assert graph.not_before_ms.tolist() == [100.0, 0.0]
    assert graph.delay_ms.tolist() == [42.0]
    assert workload.session_id.to_list() == ["agentic-session"] * 2
    assert graph.play_id.to_list() == ["legacy-play:a"]


def test_dynamo_records_are_sorted_and_shifted(tmp_path) -> None:
    workload = read_sample(tmp_path, "dynamo")
    assert workload.arrival_ms.tolist() == [0.0, 9.5]
    assert workload.request_id.to_list() == ["b", "a"]
    assert workload.session_id.to_list() == ["request_1", "request_2"]


def test_dynamo_start_from_the_end(tmp_path) -> None:
    text = dynamo("a", 1000, 1040, request={"request_received_ms": None}) + dynamo("b", 1002, 1010)
    assert read_trace(write(tmp_path, text)).arrival_ms.tolist() == [0.0, 2.0]


def test_dynamo_children_are_spawned_and_joined(tmp_path) -> None:
    """Equal to the reference's edges, read off its arrival times."""
    text = (
        dynamo("a", 1000, 1100, session="s")
        + dynamo("k", 1150, 1200, session="k", parent="s")
        + dynamo("b", 1300, 1310, session="s")
    )
    workload = read_trace(write(tmp_path, text))
    graph = workload.dependencies
    assert workload.request_id.to_list() == ["a", "b", "k"]
    assert graph.offsets.tolist() == [0, 0, 2, 3]
    assert graph.source.tolist() == [0, 2, 0]
    assert graph.on_completion.tolist() == [True, True, False]
    assert graph.delay_ms.tolist() == [200.0, 100.0, 150.0]
    assert graph.not_before_ms.tolist() == [0.0, 0.0, 0.0]
    tool = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "tool_end",
        "tool": {"claude": {"child_session_id": "k", "consumer_request_id": "c"}},
    }
    text += dynamo("c", 1400, 1410, session="s") + json.dumps(tool) + "\n"
    graph = read_trace(write(tmp_path, text)).dependencies
    assert graph.offsets.tolist() == [0, 0, 1, 3, 4]  # a, b, c, k: the tool event names c


def test_dynamo_parents_may_be_named_late(tmp_path) -> None:
    """The first record of a session that names a parent speaks for all of it."""
    text = (
        dynamo("a", 1000, 1005, session="u")
        + dynamo("b", 1025, 1025, session="u", parent="s")
        + dynamo("c", 1250, 1255, session="s")
    )
    graph = read_trace(write(tmp_path, text)).dependencies
    assert graph.offsets.tolist() == [0, 0, 1, 2]
    assert graph.source.tolist() == [0, 1]
    assert graph.delay_ms.tolist() == [20.0, 225.0]


def test_burstgpt_failures_are_dropped_and_counted(tmp_path) -> None:
    text = SAMPLES["burstgpt"][1] + "130,GPT-4,99,0,99,API log\n"
    path = write(tmp_path, text, "t.csv")
    with pytest.warns(UserWarning, match="1 rows dropped: failed in the source"):
        workload = read_trace(path)
    assert len(workload) == 3
    assert workload.arrival_ms.tolist() == [0.0, 40_500.0, 113_000.0]
    assert workload.origin.dropped == {"failed in the source (no Response tokens)": 1}
    kept = read_trace(path, failed_rows="keep")
    assert kept.output_length.tolist() == [18, 230, 276, 0]
    with pytest.raises(InputError, match=r"t.csv:5, Response tokens: got 0, expected outputs"):
        read_trace(path, failed_rows="error")


def test_token_ids_are_kept_as_they_are(tmp_path) -> None:
    workload = read_sample(tmp_path, "tokens and ns", rebase=False)
    assert workload.block_ids.tolist() == [7, 8, 9, 7, 8, 10]
    assert workload.output_token_ids.tolist() == [1, 2**32 - 1]
    assert workload.arrival_ms.tolist() == [1.5, 1.500001]


def test_units_agree_to_the_last_bit(tmp_path) -> None:
    """Law 6: the same instants written in s, ms, us or ns give the same floats."""
    milliseconds = ["0.125", "17.3", "1000001.375"]
    shifts = {"s": -3, "ms": 0, "us": 3, "ns": 6}
    from decimal import Decimal

    for name, column in (("vidur", "arrived_at"), ("azure", "TIMESTAMP")):
        read = []
        for unit, shift in shifts.items():
            times = [f"{Decimal(text).scaleb(shift):f}" for text in milliseconds]
            names = {
                "vidur": "num_prefill_tokens,num_decode_tokens",
                "azure": "ContextTokens,GeneratedTokens",
            }
            text = f"{column},{names[name]}\n" + "".join(f"{t},10,2\n" for t in times)
            path = write(tmp_path, text, "t.csv")
            read.append(read_trace(path, time_unit=unit).arrival_ms.tolist())
        assert read == [[0.0, 17.3 - 0.125, 1000001.375 - 0.125]] * 4


# --- shards ---------------------------------------------------------------------------------------


def test_shards_are_merged_by_time(tmp_path) -> None:
    write(tmp_path, line(timestamp=10) + line(timestamp=30, input_length=300), "a.jsonl")
    write(tmp_path, gzip.compress((line(timestamp=0) + line(timestamp=20)).encode()), "b.jsonl.gz")
    (tmp_path / ".hidden").write_text("no trace")
    expected = [0.0, 10.0, 20.0, 30.0]
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
    for path in (tmp_path, str(tmp_path / "*.jsonl*"), paths):
        workload = read_trace(path)
        assert workload.arrival_ms.tolist() == expected
        assert workload.input_length.tolist() == [100, 100, 100, 300]
        assert workload.session_id.n_unique() == 4
        assert [Path(file).name for file in workload.origin.files] == ["a.jsonl", "b.jsonl.gz"]
    assert read_trace(tmp_path, limit=2).arrival_ms.tolist() == [0.0, 10.0]


def test_sessions_span_shards_in_file_order(tmp_path) -> None:
    write(tmp_path, line(session_id="s", timestamp=10), "a.jsonl")
    write(tmp_path, line(session_id="s", timestamp=25), "b.jsonl")
    assert read_trace(tmp_path).sessions.delay_ms.tolist() == [0.0, 15.0]
    with pytest.raises(InputError, match=r"a.jsonl:1, timestamp: got 10.0"):
        read_trace([tmp_path / "b.jsonl", tmp_path / "a.jsonl"])


def test_dynamo_shards_are_one_corpus(tmp_path) -> None:
    write(tmp_path, dynamo("b", 1200, 1210, session="s"), "a.jsonl")
    write(tmp_path, dynamo("a", session="s"), "b.jsonl")
    assert read_trace(tmp_path).dependencies.delay_ms.tolist() == [190.0]
    write(tmp_path, dynamo("c", session="s", replay={"trace_block_size": 50}), "c.jsonl")
    with pytest.raises(InputError, match="trace_block_size: got 50, expected 64"):
        read_trace(tmp_path)


def test_shards_of_two_formats_are_refused(tmp_path) -> None:
    write(tmp_path, MOONCAKE, "a.jsonl")
    write(tmp_path, AZURE_2023, "b.csv")
    with pytest.raises(InputError, match=r"b.csv: got 'the format azure', expected mooncake"):
        read_trace(tmp_path)


# --- written and read back ------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize("name", SAMPLES)
def test_written_workloads_read_back_equal(tmp_path, name, suffix) -> None:
    workload = read_sample(tmp_path, name)
    path = tmp_path / f"w{suffix}"
    workload.write(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = read_trace(path)
    assert_equal(again, workload)
    with pytest.raises(InputError, match="or --overwrite"):
        workload.write(path)
    workload.write(path, overwrite=True)


def test_only_known_suffixes_are_written(tmp_path) -> None:
    workload = read_sample(tmp_path, "azure")
    with pytest.raises(InputError, match=r"output file: got .*w.xlsx', expected a name that ends"):
        workload.write(tmp_path / "w.xlsx")


# --- size -----------------------------------------------------------------------------------------


def test_half_a_million_csv_rows_are_read(tmp_path) -> None:
    n = 500_000
    seconds = np.arange(n) // 10 % 60
    times = (f"2024-05-10 00:00:{s:02}.{k % 10**7:07}" for k, s in enumerate(seconds.tolist()))
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{t},100,2\n" for t in times)
    path = write(tmp_path, text, "t.csv")
    workload = read_trace(path)
    assert len(workload) == n
    assert workload.input_length.sum() == 100 * n
