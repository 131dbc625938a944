"""Weka agent traces: nested requests of one session tree.

Names, edges and contents are those of AISimulate, `crates/core/src/replay/loadgen/weka.rs` of
github.com/ai-dynamo/aisimulate.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import msgspec

from vecsim.errors import MISSING, InputError
from vecsim.traces.files import TraceFile
from vecsim.traces.graphs import Edge, Node, graph_table, shared_block_size
from vecsim.traces.json_rows import (
    Place,
    array,
    decode,
    id_list,
    is_array,
    items,
    length,
    not_negative,
    obj,
    positive_length,
    text,
)
from vecsim.traces.table import ReadOptions, TraceTable
from vecsim.traces.weka_streams import EPSILON_S, Request, Stream, ended_before, streams_of

NESTED_TIMES = ("auto", "absolute", "relative")
ENDINGS = (".json", ".jsonl")
_DECODER = msgspec.json.Decoder(dict[str, Any])
_EXTENTS = json.JSONDecoder()
_MOST_PRIVATE = 1 << 24
_BLOCKING = {"completed": True, "async_launched": False}
_TRACE_FIELDS = ("id", "block_size", "hash_id_scope", "models", "requests")
_REQUEST_FIELDS = ("type", "t", "model", "in", "out", "hash_ids", "api_time")
_SUBAGENT_FIELDS = ("agent_id", "subagent_type", "status", "duration_ms")
_FIELDS = frozenset(_TRACE_FIELDS + _REQUEST_FIELDS + _SUBAGENT_FIELDS)
_ANY_FIELD = re.compile(rb'(?<!\\)"(?:%s)"\s*:' % "|".join(sorted(_FIELDS)).encode())
_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass
class _Subagent:
    """A nested scope: its marker's time (s), and how long it ran (s) where that was recorded."""

    place: Place
    name: str
    position: int
    start: float
    duration: float | None
    blocking: bool
    requests: list[Request]


@dataclass
class _Trace:
    """One recording; `source` names it in the corpus, `prefix` begins the names of its parts."""

    place: Place
    source: str
    prefix: str
    name: str
    block: int
    requests: list[Request] = field(default_factory=list)
    subagents: list[_Subagent] = field(default_factory=list)

    @property
    def everything(self) -> list[Request]:
        return self.requests + [r for agent in self.subagents for r in agent.requests]


def looks_like(file: TraceFile) -> bool:
    """Whether the first object holds `requests`, a `block_size` and a `hash_id_scope`."""
    return {"requests", "block_size", "hash_id_scope"} <= file.first_object.keys()


def read(files: Iterable[TraceFile], options: ReadOptions) -> TraceTable:
    """All requests, sorted by request id, with their graph; one play per trace.

    Raises:
        InputError: a malformed trace, or no package `blake3`; names file, line (or item) and field.
    """
    traces = [trace for file in files for trace in _traces(file)]
    if not traces:
        return graph_table([], 1)
    blocks = [(trace.place, trace.block) for trace in traces]
    block = shared_block_size("block_size", blocks, options.block_size)
    _settle_times(traces, options.nested_times)
    numbers = count()
    nodes = [node for k, trace in enumerate(traces) for node in _nodes(k, trace, numbers)]
    return graph_table(sorted(nodes, key=lambda node: node.request_id), block)


# --- objects --------------------------------------------------------------------------------------


def _traces(file: TraceFile) -> Iterator[_Trace]:
    """The recordings of a file.

    A .json file holds one, which is named by the file; other files any number, which are numbered.
    """
    alone = file.source.lower().endswith(".json") and not is_array(file)
    for k, (place, extent) in enumerate(_objects(file)):
        if alone and k > 0:
            raise InputError(place.where, "a second object", "one, unless the name ends in .jsonl")
        row = decode(place, extent, _DECODER)
        _refuse_duplicates(place, extent, row)
        yield _trace(place, row, file.source if alone else f"{file.source}#{k:06d}")


def _objects(file: TraceFile) -> Iterator[tuple[Place, bytes]]:
    """Objects one after another, on one line or on several each, or the items of an array."""
    return items(file) if is_array(file) or _one_a_line(file) else _extents(file)


