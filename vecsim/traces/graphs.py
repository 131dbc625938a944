"""Graphs of requests: edges by request id, checked and turned into columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from vecsim.errors import MISSING, InputError
from vecsim.traces.json_rows import Place
from vecsim.traces.table import Graph, TraceTable
from vecsim.traces.times import Times
from vecsim.workload.columns import flatten, number_ids, offsets_of
from vecsim.workload.select import take_spans


@dataclass
class Edge:
    """One wait of a request: for the end (`on_completion`) or release of another, plus a delay."""

    request_id: str
    on_completion: bool
    delay_ms: float


@dataclass
class Node:
    """One request of a graph as authored, with its place in the file."""

    place: Place
    request_id: str
    play_id: str
    session_id: str | None
    input_length: int
    output_length: int
    hash_ids: list[int]
    not_before_ms: float
    edges: list[Edge] = field(default_factory=list)
    ordinal: int | None = None
    output_token_ids: list[int] | None = None


def graph_table(nodes: Sequence[Node], block: int, **more: Any) -> TraceTable:
    """The table of some nodes, in their order.

    Raises:
        InputError: a repeated or unknown request id, an edge to itself or to another play, a
            cycle, a play without a root, ordinals that are not 0, 1, 2 ...
    """
    rows = _rows_by_id(nodes)
    _check_edges(nodes, rows)
    _check_cycles(nodes, rows)
    plays = _play_order(nodes)
    edges = [edge for node in nodes for edge in node.edges]
    planned = [node.output_token_ids for node in nodes]
    return TraceTable(
        times=Times(np.array([node.not_before_ms for node in nodes], np.float64)),
        input_length=np.array([node.input_length for node in nodes], np.int64),
        output_length=np.array([node.output_length for node in nodes], np.int64),
        numbers=np.array([node.place.number for node in nodes], np.int64),
        session_id=pl.Series("session_id", [node.session_id for node in nodes], pl.String),
        request_id=pl.Series("request_id", [node.request_id for node in nodes], pl.String),
        ids=_numbered_ids(nodes),
        raw_ids=True,
        block_size=block,
        planned=flatten(planned, np.uint32) if any(planned) else None,
        graph=Graph(
            offsets=offsets_of(np.array([len(node.edges) for node in nodes], np.int64)),
            source=np.array([rows[edge.request_id] for edge in edges], np.int32),
            on_completion=np.array([edge.on_completion for edge in edges], np.bool_),
            delay_ms=np.array([edge.delay_ms for edge in edges], np.float64),
            not_before_ms=np.array([node.not_before_ms for node in nodes], np.float64),
            play_id=pl.Series("play_id", [node.play_id for node in nodes], pl.String),
            play_index=np.array([plays[node.play_id] for node in nodes], np.int32),
        ),
        **more,
    )


def _numbered_ids(nodes: Sequence[Node]) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [n + 1] offsets, uint32 ids) of the nodes' hash ids, numbered by first appearance in
    order of request ids: as token values, which planned outputs may hold as well."""
    order = sorted(range(len(nodes)), key=lambda row: nodes[row].request_id)
    offsets, ids = flatten([nodes[row].hash_ids for row in order], np.uint64)
    return take_spans(offsets, number_ids(ids), np.argsort(order))


def _rows_by_id(nodes: Sequence[Node]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for row, node in enumerate(nodes):
        if node.request_id in rows:
            raise node.place.error("request_id", node.request_id, "an id that no earlier row has")
        rows[node.request_id] = row
    return rows


def _check_edges(nodes: Sequence[Node], rows: dict[str, int]) -> None:
    for node in nodes:
        for k, edge in enumerate(node.edges):
            name = f"dependencies[{k}].request_id"
            if edge.request_id not in rows:
                raise node.place.error(name, edge.request_id, "the request_id of a row")
            if edge.request_id == node.request_id:
                raise node.place.error(name, edge.request_id, "another request, not itself")
            play = nodes[rows[edge.request_id]].play_id
            if play != node.play_id:
                expected = f"a request of play {node.play_id!r}, not of {play!r}"
                raise node.place.error(name, edge.request_id, expected)
            if not edge.delay_ms >= 0:
                raise node.place.error(f"dependencies[{k}].delay_ms", edge.delay_ms, "0 or more")
    rooted = {node.play_id for node in nodes if not node.edges}
    for node in nodes:
        if node.play_id not in rooted:
            expected = "a play with a request that waits for none"
            raise node.place.error("play_id", node.play_id, expected)


def _check_cycles(nodes: Sequence[Node], rows: dict[str, int]) -> None:
    waiting = [len(node.edges) for node in nodes]
    followers: list[list[int]] = [[] for _ in nodes]
    for row, node in enumerate(nodes):
        for edge in node.edges:
            followers[rows[edge.request_id]].append(row)
    free = [row for row, count in enumerate(waiting) if count == 0]
    while free:
        for row in followers[free.pop()]:
            waiting[row] -= 1
            if waiting[row] == 0:
                free.append(row)
    for node, count in zip(nodes, waiting, strict=True):
        if count:
            raise node.place.error(
                "dependencies", node.request_id, "a graph in which no request waits for itself"
            )


def _play_order(nodes: Sequence[Node]) -> dict[str, int]:
    """Index of each play: by ordinal where there are some, else by id."""
    ordinals: dict[str, int | None] = {}
    for node in nodes:
        known = ordinals.setdefault(node.play_id, node.ordinal)
        if known != node.ordinal:
            expected = f"{known}, as in the rows of play {node.play_id!r} before"
            raise node.place.error("source_play_ordinal", node.ordinal, expected)
    if all(ordinal is None for ordinal in ordinals.values()):
        return {play: k for k, play in enumerate(sorted(ordinals))}
    taken = {ordinal for ordinal in ordinals.values() if ordinal is not None}
    if taken != set(range(len(ordinals))):
        node = next(
            (n for n in nodes if n.ordinal is None),
            max(nodes, key=lambda n: -1 if n.ordinal is None else n.ordinal),
        )
        value = MISSING if node.ordinal is None else node.ordinal
        expected = f"each of 0 to {len(ordinals) - 1} for one play"
        raise node.place.error("source_play_ordinal", value, expected)
    return {play: int(ordinal or 0) for play, ordinal in ordinals.items()}


def shared_block_size(name: str, blocks: Sequence[tuple[Place, int]], asked: int | None) -> int:
    """The one block size of a file; the one that was asked for, if any, must be the same.

    Raises:
        InputError: block sizes that differ.
    """
    first = blocks[0][1]
    for place, block in blocks:
        if block != first:
            raise place.error(name, block, f"{first}, as in the rows before")
    if asked is not None and asked != first:
        raise InputError("block_size", asked, f"{first}, as the file says, or none")
    return first


def name_components(nodes: list[Node], prefix: str) -> None:
    """Give each connected component of a graph the play id `prefix` + the request id of its first
    root, by time, then id."""
    leader = {node.request_id: node.request_id for node in nodes}

    def find(request: str) -> str:
        while leader[request] != request:
            leader[request] = leader[leader[request]]
            request = leader[request]
        return request

    for node in nodes:
        for edge in node.edges:
            if edge.request_id in leader:
                leader[find(node.request_id)] = find(edge.request_id)
    first: dict[str, str] = {}
    for node in sorted(nodes, key=lambda n: (bool(n.edges), n.not_before_ms, n.request_id)):
        first.setdefault(find(node.request_id), node.request_id)
    for node in nodes:
        node.play_id = prefix + first[find(node.request_id)]
