"""The reference's answers for traffic: every case reads, is refused, or replays equally."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path

import pytest

from tests.support.answers import differences, from_case, from_result
from vecsim.config.load import load
from vecsim.config.schema import Payload
from vecsim.config.validate import validate
from vecsim.errors import InputError
from vecsim.run.replay import replay
from vecsim.workload.dependencies import session_cap
from vecsim.workload.workload import Workload

FOLDER = Path(__file__).parents[1] / "conformance/cases"


@cache
def cases() -> dict[str, dict]:
    files = [FOLDER / "traffic_cases.json", FOLDER / "weka_cases.json"]
    return {case["name"]: case for file in files for case in json.loads(file.read_text())["cases"]}


def workload_of(case: dict, folder: Path, monkeypatch) -> tuple[Payload, Workload]:
    """The checked payload and the workload of a case, read in a folder with its files."""
    monkeypatch.chdir(folder)
    for name, text in (case.get("files") or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, newline="")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        payload = load(case["payload"])
        validate(payload)
        return payload, Workload.from_traffic(payload.traffic, payload.spec)


@pytest.mark.parametrize("name", cases())
def test_what_the_reference_reads_is_read(name, tmp_path, monkeypatch) -> None:
    """Rows, their order, lengths, sessions and first arrivals; refusals where it refuses."""
    case = cases()[name]
    if not case["expect"]["ok"]:
        if "deviation" in case:
            workload_of(case, tmp_path, monkeypatch)
            return
        with pytest.raises(InputError) as caught:
            workload_of(case, tmp_path, monkeypatch)
        assert "\n" not in str(caught.value)
        return
    payload, workload = workload_of(case, tmp_path, monkeypatch)
    sessions, graph = workload.sessions, workload.dependencies
    for row in case["expect"]["requests"] or ():
        k = row["index"]
        assert workload.output_length[k] == row["requested_output_length"]
        if sessions is None or not sessions.accumulate:
            assert workload.input_length[k] == row["input_length"]
        if row.get("session_id") is not None:
            assert workload.session_id[k] == row["session_id"]
        if graph is None:
            assert workload.turn_index[k] == row["turn_index"]
        else:
            assert workload.request_id[k] == row["request_id"]
            assert graph.play_id[int(graph.play[k])] == row["play_id"]
        rooted = graph is not None and graph.offsets[k] == graph.offsets[k + 1]
        rooted = rooted and graph.lanes is None
        open_loop = session_cap(payload.traffic, workload) is None
        if rooted or (graph is None and row["turn_index"] == 0 and open_loop):
            assert workload.arrival_ms[k] == row["arrival_time_ms"]


READ = [name for name, case in cases().items() if case["expect"]["ok"]]


@pytest.mark.parametrize("name", READ)
def test_what_the_reference_replays_replays_equally(name, tmp_path, monkeypatch) -> None:
    case = cases()[name]
    _, workload = workload_of(case, tmp_path, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = from_result(replay(case["payload"]))
    assert differences(from_case(case["expect"], len(workload)), got) == []