def _one_a_line(file: TraceFile) -> bool:
    try:
        for _, line in file.lines():
            msgspec.json.decode(line, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _extents(file: TraceFile) -> Iterator[tuple[Place, bytes]]:
    """The text of each object, placed by the line in which it begins."""
    whole = file.data.decode()
    begin, line = _BLANK.match(whole).end(), 1
    line += whole.count("\n", 0, begin)
    while begin < len(whole):
        where = f"{file.name}:{line}"
        try:
            end = _EXTENTS.raw_decode(whole, begin)[1]
        except json.JSONDecodeError as error:
            found = whole[error.pos : error.pos + 200] or "the end of the text"
            where = f"{file.name}:{error.lineno}:{error.colno}"
            raise InputError(where, found, f"JSON ({error.msg})") from None
        except (ValueError, RecursionError):  # too many digits, or too deep
            raise InputError(where, "JSON beyond all bounds", "the requests of a trace") from None
        yield Place(line, where), whole[begin:end].encode()
        following = _BLANK.match(whole, end).end()
        line += whole.count("\n", begin, following)
        begin = following


def _refuse_duplicates(place: Place, extent: bytes, row: dict[str, Any]) -> None:
    """Raise InputError for a known field that one object holds twice; others are not read."""
    met = _fields_of(row)
    for entry in _entries(row):
        met += _fields_of(entry) + sum(map(_fields_of, _entries(entry)))
    if met == len(_ANY_FIELD.findall(extent)):
        return
    pairs = json.loads(extent, object_pairs_hook=_Pairs)
    pairs.refuse_duplicates(place, "")
    for k, entry in enumerate(pairs.entries()):
        entry.refuse_duplicates(place, f"requests[{k}].")
        for j, inner in enumerate(entry.entries()):
            inner.refuse_duplicates(place, f"requests[{k}].requests[{j}].")


def _fields_of(entry: dict[str, Any]) -> int:
    return len(_FIELDS & entry.keys())


def _entries(row: dict[str, Any]) -> list[dict[str, Any]]:
    found = row.get("requests")
    return [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []


class _Pairs(list):
    """The members of one JSON object, duplicates kept."""

    def entries(self) -> list[_Pairs]:
        found = next((value for name, value in self if name == "requests"), None)
        return [e for e in found if isinstance(e, _Pairs)] if isinstance(found, list) else []

    def refuse_duplicates(self, place: Place, where: str) -> None:
        seen = set()
        for name, value in self:
            if name in seen and name in _FIELDS:
                raise place.error(f"{where}{name}", value, "the field only once")
            seen.add(name)


# --- fields ---------------------------------------------------------------------------------------


def _trace(place: Place, row: dict[str, Any], source: str) -> _Trace:
    name = text(place, "id", row.get("id"))
    if row.get("hash_id_scope") != "local":
        raise place.error("hash_id_scope", row.get("hash_id_scope", MISSING), "'local'")
    trace = _Trace(
        place,
        source,
        f"weka:{_digest(place, source)}:",
        name,
        positive_length(place, "block_size", _whole(place, "block_size", row.get("block_size"))),
    )
    for k, item in enumerate(array(place, "requests", row.get("requests"))):
        where = f"requests[{k}]"
        entry = obj(place, where, item)
        if entry.get("type") == "subagent":
            if not trace.requests:
                raise place.error(where, "a subagent", "a parent request before the first subagent")
            trace.subagents.append(_subagent(place, where, k, entry))
        else:
            trace.requests.append(_request(place, where, f"outer:{k}", k, entry))
    if not trace.requests:
        raise place.error("requests", row["requests"], "at least one parent request")
    _check_models(trace, row.get("models", []))
    return trace


def _digest(place: Place, source: str) -> str:
    """16 hexadecimal digits that stand for a recording in the names of its requests."""
    try:
        from blake3 import blake3
    except ImportError:
        expected = "the package blake3, which names Weka requests: pip install blake3"
        raise InputError(place.where, MISSING, expected) from None
    return blake3(source.encode(errors="surrogateescape")).hexdigest(length=8)


def _whole(place: Place, name: str, value: Any) -> Any:
    """A value that is no fraction and no text; whether it may be missing is for others to say."""
    if isinstance(value, float | str):
        raise place.error(name, value, "a whole number")
    return value


def _check_models(trace: _Trace, models: Any) -> None:
    """Every request is of a model that the trace lists, if it lists some."""
    declared = {
        text(trace.place, f"models[{k}]", model)
        for k, model in enumerate(array(trace.place, "models", models))
    }
    for request in trace.everything if declared else ():
        if request.model not in declared:
            expected = f"one of models: {', '.join(sorted(declared))}"
            raise trace.place.error(f"model of {request.name}", request.model, expected)


def _subagent(place: Place, where: str, k: int, entry: dict[str, Any]) -> _Subagent:
    status = entry.get("status", MISSING)
    if status not in _BLOCKING:
        raise place.error(f"{where}.status", status, f"one of {', '.join(_BLOCKING)}")
    if not isinstance(entry.get("subagent_type"), str):
        raise place.error(f"{where}.subagent_type", entry.get("subagent_type", MISSING), "a string")
    duration = entry.get("duration_ms")
    if duration is not None and (type(duration) is not int or not 0 <= duration < 2**63):
        raise place.error(f"{where}.duration_ms", duration, "a whole number, 0 or more")
    inner = array(place, f"{where}.requests", entry.get("requests"))
    if not inner and _BLOCKING[status]:
        raise place.error(f"{where}.requests", inner, "a request, as the parent waited for some")
    agent = text(place, f"{where}.agent_id", entry.get("agent_id"))
    return _Subagent(
        place=place,
        name=f"subagent:{k}:{agent}",
        position=k,
        start=not_negative(place, f"{where}.t", entry.get("t")),
        duration=None if duration is None else duration / 1000.0,
        blocking=_BLOCKING[status],
        requests=[
            _request(
                place,
                f"{where}.requests[{j}]",
                f"outer:{k}:inner:{j}",
                j,
                obj(place, f"{where}.requests[{j}]", item),
            )
            for j, item in enumerate(inner)
        ],
    )


def _request(place: Place, where: str, name: str, position: int, entry: dict[str, Any]) -> Request:
    kind = entry.get("type", MISSING)
    if kind not in ("n", "s"):
        raise place.error(f"{where}.type", kind, "'n', 's', or 'subagent' at the outer level")
    hashes = id_list(place, f"{where}.hash_ids", entry.get("hash_ids", []), 64)
    if hashes is None:
        raise place.error(f"{where}.hash_ids", None, "a list of hash ids")
    return Request(
        place=place,
        name=name,
        position=position,
        model=text(place, f"{where}.model", entry.get("model")),
        start=not_negative(place, f"{where}.t", entry.get("t")),
        api=not_negative(place, f"{where}.api_time", entry.get("api_time"), 0.0),
        input_length=positive_length(
            place, f"{where}.in", _whole(place, f"{where}.in", entry.get("in"))
        ),
        output_length=length(
            place, f"{where}.out", _whole(place, f"{where}.out", entry.get("out"))
        ),
        hashes=hashes,
    )


# --- times ----------------------------------------------------------------------------------------


def _settle_times(traces: list[_Trace], basis: str) -> None:
    """Count the times of nested requests from the trace's zero too.

    They count from their subagent's marker where `basis` says so; left to the data, where one of
    the corpus comes before its marker.
    """
    if basis not in NESTED_TIMES:
        raise InputError("nested_times", basis, f"one of {', '.join(NESTED_TIMES)}")
    nested = [(a, r) for trace in traces for a in trace.subagents for r in a.requests]
    relative = basis == "relative" or (
        basis == "auto" and any(r.start < a.start - EPSILON_S for a, r in nested)
    )
    for agent, request in nested:
        if relative:
            request.start += agent.start
        elif request.start < agent.start - EPSILON_S:
            expected = f"at least {agent.start}, as its subagent's, unless times are relative"
            raise agent.place.error(f"t of {request.name}", request.start, expected)
        request.start = max(request.start, agent.start)


def _milliseconds(seconds: float) -> float:
    """Whole nanoseconds, halves up, as milliseconds; 0 of what is negative."""
    return math.floor(max(0.0, seconds) * 1e9 + 0.5) / 1e6


# --- the graph ------------------------------------------------------------------------------------


class _Edges:
    """The edges of one trace by name of the request that waits; none is there twice."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._edges: dict[str, dict[tuple[str, bool, str], float]] = {}

    def of(self, request: Request) -> list[Edge]:
        found = self._edges.get(request.name, {})
        return [Edge(source, trigger, delay) for (source, trigger, _), delay in found.items()]

    def after_end(self, request: Request, source: Request, kind: str, delay: float) -> None:
        """Wait for the end of `source`, and `delay` seconds more."""
        self._add(request, source, True, kind, delay)

    def after_release(self, request: Request, source: Request, kind: str) -> None:
        """Wait for the release of `source`, and as long as there was between the two."""
        self._add(request, source, False, kind, request.start - source.start)

    def _add(self, r: Request, source: Request, on_end: bool, kind: str, delay: float) -> None:
        key = (f"{self._prefix}request:{source.name}", on_end, kind)
        self._edges.setdefault(r.name, {}).setdefault(key, _milliseconds(delay))


def _nodes(ordinal: int, trace: _Trace, numbers: Iterator[int]) -> Iterator[Node]:
    """The requests of a trace with what each waits for; `numbers` are those of content blocks."""
    edges = _Edges(trace.prefix)
    parents = streams_of(trace.requests)
    _connect(edges, parents)
    sessions = list(_sessions("session:root", parents))
    for agent in trace.subagents:
        if agent.requests:
            streams = streams_of(agent.requests)
            _attach(edges, agent, streams, parents)
            sessions += _sessions(f"session:{agent.name}", streams)
    root = parents[0].requests[0]
    first = min(r.start for r in trace.everything)
    contents = _Contents(trace.block, numbers)
    for session, stream in sessions:
        leader = stream.requests[0]
        if leader is not root and not edges.of(leader):
            edges.after_release(leader, root, "spawn")
        for request in stream.requests:
            yield Node(
                place=request.place,
                request_id=f"{trace.prefix}request:{request.name}",
                play_id=f"{trace.prefix}play:{trace.name}",
                session_id=f"{trace.prefix}{session}",
                input_length=request.input_length,
                output_length=request.output_length,
                hash_ids=contents.of(request),
                not_before_ms=_milliseconds(request.start - first),
                edges=edges.of(request),
                ordinal=ordinal,
            )


def _sessions(name: str, streams: list[Stream]) -> Iterator[tuple[str, Stream]]:
    """Name of each stream: the main one's, then those of its workers."""
    for k, stream in enumerate(streams):
        yield name if k == 0 else f"{name}:worker:{k - 1}", stream


def _connect(edges: _Edges, streams: list[Stream]) -> None:
    """The edges inside a scope."""
    ended = ended_before(streams)
    for stream in streams:
        for before, request in pairwise(stream.requests):
            edges.after_end(request, before, "sequence", request.start - before.end)
        leader, source = stream.requests[0], stream.source
        if source is not None and leader.start < source.end:
            edges.after_release(leader, source, "spawn")
        elif source is not None:
            edges.after_end(leader, source, "spawn", leader.start - source.end)
        for request in stream.requests:
            for other in ended[request.name]:
                edges.after_end(request, other, "barrier", 0.0)


def _attach(edges: _Edges, agent: _Subagent, streams: list[Stream], parents: list[Stream]) -> None:
    """A subagent's edges: spawned by the parent request before it in the file, and joined by the
    first one of the same stream that began when the subagent had ended."""
    spawning = (
        (r.position, k)
        for k, stream in enumerate(parents)
        for r in stream.requests
        if r.position < agent.position
    )
    position, owner = max(spawning)
    stream = parents[owner].requests
    streams[0].source = next(r for r in stream if r.position == position)
    _connect(edges, streams)
    if not agent.blocking:
        return
    ends = [agent.start, *(r.end for r in agent.requests)]
    end = max(ends) if agent.duration is None else agent.start + agent.duration
    later = [r for r in stream if r.position > agent.position and r.start + EPSILON_S >= end]
    if later:
        join = min(later, key=lambda r: r.position)
        for each in streams:
            last = each.requests[-1]
            edges.after_end(join, last, "join", join.start - last.end)


# --- prompts --------------------------------------------------------------------------------------


class _Contents:
    """Prompts as content that is the trace's own: blocks of an id, and private ones.

    An id stands for a full block. A block without one, and a last, partial block, is private to
    its request; a prompt of private blocks alone has no ids at all.
    """

    def __init__(self, block: int, numbers: Iterator[int]) -> None:
        self._block = block
        self._numbers = numbers
        self._known: dict[int, int] = defaultdict(numbers.__next__)

    def of(self, request: Request) -> list[int]:
        """One number for each block of the prompt; none where all are private."""
        blocks = -(-request.input_length // self._block)
        ids = request.hashes[: request.input_length // self._block]
        if not ids:
            return []
        private = blocks - len(ids)
        if private > _MOST_PRIVATE:
            expected = f"at most {_MOST_PRIVATE} blocks of {self._block} tokens beyond its hash ids"
            raise request.place.error(f"in of {request.name}", request.input_length, expected)
        # A block's identity holds those before it: one number will do for all private ones.
        rest = [next(self._numbers)] * private if private else []
        return [self._known[i] for i in ids] + rest
