"""The clock of an aggregated pool.

Two ways to run it. *Independent*: with open-loop arrivals and round-robin or pinned placement
workers do not see each other, and each advances to the horizon on its own. *Coupled*: where one
worker's completion decides another's arrival (closed loop), or all share one forecast (Belady), the
workers keep a tournament tree of their next ends, and the instants are settled one after another in
the reference's order: completions, arrivals, drives (reference: runtimes, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.decode_run import LOOKS_AHEAD, OBSERVES, walk_stretch
from vecsim.kernels.fleet.event_queue import first_leaf, set_leaf
from vecsim.kernels.fleet.placement import enqueue, tokenized_at
from vecsim.kernels.fleet.ready_set import drop_driven, enter_awake
from vecsim.kernels.fleet.worker import WorkerKernels, earliest_arrival
from vecsim.kernels.state.layout import (
    BAD_PRICE,
    CLOCK,
    DONE,
    ISL,
    NO_PASS,
    PASS_END,
    PAUSED,
    PENDING,
    PENDING_PASSES,
    RANK,
    RELEASED,
    STRETCH,
    TERMINALS,
)

# --- rows of `Clock.state` ------------------------------------------------------------------------
(
    DP_SIZE,
    MAX_IN_FLIGHT,  # closed loop: cap on requests in flight; 0 = open loop
    SEGMENTS,  # passes and stretches after which an entry returns PAUSED
    NEXT_WORKER,  # independent: the worker being advanced
    END_WORKER,  # independent: one past the last worker of this call
    TAKEN,  # coupled: requests taken in so far
    ENDED,  # coupled: terminals so far
    AWAKE,  # coupled: workers to drive in this round
    ROUND,  # coupled: rounds of the present instant that are over
) = (np.int64(k) for k in range(9))
CLOCK_STATE = 9

NOW, HORIZON, TOKENIZE_MS, TOKENIZE_TOKEN_MS = (np.int64(k) for k in range(4))
CLOCK_TIME = 4


class Clock(NamedTuple):
    """State of the pool's clock."""

    state: np.ndarray  # int64 [CLOCK_STATE]
    time: np.ndarray  # float64 [CLOCK_TIME]
    tree: np.ndarray  # float64 [2 * leaves], leaves a power of two: next end of each worker
    awake: np.ndarray  # int64 [workers]: workers to drive, ascending
    servers: np.ndarray  # float64 [workers, servers]: when each tokenizer is free


@inner
def set_end(clock, worker, end):
    """Enter a worker's next end into the tournament tree."""
    set_leaf(clock.tree, worker, end)


@inner
def wake(clock, worker):
    """Enter a worker into the list of those to drive."""
    enter_awake(clock.awake, clock.state, AWAKE, worker)


@inner
def shorten_stretch(ranks, workers, requests, scratch, clock, worker, arrival):
    """End the stretch in flight at the first pass end at which an arrival is seen."""
    c = clock.state
    w = workers.state[worker]
    w[PENDING_PASSES] = walk_stretch(
        ranks,
        workers,
        requests,
        scratch,
        worker,
        c[DP_SIZE],
        w[PENDING_PASSES],
        arrival,
        np.inf,
        LOOKS_AHEAD,
    )
    set_end(clock, worker, workers.time[worker, PASS_END])


class PoolKernels(NamedTuple):
    """The kernels of a pool's clock, bound to a scheduler, and the steps of its instants."""

    advance_all: Callable
    run_clock: Callable
    complete_due: Callable
    take_in: Callable
    drive: Callable
    cut_at_horizon: Callable


