"""Agentic Mooncake traces: graphs of requests (reference: traffic, sections 4.2 and 4.3).

Version 2 starts with a header; without one rows are Mooncake rows with `wait_for`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from vecsim.errors import MISSING, InputError
from vecsim.traces import mooncake
from vecsim.traces.files import TraceFile
from vecsim.traces.graphs import Edge, Node, graph_table, name_components
from vecsim.traces.json_rows import (
    Place,
    array,
    decode,
    exact_ids,
    is_array,
    items,
    length,
    not_negative,
    obj,
    planned_output,
    positive_length,
    text,
)
from vecsim.traces.table import DEFAULT_BLOCK_SIZE, ReadOptions, TraceTable
from vecsim.traces.times import UNIT_SHIFTS

SCHEMA = "dynamo.agentic_mooncake"
_DECODER = msgspec.json.Decoder(dict[str, Any])
_TRIGGERS = {"dispatch": False, "completion": True}
_RELATIONS = {
    "sequence": ("completion",),
    "join": ("completion",),
    "replay_barrier": ("completion",),
    "spawn": ("dispatch", "completion"),
}
_LEGACY_SESSION = "agentic-session"
_LEGACY_FIELD = re.compile(rb'"(wait_for|tool_wait_ms)"\s*:')


def looks_like(file: TraceFile) -> bool:
    """Whether the file starts with the header, or has rows that wait for others."""
    first = file.first_object
    if first.get("schema") == SCHEMA:
        return True
    legacy = "request_id" in first and "hash_ids" in first
    return legacy and _LEGACY_FIELD.search(file.data) is not None


def read(file: TraceFile, options: ReadOptions) -> TraceTable:
    """All requests in file order, with their graph.

    Raises:
        InputError: a malformed or impossible row; names file, line and field.
    """
    if file.first_object.get("schema") is not None:
        return _read_graph(file, options)
    return _read_legacy(file, options)


def _read_graph(file: TraceFile, options: ReadOptions) -> TraceTable:
    rows = ((place, decode(place, line, _DECODER)) for place, line in items(file))
    block = _read_header(*next(rows))
    nodes = [_node(place, row, block, options.time_unit or "ms") for place, row in rows]
    return graph_table(nodes, block, in_items=is_array(file), unit=options.time_unit or "ms")


def _read_header(place: Place, header: dict[str, Any]) -> int:
    """Checks the header; returns its block size."""
    for name, value in (("schema", SCHEMA), ("version", 2), ("hash_id_scope", "local")):
        if header.get(name) != value:
            raise place.error(name, header.get(name, MISSING), repr(value))
    source = obj(place, "source", header.get("source"))
    for name in ("format", "digest"):
        text(place, f"source.{name}", source.get(name))
    return positive_length(place, "block_size", header.get("block_size"))


def _node(place: Place, row: dict[str, Any], block: int, unit: str) -> Node:
    text(place, "model", row.get("model"))
    inputs = positive_length(place, "input_length", row.get("input_length"))
    outputs = length(place, "output_length", row.get("output_length"))
    ordinal = row.get("source_play_ordinal")
    if ordinal is not None and (type(ordinal) is not int or ordinal < 0):
        raise place.error("source_play_ordinal", ordinal, "a whole number, 0 or more")
    start = not_negative(place, "not_before_ms", row.get("not_before_ms"))
    return Node(
        place=place,
        request_id=text(place, "request_id", row.get("request_id")),
        play_id=text(place, "play_id", row.get("play_id")),
        session_id=text(place, "session_id", row.get("session_id")),
        input_length=inputs,
        output_length=outputs,
        hash_ids=exact_ids(place, "hash_ids", row.get("hash_ids"), inputs, block),
        not_before_ms=start * 10.0 ** UNIT_SHIFTS[unit],
        edges=list(_edges(place, row.get("dependencies", []))),
        ordinal=ordinal,
        output_token_ids=planned_output(place, row.get("output_token_ids"), outputs),
    )


def _edges(place: Place, dependencies: Any) -> Iterator[Edge]:
    for k, item in enumerate(array(place, "dependencies", dependencies)):
        name = f"dependencies[{k}]"
        edge = obj(place, name, item)
        relation, trigger = edge.get("relation"), edge.get("trigger")
        if relation not in _RELATIONS:
            raise place.error(f"{name}.relation", relation, f"one of {', '.join(_RELATIONS)}")
        if trigger not in _RELATIONS[relation]:
            expected = f"{' or '.join(_RELATIONS[relation])} for the relation {relation}"
            raise place.error(f"{name}.trigger", trigger, expected)
        yield Edge(
            text(place, f"{name}.request_id", edge.get("request_id")),
            _TRIGGERS[trigger],
            not_negative(place, f"{name}.delay_ms", edge.get("delay_ms")),
        )


# --- without a header -----------------------------------------------------------------------------


class _Waits(msgspec.Struct, gc=False):
    request_id: Any = None
    wait_for: Any = None
    tool_wait_ms: Any = None


_WAITS = msgspec.json.Decoder(_Waits)


def _read_legacy(file: TraceFile, options: ReadOptions) -> TraceTable:
    """Mooncake rows with `wait_for`: an edge on completion each, with delay + tool_wait_ms."""
    table = mooncake.read(file, replace(options, limit=None))
    block = options.block_size or DEFAULT_BLOCK_SIZE
    if table.times.values.dtype.kind == "i":
        raise InputError(file.name, "dates", f"numbers of {table.unit} as timestamps")
    nodes = []
    for row, (place, line) in enumerate(items(file)):
        waits = decode(place, line, _WAITS)
        delay = 0.0 if table.delay_ms is None else float(table.delay_ms[row])
        extra = not_negative(place, "tool_wait_ms", waits.tool_wait_ms, 0.0)
        wait = (0.0 if delay != delay else delay) + extra
        sources = [] if waits.wait_for is None else array(place, "wait_for", waits.wait_for)
        stamp = float(table.times.values[row])
        nodes.append(
            Node(
                place=place,
                request_id=text(place, "request_id", waits.request_id),
                play_id="",
                session_id=_legacy_session(table, row),
                input_length=int(table.input_length[row]),
                output_length=int(table.output_length[row]),
                hash_ids=_ids(table, row, block),
                not_before_ms=0.0 if sources or stamp != stamp else stamp,
                edges=[
                    Edge(text(place, f"wait_for[{k}]", source), True, wait)
                    for k, source in enumerate(sources)
                ],
                output_token_ids=_planned(table, row),
            )
        )
    name_components(nodes, "legacy-play:")
    return graph_table(nodes, block, in_items=is_array(file), unit=table.unit)


def _legacy_session(table: TraceTable, row: int) -> str:
    name = None if table.session_id is None else table.session_id[row]
    return _LEGACY_SESSION if name is None else name


def _ids(table: TraceTable, row: int, block: int) -> list[int]:
    if table.ids is None:
        return []
    offsets, ids = table.ids
    needed = -(-int(table.input_length[row]) // block)
    return ids[offsets[row] : offsets[row + 1]][:needed].tolist()


def _planned(table: TraceTable, row: int) -> list[int] | None:
    if table.planned is None:
        return None
    offsets, tokens = table.planned
    return tokens[offsets[row] : offsets[row + 1]].tolist() or None
