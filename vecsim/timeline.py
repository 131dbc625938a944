"""Time series of a run, derived from its segment log and its request columns.

A segment is a pass, or a stretch of passes that differ only in duration; within one, tokens count
as spread evenly. Sums over all buckets are the totals of the report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.kernels import layout
from vecsim.outcome import Outcome

_BUCKETS = 200
_NICE = (1.0, 2.0, 5.0, 10.0)
_MOST_BUCKETS = 10_000_000

TIMELINE_SCHEMA: dict[str, pl.DataType] = {
    "bucket": pl.Int32(),
    "start_ms": pl.Float64(),
    "end_ms": pl.Float64(),
    "pool": pl.String(),
    "worker": pl.Int32(),
    "running": pl.Float64(),
    "waiting": pl.Float64(),
    "kv_blocks_used": pl.Float64(),
    "kv_usage": pl.Float64(),
    "busy_ratio": pl.Float64(),
    "prefill_tokens": pl.Float64(),
    "output_tokens": pl.Float64(),
    "passes": pl.Float64(),
    "preemptions": pl.Int64(),
    "arrivals": pl.Int64(),
    "completions": pl.Int64(),
}
"""Columns of `Result.timeline`.

running, waiting: requests in a batch, and arrived ones in no batch, mean over the bucket.
kv_blocks_used: referenced KV blocks, mean over the bucket; kv_usage: as a share of all blocks.
busy_ratio: share of (worker) time with a pass in flight. prefill_tokens: prompt tokens computed;
output_tokens: tokens emitted; passes: passes made. preemptions, arrivals, completions: how many.
worker is null in the series of a whole pool.
"""


@dataclass(frozen=True)
class _Series:
    """Segments of one worker: knots of time, and what was done from each to the next."""

    start: np.ndarray
    end: np.ndarray
    amounts: dict[str, np.ndarray]
    preempted_at: np.ndarray
    preempted: np.ndarray


def build_timeline(outcome: Outcome, bucket_ms: float | None, by: str) -> pl.DataFrame:
    """The series of a run.

    Args:
        outcome: a run with a segment log.
        bucket_ms: width of a bucket (ms); None = a round width that makes about 200 buckets.
        by: "worker", or "pool" for the sum over the workers.

    Returns:
        One row for each bucket and worker (or pool), columns of `TIMELINE_SCHEMA`.

    Raises:
        InputError: no segment log, a width that is not positive, an unknown `by`.
    """
    if outcome.segments is None:
        raise InputError("timeline", "a run without it", "replay(..., timeline=True)")
    if by not in ("worker", "pool"):
        raise InputError("by", by, "worker or pool")
    edges = _edges(outcome.end_ms, bucket_ms)
    pool = outcome.pools[0]
    series = _worker_series(outcome)
    columns = [
        _buckets_of_worker(outcome, edges, worker, series[worker]) for worker in range(pool.workers)
    ]
    if by == "pool":
        columns = [{name: sum(one[name] for one in columns) for name in columns[0]}]
    frames = [
        _frame(edges, one, pool.name, worker if by == "worker" else None, share)
        for worker, one in enumerate(columns)
        for share in [(pool.workers if by == "pool" else 1, pool.dp_size * pool.total_blocks)]
    ]
    return pl.concat(frames)


def _edges(end_ms: float, bucket_ms: float | None) -> np.ndarray:
    """Ascending edges of the buckets: float64 [buckets + 1], from 0 to the end or beyond."""
    if bucket_ms is None:
        raw = max(end_ms, 1e-3) / _BUCKETS
        power = 10.0 ** math.floor(math.log10(raw))
        bucket_ms = next(step * power for step in _NICE if step * power >= raw * (1 - 1e-9))
    if isinstance(bucket_ms, bool) or not isinstance(bucket_ms, int | float):
        raise InputError("bucket_ms", bucket_ms, "a finite number above 0, or None")
    if not 0.0 < bucket_ms < math.inf or end_ms / bucket_ms > _MOST_BUCKETS:
        raise InputError("bucket_ms", bucket_ms, f"above 0, for at most {_MOST_BUCKETS} buckets")
    return bucket_ms * np.arange(max(math.ceil(end_ms / bucket_ms), 1) + 1)


def _worker_series(outcome: Outcome) -> list[_Series]:
    """The log by worker: ranks that worked side by side are added up."""
    pool = outcome.pools[0]
    log = outcome.segments
    worker = log[layout.SEGMENT_RANK].astype(np.int64) // pool.dp_size
    order = np.lexsort((log[layout.SEGMENT_FIRST], worker))
    log, worker = log[:, order], worker[order]
    ends = np.searchsorted(worker, np.arange(pool.workers + 1))
    return [_series(log[:, ends[w] : ends[w + 1]]) for w in range(pool.workers)]


def _series(log: np.ndarray) -> _Series:
    start, end = log[layout.SEGMENT_START], log[layout.SEGMENT_END]
    new = np.ones(len(start), bool)
    new[1:] = np.diff(log[layout.SEGMENT_FIRST]) != 0
    first = np.flatnonzero(new)

    def total(field: np.int64) -> np.ndarray:
        return np.add.reduceat(log[field], first) if len(first) else np.zeros(0)

    def largest(field: np.int64) -> np.ndarray:
        return np.maximum.reduceat(log[field], first) if len(first) else np.zeros(0)

    duration = end[first] - start[first]
    held = largest(layout.SEGMENT_HELD)
    preempted = np.zeros(len(start))
    for rank in np.unique(log[layout.SEGMENT_RANK]):
        own = log[layout.SEGMENT_RANK] == rank
        preempted[own] = np.diff(log[layout.SEGMENT_PREEMPTIONS, own], prepend=0.0)
    return _Series(
        start[first],
        end[first],
        {
            "running": total(layout.SEGMENT_RUNNING) * duration,
            "kv_blocks_used": np.diff(held, prepend=0.0),
            "busy_ratio": duration,
            "prefill_tokens": total(layout.SEGMENT_PREFILL),
            "output_tokens": total(layout.SEGMENT_OUTPUT),
            "passes": largest(layout.SEGMENT_PASSES),
        },
        start,
        preempted,
    )


def _buckets_of_worker(
    outcome: Outcome, edges: np.ndarray, worker: int, series: _Series
) -> dict[str, np.ndarray]:
    columns = {name: _spread(edges, series, values) for name, values in series.amounts.items()}
    mine = outcome.rank // outcome.pools[0].dp_size == worker
    mine &= outcome.rank >= 0
    arrival = outcome.arrival_ms if outcome.tokenized_ms is None else outcome.tokenized_ms
    arrival, terminal = arrival[mine], outcome.terminal_ms[mine]
    left = np.where(np.isnan(terminal), outcome.end_ms, terminal)
    inside = _time_inside(edges, np.minimum(arrival, left), left)
    columns["waiting"] = np.maximum(inside - columns["running"], 0.0)
    weights = series.preempted
    columns["preemptions"] = _counts(edges, series.preempted_at, weights)
    columns["arrivals"] = _counts(edges, outcome.arrival_ms[mine])
    done = outcome.status[mine] == layout.COMPLETED
    columns["completions"] = _counts(edges, terminal[done])
    return columns


def _spread(edges: np.ndarray, series: _Series, values: np.ndarray) -> np.ndarray:
    """Amounts per bucket of `values`, each spread evenly over its segment."""
    after = np.cumsum(values)
    times = np.column_stack([series.start, series.end]).ravel()
    sums = np.column_stack([after - values, after]).ravel()
    if len(times) == 0:
        return np.zeros(len(edges) - 1)
    at_edges = np.interp(edges, times, sums)
    at_edges[edges >= times[-1]] = after[-1]
    at_edges[0] = 0.0  # what took no time at the very beginning belongs to the first bucket
    return np.diff(at_edges)


def _time_inside(edges: np.ndarray, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """Request-ms per bucket of requests that are there from `since` to `until`."""
    return np.diff(_integral(edges, np.sort(since)) - _integral(edges, np.sort(until)))


def _integral(edges: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Integral up to each edge of the number of `times` (ascending) that have passed."""
    passed = np.searchsorted(times, edges, side="right")
    sums = np.concatenate([[0.0], np.cumsum(times)])
    return passed * edges - sums[passed]


