"""Running the kernels over lowered state: threads, pauses, growing logs, columns read out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from vecsim.config.roles import Role
from vecsim.config.schema import Tokenization
from vecsim.errors import SimulationError
from vecsim.kernels.fleet import clock as pool_clock
from vecsim.kernels.fleet.clock import Clock
from vecsim.kernels.fleet.itl_histogram import GAP_BINS, bin_midpoints, bin_of
from vecsim.kernels.state import layout
from vecsim.kernels.state.layout import Pools, Ranks, Requests, Scratch, Workers
from vecsim.run.lower import Forests, State, grown_forest
from vecsim.run.outcome import GapDistribution, Outcome, PoolOutcome

if TYPE_CHECKING:
    from vecsim.run.kv_events import KvEvents
    from vecsim.workload.workload import Workload

Progress = Callable[[int, int], None]

_SEGMENTS_A_CALL = 100_000
_CALLS_A_LANE = 50
_LOG_LINES = 4096


@dataclass(frozen=True)
class RunOptions:
    """How to run a lowered pool.

    Attributes:
        max_in_flight: cap of a closed loop, or None for open-loop arrivals.
        coupled: the workers share one clock.
        tokenization: the stage in front of every worker, or None.
        horizon_ms: virtual time after which nothing is processed; infinity = run to the end.
        threads: threads to advance independent workers on. Results do not depend on it.
        progress: called with (requests ended, requests) now and then, or None.
        record_segments: keep the segment log, from which time series are made.
    """

    max_in_flight: int | None
    coupled: bool
    tokenization: Tokenization | None
    horizon_ms: float
    threads: int
    progress: Progress | None
    record_segments: bool = False


def simulate(state: State, workload: Workload, role: Role, options: RunOptions) -> Outcome:
    """Run to the end or to the horizon, and return the columns in workload order.

    Raises:
        SimulationError: an unusable pass duration, or a standstill that no rule settles.
    """
    lanes = (
        _run_coupled(state, role, options) if options.coupled else _run_free(state, role, options)
    )
    outcome = _outcome(state, role, options, lanes)
    if state.watched is None:
        return outcome
    return replace(outcome, kv_events=(_kv_events(state, workload, role, lanes),))


@dataclass
class _Lane:
    """One thread's clock and scratch memory. Radix trees are each thread's own, and so is the log
    of KV events: `logged` are the parts of it that had to make room."""

    clock: Clock
    scratch: Scratch
    pools: Pools | Forests
    logged: list[np.ndarray] = field(default_factory=list)


def _lane(state: State, role: Role, options: RunOptions) -> _Lane:
    stage = options.tokenization
    servers = 0 if stage is None else min(stage.workers, state.requests.state.shape[1])
    workers = len(state.workers.state)
    leaves = 1 << max(workers - 1, 0).bit_length()
    clock = Clock(
        state=np.zeros(pool_clock.CLOCK_STATE, np.int64),
        time=np.zeros(pool_clock.CLOCK_TIME),
        tree=np.full(2 * leaves if options.coupled else 2, np.inf),
        awake=np.zeros(workers if options.coupled else 1, np.int64),
        servers=np.zeros((workers, servers)),
    )
    if stage is not None:
        clock.time[pool_clock.TOKENIZE_MS] = stage.base_ms
        clock.time[pool_clock.TOKENIZE_TOKEN_MS] = stage.per_input_token_ms
    clock.state[pool_clock.DP_SIZE] = role.dp_size
    requests = state.requests.state.shape[1]
    clock.state[pool_clock.MAX_IN_FLIGHT] = min(options.max_in_flight or 0, requests)
    clock.state[pool_clock.SEGMENTS] = _SEGMENTS_A_CALL
    clock.time[pool_clock.HORIZON] = options.horizon_ms
    lane = _Lane(
        clock,
        new_scratch(state.ranks, options.record_segments),
        state.pools if isinstance(state.pools, Pools) else grown_forest(state.pools, state.ranks),
    )
    if state.watched is not None:
        from vecsim.run.kv_events import new_log, observed

        log = new_log(state.watched, len(state.ranks.fields), options.coupled)
        lane.pools, lane.scratch = observed(lane.pools, lane.scratch, state.watched, log)
    return lane


def new_scratch(ranks: Ranks, record_segments: bool) -> Scratch:
    """Working memory of one thread."""
    lines = _LOG_LINES + len(ranks.fields) if record_segments else 0
    chunk = np.zeros((layout.CHUNK_FIELDS, layout.CHUNK))
    chunk[layout.COUNTING] = np.arange(layout.CHUNK)
    return Scratch(
        chunk=chunk,
        bins=np.zeros(GAP_BINS, np.int64),
        log=np.zeros((3, _LOG_LINES)),
        log_length=np.zeros(2, np.int64),
        segments=np.zeros((layout.SEGMENT_FIELDS, lines)),
    )


def _run_coupled(state: State, role: Role, options: RunOptions) -> list[_Lane]:
    lane = _lane(state, role, options)
    finished = False
    while not finished:
        finished = _advance(state, options, lane)
        _report_progress(state, options)
    return [lane]


def _run_free(state: State, role: Role, options: RunOptions) -> list[_Lane]:
    """Advance the workers one by one; each thread takes the next one that nobody has."""
    workers = len(state.workers.state)
    threads = max(1, min(options.threads, workers))
    lanes = [_lane(state, role, options) for _ in range(threads)]
    if threads == 1:
        clock = lanes[0].clock.state
        a_call = max(workers // _CALLS_A_LANE, 1)
        while clock[pool_clock.END_WORKER] < workers:
            clock[pool_clock.END_WORKER] = min(clock[pool_clock.END_WORKER] + a_call, workers)
            while not _advance(state, options, lanes[0]):
                _report_progress(state, options)
            _report_progress(state, options)
        return lanes
    todo = iter(range(workers))
    lock = threading.Lock()
    stop = threading.Event()

    def work(lane: _Lane) -> None:
        while not stop.is_set():
            with lock:
                worker = next(todo, None)
            if worker is None:
                return
            lane.clock.state[pool_clock.NEXT_WORKER] = worker
            lane.clock.state[pool_clock.END_WORKER] = worker + 1
            finished = False
            while not stop.is_set() and not finished:
                finished = _advance(state, options, lane)
                with lock:
                    _report_progress(state, options)

    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(work, lane) for lane in lanes]:
                done.result()
        finally:
            stop.set()
    return lanes


def _advance(state: State, options: RunOptions, lane: _Lane) -> bool:
    """Run until the lane pauses or is done. Returns whether it is done."""
    entries = state.entries
    run = entries.run_coupled if options.coupled else entries.run_independent
    room = (state.ranks, state.workers, state.requests, lane.pools, lane.scratch, lane.clock)
    code = run(*room, *state.waiting)
    if code == layout.LOG_FULL:
        lane.scratch = with_longer_logs(state.ranks, lane.scratch)
    elif code == layout.FOREST_FULL:
        _make_room(state, lane)
    elif code not in (layout.DONE, layout.PAUSED):
        raise SimulationError(failure(int(code), state.ranks, state.workers))
    return code == layout.DONE


def _make_room(state: State, lane: _Lane) -> None:
    """Room in the log of KV events, or else in the radix trees, for the next pass."""
    if state.watched is None:
        lane.pools = grown_forest(lane.pools, state.ranks)
        return
    from vecsim.run.kv_events import lacks_room, taken_out

    if lacks_room(lane.pools.events):
        lane.logged.append(taken_out(lane.pools.events))
        return
    lane.pools = grown_forest(lane.pools, state.ranks)
    lane.scratch = lane.scratch._replace(pools=lane.pools)


def with_longer_logs(ranks: Ranks, scratch: Scratch) -> Scratch:
    """The scratch with twice the room in each log that is nearly full."""
    log, segments = scratch.log, scratch.segments
    waiting = int(ranks.fields[:, layout.PREEMPTED_COUNT].sum())
    if log.shape[1] - scratch.log_length[0] <= waiting:
        log = np.zeros((3, 2 * log.shape[1] + waiting))
        log[:, : scratch.log.shape[1]] = scratch.log
    needed = scratch.log_length[1] + int(layout.LINES_A_RANK) * len(ranks.fields)
    if 0 < segments.shape[1] < needed:
        segments = np.zeros((layout.SEGMENT_FIELDS, 2 * segments.shape[1]))
        segments[:, : scratch.segments.shape[1]] = scratch.segments
    return scratch._replace(log=log, segments=segments)


def failure(code: int, ranks: Ranks, workers: Workers) -> str:
    """What an error code of a kernel means for these workers."""
    if code == layout.BAD_PRICE:
        return (
            "timing model: a pass duration is NaN, negative, or 2**64 s or more (after speedup);"
            " expected a finite non-negative number of ms"
        )
    if code == layout.TICKS_EXHAUSTED:
        return "a rank made more than 2**31 passes without a break; split the workload"
    busiest = int(workers.state[:, layout.FRUITLESS].argmax())
    dp_size = len(ranks.fields) // len(workers.state)
    own = ranks.fields[busiest * dp_size : (busiest + 1) * dp_size]
    running = own[:, layout.RUNNING].tolist()
    preempted = own[:, layout.PREEMPTED_COUNT].tolist()
    free = (own[:, layout.FREE] + own[:, layout.IDLE]).tolist()
    return (
        f"no progress: worker {busiest} at {workers.time[busiest, layout.CLOCK]} ms keeps"
        f" preempting without a token; per rank running {running}, preempted {preempted},"
        f" unheld blocks {free}"
    )


def _report_progress(state: State, options: RunOptions) -> None:
    if options.progress is not None:
        ended = int(state.workers.state[:, layout.TERMINALS].sum())
        options.progress(ended, state.requests.state.shape[1])


# --- reading the columns out ----------------------------------------------------------------------


def _kv_events(state: State, workload: Workload, role: Role, lanes: list[_Lane]) -> KvEvents:
    """What the ranks announced, after the columns were read out."""
    from vecsim.run.kv_events import collect, taken_out

    logs = [[*lane.logged, taken_out(lane.pools.events)] for lane in lanes]
    return collect(logs, state.watched, state.ranks, workload, state.order, "agg", role.dp_size)


def _outcome(state: State, role: Role, options: RunOptions, lanes: list[_Lane]) -> Outcome:
    sglang = not isinstance(state.pools, Pools)
    settle_fronts(state.ranks, state.workers, state.requests, sglang)
    columns = state.requests.state
    times = state.requests.time
    released = times[layout.RELEASED]
    arrival = times[layout.ARRIVAL]
    arrived = released <= options.horizon_ms
    queued = arrival <= options.horizon_ms
    end_ms = max(
        float(state.workers.time[:, layout.CLOCK].max()),
        float(released[arrived].max(initial=0.0)),
        float(arrival[queued].max(initial=0.0)),
        *(float(lane.clock.time[pool_clock.NOW]) for lane in lanes),
    )
    status = columns[layout.STATUS].astype(np.uint8)
    status[~arrived] = layout.NOT_ARRIVED
    reason = columns[layout.REASON].astype(np.uint8)
    reason[status == layout.UNFINISHED] = layout.NO_REASON
    reason[status == layout.NOT_ARRIVED] = layout.NO_REASON
    rank = columns[layout.RANK].copy()
    rank[~arrived] = layout.NONE

    def in_workload_order(column: np.ndarray) -> np.ndarray:
        if state.order is None:
            return column
        restored = np.empty_like(column)
        restored[state.order] = column
        return restored

    request, at_ms, reused = _readmissions(state, lanes)
    return Outcome(
        arrival_ms=in_workload_order(np.where(arrived, released, np.nan)),
        tokenized_ms=None
        if options.tokenization is None
        else in_workload_order(np.where(arrived, arrival, np.nan)),
        first_admit_ms=in_workload_order(times[layout.FIRST_ADMIT]),
        first_token_ms=in_workload_order(times[layout.FIRST_TOKEN]),
        second_token_ms=in_workload_order(times[layout.SECOND_TOKEN]),
        last_token_ms=in_workload_order(times[layout.LAST_TOKEN]),
        terminal_ms=in_workload_order(times[layout.TERMINAL]),
        input_length=in_workload_order(columns[layout.ISL]),
        output_length=in_workload_order(columns[layout.GENERATED]),
        reused_input_tokens=in_workload_order(columns[layout.REUSED]),
        first_reused_input_tokens=in_workload_order(columns[layout.FIRST_REUSED]),
        admissions=in_workload_order(columns[layout.ADMISSIONS]),
        status=in_workload_order(status),
        reason=in_workload_order(reason),
        rank=in_workload_order(rank),
        readmission_request=request,
        readmission_at_ms=at_ms,
        readmission_reused=reused,
        end_ms=end_ms,
        committed_prefill_tokens=int(state.ranks.fields[:, layout.COMMITTED_PREFILL].sum()),
        gaps=gap_distribution(state.workers, [lane.scratch.bins for lane in lanes]),
        pools=(
            pool_outcome("agg", role, state.ranks, state.workers, [lane.scratch for lane in lanes]),
        ),
    )


def pool_outcome(
    name: str, role: Role, ranks: Ranks, workers: Workers, scratches: list[Scratch]
) -> PoolOutcome:
    """What became of one pool."""
    times = workers.time
    return PoolOutcome(
        name=name,
        workers=len(workers.state),
        dp_size=role.dp_size,
        gpus_per_worker=role.gpus_per_worker,
        busy_ms=times[:, layout.BUSY_MS].copy(),
        kv_block_ms=times[:, layout.KV_BLOCK_MS].copy(),
        total_blocks=role.total_blocks,
        passes=workers.state[:, layout.PASSES].copy(),
        preemptions=ranks.fields[:, layout.PREEMPTIONS].copy(),
        segments=_segments(scratches),
    )


def settle_fronts(ranks: Ranks, workers: Workers, requests: Requests, sglang: bool) -> None:
    """Write out the tokens of requests that were decoding in step when the run was cut."""
    dp_size = len(ranks.fields) // len(workers.state)
    for r in np.flatnonzero(ranks.fields[:, layout.FRONT]):
        s = ranks.fields[r]
        start = s[layout.RUN_OFFSET]
        members = ranks.lists[start : start + s[layout.FRONT]]
        requests.state[layout.GENERATED, members] += np.int32(s[layout.TICK])
        last_ms = workers.time[r // dp_size, layout.CLOCK]
        if sglang:
            # Members that have not decoded yet have the time of their first token there.
            members = members[: s[layout.FRONT_JOINED]]
            last_ms = ranks.factors[r, layout.LAST_EMIT]
        requests.time[layout.LAST_TOKEN, members] = last_ms


def _segments(scratches: list[Scratch]) -> np.ndarray | None:
    """float64 [SEGMENT_FIELDS, lines], by rank, then time; None if not kept."""
    if scratches[0].segments.shape[1] == 0:
        return None
    lines = np.concatenate([s.segments[:, : int(s.log_length[1])] for s in scratches], axis=1)
    return lines[:, np.argsort(lines[layout.SEGMENT_RANK], kind="stable")]


def _readmissions(state: State, lanes: list[_Lane]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(request, at_ms, reused tokens) of all readmissions, by request, then time."""
    log = np.concatenate(
        [lane.scratch.log[:, : int(lane.scratch.log_length[0])] for lane in lanes], axis=1
    )
    request = log[0].astype(np.int64)
    if state.order is not None:
        request = state.order[request]
    # Each request's lines stand in order of time in one thread's log.
    by_request = np.argsort(request, kind="stable")
    return (
        request[by_request].astype(np.int32),
        log[1][by_request],
        log[2][by_request].astype(np.int32),
    )


