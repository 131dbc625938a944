"""Dynamo request traces, version 1 (reference: traffic, section 4.4)."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import polars as pl

from vecsim.errors import MISSING
from vecsim.traces.files import TraceFile
from vecsim.traces.graphs import Edge, Node, graph_table, name_components, shared_block_size
from vecsim.traces.json_rows import (
    Place,
    decode,
    exact_ids,
    id_list,
    items,
    length,
    not_negative,
    number,
    obj,
    positive_length,
    text,
)
from vecsim.traces.table import ReadOptions, TraceTable
from vecsim.traces.times import Times
from vecsim.workload.columns import flatten

SCHEMA = "dynamo.request.trace.v1"
_DECODER = msgspec.json.Decoder(dict[str, Any])
_SKIPPED = ("request_payload", "tool_start")
_TOOL_EVENTS = ("tool_end", "tool_error")
_KNOWN = ("request_end", *_TOOL_EVENTS, *_SKIPPED)


@dataclass
class _Request:
    place: Place
    request_id: str
    start: float
    end: float
    input_length: int
    output_length: int
    block: int
    hashes: list[int]
    session: str | None
    parent: str | None


def looks_like(file: TraceFile) -> bool:
    """Whether the first record has the schema."""
    first = file.first_object
    record = first.get("event", first)
    return isinstance(record, dict) and record.get("schema") == SCHEMA


def read(files: Iterable[TraceFile], options: ReadOptions) -> TraceTable:
    """All requests of one corpus, sorted by (start, end, request id) or, as a graph, by request id.

    Raises:
        InputError: a malformed record, block sizes that differ, agent context in some requests
            only, overlapping requests in one session; names file, line and field.
    """
    requests, tools = _records(files)
    if not requests:
        return _plain_table([], options)
    requests.sort(key=lambda r: (r.start, r.end, r.request_id))
    blocks = [(r.place, r.block) for r in requests]
    shared_block_size("request.replay.trace_block_size", blocks, options.block_size)
    without = [r for r in requests if r.session is None]
    if len(without) == len(requests):
        return _plain_table(requests, options)
    if without:
        expected = "agent_context in all requests or in none"
        raise without[0].place.error("agent_context", MISSING, expected)
    return _graph(requests, tools)


def _records(files: Iterable[TraceFile]) -> tuple[list[_Request], list[dict[str, Any]]]:
    requests: list[_Request] = []
    tools: list[dict[str, Any]] = []
    seen: set[str] = set()
    for file in files:
        for place, line in items(file):
            record = decode(place, line, _DECODER)
            event = obj(place, "event", record.get("event", record))
            if event.get("schema") != SCHEMA:
                raise place.error("schema", event.get("schema", MISSING), repr(SCHEMA))
            kind = event.get("event_type", MISSING)
            if kind not in _KNOWN:
                raise place.error("event_type", kind, f"one of {', '.join(_KNOWN)}")
            if kind in _TOOL_EVENTS:
                tools.append(_tool(event))
            elif kind == "request_end":
                requests.append(_request(place, event))
                name = requests[-1].request_id
                if name in seen:
                    raise place.error("request.request_id", name, "an id that no earlier row has")
                seen.add(name)
    return requests, tools


def _request(place: Place, record: dict[str, Any]) -> _Request:
    request = obj(place, "request", record.get("request"))
    replay = obj(place, "request.replay", request.get("replay"))
    ended = not_negative(place, "event_time_unix_ms", record.get("event_time_unix_ms"))
    total = request.get("total_time_ms")
    span = None
    if total is not None:
        # Rounded half away from zero to whole ms, as the reference does.
        span = float(int(not_negative(place, "request.total_time_ms", total) + 0.5))
    start = request.get("request_received_ms")
    if start is not None:
        start = number(place, "request.request_received_ms", start)
        end = ended if span is None else start + span
    else:
        start, end = ended - (span or 0.0), ended
    context = record.get("agent_context")
    context = None if context is None else obj(place, "agent_context", context)
    block = positive_length(
        place, "request.replay.trace_block_size", replay.get("trace_block_size")
    )
    inputs = length(place, "request.replay.input_length", replay.get("input_length"))
    return _Request(
        place=place,
        request_id=text(place, "request.request_id", request.get("request_id")),
        start=start,
        end=end,
        input_length=inputs,
        output_length=length(place, "request.output_tokens", request.get("output_tokens")),
        block=block,
        hashes=_hashes(place, replay.get("input_sequence_hashes"), inputs, block),
        session=_session(place, context, "session_id", True),
        parent=_session(place, context, "parent_session_id", False),
    )


def _session(place: Place, context: dict[str, Any] | None, name: str, needed: bool) -> str | None:
    if context is None:
        return None
    return text(place, f"agent_context.{name}", context.get(name), needed=needed)


def _hashes(place: Place, ids: Any, inputs: int, block: int) -> list[int]:
    name = "request.replay.input_sequence_hashes"
    found = id_list(place, name, ids, 64)
    if found is None:
        raise place.error(name, MISSING, "a list of hash ids")
    covered = len(found) * block
    if inputs > covered:
        hashes = f"{len(found)} hash ids of {block} tokens"
        raise place.error(
            "request.replay.input_length", inputs, f"at most {covered}, as {hashes} cover"
        )
    return found


def _tool(record: dict[str, Any]) -> dict[str, Any]:
    tool = record.get("tool")
    claude = tool.get("claude") if isinstance(tool, dict) else None
    return claude if isinstance(claude, dict) else {}


def _plain_table(requests: list[_Request], options: ReadOptions) -> TraceTable:
    if options.limit is not None:
        requests = requests[: options.limit]
    return TraceTable(
        times=Times(np.array([r.start for r in requests], np.float64)),
        input_length=np.array([r.input_length for r in requests], np.int64),
        output_length=np.array([r.output_length for r in requests], np.int64),
        numbers=np.arange(1, len(requests) + 1),
        request_id=pl.Series("request_id", [r.request_id for r in requests], pl.String),
        ids=flatten([r.hashes for r in requests], np.uint64),
        block_size=requests[0].block if requests else 1,
    )


# --- agent records --------------------------------------------------------------------------------


def _graph(requests: list[_Request], tools: list[dict[str, Any]]) -> TraceTable:
    nodes = {r.request_id: _node(r) for r in requests}
    sessions: dict[str, list[_Request]] = {}
    for r in requests:
        sessions.setdefault(str(r.session), []).append(r)
    for turns in sessions.values():
        for before, after in itertools.pairwise(turns):
            delay = after.start - before.end
            if delay < 0:
                expected = "a start after the request before it in its session has ended"
                raise after.place.error("request.request_received_ms", after.start, expected)
            nodes[after.request_id].edges.append(Edge(before.request_id, True, delay))
    explicit = {
        str(tool["child_session_id"]): tool for tool in tools if tool.get("child_session_id")
    }
    for name, turns in sessions.items():
        for target, edge in _child_edges(name, turns, sessions, explicit.get(name, {})):
            nodes[target].edges.append(edge)
    ordered = [nodes[key] for key in sorted(nodes)]
    for node in ordered:
        # Only roots keep their recorded time; the others follow what they wait for.
        node.not_before_ms = 0.0 if node.edges else node.not_before_ms - requests[0].start
    name_components(ordered, "dynamo-play:")
    return graph_table(ordered, requests[0].block)


def _node(r: _Request) -> Node:
    return Node(
        place=r.place,
        request_id=r.request_id,
        play_id="",
        session_id=r.session,
        input_length=r.input_length,
        output_length=r.output_length,
        hash_ids=exact_ids(
            r.place,
            "request.replay.input_sequence_hashes",
            r.hashes[: -(-r.input_length // r.block)],
            r.input_length,
            r.block,
        ),
        not_before_ms=r.start,
    )


def _child_edges(
    name: str,
    turns: list[_Request],
    sessions: dict[str, list[_Request]],
    tool: dict[str, Any],
) -> Iterator[tuple[str, Edge]]:
    """Spawn and join of a child session: by its tool event, else by time.

    By time, the child is spawned on the release of the latest request of its parent that started
    before it, and is joined by the first one that starts after its end.
    """
    first, last = turns[0], turns[-1]
    child = next((r for r in turns if r.parent is not None), None)
    if child is None:
        return
    if child.parent not in sessions or child.parent == name:
        expected = "the session_id of another session"
        raise child.place.error("agent_context.parent_session_id", child.parent, expected)
    parent = sessions[child.parent]
    by_id = {r.request_id: r for r in parent}
    spawn = by_id.get(tool.get("source_request_id", ""))
    if spawn is None:
        k = bisect_right([r.start for r in parent], first.start) - 1
        spawn = parent[k] if k >= 0 else None
    if spawn is not None:
        yield first.request_id, Edge(spawn.request_id, False, max(0.0, first.start - spawn.start))
    join = by_id.get(tool.get("consumer_request_id", ""))
    if join is None:
        join = next((r for r in parent if r.start >= last.end), None)
    if join is not None:
        yield join.request_id, Edge(last.request_id, True, max(0.0, join.start - last.end))
