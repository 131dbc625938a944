"""Workers that do not see each other: an optimisation of one case.

With open-loop arrivals and round-robin placement nothing couples the workers of an aggregated pool.
Each advances to the horizon on its own, hot in cache, on whatever thread; requests are placed and
queued before the start. The answers are those of the fleet's clock (clock.py).
"""

from __future__ import annotations

from collections.abc import Callable

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.decode_run import walk_run
from vecsim.kernels.fleet.worker import bind as bind_worker
from vecsim.kernels.fleet.worker import jump_to_arrival
from vecsim.kernels.sched.interface import Scheduler
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import BAD_PRICE, DONE, PAUSED


def bind(scheduler: Scheduler) -> Callable:
    """The loop over independent workers for one family of backends."""
    kernels = bind_worker(scheduler)
    room_for_a_pass, first_watched_arrival, open_pass, close_pass, close_run = kernels
    log_run, forget = scheduler.log_run, scheduler.forget

    @inner
    def advance(ranks, workers, requests, pools, scratch, worker, until, segments):
        """Run every pass of the worker that ends at or before `until`, at most `segments` passes
        and runs. Returns DONE, PAUSED (segments used up), LOG_FULL, FOREST_FULL or an error; all
        but errors can be continued by calling again."""
        w = workers.state[worker]
        for _ in range(segments):
            code = room_for_a_pass(ranks, workers, pools, scratch, worker)
            if code != DONE:
                return code
            code = open_pass(ranks, workers, requests, pools, scratch, worker)
            if code != DONE:
                return code
            if w[W.PENDING] == W.NO_PASS:
                if not jump_to_arrival(ranks, workers, requests, worker, until):
                    return DONE
            elif w[W.PENDING] == W.RUN:
                passes = walk_run(
                    ranks,
                    workers,
                    requests,
                    pools,
                    scratch,
                    worker,
                    w[W.PENDING_PASSES],
                    first_watched_arrival(ranks, workers, requests, worker),
                    until,
                    log_run,
                )
                if passes < 0:
                    return BAD_PRICE
                if passes == 0:
                    return DONE
                code = close_run(ranks, workers, requests, pools, scratch, worker, passes)
            else:
                if workers.time[worker, W.PASS_END] > until:
                    return DONE
                code = close_pass(ranks, workers, requests, pools, scratch, worker)
            if code != DONE:
                return code
        return PAUSED

    @inner
    def advance_all(ranks, workers, requests, pools, scratch, clock):
        """Advance the workers NEXT_WORKER..END_WORKER-1 to the horizon, one after another.

        Returns DONE, PAUSED, LOG_FULL, FOREST_FULL or an error code; call it again unless that is
        DONE or an error.
        """
        c = clock.state
        while c[F.NEXT_WORKER] < c[F.END_WORKER]:
            code = advance(
                ranks,
                workers,
                requests,
                pools,
                scratch,
                c[F.NEXT_WORKER],
                clock.time[F.HORIZON],
                c[F.SEGMENTS],
            )
            if code != DONE:
                return code
            forget(ranks, pools)
            c[F.NEXT_WORKER] += 1
        return DONE

    return advance_all
