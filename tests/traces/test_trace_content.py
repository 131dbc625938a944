"""Prompt content that does not fit its lengths, times that stay or are shifted, ids as numbers."""

from __future__ import annotations

import json
import re
import warnings

import numpy as np
import polars as pl
import pytest

from tests.support.trace_text import AGENTIC_HEADER, agentic, edge, line, write
from vecsim.errors import InputError
from vecsim.run.replay import replay
from vecsim.traces import read_trace
from vecsim.workload.describe import describe
from vecsim.workload.workload import Workload

COLUMNS = {"arrival": "t_ms", "input_length": "in", "output_length": "out"}


def rows(*objects: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in objects)


# --- ids and lengths ------------------------------------------------------------------------------


def bailian(turn: int, at: float, tokens: int, first_id: int = 0) -> dict:
    ids = list(range(first_id, first_id - -tokens // 16))
    row = {"chat_id": 7, "timestamp": at, "input_length": tokens, "output_length": 4}
    return {**row, "turn": turn, "hash_ids": ids}


def test_qwen_bailian_rows_are_told_by_their_fields(tmp_path) -> None:
    """Seconds, and one id for 16 tokens."""
    text = rows(bailian(1, 0.5, 521), bailian(2, 2.25, 530), bailian(1, 3.0, 100, 50))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        workload = read_trace(write(tmp_path, text))
    assert workload.origin.format == "qwen_bailian"
    assert workload.origin.unit == "s"
    assert workload.block_tokens == 16
    assert workload.arrival_ms.tolist() == [0.0, 1750.0, 2500.0]
    # 32 full blocks and the nine tokens of the 33rd, which the second row holds whole, and more
    assert describe(workload)["shareable_input_ratio"] == (32 * 16 + 16) / (521 + 530 + 100)


def test_surplus_ids_are_announced_with_the_block_size_that_would_fit(tmp_path) -> None:
    path = write(tmp_path, rows(bailian(1, 0.0, 521), bailian(1, 1.0, 17)))
    message = (
        "2 of 2 rows have more hash_ids than blocks of 512 tokens; the last ones are ignored "
        "(blocks of 16 tokens would fit all rows)"
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        workload = read_trace(path, "mooncake")
    assert np.diff(workload.block_offsets).tolist() == [2, 1]
    with pytest.warns(UserWarning, match=r"1 of 2 rows .* are ignored$"):
        read_trace(write(tmp_path, line(hash_ids=[1, 2]) + line(input_length=600, hash_ids=[1, 2])))
    own = {"arrival_ms": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2, 3]}
    with pytest.warns(UserWarning, match=r"blocks of 34 to 49 tokens would fit"):
        read_trace(write(tmp_path, rows(own)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hash_ids": [1]}, ":2, input_length: got 1000, expected at most 512, as 1 ids of 512"),
        ({"input_token_ids": [1, 2]}, ":2, input_length: got 1000, expected at most 2, as 2 ids"),
        ({"input_token_ids": [1] * 1001}, ":2, token ids: got '1001 ids', expected 1000, as input"),
        ({"output_token_ids": [1]}, ":2, output_token_ids: got '1 ids', expected 3, as output_le"),
    ],
)
def test_content_of_another_length_names_file_and_line(tmp_path, fields, message) -> None:
    sound = {name: [5] * (3 if name[0] == "o" else 1) for name in fields}
    first = {"arrival_ms": 0, "input_length": 1, "output_length": 3, **sound}
    second = {"arrival_ms": 1, "input_length": 1000, "output_length": 3, **fields}
    with pytest.raises(InputError, match=re.escape(message)):
        read_trace(write(tmp_path, rows(first, second)))


def test_planned_outputs_of_another_length_are_announced() -> None:
    requests = [
        {"id": k, "arrival_time_ms": 0.0, "input_tokens": 5, "output_tokens": 5} for k in "abc"
    ]
    for request in requests[1:]:
        request["output_token_ids"] = [1, 2]
    spec = {"version": 1, "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}}}
    spec |= {"engine": {"rank": {"backend": "vllm"}}, "requests": requests}
    message = "requests[1].output_token_ids: 2 tokens are generated, not output_tokens, 5 (2 such"
    with pytest.warns(UserWarning, match=re.escape(message)):
        result = replay(spec)
    assert result.requests["output_length"].to_list() == [5, 2, 2]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[7, 7], [7, "7"], [2**70, None]])
def test_whole_numbers_are_names(tmp_path, ids) -> None:
    given = [
        {"request_id": k, "arrival_ms": k, "input_length": 9, "output_length": 2, "session_id": s}
        for k, s in enumerate(ids)
    ]
    workload = read_trace(write(tmp_path, rows(*given)))
    assert workload.request_id.to_list() == ["0", "1"]
    assert workload.session_id.to_list() == [
        "request_2" if name is None else str(name) for name in ids
    ]
    mapped = [{"t_ms": k, "in": 9, "out": 2, "who": s} for k, s in enumerate(ids)]
    columns = {**COLUMNS, "session_id": "who"}
    again = read_trace(write(tmp_path, rows(*mapped)), columns=columns)
    assert again.session_id.to_list() == workload.session_id.to_list()


@pytest.mark.parametrize("value", [True, [1], {"a": 1}])
def test_other_values_are_no_names(tmp_path, value) -> None:
    first = {"arrival_ms": 0, "input_length": 9, "output_length": 2, "session_id": "a"}
    with pytest.raises(InputError, match=r":2, session_id: got .* a string or a whole number"):
        read_trace(write(tmp_path, rows(first, {**first, "session_id": value})))


def test_agentic_rows_may_leave_out_their_dependencies(tmp_path) -> None:
    root = json.loads(agentic())
    del root["dependencies"]
    text = AGENTIC_HEADER + rows(root) + agentic(request_id="b", dependencies=[edge()])
    graph = read_trace(write(tmp_path, text)).dependencies
    assert graph.offsets.tolist() == [0, 0, 1]


# --- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "start", "step"),
    [
        ("arrival_s", "1700000000.00", "1700000000.01"),
        ("arrival_ms", "1700000000000", "1700000000010"),
        ("arrival_us", "5", "10005"),
        ("arrival_ns", "1700000000000000000", "1700000000010000000"),
    ],
)
def test_own_tables_begin_at_zero(tmp_path, name, start, step) -> None:
    text = f"{name},input_length,output_length\n{start},100,5\n{step},100,5\n"
    workload = read_trace(write(tmp_path, text, "own.csv"))
    assert workload.arrival_ms.tolist() == [0.0, 10.0]
    assert describe(workload)["mean_rate_rps"] == 100.0


