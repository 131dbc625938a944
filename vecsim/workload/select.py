"""Parts of a workload: some of its rows, a window of time, a rate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vecsim.config.checks import finite_positive
from vecsim.errors import InputError
from vecsim.workload.columns import offsets_of

if TYPE_CHECKING:
    from vecsim.workload.workload import Workload


def take_spans(
    offsets: np.ndarray, ids: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The spans (int64 [n + 1] offsets into ids) of some rows, in that order."""
    counts = np.diff(offsets)[rows]
    taken = offsets_of(counts)
    position = np.arange(taken[-1]) - np.repeat(taken[:-1] - offsets[rows], counts)
    return taken, ids[position]


def take(workload: Workload, rows: np.ndarray) -> Workload:
    """The workload of some rows (int64, rising): first turns of sessions, and whole plays."""
    w = workload
    blocks = planned = (None, None)
    if w.block_offsets is not None:
        blocks = take_spans(w.block_offsets, w.block_ids, rows)
    if w.output_offsets is not None:
        planned = take_spans(w.output_offsets, w.output_token_ids, rows)
    graph = w.dependencies
    return replace(
        w,
        arrival_ms=w.arrival_ms[rows],
        input_length=w.input_length[rows],
        output_length=w.output_length[rows],
        dp_rank=w.dp_rank[rows],
        prefill_dp_rank=w.prefill_dp_rank[rows],
        request_id=None if w.request_id is None else w.request_id.gather(rows),
        session_id=None if w.session_id is None else w.session_id.gather(rows),
        turn_index=None if w.turn_index is None else w.turn_index[rows],
        metadata=None if w.metadata is None else [w.metadata[row] for row in rows],
        block_offsets=blocks[0],
        block_ids=blocks[1],
        output_offsets=planned[0],
        output_token_ids=planned[1],
        sessions=None if w.sessions is None else w.sessions.take(rows),
        dependencies=None if graph is None else graph.take(rows),
        _trees={},
    )


def check_whole_plays(workload: Workload, rows: np.ndarray) -> None:
    """Raise InputError if the first rows (0, 1, 2 ...) hold a play in part."""
    if workload.dependencies is None:
        return
    play = workload.dependencies.play
    cut = set(play[: len(rows)].tolist()) & set(play[len(rows) :].tolist())
    if cut:
        name = workload.dependencies.play_id[min(cut)]
        raise InputError("limit", len(rows), f"a number of rows that leaves play {name!r} whole")


def rows_of_window(workload: Workload, start_ms: float, end_ms: float) -> np.ndarray:
    """int64 rows that arrive in [start_ms, end_ms); sessions and plays by their first arrival."""
    if not start_ms <= end_ms:
        raise InputError("window", (start_ms, end_ms), "a start (ms), and an end not before it")
    arrival = workload.arrival_ms
    if workload.dependencies is not None:
        play = workload.dependencies.play
        first = np.full(len(workload.dependencies.play_id), np.inf)
        np.minimum.at(first, play, arrival)
        arrival = first[play]
    return np.flatnonzero((arrival >= start_ms) & (arrival < end_ms))


def rate_ratio(workload: Workload, requests_per_s: float) -> float:
    """The speed-up that gives a workload this mean rate of arrivals."""
    finite_positive("requests_per_s", requests_per_s)
    span = float(np.ptp(workload.arrival_ms)) if len(workload) else 0.0
    if span == 0.0:
        expected = "a workload whose arrivals are spread in time"
        raise InputError("requests_per_s", requests_per_s, expected)
    return requests_per_s / ((len(workload) - 1) * 1000.0 / span)
