"""One logical worker: its attention-DP ranks, the group barrier, decode runs, advance.

All ranks with work start a pass together and end together, at the latest rank's end (reference:
runtimes, section 4). When every one of them is *steady* (its running requests all decode in lock
step, and nobody can be admitted), the following passes differ only in their durations: they are
walked as one *decode run*, whose effects on blocks and requests are applied once, at its end.

What depends on the backend is a `Scheduler`; `bind` compiles the worker around one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.interface import Scheduler
from vecsim.kernels.state.layout import (
    ARRIVAL,
    BAD_PRICE,
    BUDGET,
    BUSY_MS,
    CLOCK,
    DONE,
    DP_SIZE,
    FIRST_RANK,
    FOREST_FULL,
    FREE,
    FRONT,
    FRUITLESS,
    IDLE,
    KV_BLOCK_MS,
    LINES_A_RANK,
    LOG_FULL,
    NO_MOVE,
    NO_PASS,
    NUM_BLOCKS,
    ONE_PASS,
    PARTICIPATES,
    PASS_END,
    PASSES,
    PENDING,
    PENDING_PASSES,
    PREEMPTED_ANY,
    PREEMPTED_COUNT,
    PREEMPTIONS,
    PREFILL_TOKENS,
    QUEUE_HEAD,
    REJECTED_HEAD,
    RUN,
    RUNNING,
    SEGMENT_BLOCKS,
    SEGMENT_END,
    SEGMENT_FIRST,
    SEGMENT_HELD,
    SEGMENT_OUTPUT,
    SEGMENT_PASSES,
    SEGMENT_PREEMPTIONS,
    SEGMENT_PREFILL,
    SEGMENT_RANK,
    SEGMENT_RUNNING,
    SEGMENT_START,
    SETTLED,
    TERMINALS,
    TICK,
    TICKS_EXHAUSTED,
    TOKEN_BUDGET,
    TREE_CLOCK,
    UNLIMITED,
)

FRUITLESS_LIMIT = np.int64(1 << 12)
"""The progress guard trips after so many passes, for each rank of the group, in which one only
preempts or none does anything: no token, no end."""

LAST_TICK = np.int64(1 << 30)
"""Ticks are kept in 32 bits, and a request adds up to 2**30 tokens to one."""


class WorkerKernels(NamedTuple):
    """The inner kernels of a worker, bound to a scheduler."""

    room_for_a_pass: Callable
    first_watched_arrival: Callable
    open_pass: Callable
    close_pass: Callable
    close_run: Callable


@inner
def log_segment(scratch, w, s, rank, times, passes, output, prefill, held):
    """Write what one rank did in a pass or run that is about to be closed, or kept in no pass
    at all."""
    line = scratch.log_length[1]
    segments = scratch.segments
    segments[SEGMENT_RANK, line] = rank
    segments[SEGMENT_FIRST, line] = w[PASSES]
    segments[SEGMENT_START, line] = times[CLOCK]
    segments[SEGMENT_END, line] = times[PASS_END]
    segments[SEGMENT_PASSES, line] = passes
    segments[SEGMENT_RUNNING, line] = s[RUNNING]
    segments[SEGMENT_OUTPUT, line] = output
    segments[SEGMENT_PREFILL, line] = prefill
    segments[SEGMENT_BLOCKS, line] = s[NUM_BLOCKS] - s[FREE] - s[IDLE]
    segments[SEGMENT_HELD, line] = times[KV_BLOCK_MS] + held
    segments[SEGMENT_PREEMPTIONS, line] = s[PREEMPTIONS]
    scratch.log_length[1] = line + 1


@inner
def log_has_room(ranks, scratch, w):
    """Whether every preempted request of the worker could be readmitted without filling the log,
    and every rank could log what it does until somebody asks again."""
    if len(scratch.segments[0]) > 0:
        lines_left = np.int64(len(scratch.segments[0])) - scratch.log_length[1]
        if lines_left < LINES_A_RANK * np.int64(len(ranks.fields)):
            return False
    room = np.int64(len(scratch.log[0])) - scratch.log_length[0]
    for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
        room -= ranks.fields[r, PREEMPTED_COUNT]
    return room >= 0


@inner
def earliest_arrival(ranks, requests, w):
    """Arrival of the first request in the queues of an idle worker, or infinity."""
    earliest = np.inf
    for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
        q = ranks.fields[r, QUEUE_HEAD]
        if q >= 0:
            earliest = min(earliest, requests.time[ARRIVAL, q])
    return earliest


@inner
def jump_to_arrival(ranks, workers, requests, worker, until):
    """Move an idle worker's clock to its next arrival; False when none is due by `until`."""
    earliest = earliest_arrival(ranks, requests, workers.state[worker])
    if earliest == np.inf or earliest > until:
        return False
    workers.time[worker, CLOCK] = earliest
    return True


