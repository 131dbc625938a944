"""Malformed traces of the other formats: one line that names place, value and expectation."""

from __future__ import annotations

import json

import pytest

from tests.support.trace_text import (
    AGENTIC_HEADER,
    ROUNDS,
    SAMPLES,
    agentic,
    dynamo,
    edge,
    line,
    weka,
    weka_request,
    write,
)
from vecsim.errors import InputError
from vecsim.traces import read_trace

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
OWN = "arrival_ms,input_length,output_length"
MAP = {"columns": {"arrival": "t_s", "input_length": "in", "output_length": "out"}}


def rounds(**changes) -> str:
    return json.dumps({n: v for n, v in (ROUNDS | changes).items() if v is not None}) + "\n"


def graph(*rows: str) -> str:
    return AGENTIC_HEADER + "".join(rows)


def depends(**changes) -> str:
    return graph(agentic(), agentic(request_id="b", dependencies=[edge(**changes)]))


def header(**changes) -> str:
    return json.dumps(json.loads(AGENTIC_HEADER) | changes) + "\n" + agentic()


def agent(*inner: dict, **changes) -> dict:
    entry = {"type": "subagent", "t": 1.0, "agent_id": "g", "subagent_type": "x"}
    return entry | {"status": "completed", "requests": list(inner)} | changes


