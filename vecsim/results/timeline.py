"""Time series of a run, derived from its segment logs and its request columns.

A segment is a pass, or a decode run of passes that differ only in duration; within one, tokens
count as spread evenly, whole ones. Sums over all buckets are what the pool did in the whole run,
for requests that were failed or cut too: `prefill_tokens` those of the report's committed prefill
tokens, `output_tokens` those of the column `output_length` of all requests, `passes` and
`preemptions` those of the report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.kernels.state import status as S
from vecsim.kernels.state import worker as W
from vecsim.run.outcome import HandoffOutcome, Outcome, PoolOutcome
from vecsim.run.window import Measured

_BUCKETS = 200
_NICE = (1.0, 2.0, 5.0, 10.0)
_MOST_BUCKETS = 10_000_000
_WHOLE = ("prefill_tokens", "output_tokens", "passes")

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
    "prefill_tokens": pl.Int64(),
    "output_tokens": pl.Int64(),
    "passes": pl.Int64(),
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

In a prefill/decode fleet a request arrives at a pool when it is sent there, and completes in the
prefill pool when its prompt is done. In the decode pool it waits for blocks, and again, once its
prompt has been transferred, for a batch.
"""


@dataclass(frozen=True)
class _Series:
    """Segments of one worker: knots of time, and what was done from each to the next."""

    start: np.ndarray
    end: np.ndarray
    amounts: dict[str, np.ndarray]
    preempted_at: np.ndarray
    preempted: np.ndarray


@dataclass(frozen=True)
class _Stays:
    """The requests of one pool.

    Attributes:
        worker: int [n], worker of each request; negative if it never came to the pool.
        came_ms, done_ms: float64 [n], when it arrived and completed there; NaN = never.
        spans: spans of time in which each request wants to be in a batch: float64 [n] pairs; those
            that begin with NaN are not.
    """

    worker: np.ndarray
    came_ms: np.ndarray
    done_ms: np.ndarray
    spans: tuple[tuple[np.ndarray, np.ndarray], ...]


def build_timeline(outcome: Outcome, bucket_ms: float | None, by: str) -> pl.DataFrame:
    """The series of a run.

    Args:
        outcome: a run with segment logs.
        bucket_ms: width of a bucket (ms); None = a round width that makes about 200 buckets.
        by: "worker", or "pool" for the sum over the workers of a pool.

    Returns:
        One row for each bucket and worker (or pool), columns of `TIMELINE_SCHEMA`; by pool
        (prefill before decode), worker, then time.

    Raises:
        InputError: no segment log, a width that is not positive, an unknown `by`.
    """
    if not outcome.has_segments:
        raise InputError("timeline", "a run without it", "replay(..., timeline=True)")
    if by not in ("worker", "pool"):
        raise InputError("by", by, "worker or pool")
    edges = _edges(outcome.end_ms, bucket_ms)
    frames = []
    for pool, stays in zip(outcome.pools, _stays(outcome), strict=True):
        frames += _pool_frames(pool, stays, edges, outcome.end_ms, by)
    return pl.concat(frames)


def _pool_frames(
    pool: PoolOutcome, stays: _Stays, edges: np.ndarray, end_ms: float, by: str
) -> list[pl.DataFrame]:
    """Rows of each worker of a pool, or of all together."""
    blocks = pool.dp_size * pool.total_blocks
    columns = [
        _buckets_of_worker(edges, series, stays, worker, end_ms)
        for worker, series in enumerate(_worker_series(pool))
    ]
    if by == "worker":
        return [
            _frame(edges, one, pool.name, worker, (1, blocks)) for worker, one in enumerate(columns)
        ]
    total = {name: sum(one[name] for one in columns) for name in columns[0]}
    return [_frame(edges, total, pool.name, None, (pool.workers, blocks))]


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


# --- requests -------------------------------------------------------------------------------------


def _stays(outcome: Outcome) -> list[_Stays]:
    """The requests of each pool."""
    if outcome.handoff is not None:
        return [_prefill_stays(outcome, outcome.handoff), _decode_stays(outcome, outcome.handoff)]
    arrival = outcome.arrival_ms if outcome.tokenized_ms is None else outcome.tokenized_ms
    return [
        _Stays(
            outcome.rank // outcome.pools[0].dp_size,
            outcome.arrival_ms,
            _completed_ms(outcome),
            ((arrival, outcome.terminal_ms),),
        )
    ]


def _completed_ms(outcome: Outcome) -> np.ndarray:
    return np.where(outcome.status == S.COMPLETED, outcome.terminal_ms, np.nan)


def _prefill_stays(outcome: Outcome, handoff: HandoffOutcome) -> _Stays:
    """From their submission until their prompts are done, or they end there."""
    came = outcome.arrival_ms if handoff.source_first else handoff.destination_reserved_ms
    since = came if outcome.tokenized_ms is None else outcome.tokenized_ms
    held = handoff.source_held_ms
    until = np.where(np.isnan(held), outcome.terminal_ms, held)
    worker = handoff.prefill_rank // outcome.pools[0].dp_size
    return _Stays(worker, came, held, ((since, until),))


def _decode_stays(outcome: Outcome, handoff: HandoffOutcome) -> _Stays:
    """Until their blocks are reserved, and from the arrival of their prompts until they end."""
    came = handoff.source_held_ms if handoff.source_first else outcome.arrival_ms
    reserved, terminal = handoff.destination_reserved_ms, outcome.terminal_ms
    asking = (came, np.where(np.isnan(reserved), terminal, reserved))
    decoding = (handoff.destination_activated_ms, terminal)
    worker = outcome.rank // outcome.pools[1].dp_size
    return _Stays(worker, came, _completed_ms(outcome), (asking, decoding))