def bind(scheduler: Scheduler) -> WorkerKernels:
    """The worker's kernels for one family of backends."""
    has_work, notices, steady_passes, defers = scheduler[:4]
    schedule, price, tokens_to_emit, apply = scheduler[4:8]
    apply_run, close_group, room = scheduler.apply_run, scheduler.close_group, scheduler.room

    @inner
    def room_for_a_pass(ranks, workers, pools, scratch, worker):
        """DONE, or what has to grow before the worker may start its next pass."""
        w = workers.state[worker]
        if not log_has_room(ranks, scratch, w):
            return LOG_FULL
        if not room(ranks, pools, w[FIRST_RANK], w[DP_SIZE]):
            return FOREST_FULL
        return DONE

    @inner
    def open_pass(ranks, workers, requests, pools, scratch, worker):
        """Start what the worker does next at its clock: nothing, one pass (scheduled and priced),
        or a run of PENDING_PASSES passes at most (still to be walked). Returns DONE or
        BAD_PRICE."""
        w = workers.state[worker]
        now = workers.time[worker, CLOCK]
        first = w[FIRST_RANK]
        dp_size = w[DP_SIZE]
        passes = UNLIMITED
        working = np.int64(0)
        for r in range(first, first + dp_size):
            s = ranks.fields[r]
            s[PARTICIPATES] = np.int64(has_work(requests, s, now))
            if s[PARTICIPATES] != 0:
                working += 1
                if passes > 0:
                    f = ranks.factors[r]
                    steady = steady_passes(requests, pools, w, s, f, ranks.lists, now)
                    passes = min(passes, steady)
        w[PENDING] = NO_PASS
        if working == 0:
            return DONE
        if passes > 0:
            w[PENDING] = RUN
            w[PENDING_PASSES] = passes
            return DONE
        end = now
        for r in range(first, first + dp_size):
            s = ranks.fields[r]
            if s[PARTICIPATES] == 0:
                continue
            f = ranks.factors[r]
            lists = ranks.lists
            defer = defers(requests, w, s, f, lists, now, dp_size)
            schedule(requests, pools, scratch, w, s, f, lists, now, defer)
            rank_end = price(requests, s, f, lists, now)
            if rank_end < 0.0:
                return BAD_PRICE
            end = max(end, rank_end)
        w[PENDING] = ONE_PASS
        w[PENDING_PASSES] = 1
        workers.time[worker, PASS_END] = end
        return DONE

    @inner
    def first_watched_arrival(ranks, workers, requests, worker):
        """Earliest arrival that ends a run of this worker, or infinity."""
        w = workers.state[worker]
        now = workers.time[worker, CLOCK]
        earliest = np.inf
        for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
            s = ranks.fields[r]
            q = s[QUEUE_HEAD]
            if q >= 0 and notices(requests, s, now):
                earliest = min(earliest, requests.time[ARRIVAL, q])
        return earliest

    @inner
    def close(ranks, workers, requests, worker, passes):
        """Bookkeeping of a finished pass or run; the clock moves to its end."""
        w = workers.state[worker]
        times = workers.time[worker]
        start = times[CLOCK]
        end = times[PASS_END]
        times[BUSY_MS] += end - start
        times[CLOCK] = end
        w[PASSES] += passes
        w[PENDING] = NO_PASS
        close_group(ranks, requests, w, w[FIRST_RANK], w[DP_SIZE], passes, start, end)

    @inner
    def close_pass(ranks, workers, requests, pools, scratch, worker):
        """Apply the pass in flight on every rank. Returns DONE, NO_MOVE or TICKS_EXHAUSTED."""
        w = workers.state[worker]
        times = workers.time[worker]
        before = w[TERMINALS]
        moved = False
        strained = False
        worked = False
        exhausted = False
        for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
            s = ranks.fields[r]
            if s[PARTICIPATES] == 0:
                continue
            strained |= s[PREEMPTED_ANY] != 0
            worked |= s[BUDGET] != s[TOKEN_BUDGET]
            moved |= s[SETTLED] > 0 or s[REJECTED_HEAD] >= 0
            if len(scratch.segments[0]) > 0:
                lasted = times[PASS_END] - times[CLOCK]
                held = np.float64(s[NUM_BLOCKS] - s[FREE] - s[IDLE]) * lasted
                tokens = tokens_to_emit(requests, s, ranks.lists)
                log_segment(scratch, w, s, r, times, np.int64(1), tokens, s[PREFILL_TOKENS], held)
            times[KV_BLOCK_MS] += apply(
                requests,
                pools,
                times,
                scratch,
                w,
                s,
                ranks.factors[r],
                ranks.lists,
                times[CLOCK],
                times[PASS_END],
            )
            moved |= s[FRONT] > 0
            exhausted |= s[TICK] > LAST_TICK or s[TREE_CLOCK] > LAST_TICK
        close(ranks, workers, requests, worker, np.int64(1))
        if moved or w[TERMINALS] > before:
            w[FRUITLESS] = 0
        elif strained or not worked:
            w[FRUITLESS] += 1
        if w[FRUITLESS] > FRUITLESS_LIMIT * w[DP_SIZE]:
            return NO_MOVE
        return TICKS_EXHAUSTED if exhausted else DONE

    @inner
    def close_run(ranks, workers, requests, pools, scratch, worker, passes):
        """Apply a decode run of `passes` walked passes that ends at PASS_END."""
        w = workers.state[worker]
        times = workers.time[worker]
        start = times[CLOCK]
        end = times[PASS_END]
        exhausted = False
        for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
            s = ranks.fields[r]
            if s[PARTICIPATES] == 0:
                continue
            if len(scratch.segments[0]) > 0:
                log_segment(scratch, w, s, r, times, passes, s[FRONT] * passes, np.int64(0), 0.0)
            f = ranks.factors[r]
            apply_run(requests, pools, w, s, f, ranks.lists, passes, start, end)
            exhausted |= s[TICK] > LAST_TICK or s[TREE_CLOCK] > LAST_TICK
        close(ranks, workers, requests, worker, passes)
        w[FRUITLESS] = 0
        return TICKS_EXHAUSTED if exhausted else DONE

    return WorkerKernels(room_for_a_pass, first_watched_arrival, open_pass, close_pass, close_run)
