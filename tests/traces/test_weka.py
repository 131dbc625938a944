"""Weka traces: names, streams, edges, contents, times, and what is refused."""

from __future__ import annotations

import builtins
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.trace_text import weka, weka_request, write
from vecsim.errors import InputError
from vecsim.traces import read_trace
from vecsim.workload.workload import Workload

NS = "weka:45eeffc56f21a631"  # BLAKE3 of "trace.json"


def entry(t: float, api: float | None, *ids: int, **changes) -> dict:
    """A request of one token, with 16 prompt tokens for each id."""
    return weka_request(t, 16 * len(ids), list(ids), api_time=api, **{"out": 1, **changes})


def subagent(t: float, agent_id: str, *requests: dict, **changes) -> dict:
    agent = {"type": "subagent", "t": t, "agent_id": agent_id, "subagent_type": "x"}
    return {**agent, "status": "completed", "requests": list(requests), **changes}


def trace(*entries: dict, **changes) -> str:
    return weka(*entries, **{"block_size": 16, **changes})


def read(folder: Path, text: str, name: str = "trace.json", **more) -> Workload:
    return read_trace(write(folder, text, name), **more)


def edges(workload: Workload) -> dict[str, set[tuple[str, str, float]]]:
    """By request, (source, "c" or "d", delay in ms) of its edges; names without the prefix."""
    graph = workload.dependencies
    names = [name.partition(":request:outer:")[2] for name in workload.request_id]
    found = {}
    for k, name in enumerate(names):
        span = slice(graph.offsets[k], graph.offsets[k + 1])
        found[name] = {
            (names[source], "c" if on_end else "d", delay)
            for source, on_end, delay in zip(
                graph.source[span].tolist(),
                graph.on_completion[span].tolist(),
                graph.delay_ms[span].tolist(),
                strict=True,
            )
        }
    return found


def sessions(workload: Workload) -> dict[str, str]:
    names = [name.partition(":request:outer:")[2] for name in workload.request_id]
    parts = [name.partition(":session:")[2] for name in workload.session_id]
    return dict(zip(names, parts, strict=True))


SCOPE = (
    entry(0, 0.3, 90),
    entry(1, 0.5, 1, 2),
    entry(2, 4, 1, 2, 3),
    entry(2.5, 1, 1, 2, 4),
    entry(4, 1, 1, 2, 4, 5),
    entry(7, 0.5, 1, 2, 3, 6),
    entry(8, 0.5, 1, 7),
    entry(8.2, 0.2, 8),
)


def test_a_scope_is_split_into_streams(tmp_path) -> None:
    """A preamble, extensions, a fork of a running request, a seam, and a chain of its own."""
    workload = read(tmp_path, trace(*SCOPE))
    assert sessions(workload) == {
        **dict.fromkeys("01256", "root"),
        **dict.fromkeys("34", "root:worker:0"),
        "7": "root:worker:1",
    }
    assert edges(workload) == {
        "0": set(),
        "1": {("0", "c", 700.0)},
        "2": {("1", "c", 500.0)},
        "3": {("2", "d", 500.0), ("1", "c", 0.0)},
        "4": {("3", "c", 500.0), ("1", "c", 0.0)},
        "5": {("2", "c", 1000.0), ("4", "c", 0.0)},
        "6": {("5", "c", 500.0), ("4", "c", 0.0)},
        "7": {("5", "c", 0.0)},
    }
    assert workload.dependencies.not_before_ms.tolist() == [
        1000.0 * r["t"] for r in sorted(SCOPE, key=lambda r: SCOPE.index(r))
    ]


