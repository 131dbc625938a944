"""The result of a run: frames, files, and the reference's own shape."""

import json
import math
import os

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from tests.support.outcomes import cases, outcome_of, plain_payload, pool, result_of, rows_of_case
from vecsim.errors import InputError
from vecsim.results.frames import ADMISSIONS_SCHEMA, REQUESTS_SCHEMA
from vecsim.run.replay import replay

DISAGGREGATED = (
    "prefill_worker_idx",
    "prefill_worker_id",
    "prefill_dp_rank_used",
    "prefill_admit_ms",
    "source_held_ms",
    "destination_reserved_ms",
    "destination_activated_ms",
    "decode_admit_ms",
    "source_released_ms",
    "decode_reused_input_tokens",
    "prefill_route_overlap_tokens",
    "decode_route_overlap_tokens",
)

ROWS = [
    {
        "request_id": "b",
        "arrival_ms": 0.0,
        "first_admit_ms": 1.0,
        "first_token_ms": 11.0,
        "second_token_ms": 21.0,
        "last_token_ms": 51.0,
        "terminal_ms": 51.0,
        "output_length": 5,
        "asked": 9,
        "reason": "length",
        "input_length": 600,
        "reused_input_tokens": 512,
        "first_reused_input_tokens": 64,
        "admissions": 3,
        "readmissions": [(25.0, 512), (35.0, 128)],
        "rank": 3,
        "metadata": {"priority": 2},
    },
    {
        "request_id": "ä",
        "arrival_ms": 2.0,
        "terminal_ms": 3.0,
        "status": "rejected",
        "reason": "prompt_exceeds_kv_capacity",
        "asked": 4,
        "input_length": 99999,
        "rank": 2,
    },
    {
        "request_id": "a",
        "arrival_ms": 4.0,
        "first_admit_ms": 5.0,
        "first_token_ms": 6.0,
        "last_token_ms": 6.0,
        "status": "unfinished",
        "output_length": 1,
        "asked": 8,
        "input_length": 10,
        "admissions": 1,
        "rank": 0,
    },
    {"request_id": "z", "status": "not_arrived", "rank": -1, "asked": 1, "input_length": 1},
]


@pytest.fixture
def result():
    return result_of(ROWS, pools=(pool(workers=2, dp_size=2),))


def test_requests_has_one_row_per_request_in_workload_order(result):
    frame = result.requests
    assert dict(frame.schema) == REQUESTS_SCHEMA
    assert frame["request_id"].to_list() == ["b", "ä", "a", "z"]
    assert frame["terminal_status"].to_list() == [
        "completed",
        "rejected",
        "unfinished",
        "not_arrived",
    ]
    assert frame["terminal_reason"].to_list() == [
        "length",
        "prompt_exceeds_kv_capacity",
        None,
        None,
    ]
    assert frame["requested_output_length"].to_list() == [9, 4, 8, 1]
    assert frame["output_length"].to_list() == [5, 0, 1, 0]
    assert frame["readmission_count"].to_list() == [2, 0, 0, 0]
    assert frame["metadata"].to_list() == ['{"priority": 2}', None, None, None]


def test_undefined_is_null_and_never_nan(result):
    frame = result.requests
    assert frame["arrival_time_ms"].to_list() == [0.0, 2.0, 4.0, None]
    assert frame["first_admit_ms"].to_list() == [1.0, None, 5.0, None]
    assert frame["terminal_time_ms"].to_list() == [51.0, 3.0, None, None]
    assert frame["tokenized_ms"].null_count() == len(ROWS)
    for name, dtype in REQUESTS_SCHEMA.items():
        if dtype == pl.Float64:
            assert not frame[name].is_nan().any(), name
    for name in DISAGGREGATED:
        assert frame[name].null_count() == len(ROWS), name


def test_latencies_cover_completed_requests_only(result):
    frame = result.requests
    assert frame["ttft_ms"].to_list() == [11.0, None, None, None]
    assert frame["ttst_ms"].to_list() == [10.0, None, None, None]
    assert frame["tpot_ms"].to_list() == [10.0, None, None, None]
    assert frame["e2e_latency_ms"].to_list() == [51.0, None, None, None]
    assert frame["first_token_ms"].to_list() == [11.0, None, 6.0, None]
    assert frame["ttft_ms"].mean() == result.report["mean_ttft_ms"]


def test_worker_and_rank_come_from_the_scheduler_id(result):
    frame = result.requests
    assert frame["decode_worker_idx"].to_list() == [3, 2, 0, None]
    assert frame["decode_worker_id"].to_list() == [1, 1, 0, None]
    assert frame["decode_dp_rank_used"].to_list() == [1, 0, 0, None]


def test_tokenized_times_are_shown_when_the_run_has_them():
    frame = result_of(ROWS, tokenized_ms=np.array([0.5, 2.5, np.nan, np.nan])).requests
    assert frame["tokenized_ms"].to_list() == [0.5, 2.5, None, None]