# --- segments -------------------------------------------------------------------------------------


def _worker_series(pool: PoolOutcome) -> list[_Series]:
    """The log by worker: ranks that worked side by side are added up."""
    log = pool.segments
    worker = log[W.SEGMENT_RANK].astype(np.int64) // pool.dp_size
    order = np.lexsort((log[W.SEGMENT_START], log[W.SEGMENT_FIRST], worker))
    log, worker = log[:, order], worker[order]
    ends = np.searchsorted(worker, np.arange(pool.workers + 1))
    preemptions = pool.preemptions.reshape(pool.workers, pool.dp_size).sum(axis=1)
    return [
        _series(log[:, ends[w] : ends[w + 1]], int(preemptions[w])) for w in range(pool.workers)
    ]


def _series(log: np.ndarray, preemptions: int) -> _Series:
    """What one worker logged; a pass that a time limit cut is not in the log, but what it preempted
    counts among all `preemptions` of the worker."""
    start, end = log[W.SEGMENT_START], log[W.SEGMENT_END]
    new = np.ones(len(start), bool)
    new[1:] = np.any(np.diff(log[[W.SEGMENT_FIRST, W.SEGMENT_START]]) != 0, axis=0)
    first = np.flatnonzero(new)

    def total(field: np.int64) -> np.ndarray:
        return np.add.reduceat(log[field], first) if len(first) else np.zeros(0)

    def largest(field: np.int64) -> np.ndarray:
        return np.maximum.reduceat(log[field], first) if len(first) else np.zeros(0)

    passes = largest(W.SEGMENT_PASSES)
    duration = np.where(passes > 0, end[first] - start[first], 0.0)
    held = largest(W.SEGMENT_HELD)
    preempted = np.zeros(len(start))
    for rank in np.unique(log[W.SEGMENT_RANK]):
        own = log[W.SEGMENT_RANK] == rank
        preempted[own] = np.diff(log[W.SEGMENT_PREEMPTIONS, own], prepend=0.0)
    cut_at = end.max(initial=0.0)
    return _Series(
        start[first],
        end[first],
        {
            "running": total(W.SEGMENT_RUNNING) * duration,
            "kv_blocks_used": np.diff(held, prepend=0.0),
            "busy_ratio": duration,
            "prefill_tokens": total(W.SEGMENT_PREFILL),
            "output_tokens": total(W.SEGMENT_OUTPUT),
            "passes": passes,
        },
        np.append(start, cut_at),
        np.append(preempted, preemptions - preempted.sum()),
    )


def use_between(pool: PoolOutcome, start_ms: float, end_ms: float) -> dict[str, np.ndarray]:
    """What the workers of a pool did in a stretch of time, as `PoolOutcome` has it of the whole
    run: `busy_ms`, `kv_block_ms` (float64 [workers]) and `passes` (int64 [workers]).

    Args:
        pool: with a segment log.
        start_ms, end_ms: 0 <= start <= end.
    """
    edges = np.array([0.0, start_ms, end_ms])
    names = {"busy_ms": "busy_ratio", "kv_block_ms": "kv_blocks_used", "passes": "passes"}
    return {
        own: np.array(
            [
                _spread(edges, one, one.amounts[name], whole=name in _WHOLE)[1]
                for one in _worker_series(pool)
            ]
        )
        for own, name in names.items()
    }


def with_use(measured: Measured, outcome: Outcome) -> Measured:
    """With what the pools did in the window, from their segment logs."""
    end = min(measured.end_ms, outcome.end_ms)
    use = tuple(use_between(pool, measured.start_ms, end) for pool in outcome.pools)
    return replace(measured, use=use)


# --- buckets --------------------------------------------------------------------------------------


def _buckets_of_worker(
    edges: np.ndarray, series: _Series, stays: _Stays, worker: int, end_ms: float
) -> dict[str, np.ndarray]:
    columns = {
        name: _spread(edges, series, values, whole=name in _WHOLE)
        for name, values in series.amounts.items()
    }
    mine = stays.worker == worker
    inside = np.zeros(len(edges) - 1)
    for since, until in stays.spans:
        wants = mine & ~np.isnan(since)
        left = np.where(np.isnan(until), end_ms, until)[wants]
        inside += _time_inside(edges, np.minimum(since[wants], left), left)
    columns["waiting"] = np.maximum(inside - columns["running"], 0.0)
    columns["preemptions"] = _counts(edges, series.preempted_at, series.preempted)
    columns["arrivals"] = _counts(edges, stays.came_ms[mine])
    columns["completions"] = _counts(edges, stays.done_ms[mine & ~np.isnan(stays.done_ms)])
    return columns


def _spread(
    edges: np.ndarray, series: _Series, values: np.ndarray, whole: bool = False
) -> np.ndarray:
    """Amounts per bucket of `values`, each spread evenly over its segment; `whole` amounts are
    rounded so that their sums stay what they are."""
    after = np.cumsum(values)
    times = np.column_stack([series.start, series.end]).ravel()
    sums = np.column_stack([after - values, after]).ravel()
    if len(times) == 0:
        return np.zeros(len(edges) - 1, np.int64 if whole else np.float64)
    at_edges = np.interp(edges, times, sums)
    at_edges[edges >= times[-1]] = after[-1]
    at_edges[0] = 0.0  # what took no time at the very beginning belongs to the first bucket
    return np.diff(np.rint(at_edges).astype(np.int64) if whole else at_edges)


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