def test_subagents_are_spawned_and_joined(tmp_path) -> None:
    inner = (
        entry(0.5, 0.2, 20),
        entry(1, 2, 21, 22),
        entry(1.5, 0.5, 21, 22, 23),
        entry(3.5, 0.5, 21, 22, 24),
    )
    text = trace(
        entry(0, 1, 1, 2),
        subagent(0.5, "a", *inner, duration_ms=3500),
        entry(2, 0.5, 1, 2, 3),
        entry(5, 1, 1, 2, 3, 4) | {"api_time": 0.5},
        subagent(5.6, "b", entry(5.6, 1, 20, 30), status="async_launched"),
        entry(6, 0.5, 1, 2, 3, 4, 5),
    )
    workload = read(tmp_path, text)
    assert edges(workload) == {
        "0": set(),
        "1:inner:0": {("0", "d", 500.0)},
        "1:inner:1": {("1:inner:0", "c", 300.0)},
        "1:inner:2": {("1:inner:1", "d", 500.0), ("1:inner:0", "c", 0.0)},
        "1:inner:3": {("1:inner:1", "c", 500.0), ("1:inner:2", "c", 0.0)},
        "2": {("0", "c", 1000.0)},
        "3": {("2", "c", 2500.0), ("1:inner:3", "c", 1000.0), ("1:inner:2", "c", 3000.0)},
        "4:inner:0": {("3", "c", 100.0)},
        "5": {("3", "c", 500.0)},
    }
    assert sessions(workload)["1:inner:2"] == "subagent:1:a:worker:0"
    assert sessions(workload)["4:inner:0"] == "subagent:4:b"


def test_names_are_those_of_the_reference(tmp_path) -> None:
    workload = read(tmp_path, trace(*SCOPE[:2], id="run"))
    assert workload.request_id.to_list() == [f"{NS}:request:outer:0", f"{NS}:request:outer:1"]
    assert workload.session_id.to_list() == [f"{NS}:session:root"] * 2
    assert workload.dependencies.play_id.to_list() == [f"{NS}:play:run"]
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        data = trace(*SCOPE[:1]).encode()
        packed = gzip.compress(data) if name.endswith(".gz") else data
        numbered = read_trace(write(tmp_path, packed, name))
        assert numbered.request_id.to_list() == ["weka:69988d6b2fc67ddb:request:outer:0"]


def test_a_folder_is_a_corpus_in_the_order_of_its_paths(tmp_path) -> None:
    """As bytes, in which "-" is before "/", with any case of the ending, and nothing else."""
    for name in ("b/x.json", "b-x.JSON", ".hidden.json"):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(trace(*SCOPE[:1], id=name))
    (tmp_path / "corpus" / "README.md").write_text("no trace")
    workload = read_trace(tmp_path / "corpus", "weka")
    names = [name.rpartition(":play:")[2] for name in workload.dependencies.play_id]
    assert names == [".hidden.json", "b-x.JSON", "b/x.json"]
    listed = [tmp_path / "corpus" / name for name in (".hidden.json", "b-x.JSON", "b/x.json")]
    assert read_trace(listed).request_id.to_list() == workload.request_id.to_list()


def test_objects_may_follow_one_another_and_span_lines(tmp_path) -> None:
    first, second = trace(*SCOPE[:1]).strip(), json.dumps(json.loads(trace(*SCOPE[:1])), indent=1)
    workload = read(tmp_path, first + first + "\n" + second, "t.jsonl")
    assert len(workload) == 3
    with pytest.raises(InputError, match=re.escape("t.jsonl:19:1: got 'the end of the text'")):
        read(tmp_path, first + "\n" + second[:-30] + "\n", "t.jsonl", format="weka")


def test_equal_ids_are_equal_content_within_one_trace_only(tmp_path) -> None:
    """Full blocks of one trace; a last partial block and a block without an id are private."""
    rows = (
        entry(0, 0.1, 1, 2) | {"in": 24},
        entry(1, 0.1, 1, 2) | {"in": 24},
        entry(2, 0.1, 1, 2, 3) | {"in": 32},
        entry(3, 0.1, 1) | {"in": 64},
        entry(4, 0.1, 1) | {"in": 8},
    )
    workload = read(tmp_path, trace(*rows) + trace(*rows), "t.jsonl")
    blocks = [
        workload.block_ids[a:b].tolist()
        for a, b in zip(workload.block_offsets, workload.block_offsets[1:], strict=False)
    ]
    for one in (blocks[:5], blocks[5:]):
        shared, partial = one[0]
        assert one[1][0] == shared
        assert one[2][0] == shared
        assert one[3][0] == shared
        assert len(one[3]) == 4
        assert len({partial, one[1][1], one[2][1], one[3][1], shared}) == 5
        assert one[4] == []  # wholly private
    assert set(np.concatenate(blocks[:5])).isdisjoint(np.concatenate(blocks[5:]))


