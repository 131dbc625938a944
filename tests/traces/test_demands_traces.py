"""Trace files as users have them: a test per demand, named after the public issue."""

from __future__ import annotations

import gzip
import re

import numpy as np
import pytest

import vecsim
from tests.support.trace_text import AZURE_2023, SAMPLES, line, write, zstd_frame
from vecsim.errors import InputError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def fleet(block_size: int) -> dict:
    return {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "engine": {"rank": {"block_size": block_size, "num_gpu_blocks": 4096}},
        "requests": [],
    }


def read(folder, text: str | bytes, **options) -> vecsim.Workload:
    return vecsim.read_trace(write(folder, text), **options)


@pytest.mark.parametrize(
    ("unit", "times"),
    [
        ("s", ["0.0105", "1.25", "7"]),
        ("ms", ["10.5", "1250", "7000"]),
        ("us", ["10500", "1250000", "7e6"]),
        ("ns", ["10500000", "1250000000", "7000000000"]),
    ],
)
def test_time_unit_and_block_size_are_parameters__vllm_39795(tmp_path, unit, times) -> None:
    row = '{{"timestamp": {}, "input_length": 30, "output_length": 1, "hash_ids": [1, 2]}}\n'
    text = "".join(map(row.format, times))
    workload = read(tmp_path, text, time_unit=unit, block_size=16)
    assert workload.arrival_ms.tolist() == [0.0, 1239.5, 6989.5]
    assert workload.origin.unit == unit
    assert workload.origin.block_size == 16
    with pytest.raises(InputError, match="time_unit: got 'min'"):
        read(tmp_path, text, time_unit="min")


def test_hashes_must_cover_the_prompt__guidellm_948(tmp_path) -> None:
    with pytest.raises(InputError, match=r":1, input_length: got 513, expected at most 512"):
        read(tmp_path, line(input_length=513, hash_ids=[1]))
    assert read(tmp_path, line(input_length=513, hash_ids=[1, 2])).input_length.tolist() == [513]


@pytest.mark.parametrize("time", ["NaN", "Infinity", "1e999", '"soon"', '"inf"', "[1]"])
def test_arrivals_that_are_no_numbers__aisimulate_183(tmp_path, time) -> None:
    text = line() + line().replace('"timestamp": 0', f'"timestamp": {time}')
    with pytest.raises(InputError, match=r"trace.jsonl:2"):
        read(tmp_path, text)


def test_missing_arrivals_are_zero__aisimulate_289(tmp_path) -> None:
    """Where only some are missing they count as 0 too (reference: traffic, section 2.3)."""
    for missing in (line(timestamp=None), line().replace("0,", "null,", 1)):
        assert read(tmp_path, missing * 2).arrival_ms.tolist() == [0.0, 0.0]
        assert read(tmp_path, missing + line(timestamp=40)).arrival_ms.tolist() == [0.0, 40.0]


@pytest.mark.parametrize("name", ["azure", "mooncake", "burstgpt", "vidur", "splitwise"])
def test_public_formats_are_read_by_one_call__inference_perf_151(tmp_path, name) -> None:
    file, text, _ = SAMPLES[name]
    assert vecsim.read_trace(write(tmp_path, text, file)).origin.format == name


def test_partial_blocks__dynamo_10095(tmp_path) -> None:
    short = read(tmp_path, line(input_length=10) * 2, block_size=16)
    requests = vecsim.replay(fleet(16), workload=short).requests
    assert requests["reused_input_tokens"].to_list() == [0, 0]
    rows = line(input_length=300) + line(input_length=300, timestamp=9000)
    requests = vecsim.replay(fleet(64), workload=read(tmp_path, rows)).requests
    assert requests["reused_input_tokens"].to_list() == [0, 256]
    with pytest.raises(InputError, match="block_size: got 0"):
        read(tmp_path, line(), block_size=0)


@pytest.mark.parametrize(
    "data", [b"", zstd_frame(b""), gzip.compress(b"", mtime=0), b"\n \n", b"\xef\xbb\xbf"]
)
def test_empty_files__polars_23172(tmp_path, data) -> None:
    with pytest.raises(InputError, match="expected at least one request"):
        read(tmp_path, data)


def test_an_empty_list_in_the_first_row__polars_7382(tmp_path) -> None:
    workload = read(tmp_path, line(input_length=0, hash_ids=[]) + line(hash_ids=[2**63 + 5]))
    assert workload.block_offsets.tolist() == [0, 0, 1]


def test_nothing_is_inferred_from_the_first_rows__polars_13768(tmp_path) -> None:
    rows = [line(timestamp=k, hash_ids=[2**63 + k]) for k in range(150)]
    workload = read(tmp_path, "".join(rows) + line(timestamp=150.5, hash_ids=[2**64 - 1]))
    assert workload.arrival_ms[-2:].tolist() == [149.0, 150.5]
    assert len(np.unique(workload.block_ids)) == 151
    text = AZURE + "".join(f"{k},10,2\n" for k in range(150)) + "150.5,3000000000,2\n"
    with pytest.raises(InputError, match=r"trace.jsonl:152, ContextTokens: got '3000000000'"):
        read(tmp_path, text, time_unit="s")


def test_a_byte_order_mark_on_a_header__datarobot_192(tmp_path) -> None:
    assert len(read(tmp_path, "\ufeff" + AZURE_2023)) == 3


def test_milliseconds_are_milliseconds__inference_sim_bc_14(tmp_path) -> None:
    spec = fleet(16)
    timing = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 10.0}
    spec["engine"]["rank"]["timing_model"] = timing
    requests = vecsim.replay(spec, workload=read(tmp_path, line())).requests
    assert requests["ttft_ms"].to_list() == [10.0]


# --- hit while probing ----------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators(tmp_path, separator) -> None:
    plain = read(tmp_path, AZURE_2023)
    other = read(tmp_path, AZURE_2023.replace(",", separator))
    assert other.arrival_ms.tolist() == plain.arrival_ms.tolist()
    assert other.input_length.tolist() == plain.input_length.tolist()


def test_numbers_in_other_clothes(tmp_path) -> None:
    text = AZURE + '"2023-11-16 18:17:03","1000","4"\n2023-11-16 18:17:04, 1e3 ,4.0\n'
    workload = read(tmp_path, text)
    assert workload.input_length.tolist() == [1000, 1000]
    assert workload.output_length.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE + "2023-11-16 18:17:03,-1,4\n", ":2, ContextTokens: got '-1'"),
        (AZURE, "got 'a file without rows'"),
        (AZURE + "2023-11-16 18:17:03\n", ":2, ContextTokens: missing"),
        (line(input_length=-5), ":1, input_length: got -5"),
        (line(input_length=2**31), ":1, input_length: got 2147483648"),
        (AZURE.encode() + b"2023-11-16 18:17:03,\xff,4\n", ":2:21: got 'byte 0xff'"),
    ],
)
def test_what_is_no_length(tmp_path, text, message) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read(tmp_path, text)


def test_a_million_rows_at_one_instant_and_a_long_prompt(tmp_path) -> None:
    stamp = "2023-11-16 18:17:03.9799600"
    text = AZURE + f"{stamp},100,2\n" * 1_000_000 + "2023-12-16 18:17:03.98,10000000,2\n"
    workload = read(tmp_path, text)
    assert len(workload) == 1_000_001
    assert np.count_nonzero(workload.arrival_ms) == 1
    assert workload.arrival_ms[-1] == 30 * 86_400_000 + 0.04
    assert workload.input_length[-1] == 10_000_000
