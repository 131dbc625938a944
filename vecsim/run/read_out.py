"""Reading the columns out of the kernels' state when a run is over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vecsim.config.roles import Role
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import NONE
from vecsim.kernels.state.fleet import Fleet, Transfers
from vecsim.kernels.state.rank import Ranks
from vecsim.kernels.state.request import Requests
from vecsim.kernels.state.worker import Scratch, Workers
from vecsim.kernels.timing.itl_histogram import bin_midpoints, bin_of
from vecsim.run.lower.fleet import FleetState
from vecsim.run.lower.independent import Independent
from vecsim.run.outcome import (
    GapDistribution,
    HandoffOutcome,
    HandoffSteps,
    Outcome,
    PoolOutcome,
)


class _Order:
    """From the order of the kernels to that of the workload: `rows` int64 [n], or None if the
    same."""

    def __init__(self, rows: np.ndarray | None) -> None:
        self.rows = rows

    def restored(self, column: np.ndarray) -> np.ndarray:
        """A column in workload order."""
        if self.rows is None:
            return column.copy()
        restored = np.empty_like(column)
        restored[self.rows] = column
        return restored

    def named(self, request: np.ndarray) -> np.ndarray:
        """Rows of the workload of requests."""
        return request if self.rows is None else self.rows[request]


# --- independent workers --------------------------------------------------------------------------
def independent_outcome(
    state: Independent,
    role: Role,
    horizon_ms: float,
    tokenized: bool,
    scratches: list[Scratch],
) -> Outcome:
    """The columns of a run of independent workers; `scratches` are those of its threads."""
    write_out_decodes(state.ranks, state.workers, state.requests, role.backend == "sglang")
    logs = [scratch.log[:, : int(scratch.log_length[0])] for scratch in scratches]
    segments = _segments(scratches)
    pool = _pool("agg", role, state.ranks, state.workers, segments)
    gaps = gap_distribution(state.workers, [scratch.bins for scratch in scratches])
    return _aggregated(
        state.requests,
        state.ranks,
        state.workers,
        _Order(state.order),
        horizon_ms,
        tokenized,
        np.concatenate(logs, axis=1),
        0.0,
        gaps,
        pool,
    )


def _aggregated(
    requests: Requests,
    ranks: Ranks,
    workers: Workers,
    order: _Order,
    horizon_ms: float,
    tokenized: bool,
    log: np.ndarray,
    now: float,
    gaps: GapDistribution,
    pool: PoolOutcome,
) -> Outcome:
    columns, times = requests.state, requests.time
    arrived = times[Q.RELEASED] <= horizon_ms
    status = columns[Q.STATUS].astype(np.uint8)
    status[~arrived] = S.NOT_ARRIVED
    reason = columns[Q.REASON].astype(np.uint8)
    reason[(status == S.UNFINISHED) | ~arrived] = S.NO_REASON
    rank = columns[Q.RANK].copy()
    rank[~arrived] = NONE
    request, at_ms, reused, _ = _readmissions(log, order, columns.shape[1])
    restored = order.restored
    return Outcome(
        arrival_ms=restored(np.where(arrived, times[Q.RELEASED], np.nan)),
        tokenized_ms=restored(np.where(arrived, times[Q.ARRIVAL], np.nan)) if tokenized else None,
        first_admit_ms=restored(times[Q.FIRST_ADMIT]),
        first_token_ms=restored(times[Q.FIRST_TOKEN]),
        second_token_ms=restored(times[Q.SECOND_TOKEN]),
        last_token_ms=restored(times[Q.LAST_TOKEN]),
        terminal_ms=restored(times[Q.TERMINAL]),
        input_length=restored(columns[Q.ISL]),
        output_length=restored(columns[Q.GENERATED]),
        reused_input_tokens=restored(columns[Q.REUSED]),
        first_reused_input_tokens=restored(columns[Q.FIRST_REUSED]),
        admissions=restored(columns[Q.ADMISSIONS]),
        status=restored(status),
        reason=restored(reason),
        rank=restored(rank),
        readmission_request=request,
        readmission_at_ms=at_ms,
        readmission_reused=reused,
        end_ms=_end_ms(times, workers, horizon_ms, now),
        committed_prefill_tokens=int(ranks.fields[:, R.COMMITTED_PREFILL].sum()),
        gaps=gaps,
        pools=(pool,),
    )


def _end_ms(times: np.ndarray, workers: Workers, horizon_ms: float, now: float) -> float:
    """The last processed event. `times` float64 [REQUEST_TIME, n]."""
    released, arrival = times[Q.RELEASED], times[Q.ARRIVAL]
    return max(
        float(workers.time[:, W.CLOCK].max()),
        float(released[released <= horizon_ms].max(initial=0.0)),
        float(arrival[arrival <= horizon_ms].max(initial=0.0)),
        now,
    )


def _readmissions(
    log: np.ndarray, order: _Order, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(request, at_ms, reused tokens, whether in the decode pool) of all readmissions, by request,
    then pool, then time: each copy's lines stand in order of time."""
    copy = log[0].astype(np.int64)
    in_decode = copy >= n
    request = order.named(copy % n if n else copy)
    by_request = np.lexsort((in_decode, request))
    return (
        request[by_request].astype(np.int32),
        log[1][by_request],
        log[2][by_request].astype(np.int32),
        in_decode[by_request],
    )