ODD = [26.766925437306057, 192.48492314751397, 1e-9, 1.7e12 + 0.1]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize("first", [0, 2])
def test_written_times_come_back_to_the_last_bit(tmp_path, suffix, first) -> None:
    rng = np.random.default_rng(5)
    arrivals = [*ODD[:2], *(rng.random(500) * 1e6), *ODD[first:]]
    workload = Workload.from_columns(arrivals, [10] * len(arrivals), [2] * len(arrivals))
    workload.write(tmp_path / f"w{suffix}")
    again = read_trace(tmp_path / f"w{suffix}")
    assert again.arrival_ms.tolist() == arrivals
    moved = read_trace(tmp_path / f"w{suffix}", rebase=True)
    assert moved.arrival_ms.min() == 0.0


def test_times_that_are_kept_are_kept_to_the_last_bit(tmp_path) -> None:
    text = "".join(line(timestamp=t) for t in ODD[:2])
    workload = read_trace(write(tmp_path, text), rebase=False)
    assert workload.arrival_ms.tolist() == ODD[:2]
    assert workload.speedup(1.0).arrival_ms.tolist() == ODD[:2]
    dates = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,1,1\n"
    kept = read_trace(write(tmp_path, dates, "t.csv"), rebase=False)
    assert kept.arrival_ms.tolist() == [1700158623979.96]


def test_a_written_graph_that_begins_late_keeps_its_times(tmp_path) -> None:
    text = AGENTIC_HEADER + agentic(not_before_ms=26.766925437306057)
    workload = read_trace(write(tmp_path, text), rebase=False)
    workload.write(tmp_path / "w.parquet")
    again = read_trace(tmp_path / "w.parquet")
    assert again.dependencies.not_before_ms.tolist() == [26.766925437306057]


def test_parquet_lists_are_read_like_those_of_json(tmp_path) -> None:
    """Null and empty lists, ids up to 2**64 - 1; a null or too large id is named with its row."""
    lists = [[1, 2**64 - 1], None, [], [3]]
    columns = {"arrival_ms": [0, 1, 2, 3], "input_length": [600, 5, 0, 9], "output_length": [1] * 4}
    frame = pl.DataFrame({**columns, "hash_ids": pl.Series(lists, dtype=pl.List(pl.UInt64))})
    frame.write_parquet(tmp_path / "w.parquet")
    frame.write_ndjson(tmp_path / "w.jsonl")
    binary, text = read_trace(tmp_path / "w.parquet"), read_trace(tmp_path / "w.jsonl")
    assert binary.block_offsets.tolist() == text.block_offsets.tolist() == [0, 2, 2, 2, 3]
    assert binary.block_ids.tolist() == text.block_ids.tolist() == [0, 1, 2]
    for bad in ([None], [2**32]):
        tokens = pl.Series([[1], None, None, bad], dtype=pl.List(pl.Int64))
        broken = frame.drop("hash_ids").with_columns(output_token_ids=tokens)
        broken.write_parquet(tmp_path / "bad.parquet")
        with pytest.raises(InputError, match=r"row 4, output_token_ids: got"):
            read_trace(tmp_path / "bad.parquet")
