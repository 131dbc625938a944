"""Weka agent traces: nested requests of one session tree (reference: traffic, section 4.5)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vecsim.errors import MISSING, InputError
from vecsim.traces.files import TraceFile
from vecsim.traces.graphs import Edge, Node, graph_table, shared_block_size
from vecsim.traces.json_rows import (
    Place,
    array,
    decode,
    first_object,
    id_list,
    items,
    json_error,
    length,
    not_negative,
    obj,
    positive_length,
    text,
)
from vecsim.traces.table import ReadOptions, TraceTable

NESTED_TIMES = ("auto", "absolute", "relative")
_DECODER = msgspec.json.Decoder(dict[str, Any])
_BLOCKING = {"completed": True, "async_launched": False}
_UNIQUE_IDS = 1 << 63


@dataclass
class _Request:
    """One recorded request; times in ms from the start of the recording.

    `position` is that of the outer entry that it is, or is inside of.
    """

    place: Place
    name: str
    position: int
    start: float
    api: float
    input_length: int
    output_length: int
    hashes: list[int]
    session: str = ""
    edges: list[Edge] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.start + self.api


@dataclass
class _Subagent:
    """A nested scope, at its marker's time (ms)."""

    name: str
    position: int
    start: float
    duration: float | None
    blocking: bool
    requests: list[_Request]


@dataclass
class _Trace:
    place: Place
    name: str
    digest: str
    block: int
    requests: list[_Request]
    subagents: list[_Subagent]


def looks_like(file: TraceFile) -> bool:
    """Whether the first object holds `requests`, a `block_size` and a `hash_id_scope`."""
    return {"requests", "block_size", "hash_id_scope"} <= first_object(file).keys()


def read(files: Iterable[TraceFile], options: ReadOptions) -> TraceTable:
    """All requests, sorted by request id, with their graph; one play per trace.

    Raises:
        InputError: a malformed trace; names file, line (or item) and field.
    """
    traces = [_trace(place, row, file.name) for file in files for place, row in _objects(file)]
    if not traces:
        return graph_table([], 1)
    blocks = [(trace.place, trace.block) for trace in traces]
    block = shared_block_size("block_size", blocks, options.block_size)
    if _are_relative(traces, options.nested_times):
        for trace in traces:
            for agent in trace.subagents:
                for request in agent.requests:
                    request.start += agent.start
    nodes = [node for trace in traces for node in _nodes(trace)]
    return graph_table(sorted(nodes, key=lambda node: node.request_id), block)


def _objects(file: TraceFile) -> Iterator[tuple[Place, dict[str, Any]]]:
    """One object over several lines, or one per line, or an array."""
    if file.data.lstrip().startswith(b"{"):
        try:
            yield Place(1, f"{file.name}:1"), _DECODER.decode(file.data)
            return
        except msgspec.DecodeError as error:
            first = next(file.lines())[1]
            try:
                _DECODER.decode(first)
            except msgspec.DecodeError:
                raise json_error(error, file.data, file.position) from None
    for place, line in items(file):
        yield place, decode(place, line, _DECODER)


def _trace(place: Place, row: dict[str, Any], file_name: str) -> _Trace:
    name = text(place, "id", row.get("id"))
    scope = row.get("hash_id_scope", MISSING)
    if scope not in ("local", "global"):
        raise place.error("hash_id_scope", scope, "'local' or 'global'")
    base_name = file_name.replace("\\", "/").rpartition("/")[2]
    digest = hashlib.blake2b(f"{base_name}\0{place.number}".encode(), digest_size=8).hexdigest()
    trace = _Trace(
        place,
        name,
        digest,
        positive_length(place, "block_size", row.get("block_size")),
        [],
        [],
    )
    for k, item in enumerate(array(place, "requests", row.get("requests"))):
        where = f"requests[{k}]"
        entry = obj(place, where, item)
        if entry.get("type") == "subagent":
            trace.subagents.append(_subagent(place, where, k, entry))
        else:
            trace.requests.append(_request(place, where, f"outer:{k}", k, entry))
    if not trace.requests and not trace.subagents:
        raise place.error("requests", [], "at least one request")
    return trace


def _subagent(place: Place, where: str, k: int, entry: dict[str, Any]) -> _Subagent:
    status = entry.get("status", MISSING)
    if status not in _BLOCKING:
        raise place.error(f"{where}.status", status, f"one of {', '.join(_BLOCKING)}")
    duration = entry.get("duration_ms")
    inner = array(place, f"{where}.requests", entry.get("requests"))
    return _Subagent(
        name=f"subagent:{k}:{text(place, f'{where}.agent_id', entry.get('agent_id'))}",
        position=k,
        start=_milliseconds(place, f"{where}.t", entry.get("t")),
        duration=None
        if duration is None
        else not_negative(place, f"{where}.duration_ms", duration),
        blocking=_BLOCKING[status],
        requests=[
            _request(
                place,
                f"{where}.requests[{j}]",
                f"outer:{k}:inner:{j}",
                k,
                obj(place, f"{where}.requests[{j}]", item),
            )
            for j, item in enumerate(inner)
        ],
    )