# --- fleets ---------------------------------------------------------------------------------------
def fleet_outcome(state: FleetState, fleet: Fleet, horizon_ms: float, tokenized: bool) -> Outcome:
    """The columns of a run on the fleet's clock."""
    sglang = state.plans[0].role.backend == "sglang"
    write_out_decodes(fleet.ranks, fleet.workers, fleet.requests, sglang)
    order = _Order(state.order)
    now = float(fleet.clock.time[F.NOW])
    log = fleet.scratch.log[:, : int(fleet.scratch.log_length[0])]
    gaps = gap_distribution(fleet.workers, [fleet.scratch.bins])
    pools = _pools(state, fleet)
    if fleet.transfers is None:
        return _aggregated(
            fleet.requests,
            fleet.ranks,
            fleet.workers,
            order,
            horizon_ms,
            tokenized,
            log,
            now,
            gaps,
            pools[0],
        )
    n = fleet.arrivals.requests.shape[1]
    columns, times = fleet.requests.state, fleet.requests.time
    source, target = columns[:, :n], columns[:, n:]
    source_time, target_time = times[:, :n], times[:, n:]
    released, arrival = source_time[Q.RELEASED], source_time[Q.ARRIVAL]
    arrived = released <= horizon_ms
    ended_early = arrived & (source[Q.STATUS] != S.UNFINISHED)
    status = np.where(ended_early, source[Q.STATUS], target[Q.STATUS])
    reason = np.where(ended_early, source[Q.REASON], target[Q.REASON])
    status[~arrived] = S.NOT_ARRIVED
    reason[(status == S.UNFINISHED) | ~arrived] = S.NO_REASON
    terminal = np.where(ended_early, source_time[Q.TERMINAL], target_time[Q.TERMINAL])
    request, at_ms, reused, in_decode = _readmissions(log, order, n)
    restored = order.restored
    return Outcome(
        arrival_ms=restored(np.where(arrived, released, np.nan)),
        tokenized_ms=restored(np.where(arrived, arrival, np.nan)) if tokenized else None,
        first_admit_ms=restored(source_time[Q.FIRST_ADMIT]),
        first_token_ms=restored(target_time[Q.FIRST_TOKEN]),
        second_token_ms=restored(target_time[Q.SECOND_TOKEN]),
        last_token_ms=restored(target_time[Q.LAST_TOKEN]),
        terminal_ms=restored(terminal),
        input_length=restored(target[Q.ISL]),
        output_length=restored(target[Q.GENERATED]),
        reused_input_tokens=restored(source[Q.REUSED]),
        first_reused_input_tokens=restored(source[Q.FIRST_REUSED]),
        admissions=restored(source[Q.ADMISSIONS] + target[Q.ADMISSIONS]),
        status=restored(status).astype(np.uint8),
        reason=restored(reason).astype(np.uint8),
        rank=restored(_own_rank(target[Q.RANK], state.plans[0].ranks)),
        readmission_request=request,
        readmission_at_ms=at_ms,
        readmission_reused=reused,
        end_ms=_end_ms(source_time, fleet.workers, horizon_ms, now),
        committed_prefill_tokens=int(fleet.ranks.fields[:, R.COMMITTED_PREFILL].sum()),
        gaps=gaps,
        pools=pools,
        handoff=_handoff(state, fleet, order, in_decode),
    )


def _own_rank(rank: np.ndarray, first: int) -> np.ndarray:
    """Scheduler ids within a pool whose first rank is `first`; -1 where never placed."""
    return np.where(rank < 0, rank, rank - first).astype(np.int32)


