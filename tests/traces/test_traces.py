"""Reading trace files: formats, compressions, times, and what a malformed file is answered with."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.support.trace_text import AZURE_2023, AZURE_2024, MOONCAKE, line, write, zstd_frame
from vecsim.errors import InputError
from vecsim.traces import delimited, mooncake, read_trace
from vecsim.traces.files import TraceFile
from vecsim.traces.raw import _plain_numbers, plain_dates
from vecsim.traces.table import ReadOptions, TraceTable
from vecsim.traces.times import milliseconds, nanoseconds
from vecsim.workload.workload import Workload


def same(a: Workload, b: Workload) -> None:
    for name in ("arrival_ms", "input_length", "output_length", "block_offsets", "block_ids"):
        one, other = getattr(a, name), getattr(b, name)
        assert (one is None) == (other is None)
        assert one is None or one.tolist() == other.tolist()
    assert a.block_tokens == b.block_tokens


# --- what the formats say -------------------------------------------------------------------------


def test_mooncake_columns(tmp_path) -> None:
    workload = read_trace(write(tmp_path, MOONCAKE))
    assert workload.arrival_ms.tolist() == [200.0, 0.0, 0.5]
    assert workload.input_length.tolist() == [600, 500, 0]
    assert workload.output_length.tolist() == [4, 3, 0]
    assert workload.block_offsets.tolist() == [0, 2, 3, 3]
    assert workload.block_ids.tolist() == [0, 1, 0]
    assert workload.block_tokens == 512
    assert workload.session_id.to_list() == ["request_1", "request_2", "request_3"]
    assert workload.turn_index.tolist() == [0, 0, 0]
    assert workload.dp_rank.tolist() == [-1, -1, -1]
    assert workload.request_id is None


def test_azure_columns(tmp_path) -> None:
    workload = read_trace(write(tmp_path, AZURE_2023, "trace.csv"))
    assert workload.arrival_ms.tolist() == [0.0, 52.0, 0.0001]
    assert workload.input_length.tolist() == [4808, 3180, 110]
    assert workload.output_length.tolist() == [10, 8, 27]
    assert workload.block_ids is None
    assert workload.session_id.to_list() == ["request_2", "request_3", "request_4"]
    later = read_trace(write(tmp_path, AZURE_2024, "trace.csv"))
    assert later.arrival_ms.tolist() == [0.0, 17.335, 2 * 86_400_000 + 100.0]
    assert later.output_length.tolist() == [5, 6, 15]


WRAPPERS = {
    "plain": bytes,
    "gzip": gzip.compress,
    "two gzip members": lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:]),
    "zstd": zstd_frame,
}
TEXTS = {
    "LF": lambda text: text,
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "BOM": lambda text: "\ufeff" + text,
    "no final newline": lambda text: text.rstrip("\n"),
    "blank lines at the end": lambda text: text + "\n  \n\n",
    "BOM, CRLF and no final newline": lambda text: (
        "\ufeff" + text.rstrip("\n").replace("\n", "\r\n")
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("shape", TEXTS)
@pytest.mark.parametrize("text", [MOONCAKE, AZURE_2023, AZURE_2024], ids=["moon", "2023", "2024"])
def test_wrapping_changes_nothing(tmp_path, text, shape, wrapper) -> None:
    plain = read_trace(write(tmp_path, text))
    data = WRAPPERS[wrapper](TEXTS[shape](text).encode())
    for name in ("trace", "trace.gz", "trace.zst", "trace.csv"):
        wrapped = read_trace(write(tmp_path, data, name))
        same(wrapped, plain)
        assert wrapped.session_id.to_list() == plain.session_id.to_list()


def test_compressed_zstd_blocks(tmp_path) -> None:
    rows = [line(timestamp=k, hash_ids=[k]).rstrip() for k in range(500)]
    buffer = io.BytesIO()
    frame = pl.DataFrame({"line": rows})
    frame.write_csv(buffer, include_header=False, quote_style="never", compression="zstd")
    assert len(buffer.getvalue()) < len("".join(rows)) / 4
    workload = read_trace(write(tmp_path, buffer.getvalue()))
    assert workload.arrival_ms.tolist() == list(range(500))


def test_blank_lines_count_for_line_numbers(tmp_path) -> None:
    """Also those of spaces, in front, and with other fields that need the pass over lines."""
    for extra in ("", '"policy_class": "x", '):
        text = MOONCAKE.replace("{", "{" + extra).replace("\n", "\r\n\r\n")
        workload = read_trace(write(tmp_path, "\n   \r\n" + text))
        assert workload.session_id.to_list() == ["request_3", "request_5", "request_7"]
        same(workload, read_trace(write(tmp_path, MOONCAKE)))
    azure_text = "\n" + AZURE_2023.replace("\n", "\n\n")
    workload = read_trace(write(tmp_path, azure_text))
    assert workload.session_id.to_list() == ["request_4", "request_6", "request_8"]


def test_array_at_top_level(tmp_path) -> None:
    rows = [json.loads(text) for text in MOONCAKE.splitlines()]
    for text in (json.dumps(rows), json.dumps(rows, indent=1), " \n" + json.dumps(rows)):
        workload = read_trace(write(tmp_path, text))
        same(workload, read_trace(write(tmp_path, MOONCAKE)))
        assert workload.session_id.to_list() == ["request_1", "request_2", "request_3"]


def test_azure_separators_order_and_other_columns(tmp_path) -> None:
    expected = read_trace(write(tmp_path, AZURE_2023))
    for separator in ";\t":
        same(read_trace(write(tmp_path, AZURE_2023.replace(",", separator))), expected)
    spaced = AZURE_2023.replace(",", " , ").replace("ContextTokens", "contexttokens")
    same(read_trace(write(tmp_path, spaced)), expected)
    rows = [row.split(",") for row in AZURE_2023.splitlines()]
    swapped = "\n".join(f'{c[2]},x,"{c[1]}","{c[0]}"' for c in rows)
    same(read_trace(write(tmp_path, swapped)), expected)


def test_limit_reads_the_first_rows_only(tmp_path) -> None:
    whole = read_trace(write(tmp_path, MOONCAKE))
    same(read_trace(write(tmp_path, MOONCAKE), limit=9), whole)
    for text in (MOONCAKE + "garbage\n", "\n\n" + MOONCAKE + "garbage\n"):
        limited = read_trace(write(tmp_path, text), limit=2)
        assert limited.arrival_ms.tolist() == [200.0, 0.0]
        assert limited.block_ids.tolist() == [0, 1, 0]
    limited = read_trace(write(tmp_path, AZURE_2023 + "garbage\n"), limit=2)
    assert limited.input_length.tolist() == [4808, 3180]
    for text in (MOONCAKE, AZURE_2023):
        assert len(read_trace(write(tmp_path, text), limit=0)) == 0


def test_all_rows_by_default(tmp_path) -> None:
    text = "".join(line(timestamp=k) for k in range(25))
    assert read_trace(write(tmp_path, text)).arrival_ms.tolist() == list(range(25))


# --- Mooncake rows (reference: validation of Mooncake rows) ---------------------------------------


def test_input_length_defaults_to_the_hash_ids(tmp_path) -> None:
    text = line(input_length=None, hash_ids=[1, 2]) + line(input_length=None, hash_ids=[])
    workload = read_trace(write(tmp_path, text))
    assert workload.input_length.tolist() == [1024, 0]
    assert read_trace(write(tmp_path, text), block_size=16).input_length.tolist() == [32, 0]


def test_last_block_may_be_partial_and_no_more(tmp_path) -> None:
    with pytest.raises(InputError, match=r"trace.jsonl:1, input_length: got 513, .* at most 512"):
        read_trace(write(tmp_path, line(input_length=513)))
    workload = read_trace(write(tmp_path, line(input_length=513, hash_ids=[1, 2])))
    assert workload.block_ids.tolist() == [0, 1]


def test_surplus_ids_count_for_numbers_but_not_for_content(tmp_path) -> None:
    text = line(hash_ids=[5, 9, 11]) + line(hash_ids=[11], output_token_ids=[2, 2, 2])
    workload = read_trace(write(tmp_path, text))
    assert workload.block_ids.tolist() == [0, 2]
    assert workload.output_token_ids.tolist() == [2, 2, 2]
    assert workload.output_offsets.tolist() == [0, 0, 3]


def test_empty_list_first_and_large_ids(tmp_path) -> None:
    text = (
        line(input_length=0, hash_ids=[]) + line(hash_ids=[2**63 + 5]) + line(hash_ids=[2**64 - 1])
    )
    assert read_trace(write(tmp_path, text)).block_ids.tolist() == [0, 1]


def test_zero_and_large_lengths(tmp_path) -> None:
    text = line(input_length=0, output_length=0) + line(
        input_length=2**31 - 1, output_length=2**31 - 1, hash_ids=[1], timestamp=None
    )
    workload = read_trace(write(tmp_path, text), block_size=2**31)
    assert workload.input_length.tolist() == [0, 2**31 - 1]
    assert workload.output_length.tolist() == [0, 2**31 - 1]
    assert workload.block_offsets.tolist() == [0, 0, 1]


def test_aliases_and_unknown_fields(tmp_path) -> None:
    text = (
        '{"created_time": 7, "input_tokens": 600, "output_tokens": 3, "hash_ids": [1, 2], '
        '"delay_ms": 0, "foo": {"timestamp": 1}, "request_id": "x"}\n'
    )
    workload = read_trace(write(tmp_path, text * 2))
    assert workload.input_length.tolist() == [600, 600]
    assert workload.output_length.tolist() == [3, 3]


def test_sessions_keep_their_names(tmp_path) -> None:
    text = line(session_id="") + line(session_id="s") + line(session_id=None)
    workload = read_trace(write(tmp_path, text))
    assert workload.session_id.to_list() == ["", "s", "request_3"]


def test_priorities_are_accepted(tmp_path) -> None:
    text = line(priority=-5, strict_priority=2**32 - 1, policy_class="gold", delay=0.0)
    assert len(read_trace(write(tmp_path, text))) == 1


def test_numbers_written_otherwise(tmp_path) -> None:
    text = line(input_length=100.0, output_length="3") + line(input_length="1e2", timestamp="0.5")
    workload = read_trace(write(tmp_path, text))
    assert workload.input_length.tolist() == [100, 100]
    assert workload.output_length.tolist() == [3, 3]
    assert workload.arrival_ms.tolist() == [0.0, 0.5]
    text = AZURE_2023.replace("4808", "1e3").replace(",110,", ',"110.0",')
    assert read_trace(write(tmp_path, text)).input_length.tolist() == [1000, 3180, 110]


def test_rows_without_hash_ids_share_nothing_and_are_announced_once(tmp_path) -> None:
    path = write(tmp_path, line() + line(hash_ids=None) + line(hash_ids=None) + line())
    with pytest.warns(UserWarning, match="trace.jsonl: 2 of 4 rows have no hash_ids") as caught:
        workload = read_trace(path)
    assert len(caught) == 1
    assert workload.block_offsets.tolist() == [0, 1, 1, 1, 2]
    with pytest.warns(UserWarning, match="2 of 2 rows"):
        workload = read_trace(write(tmp_path, line(hash_ids=None) * 2))
    assert workload.block_ids is None
    text = line(hash_ids=None, output_token_ids=[1, 2, 3])
    with pytest.warns(UserWarning, match="1 of 1 rows"):
        workload = read_trace(write(tmp_path, text))
    assert workload.block_offsets.tolist() == [0, 0]
    assert workload.prefix_tree(1).node_count == 0


# --- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "arrivals"),
    [
        ([1000, None, 1200.5], [1000.0, 0.0, 1200.5]),
        ([None, None], [0.0, 0.0]),
        ([-250, 0, 40], [0.0, 250.0, 290.0]),
        ([32_400_000, 32_400_010], [0.0, 10.0]),
        ([1_700_000_000_000.0, 1_700_000_000_500.25], [0.0, 500.25]),
        ([0, 1e10], [0.0, 1e10]),
        (["2024-01-01T00:00:00Z", "2024-01-01 01:00:00.25+00:30"], [0.0, 1_800_250.0]),
        (["2024-01-01T00:00:00.0000001", "2023-12-31T19:00:00.0000003-0500"], [0.0, 0.0002]),
    ],
)
def test_first_arrival_is_zero(tmp_path, times, arrivals) -> None:
    path = write(tmp_path, "".join(line(timestamp=time) for time in times))
    assert read_trace(path).arrival_ms.tolist() == arrivals


def test_speedup_scales_gaps(tmp_path) -> None:
    path = write(tmp_path, "".join(line(timestamp=time) for time in (5000, 5010, 5030)))
    assert read_trace(path, arrival_speedup_ratio=2.0).arrival_ms.tolist() == [0.0, 5.0, 15.0]
    path = write(tmp_path, "".join(line(timestamp=time) for time in (1000, 1500, 1300)))
    assert read_trace(path, arrival_speedup_ratio=2.0).arrival_ms.tolist() == [0.0, 250.0, 150.0]
    kept = read_trace(path, arrival_speedup_ratio=2.0, rebase=False)
    assert kept.arrival_ms.tolist() == [1000.0, 1250.0, 1150.0]


def test_without_rebase_no_arrival_may_be_negative(tmp_path) -> None:
    path = write(tmp_path, line(timestamp=-1))
    with pytest.raises(InputError, match=r"rebase: got False, .* first arrival is at -1.0 ms"):
        read_trace(path, rebase=False)


def test_units_agree_to_the_last_bit(tmp_path) -> None:
    """The same instants in s, ms, us and ns, near zero and since 1970, down to single ns."""
    rng = random.Random(3)
    for origin in (0, 1_700_000_000 * 10**9):
        instants = [origin + rng.randrange(10**13) for _ in range(200)]
        workloads = []
        for unit, digits in (("s", 9), ("ms", 6), ("us", 3), ("ns", 0)):
            texts = [f"{t // 10**digits}.{t % 10**digits:0{digits}d}" for t in instants]
            texts = [text if digits else text.split(".")[0] for text in texts]
            rows = [line(timestamp="T").replace('"T"', text) for text in texts]
            path = write(tmp_path, "".join(rows))
            workloads.append(read_trace(path, time_unit=unit))
        for workload in workloads[1:]:
            same(workload, workloads[0])
    same(
        read_trace(write(tmp_path, MOONCAKE), time_unit="ms"), read_trace(write(tmp_path, MOONCAKE))
    )


def test_azure_numbers_need_a_unit(tmp_path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n10.5,1,2\n10,3,4\n"
    path = write(tmp_path, text, "trace.csv")
    assert read_trace(path, time_unit="s").arrival_ms.tolist() == [500.0, 0.0]
    with pytest.raises(InputError, match=r"trace.csv:2, TIMESTAMP: got '10.5', .* time_unit"):
        read_trace(path)


def test_many_equal_times_and_long_gaps(tmp_path) -> None:
    text = line() * 20_000 + line(timestamp=40 * 86_400_000)
    arrivals = read_trace(write(tmp_path, text)).arrival_ms
    assert (arrivals[:-1] == 0).all()
    assert arrivals[-1] == 40 * 86_400_000.0


# --- sessions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "turns", "delays"),
    [
        ([line(session_id="s"), line(session_id="s", timestamp=5)], [0, 1], [0.0, 5.0]),
        ([line(), line(), line(session_id="request_2")], [0, 0, 1], [0.0, 0.0, 0.0]),
        ([line(session_id="s"), line(session_id="s", delay=5)], [0, 1], [0.0, 5.0]),
        ([line(session_id="s"), line(session_id="s", timestamp=None)], [0, 1], [0.0, 0.0]),
        (
            [
                line(session_id="s"),
                line(session_id="s", timestamp=None, delay=5),
                line(session_id="s", timestamp=100),
            ],
            [0, 1, 2],
            [0.0, 5.0, 100.0],
        ),
    ],
)
def test_turns_and_their_delays(tmp_path, rows, turns, delays) -> None:
    for text in ("".join(rows), "[" + ",".join(rows) + "]"):
        sessions = read_trace(write(tmp_path, text)).sessions
        assert sessions.turn.tolist() == turns
        assert sessions.delay_ms.tolist() == delays
        assert sessions.count == turns.count(0)
        assert not sessions.accumulate
    faster = read_trace(write(tmp_path, "".join(rows)), arrival_speedup_ratio=4.0).sessions
    assert faster.delay_ms.tolist() == [delay / 4 for delay in delays]


def test_sessions_are_numbered_by_first_appearance(tmp_path) -> None:
    rows = [line(session_id=name, timestamp=k) for k, name in enumerate("babcab")]
    workload = read_trace(write(tmp_path, "".join(rows)))
    assert workload.sessions.session.tolist() == [0, 1, 0, 2, 1, 0]
    assert workload.arrival_ms.tolist() == [0.0, 1.0, 0.0, 3.0, 1.0, 0.0]
    offsets, order = workload.sessions.rows()
    assert (offsets.tolist(), order.tolist()) == ([0, 3, 5, 6], [0, 2, 5, 1, 4, 3])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [line(delay=5)],
            ":1, delay: got 5.0, expected 0 on the first turn of session 'request_1'",
        ),
        ([line(delay=-1)], ":1, delay: got -1.0"),
        (
            [line(session_id="s", timestamp=50), line(session_id="s", timestamp=40)],
            ":2, timestamp: got 40.0, expected a time not before 50.0",
        ),
        (
            [line(session_id="s"), line(session_id="s", delay=-1)],
            ":2, delay: got -1.0, expected 0 or more",
        ),
        (
            [line(session_id="s", timestamp=None), line(session_id="s", timestamp=40)],
            ":2, timestamp: got 40.0, expected an earlier timestamp in session 's', or a delay",
        ),
        (
            [
                line(session_id="s"),
                line(session_id="s", timestamp=100),
                line(session_id="s", timestamp=None, delay=5),
                line(session_id="s", timestamp=99),
            ],
            ":4, timestamp: got 99.0, expected a time not before 100.0",
        ),
        ([line(session_id="s")] * 2 + [line(hash_ids=[])], ":3, input_length: got 100"),
    ],
)
def test_sessions_are_validated(tmp_path, rows, message) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read_trace(write(tmp_path, "".join(rows)))


# --- the fast pass agrees with the pass over lines ------------------------------------------------


def assert_equal_tables(a: TraceTable, b: TraceTable) -> None:
    assert a.times.values.dtype == b.times.values.dtype
    np.testing.assert_array_equal(a.times.values, b.times.values)
    np.testing.assert_array_equal(a.input_length, b.input_length)
    np.testing.assert_array_equal(a.output_length, b.output_length)
    assert a.numbers.tolist() == b.numbers.tolist()
    assert (a.session_id is None) == (b.session_id is None)
    assert (a.ids is None) == (b.ids is None)
    for one, other in zip(a.ids or (), b.ids or (), strict=True):
        np.testing.assert_array_equal(one, other)


def mutations(text: str, fragments: list[str], seed: int, count: int):
    rng = random.Random(seed)
    for _ in range(count):
        changed = text
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.randrange(len(changed) + 1)
            if rng.random() < 0.6:
                changed = changed[:at] + rng.choice(fragments) + changed[at:]
            else:
                changed = changed[:at] + changed[at + rng.choice([1, 1, 2, 9]) :]
        yield changed


JSON_SYNTAX = (
    '" , } { [ ] : 1 - .5 e3 null true NaN 1e999 0.1 01 "5" + {} 5, // E5 é 18446744073709551616'
)
CSV_SYNTAX = ', ; " \'\' 1 - .5 e3 60 T Z +00:00 1e3 "4" ,, # 2024-02-29'
SPACES = ["\n", "\r\n", "\r", " ", "\t", "\x00", "\n\n"]
JSON_FRAGMENTS = [*JSON_SYNTAX.split(), *SPACES, '"hash_ids": [1],', '"timestamp": 3,']
CSV_FRAGMENTS = [*CSV_SYNTAX.split(), *SPACES]


CLEAN = '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": %s}'


def test_fast_mooncake_pass_agrees_with_lines() -> None:
    text = "".join(
        line(timestamp=k + 0.25, input_length=600 + k, hash_ids=[k, 2]) for k in range(3)
    )
    options = ReadOptions()
    accepted = 0
    for changed in mutations(text, JSON_FRAGMENTS, seed=1, count=2400):
        file = TraceFile("t", changed.encode())
        fast = mooncake._read_whole(file, options)
        if fast is not None:
            accepted += 1
            assert_equal_tables(fast, mooncake._read_lines(file, options))
    assert accepted > 50


@pytest.mark.parametrize(
    "lists",
    [
        ["[]", "[1,2]", "[]", "[ ]", "[ 3 , 4 ]"],
        ["[]", "[ ]"],
        [f"[{2**63}, {2**64 - 2}]", "[0]"],
        [f"[{2**64 - 1}]"],
    ],
)
def test_ids_at_one_go_are_those_of_each_line(lists) -> None:
    rows = [CLEAN % one for one in lists]
    file = TraceFile("t", "\n".join(rows).encode())
    slow = mooncake._read_lines(file, ReadOptions())
    fast = mooncake._read_whole(file, ReadOptions())
    assert slow.ids[1].tolist() == [i for one in lists for i in json.loads(one)]
    if lists == [f"[{2**64 - 1}]"]:  # not told from what is larger
        assert fast is None
    else:
        assert_equal_tables(fast, slow)


@pytest.mark.parametrize("lists", [["5", "[[1]]"], ["[1]", "5", "[2]"], ["[1]", "[[2],[3]]"]])
def test_what_is_no_list_of_ids_is_left_to_the_pass_over_lines(lists) -> None:
    rows = [CLEAN % one for one in lists]
    assert mooncake._read_whole(TraceFile("t", "\n".join(rows).encode()), ReadOptions()) is None


def test_fast_csv_pass_agrees_with_lines() -> None:
    names, positions = list(delimited.AZURE[:3]), [0, 1, 2]
    accepted = 0
    for changed in mutations(AZURE_2023.replace("\n", "\r\n"), CSV_FRAGMENTS, seed=1, count=1200):
        file = TraceFile("t", changed.encode())
        try:
            header = delimited._read_header(file, names)
        except InputError:
            continue
        fast = delimited._read_whole(file, header, names, positions, None)
        try:
            slow = delimited._read_lines(file, header, names, positions, None)
        except InputError:
            assert fast is None, changed
            continue
        if fast is not None:
            accepted += 1
            assert fast.frame.equals(slow.frame), changed
            assert fast.numbers.tolist() == slow.numbers.tolist()
    assert accepted > 20


def test_fast_dates_agree_with_each_date() -> None:
    rng = random.Random(2)
    texts = ["2024-02-29 23:59:59", "1678-01-01T00:00:00.1", "2261-12-31 23:59:59.999999999"]
    for _ in range(500):
        day, month = rng.randrange(0, 33), rng.randrange(0, 14)
        clock = f"{rng.randrange(25):02}:{rng.randrange(61):02}:{rng.randrange(61):02}"
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randrange(10)))
        fraction = "." + digits if digits else ""
        year = rng.choice([1700, 1900, 2000, 2023, 2100])
        texts.append(f"{year}-{month:02}-{day:02}{rng.choice(' T')}{clock}{fraction}")
    good = [text for text in texts if nanoseconds(text) is not None]
    assert 100 < len(good) < len(texts)
    for suffix in ("", "Z", "+00:00"):
        times = plain_dates(pl.Series([text + suffix for text in good]))
        assert times.values.tolist() == [nanoseconds(text) for text in good]
    for text in set(texts) - set(good):
        assert plain_dates(pl.Series([text])) is None


def test_fast_numbers_agree_with_each_number() -> None:
    rng = random.Random(3)
    texts = [
        f"{rng.randrange(10 ** rng.randrange(1, 9))}.{rng.randrange(10 ** rng.randrange(1, 7))}"
        for _ in range(2000)
    ]
    for unit in ("s", "ms", "us", "ns"):
        times = _plain_numbers(pl.Series(texts), unit)
        assert times.values.tolist() == [milliseconds(text, unit) for text in texts]


def test_fast_pass_reads_floats_to_the_last_bit() -> None:
    rng = random.Random(4)
    texts = [repr(rng.random() * 10.0 ** rng.randrange(-5, 14)) for _ in range(2000)]
    texts += [f"{rng.randrange(10**15)}.{rng.randrange(10**9)}" for _ in range(2000)]
    rows = [line().replace("0,", f"{text},", 1) for text in texts]
    table = mooncake._read_whole(TraceFile("t", "".join(rows).encode()), ReadOptions())
    assert table.times.values.tolist() == [float(text) for text in texts]


# --- public traces --------------------------------------------------------------------------------


def public(name: str) -> Path:
    folder = os.environ.get("VECSIM_TRACES")
    if not folder:
        pytest.skip("VECSIM_TRACES does not name the folder of the public traces")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{name} is not in VECSIM_TRACES")
    return path


@pytest.mark.parametrize(
    ("name", "rows"), [("conversation_trace.jsonl", 12_031), ("synthetic_trace.jsonl", 3_993)]
)
def test_public_mooncake_traces(name, rows) -> None:
    path = public(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        workload = read_trace(path)
    authored = [json.loads(text) for text in path.read_text().splitlines()]
    assert len(workload) == rows
    assert workload.input_length.tolist() == [row["input_length"] for row in authored]
    assert workload.arrival_ms.tolist() == [float(row["timestamp"]) for row in authored]
    assert np.diff(workload.block_offsets).tolist() == [len(row["hash_ids"]) for row in authored]
    same(workload, read_trace(path, time_unit="ms", format="mooncake"))
    numbers: dict[tuple[int, ...], int] = {}
    tree = workload.prefix_tree(64)
    for row in range(0, rows, 40):
        ids = authored[row]["hash_ids"]
        path_nodes = tree.nodes[tree.offsets[row] : tree.offsets[row + 1]].tolist()
        for depth, node in enumerate(path_nodes, 1):
            assert numbers.setdefault(tuple(ids[:depth]), node) == node


def test_public_azure_trace() -> None:
    workload = read_trace(public("AzureLLMInferenceTrace_code.csv"))
    assert len(workload) == 8_819
    assert workload.arrival_ms[:3].tolist() == [0.0, 52.0, 98.189]
    assert workload.input_length[:3].tolist() == [4808, 3180, 110]
    assert workload.output_length[-1] == 173


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [MOONCAKE, AZURE_2023])
def test_blank_lines_cost_no_more_than_their_bytes(tmp_path, text, monkeypatch) -> None:
    """At the start, where they also hide what the file looks like, and between rows."""
    first, rest = text.split("\n", 1)
    blank = "\n" * 3_000_000
    path = write(tmp_path, gzip.compress((blank + first + "\n" + blank + rest).encode()))
    plain = read_trace(write(tmp_path, text, "plain"))
    monkeypatch.setattr(pl, "read_csv", None)  # would make a row of each of them
    tracemalloc.start()
    workload = read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(workload) == len(plain)
    assert peak < 8 * 6_000_000
    broken = path.with_name("broken")
    broken.write_text(blank + text + "x" if text is AZURE_2023 else blank + text + "{")
    with pytest.raises(InputError, match=rf"broken:{3_000_000 + text.count(chr(10)) + 1}"):
        read_trace(broken)


def raw_frame(blocks: list[bytes], size: bytes = b"", flags: int = 0) -> bytes:
    """A Zstandard frame of raw blocks; `size` and `flags` as in its header."""
    frame = b"\x28\xb5\x2f\xfd" + bytes([flags]) + (b"" if flags & 32 else b"\x58") + size
    for k, block in enumerate(blocks):
        frame += (len(block) << 3 | (k == len(blocks) - 1)).to_bytes(3, "little") + block
    return frame


SKIPPED = b"\x50\x2a\x4d\x18\x02\0\0\0ab"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(b"\n" * 5000, mtime=0), "more than 1,000 bytes when decompressed"),
        (b"\n" * 1001, "more than 1,000 bytes"),
        (raw_frame([b"\n" * 600, b"\n" * 500]), "up to 1,100 bytes when decompressed"),
        (raw_frame([b"\n" * 600] * 2, b"\xb0\x03", 0x40), "up to 1,200 bytes when decompressed"),
        (raw_frame([b"\n"], b"\xd0\x07\0\0", 0xA0), "up to 2,000 bytes when decompressed"),
        (raw_frame([b"\n" * 600]) + SKIPPED + raw_frame([b"\n" * 600]), "up to 1,200 bytes"),
        (zstd_frame(MOONCAKE.encode() * 99), "bytes when decompressed"),
    ],
    ids=["gzip", "plain", "blocks", "two bytes", "four bytes", "two frames", "stored"],
)
def test_what_does_not_fit_into_memory_is_refused(tmp_path, monkeypatch, data, message) -> None:
    monkeypatch.setattr("vecsim.traces.packed.most_bytes", lambda: 1000)
    if data[:1] == b"\n":
        monkeypatch.setattr("vecsim.traces.files.most_bytes", lambda: 1000)
    with pytest.raises(InputError, match=f"{message}.*, expected at most 1,000 bytes of text"):
        read_trace(write(tmp_path, data))