def _request(place: Place, where: str, name: str, position: int, entry: dict[str, Any]) -> _Request:
    kind = entry.get("type", MISSING)
    if kind not in ("n", "s"):
        raise place.error(f"{where}.type", kind, "'n', 's', or 'subagent' at the outer level")
    hashes = id_list(place, f"{where}.hash_ids", entry.get("hash_ids"), 64)
    if hashes is None:
        raise place.error(f"{where}.hash_ids", MISSING, "a list of hash ids")
    return _Request(
        place=place,
        name=name,
        position=position,
        start=_milliseconds(place, f"{where}.t", entry.get("t")),
        api=_milliseconds(place, f"{where}.api_time", entry.get("api_time", 0.0)),
        input_length=positive_length(place, f"{where}.in", entry.get("in")),
        output_length=length(place, f"{where}.out", entry.get("out")),
        hashes=hashes,
    )


def _milliseconds(place: Place, name: str, value: Any) -> float:
    return not_negative(place, name, value) * 1000.0


def _are_relative(traces: list[_Trace], basis: str) -> bool:
    if basis not in NESTED_TIMES:
        raise InputError("nested_times", basis, f"one of {', '.join(NESTED_TIMES)}")
    if basis != "auto":
        return basis == "relative"
    return any(
        request.start < agent.start
        for trace in traces
        for agent in trace.subagents
        for request in agent.requests
    )


# --- edges ----------------------------------------------------------------------------------------


def _nodes(trace: _Trace) -> Iterator[Node]:
    root = sorted(trace.requests, key=lambda r: r.start)
    _chain(root, "session:root")
    for agent in trace.subagents:
        inner = sorted(agent.requests, key=lambda r: r.start)
        chains = _chain(inner, f"session:{agent.name}")
        _connect(root, agent, chains)
    everything = root + [r for agent in trace.subagents for r in agent.requests]
    first = min(r.start for r in everything)
    prefix = f"weka:{trace.digest}:"
    unique = _UNIQUE_IDS + (int(trace.digest, 16) >> 2)
    for r in everything:
        needed = -(-r.input_length // trace.block)
        missing = max(0, needed - len(r.hashes))
        ids = r.hashes[:needed] + list(range(unique, unique + missing))
        unique += missing
        yield Node(
            place=r.place,
            request_id=f"{prefix}request:{r.name}",
            play_id=f"{prefix}play:{trace.name}",
            session_id=f"{prefix}{r.session}",
            input_length=r.input_length,
            output_length=r.output_length,
            hash_ids=ids,
            not_before_ms=r.start - first,
            edges=[
                Edge(f"{prefix}request:{e.request_id}", e.on_completion, e.delay_ms)
                for e in r.edges
            ],
        )


def _chain(requests: list[_Request], session: str) -> list[list[_Request]]:
    """Split a scope into chains and add the edges inside the scope.

    A request continues the chain that shares the longest prefix with it, if that chain's last
    request had ended and they share at least half of its blocks; with a shorter prefix in common it
    begins a chain, but waits as long. Every request also waits, without delay, for what had ended
    before it in the other chains.
    """
    chains: list[list[_Request]] = []
    for r in requests:
        ended = [chain for chain in chains if chain[-1].end <= r.start]
        best = max(ended, key=lambda chain: _common(chain[-1], r), default=None)
        shared = 0 if best is None else _common(best[-1], r)
        source = None
        if best is not None and shared:
            source = best[-1]
            r.edges.append(Edge(source.name, True, max(0.0, r.start - source.end)))
        for chain in chains:
            before = next((q for q in reversed(chain) if q.end <= r.start), None)
            if before is not None and before is not source:
                r.edges.append(Edge(before.name, True, 0.0))
        if best is None or not shared or 2 * shared < len(r.hashes):
            best = []
            chains.append(best)
        worker = next(k for k, chain in enumerate(chains) if chain is best)
        r.session = session if worker == 0 else f"{session}:worker:{worker - 1}"
        best.append(r)
    return chains


def _common(a: _Request, b: _Request) -> int:
    """Number of leading blocks that two prompts share."""
    for k, (one, other) in enumerate(zip(a.hashes, b.hashes, strict=False)):
        if one != other:
            return k
    return min(len(a.hashes), len(b.hashes))


def _connect(root: list[_Request], agent: _Subagent, chains: list[list[_Request]]) -> None:
    """Spawn and join of a subagent, chain by chain."""
    spawned_by = -1
    for chain in chains:
        first = chain[0]
        before = [
            k for k, r in enumerate(root) if r.position < agent.position and r.start <= first.start
        ]
        if before:
            spawn = root[before[-1]]
            spawned_by = max(spawned_by, before[-1])
            running = first.start < spawn.end
            since = spawn.start if running else spawn.end
            first.edges.append(Edge(spawn.name, not running, first.start - since))
    if not agent.blocking or not chains:
        return
    last_end = max(chain[-1].end for chain in chains)
    end = last_end if agent.duration is None else agent.start + agent.duration
    join = next((r for r in root[spawned_by + 1 :] if r.start >= end), None)
    for chain in chains:
        if join is not None:
            join.edges.append(Edge(chain[-1].name, True, max(0.0, join.start - chain[-1].end)))