def _handoff(
    state: FleetState, fleet: Fleet, order: _Order, in_decode: np.ndarray
) -> HandoffOutcome:
    n = fleet.arrivals.requests.shape[1]
    source, target = fleet.requests.state[:, :n], fleet.requests.state[:, n:]
    instants = fleet.transfers.instants
    restored = order.restored
    return HandoffOutcome(
        source_first=state.plans[0].role.backend != "sglang",
        prefill_rank=restored(source[Q.RANK]),
        source_held_ms=restored(instants[F.HELD_AT]),
        destination_reserved_ms=restored(instants[F.RESERVED_AT]),
        destination_activated_ms=restored(instants[F.ACTIVATED_AT]),
        decode_admit_ms=restored(fleet.requests.time[Q.FIRST_ADMIT, n:]),
        source_released_ms=restored(instants[F.RELEASED_AT]),
        decode_admissions=restored(target[Q.ADMISSIONS]),
        decode_reused=restored(target[Q.REUSED]),
        decode_first_reused=restored(target[Q.FIRST_REUSED]),
        readmission_in_decode=in_decode,
        steps=None if fleet.transfers.steps is None else _steps(state, fleet, order),
    )


def _steps(state: FleetState, fleet: Fleet, order: _Order) -> HandoffSteps:
    transfers = fleet.transfers
    n = fleet.arrivals.requests.shape[1]
    lines = transfers.steps.lines[:, : int(transfers.steps.length[0])]
    kind = lines[F.STEP_KIND].astype(np.uint8)
    request = lines[F.STEP_REQUEST].astype(np.int64)
    # Blocks of a source that was canceled were given back as well.
    released = ~np.isnan(transfers.instants[F.RELEASED_AT])
    kept = (kind != F.STEP_RELEASED) | released[request]
    first = state.plans[0].ranks
    fields, pending = fleet.ranks.fields, fleet.workers.state[:, W.PENDING]
    prefill_workers = state.plans[0].workers
    return HandoffSteps(
        kind=kind[kept],
        request=order.named(request)[kept].astype(np.int32),
        at_ms=lines[F.STEP_MS, kept],
        source_output=order.restored(fleet.requests.state[Q.GENERATED, :n]),
        drained=(
            _is_drained(fields[:first], pending[:prefill_workers]),
            _is_drained(fields[first:], pending[prefill_workers:]),
            _is_done(fleet, transfers),
        ),
    )


def _is_drained(fields: np.ndarray, pending: np.ndarray) -> bool:
    """Whether no rank of a pool runs, keeps or awaits a request, or holds a block."""
    held = fields[:, R.NUM_BLOCKS] - fields[:, R.FREE] - fields[:, R.EVICTABLE]
    counts = (R.RUNNING, R.HELD, R.PREALLOCATED, R.PREEMPTED_COUNT)
    heads = (R.QUEUE_HEAD, R.READY_HEAD, R.ACTIVATED_HEAD)
    return bool(
        np.all(held == 0)
        and np.all(fields[:, counts] == 0)
        and np.all(fields[:, heads] == NONE)
        and np.all(pending == W.NO_PASS)
    )


def _is_done(fleet: Fleet, transfers: Transfers) -> bool:
    """Whether no request is on its way, and nothing is left to do."""
    clock, n = fleet.clock.state, fleet.arrivals.requests.shape[1]
    ended = fleet.arrivals.state[F.ENDED_COUNT]
    return bool(
        transfers.state[F.ACTIONS] == 0
        and clock[F.READY_WORKERS] == 0
        and clock[F.RELEASED_COUNT] == ended == n
        and np.all(transfers.deferred[F.FIRST_DEFERRED] == NONE)
        and np.all(np.isinf(transfers.ends))
        and np.all(np.isinf(fleet.clock.ends))
    )


# --- pools ----------------------------------------------------------------------------------------
def _pools(state: FleetState, fleet: Fleet) -> tuple[PoolOutcome, ...]:
    """What became of each pool."""
    segments = _segments([fleet.scratch])
    pools = []
    first_rank = first_worker = 0
    for plan in state.plans:
        ranks = slice(first_rank, first_rank + plan.ranks)
        workers = slice(first_worker, first_worker + plan.workers)
        own = segments
        if segments is not None and len(state.plans) > 1:
            rank = segments[W.SEGMENT_RANK]
            own = segments[:, (rank >= ranks.start) & (rank < ranks.stop)]
            own[W.SEGMENT_RANK] -= ranks.start
        name = "agg" if plan.role.stage == "aggregated" else plan.role.stage
        pools.append(
            _pool(
                name,
                plan.role,
                Ranks(fleet.ranks.fields[ranks], fleet.ranks.factors[ranks], fleet.ranks.lists),
                Workers(fleet.workers.state[workers], fleet.workers.time[workers]),
                own,
            )
        )
        first_rank, first_worker = ranks.stop, workers.stop
    return tuple(pools)


