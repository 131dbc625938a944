"""Running the kernels over lowered state: threads, pauses, growing logs, ticks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from vecsim.config.roles import Role
from vecsim.errors import SimulationError
from vecsim.kernels.cache.kv_events import events_have_room
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import (
    BAD_PRICE,
    DONE,
    FOREST_FULL,
    LOG_FULL,
    PAUSED,
    TICKED,
    TICKS_EXHAUSTED,
)
from vecsim.kernels.state.fleet import Clock, Fleet
from vecsim.kernels.state.pools import Forest, Pools
from vecsim.kernels.state.rank import Ranks
from vecsim.kernels.state.worker import Scratch, Workers
from vecsim.run.lower.fleet import FleetState, new_scratch
from vecsim.run.lower.independent import Independent
from vecsim.run.lower.ranks import grown_forest, lacks_nodes
from vecsim.run.read_out import fleet_outcome, independent_outcome

if TYPE_CHECKING:
    from vecsim.run.kv_events import KvEvents
    from vecsim.run.outcome import Outcome
    from vecsim.workload.workload import Workload

Progress = Callable[[int, int], None]

_SEGMENTS_A_CALL = 100_000
_CALLS_A_LANE = 50


@dataclass(frozen=True)
class RunOptions:
    """How to run what was lowered.

    Attributes:
        horizon_ms: virtual time after which nothing is processed; infinity = run to the end.
        threads: threads to advance independent workers on. Results do not depend on it.
        progress: called with (requests ended, requests) now and then, or None.
        record_segments: keep the segment log, from which time series are made.
        tokenized: there is a tokenization stage.
    """

    horizon_ms: float
    threads: int
    progress: Progress | None
    record_segments: bool = False
    tokenized: bool = False


def _entries(backend: str) -> ModuleType:
    """The module with the entry points of a backend; loading it takes a tenth of a second."""
    if backend == "sglang":
        from vecsim.kernels import entries_sglang

        return entries_sglang
    from vecsim.kernels import entries_vllm

    return entries_vllm


# --- fleets on one clock --------------------------------------------------------------------------
@dataclass(frozen=True)
class Ticks:
    """Moments at which the run stops to be looked at.

    Attributes:
        next_ms: the first one.
        act: called with the fleet, at rest, when all that happens up to the moment has happened;
            answers when the next one is (later, ms; infinity: never).
    """

    next_ms: float
    act: Callable[[Fleet], float]


def run_fleet(
    state: FleetState, workload: Workload, options: RunOptions, ticks: Ticks | None = None
) -> Outcome:
    """Run to the end or to the horizon, and return the columns in workload order.

    Args:
        state: lowered state; its arrays are used up.
        workload: n requests.
        options: how to run it.
        ticks: when to look at it, or None.

    Raises:
        SimulationError: an unusable pass duration, or a standstill that no rule settles.
    """
    run = _entries(state.plans[0].role.backend).run_fleet
    fleet = state.fleet
    logged: list[np.ndarray] = []
    if ticks is not None:
        fleet.clock.time[F.NEXT_TICK] = ticks.next_ms
    while True:
        code = run(fleet)
        if options.progress is not None:
            ended = int(fleet.arrivals.state[F.ENDED_COUNT])
            options.progress(ended, fleet.arrivals.requests.shape[1])
        if code == DONE:
            break
        if code == LOG_FULL:
            fleet = fleet._replace(scratch=with_longer_logs(fleet.ranks, fleet.scratch))
        elif code == FOREST_FULL:
            fleet = fleet._replace(pools=_with_room(fleet.pools, fleet.ranks, logged))
        elif code == TICKED:
            fleet.clock.time[F.NEXT_TICK] = ticks.act(fleet)
        elif code != PAUSED:
            raise SimulationError(_fleet_failure(int(code), state, fleet))
    outcome = fleet_outcome(state, fleet, options.horizon_ms, options.tokenized)
    if state.watched is None:
        return outcome
    from vecsim.run.kv_events import collect, taken_out

    logs = [[*logged, taken_out(fleet.pools.events)]]
    return replace(outcome, kv_events=collect(logs, state, fleet.ranks, workload))


def _with_room(pools: Pools | Forest, ranks: Ranks, logged: list[np.ndarray]) -> Pools | Forest:
    """Room in the log of KV events, whose words go to `logged`, and in radix trees, for the next
    pass of any worker."""
    if not events_have_room(pools.events):
        from vecsim.run.kv_events import taken_out

        logged.append(taken_out(pools.events))
    if isinstance(pools, Forest) and lacks_nodes(pools, ranks):
        return grown_forest(pools, ranks)
    return pools


def _fleet_failure(code: int, state: FleetState, fleet: Fleet) -> str:
    """The pool of the worker whose pass has no price speaks, or that whose workers got nowhere."""
    if len(state.plans) == 1:
        return failure(code, fleet.ranks, fleet.workers)
    worker = int(fleet.workers.state[:, W.PASSES_WITHOUT_PROGRESS].argmax())
    if code == BAD_PRICE:
        worker = int(fleet.clock.ready[0])
    pool = int(fleet.workers.state[worker, W.POOL])
    first = int(fleet.clock.pools[pool, F.FIRST_WORKER])
    count = int(fleet.clock.pools[pool, F.WORKER_COUNT])
    own = Workers(*(column[first : first + count] for column in fleet.workers))
    return f"{state.plans[pool].role.stage} pool: {failure(code, fleet.ranks, own)}"


# --- independent workers --------------------------------------------------------------------------
def run_independent(
    state: Independent, workload: Workload, role: Role, options: RunOptions
) -> Outcome:
    """Run to the end or to the horizon, and return the columns in workload order.

    Raises:
        SimulationError: an unusable pass duration, or a standstill that no rule settles.
    """
    lanes = _run_lanes(state, role, options)
    outcome = independent_outcome(
        state,
        role,
        options.horizon_ms,
        options.tokenized,
        [lane.scratch for lane in lanes],
    )
    if state.watched is None:
        return outcome
    return replace(outcome, kv_events=_kv_events(state, workload, role, lanes))


@dataclass
class _Lane:
    """One thread's clock and scratch memory. Radix trees are each thread's own, and so is the log
    of KV events: `logged` are the parts of it that had to make room."""

    run: Callable
    clock: Clock
    scratch: Scratch
    pools: Pools | Forest
    logged: list[np.ndarray] = field(default_factory=list)


def _lane(state: Independent, role: Role, options: RunOptions) -> _Lane:
    clock = Clock(
        state=np.zeros(F.CLOCK_STATE, np.int64),
        time=np.zeros(F.CLOCK_TIME),
        ends=np.full(2, np.inf),
        ready=np.zeros(1, np.int64),
        servers=np.zeros((1, 0)),
        pools=np.zeros((1, F.POOL_FIELDS), np.int64),
    )
    clock.state[F.SEGMENTS] = _SEGMENTS_A_CALL
    clock.time[F.HORIZON] = options.horizon_ms
    pools = state.pools
    if isinstance(pools, Forest):
        pools = grown_forest(pools, state.ranks)
    if state.watched is not None:
        from vecsim.run.kv_events import new_log

        named = state.watched.requests if isinstance(pools, Forest) else None
        log = new_log(state.watched, len(state.ranks.fields), coupled=False, named=named)
        pools = pools._replace(events=log)
    run = _entries(role.backend).run_independent
    return _Lane(run, clock, new_scratch(state.ranks, options.record_segments), pools)


def _run_lanes(state: Independent, role: Role, options: RunOptions) -> list[_Lane]:
    """Advance the workers one by one; each thread takes the next one that nobody has."""
    workers = len(state.workers.state)
    threads = max(1, min(options.threads, workers))
    lanes = [_lane(state, role, options) for _ in range(threads)]
    if threads == 1:
        clock = lanes[0].clock.state
        a_call = max(workers // _CALLS_A_LANE, 1)
        while clock[F.END_WORKER] < workers:
            clock[F.END_WORKER] = min(clock[F.END_WORKER] + a_call, workers)
            while not _advance(state, lanes[0]):
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
            lane.clock.state[F.NEXT_WORKER] = worker
            lane.clock.state[F.END_WORKER] = worker + 1
            finished = False
            while not stop.is_set() and not finished:
                finished = _advance(state, lane)
                with lock:
                    _report_progress(state, options)

    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(work, lane) for lane in lanes]:
                done.result()
        finally:
            stop.set()
    return lanes


def _advance(state: Independent, lane: _Lane) -> bool:
    """Run until the lane pauses or is done. Returns whether it is done."""
    code = lane.run(
        state.ranks, state.workers, state.requests, lane.pools, lane.scratch, lane.clock
    )
    if code == LOG_FULL:
        lane.scratch = with_longer_logs(state.ranks, lane.scratch)
    elif code == FOREST_FULL:
        lane.pools = _with_room(lane.pools, state.ranks, lane.logged)
    elif code not in (DONE, PAUSED):
        raise SimulationError(failure(int(code), state.ranks, state.workers))
    return code == DONE


def _report_progress(state: Independent, options: RunOptions) -> None:
    if options.progress is not None:
        ended = int(state.workers.state[:, W.TERMINALS].sum())
        options.progress(ended, state.requests.state.shape[1])


def _kv_events(
    state: Independent, workload: Workload, role: Role, lanes: list[_Lane]
) -> tuple[KvEvents, ...]:
    """What the ranks announced, after the columns were read out."""
    from vecsim.run.kv_events import collect_pool, taken_out

    logs = [[*lane.logged, taken_out(lane.pools.events)] for lane in lanes]
    return collect_pool(logs, state, role, workload)


# --- both -----------------------------------------------------------------------------------------
def with_longer_logs(ranks: Ranks, scratch: Scratch) -> Scratch:
    """The scratch with twice the room in each log that is nearly full."""
    log, segments = scratch.log, scratch.segments
    waiting = int(ranks.fields[:, R.PREEMPTED_COUNT].sum())
    if log.shape[1] - scratch.log_length[0] <= waiting:
        log = np.zeros((3, 2 * log.shape[1] + waiting))
        log[:, : scratch.log.shape[1]] = scratch.log
    needed = scratch.log_length[1] + int(W.LINES_A_RANK) * len(ranks.fields)
    if 0 < segments.shape[1] < needed:
        segments = np.zeros((W.SEGMENT_FIELDS, 2 * segments.shape[1]))
        segments[:, : scratch.segments.shape[1]] = scratch.segments
    return scratch._replace(log=log, segments=segments)


def failure(code: int, ranks: Ranks, workers: Workers) -> str:
    """What an error code of a kernel means for these workers."""
    if code == BAD_PRICE:
        return (
            "timing model: a pass duration is NaN, negative, or 2**64 s or more (after speedup);"
            " expected a finite non-negative number of ms"
        )
    if code == TICKS_EXHAUSTED:
        return "a rank made more than 2**31 passes without a break; split the workload"
    busiest = int(workers.state[:, W.PASSES_WITHOUT_PROGRESS].argmax())
    first, dp_size = workers.state[busiest, [W.FIRST_RANK, W.DP_SIZE]]
    own = ranks.fields[first : first + dp_size]
    running = own[:, R.RUNNING].tolist()
    preempted = own[:, R.PREEMPTED_COUNT].tolist()
    free = (own[:, R.FREE] + own[:, R.EVICTABLE]).tolist()
    return (
        f"no progress: worker {busiest} at {workers.time[busiest, W.CLOCK]} ms keeps"
        f" preempting without a token; per rank running {running}, preempted {preempted},"
        f" unheld blocks {free}"
    )
