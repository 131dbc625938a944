"""The clock of an aggregated pool whose requests wait for other requests.

It is the coupled clock (see clock.py) with other arrivals: at each instant it asks the room of
`arrivals` who is due, places them, and tells it who ended.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vecsim.kernels.cache.session_content import grow_prompt, seat
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.arrivals import next_ready, note_end, take_due
from vecsim.kernels.fleet.clock import (
    AWAKE,
    DP_SIZE,
    HORIZON,
    NOW,
    ROUND,
    SEGMENTS,
    TAKEN,
    PoolKernels,
)
from vecsim.kernels.fleet.ready_set import drop_driven
from vecsim.kernels.state.layout import CLOCK, DONE, FAMILY, LAST_ENDED, NEXT, NONE, PAUSED, STATUS


def bind(pool: PoolKernels, settle: Callable) -> Callable:
    """The clock for one family of backends.

    Args:
        pool: the coupled clock of the backend.
        settle: (requests, pools, s, seats, rank, q): prepares a request on its rank.
    """
    complete_due, take_in, drive, cut_at_horizon = pool[2:]

    @inner
    def report_ends(workers, requests, clock, arrivals, worker):
        """Tell the arrivals who ended on a worker at this instant."""
        w = workers.state[worker]
        q = w[LAST_ENDED]
        while q >= 0:
            status = np.int64(requests.state[STATUS, q])
            note_end(arrivals, q, status, clock.time[NOW])
            q = np.int64(requests.state[NEXT, q])
        w[LAST_ENDED] = NONE

    @inner
    def release_due(ranks, workers, requests, pools, scratch, clock, arrivals, seats):
        """Release every request that is due now, and place each at once."""
        c = clock.state
        while True:
            q = take_due(arrivals, clock.time[NOW])
            if q < 0:
                return
            rank = seat(requests, seats, q, c[TAKEN], np.int64(len(workers.state)), c[DP_SIZE])
            s = ranks.fields[rank]
            if requests.state[FAMILY, q] != q:
                grow_prompt(requests, requests, s, q)
            settle(requests, pools, s, seats, rank, q)
            take_in(ranks, workers, requests, scratch, clock, q)
            c[TAKEN] += 1

    @inner
    def settle_instant(ranks, workers, requests, pools, scratch, clock, arrivals, seats):
        """Rounds of completions, arrivals and drives at this instant, until nothing changes."""
        c = clock.state
        while True:
            code = complete_due(ranks, workers, requests, pools, scratch, clock)
            if code != DONE:
                return code
            for i in range(c[AWAKE]):
                report_ends(workers, requests, clock, arrivals, clock.awake[i])
            release_due(ranks, workers, requests, pools, scratch, clock, arrivals, seats)
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
                report_ends(workers, requests, clock, arrivals, worker)
                driven += 1
            c[AWAKE] = 0
            c[ROUND] += 1

    @inner
    def run_clock(ranks, workers, requests, pools, scratch, clock, arrivals, seats):
        """The outer loop: settle the present instant, then jump to the next one.

        Returns DONE, PAUSED, LOG_FULL, FOREST_FULL or an error code; call it again unless
        that is DONE or an error.
        """
        c = clock.state
        for _ in range(c[SEGMENTS]):
            code = settle_instant(ranks, workers, requests, pools, scratch, clock, arrivals, seats)
            if code != DONE:
                return code
            following = min(clock.tree[1], next_ready(arrivals))
            if following == np.inf:
                return DONE
            if following > clock.time[HORIZON]:
                return cut_at_horizon(ranks, workers, requests, pools, scratch, clock)
            clock.time[NOW] = following
            c[ROUND] = 0
        return PAUSED

    return run_clock