def test_admissions_are_ordered_by_request_and_time(result):
    frame = result.admissions
    assert dict(frame.schema) == ADMISSIONS_SCHEMA
    assert frame.rows() == [
        (0, "agg", 1, 1, 1.0, 64),
        (0, "agg", 1, 1, 25.0, 512),
        (0, "agg", 1, 1, 35.0, 128),
        (2, "agg", 0, 0, 5.0, 0),
    ]


def test_an_empty_workload_keeps_the_full_schema(tmp_path):
    result = result_of([])
    assert dict(result.requests.schema) == REQUESTS_SCHEMA
    assert dict(result.admissions.schema) == ADMISSIONS_SCHEMA
    assert result.requests.height == result.admissions.height == 0
    result.write(tmp_path)
    assert dict(pl.read_parquet(tmp_path / "requests.parquet").schema) == REQUESTS_SCHEMA
    assert result.reference_report()["per_request"] == []


def test_session_columns_of_a_trace():
    rows = [
        {"status": "not_arrived", "rank": -1, "session_id": f"request_{i}", "turn_index": i - 1}
        for i in range(3)
    ]
    frame = result_of(rows).requests
    assert frame["session_id"].to_list() == ["request_0", "request_1", "request_2"]
    assert frame["turn_index"].to_list() == [None, 0, 1]
    assert frame["request_id"].null_count() == 3


@pytest.mark.parametrize("file", ["report", "vllm", "runtime", "mooncake"])
def test_requests_equal_the_reference_records(file):
    compared = 0
    for case in cases(file):
        expect = case["expect"]
        if not expect["ok"] or "disaggregated" in case["feature"]:
            continue
        spec = case["payload"].get("spec", case["payload"])
        dp_size = spec.get("engine", {}).get("dp_size", 1)
        workers = spec["topology"]["workers"]["initial_workers"]
        result = result_of(
            rows_of_case(case), case["payload"], pools=(pool(workers=workers, dp_size=dp_size),)
        )
        admissions = result.admissions.rows_by_key("request")
        for index, record in enumerate(expect["requests"]):
            row = result.requests.row(index, named=True)
            for name in ("ttft_ms", "tpot_ms", "e2e_latency_ms", "first_admit_ms"):
                assert row[name] == record[name], (case["name"], name)
            for name in ("reused_input_tokens", "admission_count", "readmission_count"):
                assert row[name] == record[name], (case["name"], name)
            routed = ("agg", row["decode_worker_id"], row["decode_dp_rank_used"])
            assert [list(routed)] == record["routing"], case["name"]
            history = [[pool, at, reused] for pool, _, _, at, reused in admissions.get(index, [])]
            assert history == record["admission_history"], case["name"]
            compared += 1
    assert compared >= 50


def test_reference_report_has_the_reference_shape(result):
    report = result.reference_report()
    assert [record["request_id"] for record in report["per_request"]] == ["b", "ä"]
    record = report["per_request"][0]
    assert record["itl_ms"] == 10.0
    assert record["uuid"] == "00000000-0000-0000-0000-000000000001"
    assert record["metadata"] == {"priority": 2}
    assert "metadata" not in report["per_request"][1]
    assert not {"tpot_ms", "terminal_reason", "decode_worker_id"} & record.keys()
    assert record["admission_history"][1] == {
        "admission_ordinal": 1,
        "pool_admission_ordinal": 1,
        "pool": "agg",
        "at_ms": 25.0,
        "reused_input_tokens": 512,
        "is_readmission": True,
    }
    assert record["routing_history"][0]["scheduler_id"] == 3
    assert record["routing_history"][0]["logical_worker_id"] == 1
    assert report["p99_tpot_ms"] == 10.0
    assert report["p99_itl_ms"] == 0.0
    assert report["wall_time_ms"] == 2.0
    assert report["processed_tokens_per_s"] == 605 / 0.002
    assert report["power_w"] is None
    assert "backlog_growing" not in report


def test_reference_report_without_records():
    report = result_of(ROWS, plain_payload(record_per_request=False)).reference_report()
    assert "per_request" not in report


def test_reference_report_with_bounds():
    report = result_of(ROWS, plain_payload(sla={"ttft_ms": 11.0})).reference_report()
    assert report["goodput_completed_requests"] == 1
    assert "goodput_ratio" not in report


def test_report_holds_simulated_facts_only(result):
    assert not [name for name in result.report if "wall" in name or name.endswith("_per_s")]


@pytest.mark.parametrize(
    ("form", "read"),
    [("parquet", pl.read_parquet), ("csv", pl.read_csv), ("jsonl", pl.read_ndjson)],
)
def test_written_requests_read_back_equal(result, tmp_path, form, read):
    folder = result.write(tmp_path / "deep" / "out", requests_format=form)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "report.json",
        f"requests.{form}",
    ]
    back = read(folder / f"requests.{form}")
    if form != "parquet":
        back = back.select(*REQUESTS_SCHEMA).cast(dict(REQUESTS_SCHEMA))
    assert back.equals(result.requests, null_equal=True)


