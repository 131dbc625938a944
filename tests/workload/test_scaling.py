"""Scaling helpers, windows of metrics, and `vecsim trace`."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import polars as pl
import pytest

import vecsim
from tests.support.trace_text import AGENTIC_HEADER, SAMPLES, agentic, edge, line, write
from tests.traces.test_formats import assert_equal
from vecsim.errors import InputError
from vecsim.workload.describe import describe, quantiles

FLEET = {"topology": {"kind": "aggregated", "workers": {"initial_workers": 1}}, "requests": []}
_POOLS = {name: {"initial_workers": 1} for name in ("prefill", "decode")}
POOLS = {"topology": {"kind": "disaggregated", **_POOLS}, "requests": []}


def read(folder, *rows: str, **options) -> vecsim.Workload:
    return vecsim.read_trace(write(folder, "".join(rows)), **options)


# --- arrivals -------------------------------------------------------------------------------------


def test_arrivals_are_moved_to_zero_unless_told_otherwise(tmp_path) -> None:
    """inference-sim#1183: a window that starts at hour 9."""
    rows = [line(timestamp=32_400_000), line(timestamp=32_400_010)]
    assert read(tmp_path, *rows).arrival_ms.tolist() == [0.0, 10.0]
    kept = read(tmp_path, *rows, rebase=False).arrival_ms
    assert kept.tolist() == [32_400_000.0, 32_400_010.0]


def test_speed_scales_gaps_not_positions(tmp_path) -> None:
    """guidellm#620."""
    rows = [line(timestamp=t) for t in (5000, 5010, 5030)]
    assert read(tmp_path, *rows, arrival_speedup_ratio=2.0).arrival_ms.tolist() == [0.0, 5.0, 15.0]
    assert read(tmp_path, *rows).speedup(2.0).arrival_ms.tolist() == [0.0, 5.0, 15.0]


def test_all_rows_in_order_by_default(tmp_path) -> None:
    """aiperf#273."""
    rows = [line(timestamp=k, input_length=k + 1) for k in range(25)]
    assert read(tmp_path, *rows).input_length.tolist() == list(range(1, 26))
    assert len(read(tmp_path, *rows, limit=7)) == 7


def test_rows_are_independent_without_a_session_column(tmp_path) -> None:
    """guidellm#1113: three rows at 0 all start at 0."""
    workload = read(tmp_path, *[line(hash_ids=[k]) for k in range(3)])
    assert workload.sessions is None
    requests = vecsim.replay(FLEET, workload=workload).requests
    assert requests["first_admit_ms"].to_list() == [0.0, 0.0, 0.0]


def test_open_loop_arrivals_never_wait(tmp_path) -> None:
    """dynamo#13897: with passes of 10 ms the second request still arrives at 1."""
    engine = {"rank": {"timing_model": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 10.0}}}
    workload = read(tmp_path, line(), line(timestamp=1, hash_ids=[2]))
    requests = vecsim.replay({**FLEET, "engine": engine}, workload=workload).requests
    assert requests["arrival_time_ms"].to_list() == [0.0, 1.0]
    assert requests["first_admit_ms"].to_list() == [0.0, 10.0]


def test_a_rate_is_reached(tmp_path) -> None:
    workload = read(tmp_path, *[line(timestamp=t) for t in (0, 100, 600)])
    scaled = workload.rescale_rate(8.0)
    assert 2 * 1000.0 / np.ptp(scaled.arrival_ms) == pytest.approx(8.0, rel=1e-12)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="requests_per_s: got"):
            workload.rescale_rate(rate)
    with pytest.raises(InputError, match="arrivals are spread in time"):
        read(tmp_path, line(), line()).rescale_rate(3.0)


# --- rows -----------------------------------------------------------------------------------------


