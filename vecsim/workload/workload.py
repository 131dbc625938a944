"""Workloads: requests as columns, and the prefix tree of their content."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.workload.columns import (
    LENGTH,
    MAX_INT32,
    check_ratio,
    csr_columns,
    fit_blocks,
    flatten,
    flatten_ids,
    float_column,
    int_column,
    is_id_list,
    json_column,
    natural_int,
    number_ids,
    offsets_of,
    optional,
    positive_int,
    rank_column,
    scale_arrivals,
    text_column,
)
from vecsim.workload.dependencies import Dependencies, Sessions
from vecsim.workload.select import check_whole_plays, rate_ratio, rows_of_window, take

_DEFAULT_TOKEN_STRIDE = 1_000_003
_BUILDING = threading.Lock()
"""Replays on several threads share a workload; the first to need a tree builds it."""


@dataclass(frozen=True)
class PrefixTree:
    """Which requests share which prefixes, as paths in a tree.

    Attributes:
        offsets: int64 [n + 1], span of each request in `nodes`.
        nodes: int32 [k], path of request i from the root: `nodes[offsets[i]:offsets[i + 1]]`. Equal
            nodes mean equal tokens up to and including that node. Numbered by first appearance.
        node_count: number of distinct nodes.
        tokens_per_node: node j of a path covers tokens [j * tokens_per_node, (j + 1) *
            tokens_per_node) of its request. Only where a node is a content block may the last
            node of a path be covered in part.
    """

    offsets: np.ndarray
    nodes: np.ndarray
    node_count: int
    tokens_per_node: int


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests as columns. Row order is authored order; arrivals need not be sorted.

    Prompt content is a list of content blocks of `block_tokens` equal tokens each; the last block
    of a prompt may be partial. A row with a prompt but an empty span is private content: it
    shares a prefix with no other row.

    Attributes:
        arrival_ms: float64 [n], arrival (ms), >= 0.
        input_length: int32 [n], prompt tokens.
        output_length: int32 [n], tokens to generate; where tokens are planned, their number.
        dp_rank: int32 [n], pinned attention-DP rank, -1 = free.
        prefill_dp_rank: int32 [n], pinned prefill rank, -1 = as `dp_rank`.
        request_id: strings [n], or None.
        session_id: strings [n] (null = none), or None.
        turn_index: int32 [n] (-1 = none), or None.
        metadata: n objects, or None.
        block_offsets: int64 [n + 1], span of each row in `block_ids`; None = lengths only.
        block_ids: uint32 [m], token value of each content block; None = lengths only.
        block_tokens: tokens per content block; 1 for token ids given by the user.
        output_offsets: int64 [n + 1], span of each row in `output_token_ids`; None = no plans.
        output_token_ids: uint32 [k], planned output tokens; None = no plans.
        sessions: turns that follow completions; None where no session has a second turn.
        dependencies: graph of requests that wait for others, or None.
        session_cap: closed loop, at most so many sessions (a row without one is its own) in
            flight, in row order; authored arrivals are then ignored. None = open loop.
        origin: what a reader recognised (`vecsim.traces.Recognised`), or None.
    """

    arrival_ms: np.ndarray
    input_length: np.ndarray
    output_length: np.ndarray
    dp_rank: np.ndarray
    prefill_dp_rank: np.ndarray
    request_id: pl.Series | None = None
    session_id: pl.Series | None = None
    turn_index: np.ndarray | None = None
    metadata: list[Any] | None = None
    block_offsets: np.ndarray | None = None
    block_ids: np.ndarray | None = None
    block_tokens: int = 1
    output_offsets: np.ndarray | None = None
    output_token_ids: np.ndarray | None = None
    sessions: Sessions | None = None
    dependencies: Dependencies | None = None
    session_cap: int | None = None
    origin: Any = None
    _trees: dict[int, PrefixTree] = field(default_factory=dict, repr=False)
    _right: bool = field(default=False, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.arrival_ms)

    def __repr__(self) -> str:
        kind = "lengths only" if self.block_offsets is None else f"{self.block_tokens}-token blocks"
        return f"<Workload: {len(self)} requests, {kind}>"

    @classmethod
    def from_columns(
        cls,
        arrival_ms: Any,
        input_length: Any,
        output_length: Any,
        *,
        dp_rank: Any = None,
        prefill_dp_rank: Any = None,
        request_id: Any = None,
        session_id: Any = None,
        turn_index: Any = None,
        metadata: Sequence[Any] | None = None,
        hash_ids: Sequence[Sequence[int]] | pl.Series | None = None,
        block_offsets: Any = None,
        block_ids: Any = None,
        block_tokens: int = 512,
        output_offsets: Any = None,
        output_token_ids: Any = None,
    ) -> Workload:
        """A workload from arrays, Polars series or lists, checked and converted.

        Prompt content is given either as `hash_ids`, one list of ids (0 to 2**64 - 1) per row, or
        as `block_offsets` and `block_ids` (0 to 2**32 - 1). Either way a row has
        ceil(input_length / block_tokens) ids, or none (private content); surplus ids are dropped.
        Without content no row shares a prefix with another.

        Raises:
            InputError: a column of the wrong length, type or range; names column and row.
        """
        arrival = float_column("arrival_ms", arrival_ms)
        n = len(arrival)
        inputs = int_column("input_length", input_length, n, 0, MAX_INT32, LENGTH)
        outputs = int_column("output_length", output_length, n, 0, MAX_INT32, LENGTH)
        block_tokens = positive_int("block_tokens", block_tokens)
        planned = csr_columns(
            "output_offsets", output_offsets, "output_token_ids", output_token_ids, n
        )
        if planned is not None:
            _check_planned(planned[0], outputs)
        if hash_ids is None:
            blocks = csr_columns("block_offsets", block_offsets, "block_ids", block_ids, n)
        elif block_offsets is not None or block_ids is not None:
            raise InputError("hash_ids", "hash_ids beside block_ids", "one of the two")
        else:
            offsets, ids = flatten_ids("hash_ids", hash_ids, n)
            blocks = offsets, number_ids(ids)
        if blocks is not None:
            blocks = fit_blocks(inputs, *blocks, block_tokens)
        elif planned is not None:
            blocks = _no_blocks(n)
        return cls(
            arrival_ms=arrival,
            input_length=inputs.astype(np.int32),
            output_length=outputs.astype(np.int32),
            dp_rank=rank_column("dp_rank", dp_rank, n),
            prefill_dp_rank=rank_column("prefill_dp_rank", prefill_dp_rank, n),
            request_id=text_column("request_id", request_id, n),
            session_id=text_column("session_id", session_id, n),
            turn_index=None if turn_index is None else rank_column("turn_index", turn_index, n),
            metadata=json_column("metadata", metadata, n),
            block_offsets=None if blocks is None else blocks[0],
            block_ids=None if blocks is None else blocks[1],
            block_tokens=block_tokens,
            output_offsets=None if planned is None else planned[0],
            output_token_ids=None if planned is None else planned[1],
        )

    @classmethod
    def from_requests(cls, requests: Sequence[Any]) -> Workload:
        """A workload from inline requests (`vecsim.config.schema.ReplayRequest`), in list order.

        Raises:
            InputError: a length, rank or token id out of range; names `requests[i].field`.
        """
        n = len(requests)
        outputs = _request_ints(requests, "output_tokens")
        _plan_outputs(requests, outputs)
        planned = _planned_outputs(requests)
        blocks = _request_tokens(requests)
        if blocks is None and planned is not None:
            blocks = _no_blocks(n)
        return cls(
            arrival_ms=np.array([request.arrival_time_ms for request in requests], np.float64),
            input_length=_request_ints(requests, "input_tokens").astype(np.int32),
            output_length=outputs.astype(np.int32),
            dp_rank=_request_ints(requests, "dp_rank").astype(np.int32),
            prefill_dp_rank=_request_ints(requests, "prefill_dp_rank").astype(np.int32),
            request_id=pl.Series("request_id", [request.id for request in requests], pl.String),
            session_id=optional(
                [request.session_id for request in requests],
                lambda values: pl.Series("session_id", values, pl.String),
            ),
            turn_index=optional(
                [request.turn_index for request in requests],
                lambda _: _request_ints(requests, "turn_index").astype(np.int32),
            ),
            metadata=optional([request.metadata for request in requests], list),
            block_offsets=None if blocks is None else blocks[0],
            block_ids=None if blocks is None else blocks[1],
            output_offsets=None if planned is None else planned[0],
            output_token_ids=None if planned is None else planned[1],
        )

    @classmethod
    def from_traffic(cls, traffic: Any, spec: Any) -> Workload:
        """The workload that a payload's `traffic` section describes: a trace, or synthetic load.

        `trace_path` is relative to the current directory. `spec` is the spec beside it: synthetic
        prompts are made of its engine's blocks; a trace needs nothing from it.

        Raises:
            InputError: an impossible option or a malformed trace; names field, or file and line.
        """
        from vecsim.traces import workload_of_traffic

        return workload_of_traffic(traffic, spec)

    def checked(self) -> Workload:
        """The same requests, checked and with columns of the dtypes above; itself if they are so.

        Once found right, a workload is not looked at again.

        Raises:
            InputError: a column of the wrong length, type or range, turns or edges that fit no
                order; names column and row.
        """
        if self._right:
            return self
        columns = {
            "arrival_ms": self.arrival_ms,
            "input_length": self.input_length,
            "output_length": self.output_length,
            **{name: getattr(self, name) for name in _OPTIONAL_COLUMNS},
        }
        right = Workload.from_columns(**columns)
        changed = {
            name: getattr(right, name)
            for name, given in columns.items()
            if not _same_column(given, getattr(right, name))
        }
        changed.update(self._checked_waits())
        if self.session_cap is not None:
            positive_int("session_cap", self.session_cap)
        result = replace(self, **changed, _trees={}) if changed else self
        object.__setattr__(result, "_right", True)
        return result

    def _checked_waits(self) -> dict[str, Any]:
        """`sessions` and `dependencies` as they should be, where they are not."""
        waits = {"sessions": self.sessions, "dependencies": self.dependencies}
        waits = {name: given for name, given in waits.items() if given is not None}
        if len(waits) == 2:
            raise InputError("dependencies", "beside sessions", "one of the two")
        changed = {}
        for name, given in waits.items():
            try:
                right = given.checked(len(self))
            except InputError as error:
                raise InputError(f"{name}.{error.where}", error.value, error.expected) from None
            columns = vars(given).items()
            if not all(_same_column(column, getattr(right, key)) for key, column in columns):
                changed[name] = right
        return changed

    def lengths_only(self) -> Workload:
        """The same requests without content: no prompt shares a prefix with another."""
        return replace(
            self,
            block_offsets=None,
            block_ids=None,
            output_offsets=None,
            output_token_ids=None,
            _trees={},
        )

    def speedup(self, ratio: float) -> Workload:
        """The same requests with every gap between arrivals divided by `ratio` (> 0).

        The first arrival stays where it is; delays between turns and of dependencies are divided
        too. The prefix trees are shared with the original.
        """
        if check_ratio("arrival_speedup_ratio", ratio) == 1 or len(self) == 0:
            return self
        first = self.arrival_ms.min()
        return replace(
            self,
            arrival_ms=first + scale_arrivals(self.arrival_ms - first, ratio),
            sessions=None if self.sessions is None else self.sessions.speedup(ratio),
            dependencies=None if self.dependencies is None else self.dependencies.speedup(ratio),
        )

    def rescale_rate(self, requests_per_s: float) -> Workload:
        """The same requests sped up or slowed down to a mean rate: (n - 1) / span of arrivals.

        Raises:
            InputError: a rate that is not above 0, or arrivals that are all at one instant.
        """
        return self.speedup(rate_ratio(self, requests_per_s))

    def window(self, start_ms: float, end_ms: float) -> Workload:
        """What arrives in [start_ms, end_ms), moved so that `start_ms` is 0.

        Sessions and plays go with their first arrival, whole. An empty window is a workload of no
        requests.

        Raises:
            InputError: an end before the start.
        """
        rows = rows_of_window(self, start_ms, end_ms)
        return replace(take(self, rows), arrival_ms=self.arrival_ms[rows] - start_ms)

    def limit(self, n: int) -> Workload:
        """The first `n` rows, in row order.

        Raises:
            InputError: `n` is not a whole number, or cuts a play of a graph.
        """
        rows = np.arange(min(natural_int("limit", n), len(self)))
        check_whole_plays(self, rows)
        return take(self, rows)

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write to a .parquet, .csv or .jsonl file; `vecsim.read_trace` gives an equal workload.

        Raises:
            InputError: no path, another suffix, or a file that is there, unless `overwrite`.
        """
        if not isinstance(path, str | os.PathLike):
            raise InputError("path", path, "the path of a file")
        from vecsim.traces.own import write

        write(self, Path(path), overwrite)

    def prefix_tree(self, engine_block: int) -> PrefixTree:
        """The prefix tree seen by an engine with KV blocks of `engine_block` tokens; cached.

        Where content blocks are whole multiples of engine blocks and nothing is planned, a node is
        a content block of the prompt, whatever the engine block. Otherwise a node is one full
        engine block of prompt and planned output. Private rows, and all rows of a workload
        without content, have empty paths.
        """
        engine_block = positive_int("engine_block", engine_block)
        by_content = self.output_offsets is None and self.block_tokens % engine_block == 0
        key = 0 if by_content else engine_block
        with _BUILDING:
            tree = self._trees.get(key)
            if tree is None:
                build = _content_tree if by_content else _engine_tree
                tree = self._trees[key] = build(self, engine_block)
        return tree


_OPTIONAL_COLUMNS = (
    "dp_rank",
    "prefill_dp_rank",
    "request_id",
    "session_id",
    "turn_index",
    "metadata",
    "block_offsets",
    "block_ids",
    "block_tokens",
    "output_offsets",
    "output_token_ids",
)


def _same_column(given: Any, right: Any) -> bool:
    """Whether a column is of the right kind already, so that it need not be exchanged."""
    if isinstance(right, pl.Series):
        return isinstance(given, pl.Series) and given.dtype == right.dtype
    if not isinstance(right, np.ndarray):
        return type(given) is type(right)
    return (
        isinstance(given, np.ndarray)
        and given.dtype == right.dtype
        and given.shape == right.shape
        and given.flags.carray
    )


def _no_blocks(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(n + 1, np.int64), np.zeros(0, np.uint32)


def _check_planned(offsets: np.ndarray, output_length: np.ndarray) -> None:
    planned = np.diff(offsets)
    bad = np.flatnonzero((planned > 0) & (planned != output_length))
    if bad.size:
        row = int(bad[0])
        expected = f"{int(planned[row])}, the number of its planned output tokens"
        raise InputError(f"output_length[{row}]", int(output_length[row]), expected)


# --- inline requests ------------------------------------------------------------------------------


def _request_ints(requests: Sequence[Any], name: str) -> np.ndarray:
    """int64 [n] of an integer field, -1 where it is None."""
    values = [getattr(request, name) for request in requests]
    for i, value in enumerate(values):
        if value is not None and not 0 <= value <= MAX_INT32:
            expected = f"a whole number from 0 to {MAX_INT32}"
            raise InputError(f"requests[{i}].{name}", value, expected)
    return np.array([-1 if value is None else value for value in values], np.int64)


def _plan_outputs(requests: Sequence[Any], outputs: np.ndarray) -> None:
    """Put the number of planned tokens, where there are some, in place of `output_tokens`.

    Warns:
        UserWarning: once, when the two differ.
    """
    differing = []
    for i, request in enumerate(requests):
        if request.output_token_ids is not None:
            if outputs[i] != len(request.output_token_ids):
                differing.append(i)
            outputs[i] = len(request.output_token_ids)
    if differing:
        first = requests[differing[0]]
        warnings.warn(
            f"requests[{differing[0]}].output_token_ids: {len(first.output_token_ids)} tokens are "
            f"generated, not output_tokens, {first.output_tokens} ({len(differing)} such requests)",
            stacklevel=2,
        )


def _request_tokens(requests: Sequence[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Token ids of all prompts as spans of one-token blocks; None when all prompts are private.

    A prompt without ids has the default tokens index * 1000003 + k. They are laid out only when an
    authored sequence could equal them.
    """
    authored = any(request.input_token_ids is not None for request in requests)
    bare = any(request.output_token_ids and not request.input_tokens for request in requests)
    if not authored and not bare:
        return None
    tokens = []
    for i, request in enumerate(requests):
        ids = request.input_token_ids
        if ids is None:
            first = i * _DEFAULT_TOKEN_STRIDE
            ids = np.arange(first, first + request.input_tokens, dtype=np.uint64)
            tokens.append((ids & np.uint64(2**32 - 1)).astype(np.uint32))
        elif len(ids) != request.input_tokens or not is_id_list(ids, 2**32):
            expected = f"{request.input_tokens} whole numbers below 2**32, one per prompt token"
            raise InputError(f"requests[{i}].input_token_ids", ids, expected)
        else:
            tokens.append(np.array(ids, np.uint32))
    offsets = offsets_of(np.array([len(ids) for ids in tokens], np.int64))
    return offsets, np.concatenate(tokens)