def bind(worker: WorkerKernels) -> PoolKernels:
    """The clock for one family of backends; `worker` is bound to its scheduler."""
    notices, forget, room_for_a_pass, first_watched_arrival = worker[:4]
    open_pass, close_pass, close_stretch, advance = worker[4:]

    @inner
    def advance_all(ranks, workers, requests, pools, scratch, clock):
        """Advance the workers NEXT_WORKER..END_WORKER-1 to the horizon, one after another.

        Returns DONE, PAUSED, LOG_FULL, FOREST_FULL or an error code; call it again unless
        that is DONE or an error.
        """
        c = clock.state
        while c[NEXT_WORKER] < c[END_WORKER]:
            code = advance(
                ranks,
                workers,
                requests,
                pools,
                scratch,
                c[NEXT_WORKER],
                c[DP_SIZE],
                clock.time[HORIZON],
                c[SEGMENTS],
            )
            if code != DONE:
                return code
            forget(ranks, pools)
            c[NEXT_WORKER] += 1
        return DONE

    @inner
    def close_segment(ranks, workers, requests, pools, scratch, clock, worker):
        """Finish the pass or stretch that a worker has in flight and that ends now."""
        c = clock.state
        w = workers.state[worker]
        before = w[TERMINALS]
        if w[PENDING] == STRETCH:
            passes = w[PENDING_PASSES]
            walk_stretch(
                ranks,
                workers,
                requests,
                scratch,
                worker,
                c[DP_SIZE],
                passes,
                np.inf,
                np.inf,
                OBSERVES,
            )
            code = close_stretch(
                ranks, workers, requests, pools, scratch, worker, c[DP_SIZE], passes
            )
        else:
            code = close_pass(ranks, workers, requests, pools, scratch, worker, c[DP_SIZE])
        c[ENDED] += w[TERMINALS] - before
        return code

    @inner
    def complete_due(ranks, workers, requests, pools, scratch, clock):
        """Apply all passes that end now, by worker id; wake workers whose next request is here."""
        while clock.tree[1] == clock.time[NOW]:
            worker = first_leaf(clock.tree)
            # Other workers may have used up what there was room for when its pass began.
            code = room_for_a_pass(ranks, pools, scratch, worker, clock.state[DP_SIZE])
            if code != DONE:
                return code
            set_end(clock, worker, np.inf)
            wake(clock, worker)
            if workers.state[worker, PENDING] == NO_PASS:
                continue
            code = close_segment(ranks, workers, requests, pools, scratch, clock, worker)
            if code != DONE:
                return code
        return DONE

    @inner
    def take_in(ranks, workers, requests, scratch, clock, q):
        """A request arrives now, at the rank it was placed on."""
        c = clock.state
        rank = np.int64(requests.state[RANK, q])
        worker = rank // c[DP_SIZE]
        s = ranks.fields[rank]
        now = clock.time[NOW]
        noticed = notices(requests, s, now)
        requests.time[RELEASED, q] = now
        arrival = tokenized_at(
            clock.servers[worker],
            clock.time[TOKENIZE_MS],
            clock.time[TOKENIZE_TOKEN_MS],
            requests.state[ISL, q],
            now,
        )
        enqueue(requests, s, q, arrival)
        if workers.state[worker, PENDING] == NO_PASS:
            if arrival <= now:
                wake(clock, worker)
            else:
                set_end(clock, worker, earliest_arrival(ranks, requests, worker, c[DP_SIZE]))
        elif workers.state[worker, PENDING] == STRETCH and noticed:
            if arrival <= now and c[ROUND] > 0:
                # The worker was driven in an earlier round: a pass that starts now is under way.
                arrival = np.nextafter(now, np.inf)
            shorten_stretch(ranks, workers, requests, scratch, clock, worker, arrival)

    @inner
    def take_in_due(ranks, workers, requests, scratch, clock):
        """Take in every request that is admissible now."""
        c = clock.state
        n = np.int64(len(requests.state[0]))
        while c[TAKEN] < n:
            q = c[TAKEN]
            if c[MAX_IN_FLIGHT] > 0:
                if q - c[ENDED] >= c[MAX_IN_FLIGHT]:
                    return
            elif requests.time[RELEASED, q] > clock.time[NOW]:
                return
            take_in(ranks, workers, requests, scratch, clock, q)
            c[TAKEN] += 1

    @inner
    def drive(ranks, workers, requests, pools, scratch, clock, worker):
        """Start passes on an idle worker until one takes time or there is nothing to do."""
        c = clock.state
        w = workers.state[worker]
        while True:
            code = room_for_a_pass(ranks, pools, scratch, worker, c[DP_SIZE])
            if code != DONE:
                return code
            before = w[TERMINALS]
            code = open_pass(ranks, workers, requests, pools, scratch, worker, c[DP_SIZE])
            c[ENDED] += w[TERMINALS] - before
            if code != DONE:
                return code
            if w[PENDING] == NO_PASS:
                set_end(clock, worker, earliest_arrival(ranks, requests, worker, c[DP_SIZE]))
                return DONE
            if w[PENDING] == STRETCH:
                w[PENDING_PASSES] = walk_stretch(
                    ranks,
                    workers,
                    requests,
                    scratch,
                    worker,
                    c[DP_SIZE],
                    w[PENDING_PASSES],
                    first_watched_arrival(ranks, workers, requests, worker, c[DP_SIZE]),
                    np.inf,
                    LOOKS_AHEAD,
                )
                if w[PENDING_PASSES] < 0:
                    return BAD_PRICE
            if workers.time[worker, PASS_END] > clock.time[NOW]:
                set_end(clock, worker, workers.time[worker, PASS_END])
                return DONE
            code = close_segment(ranks, workers, requests, pools, scratch, clock, worker)
            if code != DONE:
                return code

    @inner
    def settle_instant(ranks, workers, requests, pools, scratch, clock):
        """Rounds of completions, arrivals and drives at this instant, until nothing changes."""
        c = clock.state
        while True:
            code = complete_due(ranks, workers, requests, pools, scratch, clock)
            if code != DONE:
                return code
            take_in_due(ranks, workers, requests, scratch, clock)
            if c[AWAKE] == 0:
                return DONE
            for i in range(c[AWAKE]):
                workers.time[clock.awake[i], CLOCK] = clock.time[NOW]
            driven = np.int64(0)
            while driven < c[AWAKE]:
                worker = clock.awake[driven]
                code = drive(ranks, workers, requests, pools, scratch, clock, worker)
                if code != DONE:
                    drop_driven(clock.awake, c, AWAKE, driven)
                    return code
                driven += 1
            c[AWAKE] = 0
            c[ROUND] += 1

    @inner
    def cut_at_horizon(ranks, workers, requests, pools, scratch, clock):
        """Settle the passes of stretches in flight that end by the horizon. Returns DONE, or what
        has to grow first."""
        dp_size = clock.state[DP_SIZE]
        for worker in range(len(workers.state)):
            w = workers.state[worker]
            if w[PENDING] != STRETCH:
                continue
            code = room_for_a_pass(ranks, pools, scratch, np.int64(worker), dp_size)
            if code != DONE:
                return code
            passes = walk_stretch(
                ranks,
                workers,
                requests,
                scratch,
                np.int64(worker),
                dp_size,
                w[PENDING_PASSES],
                np.inf,
                clock.time[HORIZON],
                OBSERVES,
            )
            if passes > 0:
                close_stretch(
                    ranks, workers, requests, pools, scratch, np.int64(worker), dp_size, passes
                )
        return DONE

    @inner
    def run_clock(ranks, workers, requests, pools, scratch, clock):
        """The outer loop: settle the present instant, then jump to the next one.

        Returns DONE, PAUSED, LOG_FULL, FOREST_FULL or an error code; call it again unless
        that is DONE or an error.
        """
        c = clock.state
        n = np.int64(len(requests.state[0]))
        for _ in range(c[SEGMENTS]):
            code = settle_instant(ranks, workers, requests, pools, scratch, clock)
            if code != DONE:
                return code
            following = clock.tree[1]
            if c[MAX_IN_FLIGHT] == 0 and c[TAKEN] < n:
                following = min(following, requests.time[RELEASED, c[TAKEN]])
            if following == np.inf:
                return DONE
            if following > clock.time[HORIZON]:
                return cut_at_horizon(ranks, workers, requests, pools, scratch, clock)
            clock.time[NOW] = following
            c[ROUND] = 0
        return PAUSED

    return PoolKernels(advance_all, run_clock, complete_due, take_in, drive, cut_at_horizon)