def test_a_window_of_time(tmp_path) -> None:
    workload = read(tmp_path, *[line(timestamp=t, hash_ids=[t]) for t in (0, 100, 200, 300)])
    part = workload.window(100, 300)
    assert part.arrival_ms.tolist() == [0.0, 100.0]
    assert part.block_ids.tolist() == [1, 2]
    assert part.session_id.to_list() == ["request_2", "request_3"]
    empty = workload.window(5000, 6000)
    assert len(empty) == 0
    requests = vecsim.replay(FLEET, workload=empty).requests
    full = vecsim.replay(FLEET, workload=workload).requests
    assert (requests.height, requests.schema) == (0, full.schema)
    with pytest.raises(InputError, match="window: got"):
        workload.window(3, 1)


def test_a_window_keeps_sessions_and_plays_whole(tmp_path) -> None:
    rows = [line(session_id="a"), line(session_id="b", timestamp=50)]
    rows += [line(session_id=name, timestamp=900) for name in "ab"]
    part = read(tmp_path, *rows).window(10, 100)
    assert part.sessions.session.tolist() == [0, 0]
    assert part.sessions.turn.tolist() == [0, 1]
    assert part.sessions.delay_ms.tolist() == [0.0, 850.0]
    rows = [
        AGENTIC_HEADER,
        agentic(request_id="r", play_id="o", not_before_ms=0),
        agentic(not_before_ms=70),
        agentic(request_id="b", not_before_ms=500, dependencies=[edge()]),
    ]
    graph = read(tmp_path, *rows).window(50, 100).dependencies
    assert graph.source.tolist() == [0]
    assert graph.play_id.to_list() == ["p"]
    assert graph.not_before_ms.tolist() == [0.0, 430.0]


def test_a_limit_does_not_cut_plays(tmp_path) -> None:
    rows = [
        AGENTIC_HEADER,
        agentic(request_id="r", play_id="o"),
        agentic(),
        agentic(request_id="b", dependencies=[edge()]),
    ]
    assert read(tmp_path, *rows, limit=1).request_id.to_list() == ["r"]
    with pytest.raises(InputError, match=r"limit: got 2, .* leaves play 'p' whole"):
        read(tmp_path, *rows, limit=2)


def test_a_limit_cuts_sessions_after_a_turn(tmp_path) -> None:
    rows = [line(session_id="a"), line(session_id="b"), line(session_id="a", timestamp=9)]
    workload = read(tmp_path, *rows)
    assert workload.limit(2).sessions.turn.tolist() == [0, 0]
    assert workload.limit(2).sessions.single


# --- windows of metrics ---------------------------------------------------------------------------


@pytest.mark.parametrize("fleet", [FLEET, POOLS], ids=["aggregated", "disaggregated"])
@pytest.mark.parametrize("observe", [None, "kv_events"])
def test_warm_up_and_cool_down_are_left_out_of_the_metrics(fleet, observe) -> None:
    workload = vecsim.synthesize(
        40,
        input_tokens=600,
        output_tokens=8,
        arrivals={"kind": "constant", "rate": 10.0},
    )
    whole = vecsim.replay(fleet, workload=workload)
    windows = {"warmup_ms": 1000.0, "cooldown_ms": 900.0}
    part = vecsim.replay(fleet, workload=workload, observe=observe, **windows)
    assert part.requests.equals(whole.requests)
    rows = whole.requests[10:31]
    report = part.report
    assert report["workload_requests"] == report["completed_requests"] == 21
    assert report["excluded_requests"] == 19
    assert report["mean_ttft_ms"] == pytest.approx(rows["ttft_ms"].mean(), rel=1e-12)
    assert report["total_output_tokens"] == 21 * 8
    assert report["duration_ms"] == pytest.approx(rows["terminal_time_ms"].max() - 1000.0)
    gaps = (rows["last_token_ms"] - rows["first_token_ms"]).sum() / (21 * 7)
    assert report["mean_itl_ms"] == pytest.approx(gaps, rel=1e-9)
    assert "excluded_requests" not in whole.report
    for bad in (-1.0, float("nan")):
        with pytest.raises(InputError, match="warmup_ms: got"):
            vecsim.replay(fleet, workload=workload, warmup_ms=bad)