def _pool(
    name: str, role: Role, ranks: Ranks, workers: Workers, segments: np.ndarray | None
) -> PoolOutcome:
    return PoolOutcome(
        name=name,
        workers=len(workers.state),
        dp_size=role.dp_size,
        gpus_per_worker=role.gpus_per_worker,
        busy_ms=workers.time[:, W.BUSY_MS].copy(),
        kv_block_ms=workers.time[:, W.KV_BLOCK_MS].copy(),
        total_blocks=role.total_blocks,
        passes=workers.state[:, W.PASSES].copy(),
        preemptions=ranks.fields[:, R.PREEMPTIONS].copy(),
        segments=segments,
    )


def write_out_decodes(ranks: Ranks, workers: Workers, requests: Requests, sglang: bool) -> None:
    """Write out the tokens of requests that were decoding in step when the run was cut."""
    for r in np.flatnonzero(ranks.fields[:, R.DECODING]):
        s = ranks.fields[r]
        start = s[R.RUN_OFFSET]
        members = ranks.lists[start : start + s[R.DECODING]]
        requests.state[Q.GENERATED, members] += np.int32(s[R.TICK])
        last_ms = workers.time[ranks.fields[r, R.WORKER], W.CLOCK]
        if sglang:
            # Members that have not decoded yet have the time of their first token there.
            members = members[: s[R.DECODING_JOINED]]
            last_ms = ranks.factors[r, R.LAST_EMIT]
        requests.time[Q.LAST_TOKEN, members] = last_ms


def _segments(scratches: list[Scratch]) -> np.ndarray | None:
    """float64 [SEGMENT_FIELDS, lines], by rank, then time; None if not kept."""
    if scratches[0].segments.shape[1] == 0:
        return None
    lines = np.concatenate([s.segments[:, : int(s.log_length[1])] for s in scratches], axis=1)
    return lines[:, np.argsort(lines[W.SEGMENT_RANK], kind="stable")]


def gap_distribution(workers: Workers, threads: list[np.ndarray]) -> GapDistribution:
    """Pool the workers' gap moments, in worker order, and the threads' bins."""
    time = workers.time
    positive = time[:, W.GAP_COUNT] - time[:, W.GAP_ZEROS]
    mean, m2 = _pooled(
        time[:, W.GAP_COUNT],
        time[:, W.GAP_SHIFT],
        time[:, W.GAP_SUM],
        time[:, W.GAP_SQUARES],
    )
    rate_mean, rate_m2 = _pooled(
        positive,
        time[:, W.RATE_SHIFT],
        time[:, W.RATE_SUM],
        time[:, W.RATE_SQUARES],
    )
    bins = sum(threads[1:], threads[0])
    counted = time[time[:, W.GAP_COUNT] > 0]
    above_zero = time[positive > 0]
    used = np.zeros(0, np.int64)
    if len(above_zero):
        lowest = bin_of(above_zero[:, W.GAP_POSITIVE_MIN].min())
        highest = bin_of(counted[:, W.GAP_MAX].max())
        used = lowest + np.flatnonzero(bins[lowest : highest + 1])
    return GapDistribution(
        count=int(counted[:, W.GAP_COUNT].sum()),
        zeros=int(counted[:, W.GAP_ZEROS].sum()),
        minimum=_or_nan(np.min, counted[:, W.GAP_MIN]),
        maximum=_or_nan(np.max, counted[:, W.GAP_MAX]),
        mean=mean,
        m2=m2,
        rate_mean=rate_mean,
        rate_m2=rate_m2,
        positive_minimum=_or_nan(np.min, above_zero[:, W.GAP_POSITIVE_MIN]),
        bins=bins[used],
        midpoints=bin_midpoints(used),
    )


def _pooled(
    count: np.ndarray, shift: np.ndarray, total: np.ndarray, squares: np.ndarray
) -> tuple[float, float]:
    """(mean, sum of squared deviations) of groups given by sums of deviations from a shift."""
    some = count > 0
    if not some.any():
        return float("nan"), 0.0
    count, shift, total, squares = count[some], shift[some], total[some], squares[some]
    means = shift + total / count
    mean = float((means * count).sum() / count.sum())
    within = squares - total * (total / count)
    between = count * (means - mean) ** 2
    return mean, float(np.maximum(within, 0.0).sum() + between.sum())


def _or_nan(reduce: Callable[[np.ndarray], np.floating], values: np.ndarray) -> float:
    return float(reduce(values)) if len(values) else float("nan")