def test_one_nested_time_before_its_marker_makes_all_relative(tmp_path) -> None:
    early = trace(entry(0, 0.1, 1), subagent(2, "a", entry(0.5, 0.1, 2)))
    late = trace(entry(0, 0.1, 1), subagent(2, "a", entry(3, 0.1, 2)))
    both = read(tmp_path, early + late, "t.jsonl").dependencies.not_before_ms.tolist()
    assert sorted(both) == [0.0, 0.0, 2500.0, 5000.0]
    alone = read(tmp_path, late).dependencies.not_before_ms.tolist()
    assert alone == [0.0, 3000.0]
    within = trace(entry(0, 0.1, 1), subagent(2, "a", entry(2 - 5e-7, 0.1, 2)))
    assert read(tmp_path, within).dependencies.not_before_ms.tolist() == [0.0, 2000.0]
    with pytest.raises(InputError, match=r"t of outer:1:inner:0: got 0\.5, expected at least 2"):
        read(tmp_path, early, nested_times="absolute")


def test_a_trace_of_several_megabytes_is_recognised(tmp_path) -> None:
    """Its first object does not fit in what is read at first, on one line or on many."""
    many = trace(*(entry(k, 0.5, *range(1000)) for k in range(300)))
    assert len(many) > 1 << 20
    for text in (many, "\n" * 5000 + json.dumps(json.loads(many), indent=1)):
        workload = read(tmp_path, text)
        assert workload.origin.format == "weka"
        assert len(workload) == 300


R = entry(0, 0.1, 1)
REFUSED = {
    "scope": (trace(R, hash_id_scope="global"), "hash_id_scope: got 'global', expected 'local'"),
    "blank id": (trace(R, id=" "), "id: got ' ', expected a string that is not blank"),
    "models": (trace(R, models=["z"]), "model of outer:0: got 'm', expected one of models: z"),
    "models null": (trace(R, models=None), "models: missing, expected an array"),
    "blank model": (trace(R | {"model": ""}), "requests[0].model: got ''"),
    "ids null": (trace(R | {"hash_ids": None}), "requests[0].hash_ids: got None"),
    "fraction": (trace(R | {"in": 16.0}), "requests[0].in: got 16.0, expected a whole number"),
    "orphan": (trace(subagent(0, "a", R), R), "requests[0]: got 'a subagent', expected a parent"),
    "no parent": (trace(), "requests: got [], expected at least one parent request"),
    "empty blocking": (trace(R, subagent(1, "a")), "requests[1].requests: got [], expected a req"),
    "no kind": (trace(R, subagent(1, "a", R, subagent_type=None)), "requests[1].subagent_type: g"),
    "duration": (trace(R, subagent(1, "a", R, duration_ms=5.0)), "requests[1].duration_ms: got 5"),
    "second object": (trace(R) * 2, "trace.json:2: got 'a second object', expected one, unless"),
    "field twice": (
        trace(R).replace('"t": 0', '"t": 0, "t": 1'),
        "requests[0].t: got 1, expected the field only once",
    ),
    "id twice": (trace(R)[:-2] + ', "id": "u"}', "id: got 'u', expected the field only once"),
    "private blocks": (
        trace(R | {"in": 2**31 - 1}, block_size=1),
        "in of outer:0: got 2147483647, expected at most 16777216 blocks of 1 tokens beyond",
    ),
    "cycle": (
        trace(
            entry(5, 1, 1),
            subagent(1, "a", entry(1, 1, 9), duration_ms=0),
            entry(2, 1, 1, 2),
            entry(0, 1, 5),
        ),
        "expected a graph in which no request waits for itself",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_reference_refuses_is_refused(tmp_path, name) -> None:
    text, message = REFUSED[name]
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read(tmp_path, text, format="weka")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"requests": ' + "[" * 100_000, '{"a":' * 99_999])
def test_deep_nesting_is_answered_in_one_line(tmp_path, text) -> None:
    for name in ("trace.json", "trace.jsonl"):
        with pytest.raises(InputError, match=r"trace\.json") as caught:
            read(tmp_path, text, name, format="weka")
        assert "\n" not in str(caught.value)


def test_unknown_fields_may_be_there_twice(tmp_path) -> None:
    text = trace(R).replace('"t": 0', '"t": 0, "z": {"t": 1, "t": 2}, "z": 1')
    assert len(read(tmp_path, text)) == 1


def test_a_missing_package_is_told_in_one_line(tmp_path, monkeypatch) -> None:
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "blake3":
            raise ImportError
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="expected the package blake3, which names Weka requests"):
        read(tmp_path, trace(R))