def _planned_outputs(requests: Sequence[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    planned = [request.output_token_ids for request in requests]
    if not any(planned):
        return None
    for i, ids in enumerate(planned):
        if ids is not None and not is_id_list(ids, 2**32):
            raise InputError(f"requests[{i}].output_token_ids", ids, "whole numbers below 2**32")
    return flatten(planned, np.uint32)


# --- prefix trees ---------------------------------------------------------------------------------


def _content_tree(workload: Workload, engine_block: int) -> PrefixTree:
    from vecsim.kernels.cache.prefix_tree import intern_content_blocks

    n = len(workload)
    if workload.block_offsets is None:
        return _empty_tree(n, engine_block)
    size = _check_size(len(workload.block_ids))
    nodes = np.empty(size, np.int32)
    parent, content = np.empty(size, np.int32), np.empty(size, np.uint32)
    count = intern_content_blocks(
        workload.block_offsets, workload.block_ids, nodes, parent, content, _hash_table(n)
    )
    return PrefixTree(workload.block_offsets, nodes, int(count), workload.block_tokens)


def _engine_tree(workload: Workload, engine_block: int) -> PrefixTree:
    from vecsim.kernels.cache.prefix_tree import intern_engine_blocks

    n = len(workload)
    if workload.block_offsets is None:
        return _empty_tree(n, engine_block)
    output_offsets, output_ids = workload.output_offsets, workload.output_token_ids
    if output_offsets is None:
        output_offsets, output_ids = np.zeros(n + 1, np.int64), np.zeros(0, np.uint32)
    tokens = workload.input_length + np.diff(output_offsets)
    private = (np.diff(workload.block_offsets) == 0) & (workload.input_length > 0)
    offsets = offsets_of(np.where(private, 0, tokens // engine_block))
    size = _check_size(int(offsets[-1]))
    nodes = np.empty(size, np.int32)
    content = (
        workload.input_length,
        workload.block_offsets,
        workload.block_ids,
        output_offsets,
        output_ids,
    )
    count = intern_engine_blocks(
        offsets,
        content,
        workload.block_tokens,
        engine_block,
        nodes,
        np.empty((2, size), np.int32),
        _hash_table(n),
    )
    return PrefixTree(offsets, nodes, int(count), engine_block)


def _empty_tree(n: int, engine_block: int) -> PrefixTree:
    return PrefixTree(np.zeros(n + 1, np.int64), np.zeros(0, np.int32), 0, engine_block)


def _hash_table(n: int) -> np.ndarray:
    return np.full(1 << max(4, (2 * n - 1).bit_length()), -1, np.int32)


def _check_size(entries: int) -> int:
    if entries > MAX_INT32:
        raise InputError("prefix tree", entries, f"at most {MAX_INT32} blocks of prompt content")
    return entries