R = weka_request(0.0, 64, [1])
MALFORMED: dict[str, tuple[str, str, dict]] = {
    # agentic_mooncake
    "agentic: other version": (header(version=3), ":1, version: got 3, expected 2", {}),
    "agentic: other scope": (header(hash_id_scope="global"), ":1, hash_id_scope: got 'global'", {}),
    "agentic: no block size": (header(block_size=None), ":1, block_size: missing", {}),
    "agentic: block size 0": (header(block_size=0), ":1, block_size: got 0", {}),
    "agentic: no source": (header(source=None), ":1, source: missing, expected an object", {}),
    "agentic: empty digest": (
        header(source={"format": "f", "digest": ""}),
        ":1, source.digest: got ''",
        {},
    ),
    "agentic: only a header": (graph(), "got 'a file without rows'", {}),
    "agentic: no id": (graph(agentic(request_id=None)), ":2, request_id: missing", {}),
    "agentic: empty play": (graph(agentic(play_id="")), ":2, play_id: got ''", {}),
    "agentic: no model": (graph(agentic(model=None)), ":2, model: missing", {}),
    "agentic: zero prompt": (
        graph(agentic(input_length=0, hash_ids=[])),
        ":2, input_length: got 0, expected a number of tokens above 0",
        {},
    ),
    "agentic: too few hashes": (
        graph(agentic(hash_ids=[1])),
        ":2, hash_ids: got '1 ids', expected exactly 2 for 100 tokens in blocks of 64",
        {},
    ),
    "agentic: too many hashes": (graph(agentic(hash_ids=[1, 2, 3])), ":2, hash_ids: got '3", {}),
    "agentic: negative start": (graph(agentic(not_before_ms=-1)), ":2, not_before_ms: got -1", {}),
    "agentic: dependencies": (graph(agentic(dependencies="b")), ":2, dependencies: got 'b'", {}),
    "agentic: planned": (graph(agentic(output_token_ids=[1])), ":2, output_token_ids: got '1", {}),
    "agentic: same id": (graph(agentic(), agentic()), ":3, request_id: got 'a'", {}),
    "agentic: relation": (depends(relation="wish"), ":3, dependencies[0].relation: got 'wish'", {}),
    "agentic: trigger": (
        depends(trigger="dispatch"),
        ":3, dependencies[0].trigger: got 'dispatch', expected completion for the relation",
        {},
    ),
    "agentic: delay": (depends(delay_ms=-1), ":3, dependencies[0].delay_ms: got -1", {}),
    "agentic: unknown source": (
        depends(source="q"),
        ":3, dependencies[0].request_id: got 'q', expected the request_id of a row",
        {},
    ),
    "agentic: itself": (depends(source="b"), ":3, dependencies[0].request_id: got 'b'", {}),
    "agentic: other play": (
        graph(agentic(), agentic(request_id="b", play_id="q", dependencies=[edge()])),
        ":3, dependencies[0].request_id: got 'a', expected a request of play 'q', not of 'p'",
        {},
    ),
    "agentic: no root": (
        graph(
            agentic(dependencies=[edge("b")]),
            agentic(request_id="b", dependencies=[edge("a")]),
        ),
        ":2, play_id: got 'p', expected a play with a request that waits for none",
        {},
    ),
    "agentic: cycle": (
        graph(
            agentic(request_id="r"),
            agentic(dependencies=[edge("b")]),
            agentic(request_id="b", dependencies=[edge("a")]),
        ),
        ":3, dependencies: got 'a', expected a graph in which no request waits for itself",
        {},
    ),
    "agentic: ordinal missing": (
        graph(agentic(source_play_ordinal=0), agentic(request_id="b", play_id="q")),
        ":3, source_play_ordinal: missing",
        {},
    ),
    "agentic: ordinal gap": (
        graph(
            agentic(source_play_ordinal=0),
            agentic(request_id="b", play_id="q", source_play_ordinal=2),
        ),
        ":3, source_play_ordinal: got 2, expected each of 0 to 1 for one play",
        {},
    ),
    "agentic: ordinal differs": (
        graph(
            agentic(source_play_ordinal=0),
            agentic(request_id="b", source_play_ordinal=1),
        ),
        ":3, source_play_ordinal: got 1, expected 0, as in the rows of play 'p' before",
        {},
    ),
    "agentic: a row is no object": (graph("[1]\n"), ":2: got '[1]', expected a JSON object", {}),
    "agentic: cut row": (graph(agentic()[:-9]), ":2:", {}),
    "agentic: lanes of a plain trace": (
        line(),
        "agentic_lanes: got 2, expected nothing",
        {"agentic_lanes": 2},
    ),
    "legacy: no id": (
        line(wait_for=["a"]),
        ":1, request_id: missing",
        {"format": "agentic_mooncake"},
    ),
    "legacy: wait_for": (
        line(request_id="a", wait_for="b"),
        ":1, wait_for: got 'b', expected an array",
        {},
    ),
    "legacy: unknown": (
        line(request_id="a") + line(request_id="b", wait_for=["z"]),
        ":2, dependencies[0].request_id: got 'z'",
        {},
    ),
    "legacy: negative wait": (
        line(request_id="a") + line(request_id="b", wait_for=["a"], tool_wait_ms=-4),
        ":2, tool_wait_ms: got -4",
        {},
    ),
    # applied_compute_agentic
    "rounds: array": (
        rounds(num_turns=2),
        ":1, assistant_response_length: got '1 values', expected 2 values, as num_turns says",
        {},
    ),
    "rounds: no array": (rounds(tool_call_latency=0.5), ":1, tool_call_latency: got 0.5", {}),
    "rounds: zero prompt": (rounds(input_prompt_length=0), ":1, input_prompt_length: got 0", {}),
    "rounds: latency": (rounds(tool_call_latency=[-1]), ":1, tool_call_latency[0]: got -1", {}),
    "rounds: output": (
        rounds(tool_call_output_length=["x"]),
        ":1, tool_call_output_length[0]: got 'x'",
        {},
    ),
    "rounds: no final": (
        rounds(final_assistant_response_length=None),
        ":1, final_assistant_response_length: missing",
        {},
    ),
    "rounds: endless prompt": (
        rounds(tool_call_output_length=[2**31 - 1]),
        ":1, prompt of turn 1: got 2147484367",
        {},
    ),
    # dynamo
    "dynamo: schema": (
        dynamo() + dynamo("b", schema="v2"),
        ":2, schema: got 'v2', expected 'dynamo.request.trace.v1'",
        {},
    ),
    "dynamo: event": (dynamo(event_type="x"), ":1, event_type: got 'x', expected one of", {}),
    "dynamo: no request": (
        json.dumps({"schema": "dynamo.request.trace.v1", "event_type": "request_end"}),
        ":1, request: missing",
        {},
    ),
    "dynamo: no replay": (dynamo(request={"replay": None}), ":1, request.replay: missing", {}),
    "dynamo: block": (dynamo(replay={"trace_block_size": 0}), "trace_block_size: got 0", {}),
    "dynamo: blocks differ": (
        dynamo() + dynamo("b", replay={"trace_block_size": 128}),
        ":2, request.replay.trace_block_size: got 128, expected 64, as in the rows before",
        {},
    ),
    "dynamo: block size asked": (dynamo(), "block_size: got 512, expected 64", {"block_size": 512}),
    "dynamo: capacity": (
        dynamo(replay={"input_length": 129}),
        ":1, request.replay.input_length: got 129, expected at most 128",
        {},
    ),
    "dynamo: no hashes": (
        dynamo(replay={"input_sequence_hashes": None}),
        ":1, request.replay.input_sequence_hashes: missing",
        {},
    ),
    "dynamo: same id": (dynamo() + dynamo(), ":2, request.request_id: got 'a'", {}),
    "dynamo: no time": (dynamo(event_time_unix_ms=None), ":1, event_time_unix_ms: missing", {}),
    "dynamo: mixed": (
        dynamo(session="s") + dynamo("b"),
        ":2, agent_context: missing, expected agent_context in all requests or in none",
        {},
    ),
    "dynamo: overlap": (
        dynamo("a", 1000, 1100, session="s") + dynamo("b", 1050, 1060, session="s"),
        ":2, request.request_received_ms: got 1050.0, expected a start after the request before",
        {},
    ),
    "dynamo: parent": (
        dynamo("a", session="s") + dynamo("b", session="t", parent="zz"),
        ":2, agent_context.parent_session_id: got 'zz'",
        {},
    ),
    # weka
    "weka: no id": (weka(R, id=None), ":1, id: missing", {}),
    "weka: block": (weka(R, block_size=0), ":1, block_size: got 0", {}),
    "weka: no requests": (weka(), ":1, requests: got []", {}),
    "weka: type": (weka(R | {"type": "x"}), ":1, requests[0].type: got 'x'", {}),
    "weka: nested twice": (
        weka(R, agent(agent(R))),
        ":1, requests[1].requests[0].type: got 'subagent', expected 'n', 's', or",
        {},
    ),
    "weka: failed subagent": (
        weka(R, agent(R, status="failed")),
        ":1, requests[1].status: got 'failed', expected one of completed, async_launched",
        {},
    ),
    "weka: time": (weka(R | {"t": -1}), ":1, requests[0].t: got -1", {}),
    "weka: empty prompt": (weka(R | {"in": 0}), ":1, requests[0].in: got 0", {}),
    "weka: hashes": (weka(R | {"hash_ids": [-1]}), ":1, requests[0].hash_ids[0]: got -1", {}),
    "weka: blocks differ": (
        weka(R) + weka(R, block_size=32),
        ":2, block_size: got 32, expected 64, as in the rows before",
        {},
    ),
    "weka: basis": (weka(R), "nested_times: got 'x'", {"nested_times": "x"}),
    "weka: cut": (weka(R)[:-5], ":1:", {"format": "weka"}),
    # tables
    "burstgpt: time": (BURST + "x,G,1,2,3,API log\n", ":2, Timestamp: got 'x'", {}),
    "burstgpt: no time": (BURST + ",G,1,2,3,API log\n", ":2, Timestamp: missing", {}),
    "burstgpt: infinite": (BURST + "inf,G,1,2,3,API log\n", ":2, Timestamp: got 'inf'", {}),
    "burstgpt: tokens": (BURST + "1,G,-1,2,3,API log\n", ":2, Request tokens: got '-1'", {}),
    "burstgpt: fields": (BURST + "1,G,1,2,3,API log,9\n", ":2: got '7 fields'", {}),
    "vidur: decode": (
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1.5\n",
        ":2, num_decode_tokens: got '1.5'",
        {},
    ),
    "splitwise: column": (
        "request_id,arrival_timestamp,prompt_size\n1,2,3\n",
        ":1: got 'request_id,arrival_timestamp,prompt_size', expected one column token_size",
        {"format": "splitwise"},
    ),
    "own: negative delay": (
        OWN + ",session_id,delay_ms\n0,1,1,s,\n0,1,1,s,-2\n",
        ":3, delay_ms",
        {},
    ),
    "own: no time": (OWN + "\n0,1,1\n,1,1\n", ":3, arrival_ms: missing", {}),
    "own: blocks": (
        OWN + ",block_ids,block_tokens\n0,9,1,[1],4\n",
        ":2, input_length: got 9, expected at most 4",
        {},
    ),
    "own: ids": (OWN + ",block_ids\n0,9,1,[1.5]\n", ":2, block_ids: got", {}),
    "own: block sizes": (OWN + ",block_tokens\n0,9,1,4\n0,9,1,5\n", ":3, block_tokens: got 5", {}),
    "own: two clocks": (OWN + ",arrival_s\n0,9,1,4\n", "expected one column of arrival_s", {}),
    "own: edges": (
        OWN + ",request_id,play_id,play_index,not_before_ms,dependencies\n"
        '0,9,1,a,p,0,0,"[[5, ""completion"", 1]]"\n',
        ":2, dependencies: got '[[5",
        {},
    ),
    "own: damaged Parquet": ("PAR1xx", "got ", {}),
    "table: no mapping": ("t_s,in,out\n0,1,1\n", "columns: missing", {"format": "table"}),
    "table: mapped name": ("t_s,in,out\n0,1,1\n", "columns: got 'x'", {"columns": {"x": "t_s"}}),
    "table: no column": ("t_s,in\n0,1\n", ":1: got 't_s,in', expected one column out", MAP),
    "table: no field": ('{"t_s": 1, "in": 2}\n', ", out: missing, expected a field", MAP),
    "table: field": ('{"t_s": 1, "in": 2, "out": [1]}\n', ":1, out: got [1]", MAP),
    "table: unit": (
        "t,in,out\n5,1,1\n",
        ":2, t: got '5', expected an ISO 8601 date and time, or a number if time_unit is given",
        {"columns": MAP["columns"] | {"arrival": "t"}},
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_answered_in_one_line(tmp_path, name) -> None:
    text, message, arguments = MALFORMED[name]
    with pytest.raises(InputError) as caught:
        read_trace(write(tmp_path, text), **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_sixty_malformed_inputs_and_more() -> None:
    assert len(MALFORMED) >= 60


def answer(path, arguments: dict) -> str:
    """The refusal of a file, empty if it is read; other errors escape."""
    try:
        read_trace(path, **arguments)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SAMPLES)
def test_cut_files_never_escape_as_other_errors(tmp_path, name) -> None:
    """A file that ends anywhere is read, or refused in one line."""
    file, text, arguments = SAMPLES[name]
    for end in range(0, len(text), max(1, len(text) // 60)):
        assert "\n" not in answer(write(tmp_path, text[:end], file), arguments)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [n for n in SAMPLES if SAMPLES[n][0].endswith("jsonl")])
def test_values_of_another_type_never_escape_as_other_errors(tmp_path, name) -> None:
    """Every value of every row replaced by one of another type."""
    file, text, arguments = SAMPLES[name]
    lines = text.splitlines()
    for k, row in enumerate(map(json.loads, lines)):
        for key in row:
            for value in (None, "x", -1, 1.5, True, [], {}, [None], 1e308, [[1]]):
                changed = lines.copy()
                changed[k] = json.dumps(row | {key: value})
                assert "\n" not in answer(write(tmp_path, "\n".join(changed), file), arguments)