def _counts(edges: np.ndarray, times: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """How many of `times` fall into each bucket; the last one includes its end."""
    bucket = np.searchsorted(edges, times, side="right") - 1
    bucket = np.clip(bucket, 0, len(edges) - 2)
    return np.bincount(bucket, weights, minlength=len(edges) - 1).astype(np.int64)


def _frame(
    edges: np.ndarray,
    columns: dict[str, np.ndarray],
    pool: str,
    worker: int | None,
    share: tuple[int, int],
) -> pl.DataFrame:
    """Rows of one worker or pool. `share`: (workers, KV blocks of one worker)."""
    workers, blocks = share
    count, width = len(edges) - 1, np.diff(edges)
    values = dict(columns)
    for name in ("running", "waiting", "kv_blocks_used"):
        values[name] = columns[name] / width
    values["kv_usage"] = values["kv_blocks_used"] / (workers * blocks)
    values["busy_ratio"] = columns["busy_ratio"] / (width * workers)
    values.update(
        bucket=np.arange(count, dtype=np.int32),
        start_ms=edges[:-1],
        end_ms=edges[1:],
        pool=[pool] * count,
        worker=[worker] * count,
    )
    return pl.DataFrame({name: values[name] for name in TIMELINE_SCHEMA}, schema=TIMELINE_SCHEMA)