def test_written_report_is_strict_json(result, tmp_path):
    result.report["made_up"] = math.nan
    folder = result.write(tmp_path)
    text = (folder / "report.json").read_text()
    assert "NaN" not in text
    assert json.loads(text) == {**result.report, "made_up": None}


def test_equal_results_write_equal_bytes(tmp_path):
    for name in ("one", "two"):
        result_of(ROWS).write(tmp_path / name, requests_format="csv")
    for name in ("requests.csv", "report.json", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_effective_config_echoes_defaults(result):
    config = result.effective_config
    assert config["payload"]["spec"]["engine"]["rank"]["num_gpu_blocks"] == 16384
    assert "requests" not in config["payload"]["spec"]
    assert config["defaulted"] == ["engine"]
    assert config["roles"][0]["block_tokens"] == 64
    assert config["workload"] == {"requests": 4}
    assert json.loads(json.dumps(config)) == config


def test_a_second_run_does_not_overwrite(result, tmp_path):
    result.write(tmp_path)
    before = (tmp_path / "report.json").read_bytes()
    other = result_of([])
    with pytest.raises(InputError, match=r"config\.json"):
        other.write(tmp_path, requests_format="csv")
    assert (tmp_path / "report.json").read_bytes() == before
    other.write(tmp_path, requests_format="csv", overwrite=True)
    assert json.loads((tmp_path / "report.json").read_text())["workload_requests"] == 0
    assert sorted(os.listdir(tmp_path)) == ["config.json", "report.json", "requests.csv"]


def test_other_files_of_the_folder_are_left_alone(result, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result.write(tmp_path)
    result.write(tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_write_leaves_nothing(result, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pl.DataFrame, "write_parquet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        result.write(tmp_path / "new" / "out")
    assert os.listdir(tmp_path) == []


def test_write_refuses_a_file_and_an_unknown_format(result, tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(InputError, match="taken"):
        result.write(tmp_path / "taken")
    with pytest.raises(InputError, match="xlsx"):
        result.write(tmp_path / "new", requests_format="xlsx")
    assert os.listdir(tmp_path) == ["taken"]


def _printed(result) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(result.summary())
    return "\n".join(line.strip() for line in capture.get().splitlines())


def test_summary_shows_numbers_with_units():
    text = _printed(result_of(ROWS))
    ttft = next(line for line in text.splitlines() if line.startswith("TTFT"))
    assert ttft.split() == ["TTFT", "ms", *["11.000"] * 5]
    assert "reuse ratio" in text
    assert "0.85333" in text
    rejected = next(line for line in text.splitlines() if line.startswith("rejected"))
    assert rejected.split() == ["rejected", "requests", "1"]
    assert "prompt exceeds kv capacity" in text


def test_summary_of_nothing_completed_has_counts():
    rows = [{"arrival_ms": 0.0, "terminal_ms": 1.0, "status": "rejected"}]
    text = _printed(result_of(rows))
    assert "TTFT" not in text
    assert "rejected" in text


def test_repr_is_short(result):
    assert repr(result) == "Result(1 of 4 completed, mean TTFT 11.000 ms, duration 51.000 ms)"
    assert repr(result_of([])) == "Result(0 of 0 completed)"


def test_a_million_rows_make_a_report_and_a_frame_quickly():
    n = 1_000_000
    small = outcome_of(ROWS[:1])
    columns = {
        name: np.tile(value, n)
        for name, value in vars(small).items()
        if isinstance(value, np.ndarray) and not name.startswith("readmission")
    }
    result = result_of(ROWS[:1], **columns, **_no_readmissions())
    workload = result.workload
    workload.input_length = np.tile(workload.input_length, n)
    workload.output_length = np.tile(workload.output_length, n)
    workload.request_id, workload.metadata = None, None
    assert result.report["completed_requests"] == n
    assert result.report["total_output_tokens"] == 5 * n
    assert result.requests.height == n
    assert result.requests["ttft_ms"].mean() == 11.0


def _no_readmissions() -> dict:
    return {
        "readmission_request": np.zeros(0, dtype=np.int32),
        "readmission_at_ms": np.zeros(0),
        "readmission_reused": np.zeros(0, dtype=np.int32),
    }


@pytest.mark.parametrize(
    ("interval", "cap", "growing"), [(5.0, None, True), (20.0, None, False), (5.0, 4, None)]
)
def test_backlog_of_a_replay_at_twice_and_half_the_service_rate(interval, cap, growing):
    fixed = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
    requests = [
        {"id": f"r{i}", "arrival_time_ms": i * interval, "input_tokens": 9, "output_tokens": 1}
        for i in range(100)
    ]
    spec = plain_payload(
        engine={"rank": {"max_num_seqs": 1, "timing_model": fixed}},
        requests=requests,
        max_in_flight=cap,
    )
    report = replay(spec).report
    assert report["backlog_growing"] is growing
    assert report["completed_requests"] == 100