def gap_distribution(workers: Workers, threads: list[np.ndarray]) -> GapDistribution:
    """Pool the workers' gap moments, in worker order, and the threads' bins."""
    time = workers.time
    positive = time[:, layout.GAP_COUNT] - time[:, layout.GAP_ZEROS]
    mean, m2 = _pooled(
        time[:, layout.GAP_COUNT],
        time[:, layout.GAP_SHIFT],
        time[:, layout.GAP_SUM],
        time[:, layout.GAP_SQUARES],
    )
    rate_mean, rate_m2 = _pooled(
        positive,
        time[:, layout.RATE_SHIFT],
        time[:, layout.RATE_SUM],
        time[:, layout.RATE_SQUARES],
    )
    bins = sum(threads[1:], threads[0])
    counted = time[time[:, layout.GAP_COUNT] > 0]
    above_zero = time[positive > 0]
    used = np.zeros(0, np.int64)
    if len(above_zero):
        lowest = bin_of(above_zero[:, layout.GAP_POSITIVE_MIN].min())
        highest = bin_of(counted[:, layout.GAP_MAX].max())
        used = lowest + np.flatnonzero(bins[lowest : highest + 1])
    return GapDistribution(
        count=int(counted[:, layout.GAP_COUNT].sum()),
        zeros=int(counted[:, layout.GAP_ZEROS].sum()),
        minimum=_or_nan(np.min, counted[:, layout.GAP_MIN]),
        maximum=_or_nan(np.max, counted[:, layout.GAP_MAX]),
        mean=mean,
        m2=m2,
        rate_mean=rate_mean,
        rate_m2=rate_m2,
        positive_minimum=_or_nan(np.min, above_zero[:, layout.GAP_POSITIVE_MIN]),
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
