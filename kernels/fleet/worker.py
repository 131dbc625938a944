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
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import (
    BAD_PRICE,
    DONE,
    FOREST_FULL,
    LOG_FULL,
    NO_MOVE,
    TICKS_EXHAUSTED,
    UNLIMITED,
)

NO_PROGRESS_LIMIT = np.int64(1 << 12)
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
    segments[W.SEGMENT_RANK, line] = rank
    segments[W.SEGMENT_FIRST, line] = w[W.PASSES]
    segments[W.SEGMENT_START, line] = times[W.CLOCK]
    segments[W.SEGMENT_END, line] = times[W.PASS_END]
    segments[W.SEGMENT_PASSES, line] = passes
    segments[W.SEGMENT_RUNNING, line] = s[R.RUNNING]
    segments[W.SEGMENT_OUTPUT, line] = output
    segments[W.SEGMENT_PREFILL, line] = prefill
    segments[W.SEGMENT_BLOCKS, line] = s[R.NUM_BLOCKS] - s[R.FREE] - s[R.EVICTABLE]
    segments[W.SEGMENT_HELD, line] = times[W.KV_BLOCK_MS] + held
    segments[W.SEGMENT_PREEMPTIONS, line] = s[R.PREEMPTIONS]
    scratch.log_length[1] = line + 1


@inner
def log_has_room(ranks, scratch, w):
    """Whether every preempted request of the worker could be readmitted without filling the log,
    and every rank could log what it does until somebody asks again."""
    if len(scratch.segments[0]) > 0:
        lines_left = np.int64(len(scratch.segments[0])) - scratch.log_length[1]
        if lines_left < W.LINES_A_RANK * np.int64(len(ranks.fields)):
            return False
    room = np.int64(len(scratch.log[0])) - scratch.log_length[0]
    for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
        room -= ranks.fields[r, R.PREEMPTED_COUNT]
    return room >= 0


@inner
def earliest_arrival(ranks, requests, w):
    """Arrival of the first request in the queues of an idle worker, or infinity."""
    earliest = np.inf
    for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
        q = ranks.fields[r, R.QUEUE_HEAD]
        if q >= 0:
            earliest = min(earliest, requests.time[Q.ARRIVAL, q])
    return earliest


