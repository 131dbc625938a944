"""Malformed traces and arguments: one line that names place, value and expectation."""

from __future__ import annotations

import gzip
import re

import pytest

from tests.support.trace_text import AZURE_2023, MOONCAKE, line, write, zstd_frame
from vecsim.errors import InputError
from vecsim.traces import read_trace

OK = line()
ROW = '{"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]}'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DATE = "2023-11-16 18:17:03"
MALFORMED = {
    # syntax
    "truncated row": (OK + OK + '{"timestamp": 2, "inp\n', ":3:22: got 'the end of the text'"),
    "truncated without newline": (OK + ROW[:-1], ":2:74: got 'the end of the text'"),
    "NaN": (ROW.replace("0,", "NaN,", 1), ":1:15: got 'NaN, "),
    "Infinity": (ROW.replace("0,", "Infinity,", 1), ":1:15: got 'Infinity"),
    "trailing comma": (ROW.replace("}", ",}"), ":1:75: got '}'"),
    "two rows on a line": (OK + ROW + ROW, ":2:76: got '"),
    "no comma between rows of an array": (f"[{ROW}\n{ROW}]", ":2:1: got '{"),
    "unfinished array": (f"[{ROW},\n{ROW}", ":2:75: got 'the end of the text'"),
    "leading zero": (ROW.replace("100", "0100"), ":1:35: got '100, "),
    "scalar row": (OK + "5\n", ":2: got '5', expected a JSON object"),
    "array row": (OK + "[1, 2]\n", ":2: got '[1, 2]', expected a JSON object"),
    "scalar in an array": (f"[{ROW}, 5]", ", item 2: got '5', expected a JSON object"),
    "not UTF-8": (OK.encode() + b'{"x": "\xff"}', ":2:8: got 'byte 0xff', expected UTF-8 text"),
    "UTF-16": (ROW.encode("utf-16"), ":1:1: got 'byte 0xff', expected UTF-8 text"),
    "deep nesting": (ROW[:-1] + ', "x": ' + "[" * 9999 + "]" * 9999 + "}", ":1: got 'deeply"),
    # fields
    "no output_length": (OK + line(output_length=None), ":2, output_length: missing, expected a"),
    "null output_length": (ROW.replace("3", "null"), ":1, output_length: missing"),
    "no lengths at all": (line(input_length=None, hash_ids=None), ":1, input_length: missing"),
    "name and alias": (line(input_tokens=100), ":1, input_tokens: got 100, expected only one of"),
    "alias of time": (line(created_time=100), ":1, created_time: got"),
    "field twice": (ROW[:-1] + ', "hash_ids": [2]}', ":1, hash_ids: got [2], expected the field"),
    "negative length": (OK + line(input_length=-5), ":2, input_length: got -5, expected a whole"),
    "fractional length": (line(output_length=1.5), ":1, output_length: got 1.5"),
    "text length": (line(output_length="many"), ":1, output_length: got 'many'"),
    "boolean length": (line(output_length=True), ":1, output_length: got True"),
    "length above 32 bits": (line(output_length=2**31), ":1, output_length: got 2147483648"),
    "default length above 32 bits": (
        line(input_length=None, hash_ids=[1] * 4_194_304),
        ":1, input_length: got 2147483648, expected a whole number of tokens from 0 to 2147483647",
    ),
    "above the hash ids": (OK + line(input_length=1025, hash_ids=[1, 2]), ":2, input_length: got"),
    "empty hash ids": (line(hash_ids=[]), ":1, input_length: got 100, expected at most 0"),
    "negative hash id": (OK + line(hash_ids=[3, -1]), ":2, hash_ids[1]: got -1, expected whole"),
    "fractional hash id": (line(hash_ids=[1.5]), ":1, hash_ids[0]: got 1.5"),
    "text hash id": (line(hash_ids=["1"]), ":1, hash_ids[0]: got '1'"),
    "null hash id": (line(hash_ids=[1, None]), ":1, hash_ids[1]: got None"),
    "boolean hash id": (line(hash_ids=[True]), ":1, hash_ids[0]: got True"),
    "hash id above 64 bits": (line(hash_ids=[2**64]), ":1, hash_ids[0]: got 18446744073709551616"),
    "one hash id, no list": (line(hash_ids=1), ":1, hash_ids: got 1, expected a list of whole"),
    "output ids of another length": (
        line(output_token_ids=[1, 2]),
        ":1, output_token_ids: got '2 ids', expected 3, as output_length says",
    ),
    "output id above 32 bits": (line(output_token_ids=[1, 2, 2**32]), ":1, output_token_ids[2]"),
    "infinite time": (ROW.replace("0,", "1e999,", 1), ":1, timestamp: got '1e999', expected a"),
    "text time": (
        line(timestamp="noon"),
        ":1, timestamp: got 'noon', expected a finite number, or",
    ),
    "NaN as text": (line(timestamp="NaN"), ":1, timestamp: got 'NaN'"),
    "boolean time": (line(timestamp=True), ":1, timestamp: got 'true'"),
    "impossible date": (line(timestamp="2023-02-30 00:00:00"), ":1, timestamp: got '2023-02-30"),
    "date after number": (OK + line(timestamp="2023-02-03 00:00:00"), ":2, timestamp: got '2023"),
    "no date after date": (
        line(timestamp="2023-02-03 00:00:00") + line(timestamp=None),
        ":2, timestamp: missing, expected dates in all rows or in none",
    ),
    "text delay": (line(delay="x"), ":1, delay: got 'x', expected a finite number"),
    "session no text": (line(session_id=5), ":1, session_id: got 5, expected a string"),
    "request id no text": (line(request_id=5), ":1, request_id: got 5, expected a string"),
    "priority out of range": (line(priority=2**31), ":1, priority: got 2147483648"),
    "fractional priority": (line(strict_priority=0.5), ":1, strict_priority: got 0.5"),
    # Azure
    "missing column": ("TIMESTAMP,ContextTokens\n", ":1: got 'TIMESTAMP,ContextTokens', expected"),
    "column twice": (HEADER.replace("\n", ",TIMESTAMP\n"), ":1: got 'TIMESTAMP,"),
    "other separator": (HEADER.replace(",", "|"), ":1: got 'TIMESTAMP|ContextTokens"),
    "too many fields": (f"{HEADER}{DATE},1,2,3\n", ":2: got '4 fields', expected at most 3"),
    "too few fields": (f"{HEADER}{DATE},1\n", ":2, GeneratedTokens: missing"),
    "empty field": (f"{HEADER}{DATE},,1\n", ":2, ContextTokens: missing"),
    "negative tokens": (f"{HEADER}{DATE},5,1\n{DATE},-5,1\n", ":3, ContextTokens: got '-5'"),
    "text tokens": (f"{HEADER}{DATE},5,x\n", ":2, GeneratedTokens: got 'x'"),
    "NaN tokens": (f"{HEADER}{DATE},NaN,1\n", ":2, ContextTokens: got 'NaN'"),
    "tokens above 32 bits": (f"{HEADER}{DATE},5,2147483648\n", ":2, GeneratedTokens: got '21474"),
    "month 13": (f"{HEADER}2023-13-16 18:17:03,5,1\n", ":2, TIMESTAMP: got '2023-13-16 18:17:03'"),
    "no time": (f"{HEADER},5,1\n", ":2, TIMESTAMP: missing, expected an ISO 8601 date and time"),
    "truncated date": (f"{HEADER}{DATE},5,1\n2023-11", ":3, TIMESTAMP: got '2023-11'"),
    # whole files
    "empty": ("", ": got 'an empty file', expected at least one request"),
    "blank": ("\n \n", ": got 'an empty file'"),
    "mark only": ("\ufeff", ": got 'an empty file'"),
    "empty array": ("[]", ": got 'a file without rows', expected at least one request"),
    "header only": (HEADER, ": got 'a file without rows'"),
    "empty zstd": (zstd_frame(b""), ": got 'an empty file'"),
    "empty gzip": (gzip.compress(b""), ": got 'an empty file'"),
    "cut gzip": (gzip.compress(OK.encode())[:-9], ": got 'Compressed file ended before"),
    "damaged gzip": (gzip.compress(OK.encode())[:-8] + b"x" * 8, ": got 'CRC check failed"),
    "cut zstd": (zstd_frame(OK.encode())[:-9], "expected a complete Zstandard stream"),
    "zstd of other bytes": (zstd_frame(b"\xff\xff\n"), "Zstandard stream of UTF-8 text"),
    "unknown format": ("hello\nworld\n", ":1: got 'hello', expected a trace in one of the"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_answered_in_one_line(tmp_path, name) -> None:
    data, message = MALFORMED[name]
    with pytest.raises(InputError) as caught:
        read_trace(write(tmp_path, data))
    assert message in str(caught.value)
    assert str(tmp_path / "trace.jsonl") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"format": "azur"},
            "format: got 'azur', expected one of auto, agentic_mooncake, dynamo, weka,",
        ),
        ({"time_unit": "minutes"}, "time_unit: got 'minutes', expected one of s, ms, us, ns"),
        ({"block_size": 0}, "block_size: got 0, expected a whole number, 1 or more"),
        ({"block_size": 1.5}, "block_size: got 1.5"),
        ({"limit": -1}, "limit: got -1, expected a whole number, 0 or more"),
        ({"arrival_speedup_ratio": 0}, "arrival_speedup_ratio: got 0, expected a finite number"),
        ({"arrival_speedup_ratio": float("nan")}, "arrival_speedup_ratio: got nan"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read_trace(write(tmp_path, MOONCAKE), **arguments)


def test_unreadable_paths(tmp_path) -> None:
    with pytest.raises(InputError, match=r"trace file: got .*, expected a readable file \("):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match=r"trace folder: got .*, expected a folder that holds"):
        read_trace(tmp_path)
    with pytest.raises(InputError, match=r"trace files: got .*, expected a pattern"):
        read_trace(tmp_path / "*.jsonl")
    with pytest.raises(InputError, match=r"path: got \[\], expected at least one file"):
        read_trace([])


def test_a_named_format_is_not_guessed(tmp_path) -> None:
    with pytest.raises(InputError, match=r"trace.jsonl:1: got"):
        read_trace(write(tmp_path, MOONCAKE), format="azure")
    with pytest.raises(InputError, match=r"trace.jsonl:1:1: got 'TIMESTAMP"):
        read_trace(write(tmp_path, AZURE_2023), format="mooncake")