# --- vecsim trace ---------------------------------------------------------------------------------


def command(*arguments: object) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "vecsim", "trace", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True)


def test_facts_about_a_workload(tmp_path) -> None:
    rows = [
        line(timestamp=0, input_length=600, hash_ids=[1, 2]),
        line(timestamp=250, input_length=700, hash_ids=[1, 2]),
        line(timestamp=1000, input_length=100, hash_ids=[9], output_length=7),
    ]
    facts = describe(read(tmp_path, *rows))
    assert (facts["requests"], facts["span_s"], facts["mean_rate_rps"]) == (3, 1.0, 2.0)
    assert facts["peak_rate_rps"] == 2.0
    assert facts["input_tokens"]["median"] == 600
    assert facts["gap_ms"]["max"] == 750.0
    assert facts["shareable_input_ratio"] == 700 / 1400
    assert (facts["format"], facts["time_unit"], facts["block_size"]) == ("mooncake", "ms", 512)
    assert quantiles(np.array([3, 1, 2, 4]))["median"] == 3
    assert describe(read(tmp_path, *rows).limit(0))["input_tokens"] is None


def test_info_prints_a_table_or_json(tmp_path) -> None:
    file, text, _ = SAMPLES["burstgpt"]
    path = write(tmp_path, text + "130,GPT-4,9,0,9,API log\n", file)
    shown = command("info", path)
    assert shown.returncode == 0
    assert "burstgpt" in shown.stdout
    assert "1: failed in the source" in shown.stdout
    assert "1 rows dropped" in shown.stderr
    facts = json.loads(command("info", path, "--format", "json").stdout)
    assert facts["requests"] == 3
    assert facts["dropped"] == {"failed in the source (no Response tokens)": 1}


def test_convert_and_its_options(tmp_path) -> None:
    path = write(tmp_path, "t_us,in,out\n0,10,1\n500000,20,2\n900000,30,3\n", "t.csv")
    columns = ["--column", "arrival=t_us", "--column", "input_length=in"]
    columns += ["--column", "output_length=out"]
    out = tmp_path / "w.parquet"
    done = command("convert", path, out, *columns, "--window", 100, 1000, "--speedup", 2)
    assert (done.returncode, done.stderr) == (0, "")
    workload = vecsim.read_trace(out)
    assert workload.arrival_ms.tolist() == [400.0, 600.0]
    assert workload.input_length.tolist() == [20, 30]
    again = command("convert", path, out, *columns)
    assert again.returncode == 2
    assert "or --overwrite" in again.stderr
    assert command("convert", path, out, *columns, "--overwrite").returncode == 0
    assert pl.read_parquet(out).height == 3


def test_bad_options_answer_in_one_line(tmp_path) -> None:
    path = write(tmp_path, line())
    for words, message in (
        (["info", tmp_path / "absent"], "expected a readable file"),
        (["info", path, "--column", "arrival"], "--column: got 'arrival', expected NAME=COLUMN"),
        (["info", path, "--trace-format", "x"], "format: got 'x'"),
        (["convert", path, tmp_path / "o.txt"], "expected a name that ends with"),
        (["convert", path, tmp_path / "o.csv", "--rate", 0], "requests_per_s: got 0.0"),
    ):
        answer = command(*words)
        assert answer.returncode == 2
        assert message in answer.stderr
        assert answer.stderr.count("\n") == 1


def test_replaying_a_converted_trace_changes_nothing(tmp_path) -> None:
    path = write(tmp_path, "".join(line(timestamp=3 * k, hash_ids=[k % 4]) for k in range(30)))
    out = tmp_path / "w.csv"
    assert command("convert", path, out).returncode == 0
    one, other = vecsim.read_trace(path), vecsim.read_trace(out)
    assert_equal(one, other)
    first = vecsim.replay(FLEET, workload=one).report
    assert first == vecsim.replay(FLEET, workload=other).report