@inner
def jump_to_arrival(ranks, workers, requests, worker, until):
    """Move an idle worker's clock to its next arrival; False when none is due by `until`."""
    earliest = earliest_arrival(ranks, requests, workers.state[worker])
    if earliest == np.inf or earliest > until:
        return False
    workers.time[worker, W.CLOCK] = earliest
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
        if not room(ranks, pools, w[W.FIRST_RANK], w[W.DP_SIZE]):
            return FOREST_FULL
        return DONE

    @inner
    def open_pass(ranks, workers, requests, pools, scratch, worker):
        """Start what the worker does next at its clock: nothing, one pass (scheduled and priced),
        or a run of PENDING_PASSES passes at most (still to be walked). Returns DONE or
        BAD_PRICE."""
        w = workers.state[worker]
        now = workers.time[worker, W.CLOCK]
        first = w[W.FIRST_RANK]
        dp_size = w[W.DP_SIZE]
        passes = UNLIMITED
        working = np.int64(0)
        for r in range(first, first + dp_size):
            s = ranks.fields[r]
            s[R.PARTICIPATES] = np.int64(has_work(requests, s, now))
            if s[R.PARTICIPATES] != 0:
                working += 1
                if passes > 0:
                    f = ranks.factors[r]
                    steady = steady_passes(requests, pools, w, s, f, ranks.lists, now)
                    passes = min(passes, steady)
        w[W.PENDING] = W.NO_PASS
        if working == 0:
            return DONE
        if passes > 0:
            w[W.PENDING] = W.RUN
            w[W.PENDING_PASSES] = passes
            return DONE
        end = now
        for r in range(first, first + dp_size):
            s = ranks.fields[r]
            if s[R.PARTICIPATES] == 0:
                continue
            f = ranks.factors[r]
            lists = ranks.lists
            defer = defers(requests, w, s, f, lists, now, dp_size)
            schedule(requests, pools, scratch, w, s, f, lists, now, defer)
            rank_end = price(requests, s, f, lists, now)
            if rank_end < 0.0:
                return BAD_PRICE
            end = max(end, rank_end)
        w[W.PENDING] = W.ONE_PASS
        w[W.PENDING_PASSES] = 1
        workers.time[worker, W.PASS_END] = end
        return DONE

    @inner
    def first_watched_arrival(ranks, workers, requests, worker):
        """Earliest arrival that ends a run of this worker, or infinity."""
        w = workers.state[worker]
        now = workers.time[worker, W.CLOCK]
        earliest = np.inf
        for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
            s = ranks.fields[r]
            q = s[R.QUEUE_HEAD]
            if q >= 0 and notices(requests, s, now):
                earliest = min(earliest, requests.time[Q.ARRIVAL, q])
        return earliest

    @inner
    def close(ranks, workers, requests, worker, passes):
        """Bookkeeping of a finished pass or run; the clock moves to its end."""
        w = workers.state[worker]
        times = workers.time[worker]
        start = times[W.CLOCK]
        end = times[W.PASS_END]
        times[W.BUSY_MS] += end - start
        times[W.CLOCK] = end
        w[W.PASSES] += passes
        w[W.PENDING] = W.NO_PASS
        close_group(ranks, requests, w, w[W.FIRST_RANK], w[W.DP_SIZE], passes, start, end)

    @inner
    def close_pass(ranks, workers, requests, pools, scratch, worker):
        """Apply the pass in flight on every rank. Returns DONE, NO_MOVE or TICKS_EXHAUSTED."""
        w = workers.state[worker]
        times = workers.time[worker]
        before = w[W.TERMINALS]
        moved = False
        preempted = False
        worked = False
        exhausted = False
        for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
            s = ranks.fields[r]
            if s[R.PARTICIPATES] == 0:
                continue
            preempted |= s[R.PREEMPTED_ANY] != 0
            worked |= s[R.BUDGET] != s[R.TOKEN_BUDGET]
            moved |= s[R.STUCK_ENDED] > 0 or s[R.REJECTED_HEAD] >= 0
            if len(scratch.segments[0]) > 0:
                lasted = times[W.PASS_END] - times[W.CLOCK]
                held = np.float64(s[R.NUM_BLOCKS] - s[R.FREE] - s[R.EVICTABLE]) * lasted
                tokens = tokens_to_emit(requests, s, ranks.lists)
                log_segment(scratch, w, s, r, times, np.int64(1), tokens, s[R.PREFILL_TOKENS], held)
            times[W.KV_BLOCK_MS] += apply(
                requests,
                pools,
                times,
                scratch,
                w,
                s,
                ranks.factors[r],
                ranks.lists,
                times[W.CLOCK],
                times[W.PASS_END],
            )
            moved |= s[R.DECODING] > 0
            exhausted |= s[R.TICK] > LAST_TICK or s[R.TREE_CLOCK] > LAST_TICK
        close(ranks, workers, requests, worker, np.int64(1))
        if moved or w[W.TERMINALS] > before:
            w[W.PASSES_WITHOUT_PROGRESS] = 0
        elif preempted or not worked:
            w[W.PASSES_WITHOUT_PROGRESS] += 1
        if w[W.PASSES_WITHOUT_PROGRESS] > NO_PROGRESS_LIMIT * w[W.DP_SIZE]:
            return NO_MOVE
        return TICKS_EXHAUSTED if exhausted else DONE

    @inner
    def close_run(ranks, workers, requests, pools, scratch, worker, passes):
        """Apply a decode run of `passes` walked passes that ends at PASS_END."""
        w = workers.state[worker]
        times = workers.time[worker]
        start = times[W.CLOCK]
        end = times[W.PASS_END]
        exhausted = False
        for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
            s = ranks.fields[r]
            if s[R.PARTICIPATES] == 0:
                continue
            if len(scratch.segments[0]) > 0:
                log_segment(
                    scratch, w, s, r, times, passes, s[R.DECODING] * passes, np.int64(0), 0.0
                )
            f = ranks.factors[r]
            apply_run(requests, pools, w, s, f, ranks.lists, passes, start, end)
            exhausted |= s[R.TICK] > LAST_TICK or s[R.TREE_CLOCK] > LAST_TICK
        close(ranks, workers, requests, worker, passes)
        w[W.PASSES_WITHOUT_PROGRESS] = 0
        return TICKS_EXHAUSTED if exhausted else DONE

    return WorkerKernels(room_for_a_pass, first_watched_arrival, open_pass, close_pass, close_run)
