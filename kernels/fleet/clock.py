"""The clock of a fleet: all workers of all pools, and whatever couples them.

The rounds of an instant (reference: runtimes, sections 2.2 and 2.3), until nothing changes:

1. passes that end, by worker, and the signals of their ranks: first tokens, held prompts, ends;
2. transfers that end;
3. actions of handoffs, first in, first out, and those that they append;
4. requests that are due, each placed at once;
5. drives of the ready set, prefill before decode: passes start.

A tick, where one is due, comes last: the entry returns with the state at rest. A
decode run stays in flight, walked chunk by chunk, until something concerns its worker.

`fleet` is a `Fleet`, `worker` and `r` are places of a worker and a rank in it, `q` is the number of
a request. An aggregated fleet has no `transfers`: what is for them alone takes them as an argument,
and is not compiled without.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.arrivals import next_time, take_due
from vecsim.kernels.fleet.decode_run import (
    cut_ahead,
    drop_ahead,
    is_last_ahead,
    look_ahead,
    record_ahead,
)
from vecsim.kernels.fleet.event_queue import first_leaf, set_leaf
from vecsim.kernels.fleet.handoff import bind as bind_handoffs
from vecsim.kernels.fleet.handoff import fail, note_failed
from vecsim.kernels.fleet.placement import enqueue, grow_prompt, next_in_turn, tokenized_at
from vecsim.kernels.fleet.ready_set import drop_driven, wake
from vecsim.kernels.fleet.signals import bind as bind_signals
from vecsim.kernels.fleet.transfer import (
    act,
    decode_copy,
    end_transfers,
    request_of,
)
from vecsim.kernels.fleet.waiting_time import (
    count_idle_ranks,
    count_idle_steps,
    count_idle_time,
    count_to_the_end,
    counts_down,
    has_effect,
    next_arrival,
    somebody_is_due,
)
from vecsim.kernels.fleet.worker import bind as bind_worker
from vecsim.kernels.sched.interface import Scheduler
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import BAD_PRICE, DONE, NONE, PAUSED, TICKED


@inner
def set_end(clock, worker, end):
    """Enter a worker's next end, or when it is to be looked at again, into the event queue."""
    set_leaf(clock.ends, worker, end)


@inner
def goes_on(fleet, worker):
    """Whether a worker is in a run that is not known to its end."""
    w = fleet.workers.state[worker]
    return w[W.PENDING] == W.RUN and not is_last_ahead(w)


def bind(scheduler: Scheduler) -> Callable:
    """The clock `run_clock(fleet)` for one family of backends."""
    kernels = bind_worker(scheduler)
    room_for_a_pass, first_watched_arrival, open_pass, close_pass, close_run = kernels
    retry, retry_all, act_on_pass, act_on_start = bind_signals(scheduler)
    log_run, notices, reserves_first = (
        scheduler.log_run,
        scheduler.notices,
        scheduler.reserves_first,
    )
    place = scheduler.place
    first_waiting, fail_waiting = scheduler.first_waiting, scheduler.fail_waiting
    try_in_vain = scheduler.try_in_vain

    # --- room -------------------------------------------------------------------------------------
    @inner
    def room_for(fleet, worker):
        """DONE, or what has to grow before a worker may go on."""
        return room_for_a_pass(fleet.ranks, fleet.workers, fleet.pools, fleet.scratch, worker)

    @inner
    def room_for_command(fleet):
        """DONE, or what has to grow before an action: none takes more room than a pass. Blocks have
        no need of room."""
        if not reserves_first and len(fleet.scratch.segments[0]) == 0:
            return DONE
        code = room_for(fleet, np.int64(0))
        if code != DONE:
            return code
        return room_for(fleet, fleet.clock.pools[1, F.FIRST_WORKER])

    # --- the ends of passes -----------------------------------------------------------------------
    @inner
    def record(fleet, worker):
        """Record the passes of a run up to the end that stands in the event queue."""
        ranks, workers, requests = fleet.ranks, fleet.workers, fleet.requests
        record_ahead(ranks, workers, requests, fleet.pools, fleet.scratch, worker, log_run)

    @inner
    def end_run(fleet, worker, passes):
        """Finish a run after `passes` recorded passes."""
        count_idle_ranks(fleet, worker)
        ranks, workers, requests = fleet.ranks, fleet.workers, fleet.requests
        return close_run(ranks, workers, requests, fleet.pools, fleet.scratch, worker, passes)

    @inner
    def close_segment(fleet, worker):
        """Finish the pass or run that a worker has in flight and that ends now."""
        w = fleet.workers.state[worker]
        if w[W.PENDING] == W.RUN:
            passes = w[W.PENDING_PASSES]
            record(fleet, worker)
            code = end_run(fleet, worker, passes)
        else:
            count_idle_ranks(fleet, worker)
            code = close_pass(
                fleet.ranks, fleet.workers, fleet.requests, fleet.pools, fleet.scratch, worker
            )
        if code == DONE:
            act_on_pass(fleet.transfers, fleet, worker)
        return code

    @inner
    def walk_on(fleet, worker):
        """Record the passes of a run up to the end that stands in the event queue, and look further
        ahead."""
        record(fleet, worker)
        look_ahead(fleet.ranks, fleet.workers, fleet.scratch, worker)
        set_end(fleet.clock, worker, fleet.workers.time[worker, W.PASS_END])

    @inner
    def complete_due(fleet):
        """Apply all passes that end now, by worker; wake workers whose next request is here."""
        clock = fleet.clock
        while clock.ends[1] == clock.time[F.NOW]:
            worker = first_leaf(clock.ends)
            # Other workers may have used up what there was room for when its pass began.
            code = room_for(fleet, worker)
            if code != DONE:
                return code
            if goes_on(fleet, worker):
                walk_on(fleet, worker)
                continue
            set_end(clock, worker, np.inf)
            wake(clock, worker)
            if fleet.workers.state[worker, W.PENDING] == W.NO_PASS:
                continue
            code = close_segment(fleet, worker)
            if code != DONE:
                return code
        return DONE

    @inner
    def cut_run(fleet, worker, due):
        """Let the run that a worker has in flight end with the first pass that ends at or after
        `due`."""
        now = fleet.clock.time[F.NOW]
        if due <= now and fleet.clock.state[F.ROUND] > 0:
            # The worker was driven in an earlier round: a pass that starts now is under way.
            due = np.nextafter(now, np.inf)
        cut_ahead(fleet.workers, worker, due)
        set_end(fleet.clock, worker, fleet.workers.time[worker, W.PASS_END])

    @inner
    def is_idle(fleet, worker):
        """Whether a decode worker has no pass in flight just now; ends its run where it may."""
        w = fleet.workers.state[worker]
        now = fleet.clock.time[F.NOW]
        if w[W.PENDING] == W.NO_PASS:
            count_idle_time(fleet, worker, now)
        if w[W.PENDING] != W.RUN:
            return w[W.PENDING] == W.NO_PASS
        cut_run(fleet, worker, now)
        if fleet.workers.time[worker, W.PASS_END] > now:
            return False
        set_end(fleet.clock, worker, np.inf)
        close_segment(fleet, worker)
        wake(fleet.clock, worker)
        return True

    # --- arrivals ---------------------------------------------------------------------------------
    @inner
    def submit(fleet, q):
        """A request joins the queue of a rank of the first pool."""
        clock = fleet.clock
        requests = fleet.requests
        r = next_in_turn(fleet, np.int64(0), np.int64(fleet.pins[0, q]))
        s = fleet.ranks.fields[r]
        place(requests, fleet.pools, fleet.content, s, q, r)
        worker = s[R.WORKER]
        w = fleet.workers.state[worker]
        now = clock.time[F.NOW]
        noticed = notices(requests, s, now)
        arrival = tokenized_at(
            clock.servers[worker],
            clock.time[F.TOKENIZE_MS],
            clock.time[F.TOKENIZE_TOKEN_MS],
            requests.state[Q.ISL, q],
            now,
        )
        enqueue(requests, s, q, arrival)
        if w[W.PENDING] == W.NO_PASS:
            if arrival <= now:
                wake(clock, worker)
            else:
                set_end(clock, worker, next_arrival(fleet, w, now))
        elif w[W.PENDING] == W.RUN and noticed:
            cut_run(fleet, worker, arrival)

    @inner
    def release(transfers, fleet, q):
        """A request is released: it is placed, or its handoff begins."""
        requests = fleet.requests
        grows = requests.state[Q.SESSION, q] != q
        if transfers is not None:
            ordinal = fleet.clock.state[F.RELEASED_COUNT]
            transfers.requests[F.ORDINAL, q] = ordinal
            transfers.requests[F.BY_ORDINAL, ordinal] = q
            if grows:
                copy = decode_copy(transfers, q)
                w = fleet.workers.state[fleet.clock.pools[1, F.FIRST_WORKER]]
                grow_prompt(requests, fleet.ranks.fields[0], q, copy - 1)
                grow_prompt(requests, fleet.ranks.fields[w[W.FIRST_RANK]], copy, copy - 1)
            act(transfers, F.RESERVE if reserves_first else F.SUBMIT, q)
        else:
            if grows:
                grow_prompt(requests, fleet.ranks.fields[0], q, q - 1)
            submit(fleet, q)

    @inner
    def release_due(fleet):
        """Release every request that is due now."""
        now = fleet.clock.time[F.NOW]
        while True:
            q = take_due(fleet.arrivals, now)
            if q < 0:
                return
            fleet.requests.time[Q.RELEASED, q] = now
            release(fleet.transfers, fleet, q)
            fleet.clock.state[F.RELEASED_COUNT] += 1

    run_actions, cancel_or_forget = bind_handoffs(
        scheduler, room_for_command, retry, is_idle, submit
    )

    # --- drives -----------------------------------------------------------------------------------
    @inner
    def counts_down_first(transfers, fleet, w, now):
        """Whether a decode worker lets one of the passes for which prefills are put off go by, at
        whose end requests may get blocks (see `counts_down`)."""
        if transfers is not None and reserves_first:
            is_source = fleet.ranks.fields[w[W.FIRST_RANK], R.ROLE] == R.SOURCE
            if not is_source and counts_down(fleet, w, now):
                retry_all(transfers, fleet, w)
                return True
        return False

    @inner
    def stands_blocked(transfers, fleet, w, end, now):
        """Whether a pass that takes no time and has no effect is dropped: the worker stands blocked
        until something happens to it, unless requests get blocks instead."""
        takes_no_time = w[W.PENDING] == W.ONE_PASS and end == now
        if transfers is not None and takes_no_time and not has_effect(fleet, w):
            w[W.PENDING] = W.NO_PASS
            w[W.STANDS_BLOCKED] = 1
            w[W.STEP] += 1
            is_source = fleet.ranks.fields[w[W.FIRST_RANK], R.ROLE] == R.SOURCE
            if not is_source and retry_all(transfers, fleet, w):
                w[W.STANDS_BLOCKED] = 0
                return True
            for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
                if fleet.ranks.fields[r, R.PARTICIPATES] != 0:
                    try_in_vain(fleet.ranks.factors[r])
        return False

    @inner
    def shorten_for_retry(transfers, fleet, w):
        """A run ends after one pass where that brings an attempt to reserve blocks."""
        if transfers is not None and somebody_is_due(fleet, w):
            w[W.PENDING_PASSES] = 1

    @inner
    def drive(fleet, worker):
        """Start passes on an idle worker until one takes time or there is nothing to do."""
        w = fleet.workers.state[worker]
        times = fleet.workers.time[worker]
        now = fleet.clock.time[F.NOW]
        count_idle_time(fleet, worker, now)
        w[W.STANDS_BLOCKED] = 0
        while True:
            code = room_for(fleet, worker)
            if code != DONE:
                return code
            if counts_down_first(fleet.transfers, fleet, w, now):
                continue
            code = open_pass(
                fleet.ranks, fleet.workers, fleet.requests, fleet.pools, fleet.scratch, worker
            )
            act_on_start(fleet.transfers, fleet, worker)
            if code != DONE:
                return code
            if w[W.PENDING] == W.RUN:
                shorten_for_retry(fleet.transfers, fleet, w)
                w[W.WALKED_PASSES] = 0
                times[W.WALKED] = now
                times[W.WAKE_AT] = first_watched_arrival(
                    fleet.ranks, fleet.workers, fleet.requests, worker
                )
                if look_ahead(fleet.ranks, fleet.workers, fleet.scratch, worker) == 0:
                    return BAD_PRICE
            end = times[W.PASS_END]
            if stands_blocked(fleet.transfers, fleet, w, end, now):
                continue
            if w[W.PENDING] == W.NO_PASS:
                set_end(fleet.clock, worker, next_arrival(fleet, w, now))
                return DONE
            if end > now:
                set_end(fleet.clock, worker, end)
                return DONE
            code = close_segment(fleet, worker)
            if code != DONE:
                return code

    @inner
    def drive_ready(fleet):
        """Drive the ready set, in order."""
        clock = fleet.clock
        driven = np.int64(0)
        while driven < clock.state[F.READY_WORKERS]:
            worker = clock.ready[driven]
            if fleet.workers.state[worker, W.PENDING] == W.NO_PASS:
                code = drive(fleet, worker)
                if code != DONE:
                    drop_driven(clock.ready, clock.state, F.READY_WORKERS, driven)
                    return code
            driven += 1
        clock.state[F.READY_WORKERS] = 0
        return DONE

    # --- an instant -------------------------------------------------------------------------------
    @inner
    def hand_over(transfers, fleet):
        """Transfers that end, and the actions of handoffs."""
        if transfers is not None:
            end_transfers(transfers, fleet.clock.time[F.NOW])
            return run_actions(transfers, fleet)
        return DONE

    @inner
    def anything_due(transfers, fleet):
        """Whether a pass or a transfer ends now."""
        now = fleet.clock.time[F.NOW]
        if transfers is not None:
            return fleet.clock.ends[1] == now or transfers.ends[1] == now
        return fleet.clock.ends[1] == now

    @inner
    def actions_left(transfers):
        """Actions that wait to be executed."""
        if transfers is not None:
            return transfers.state[F.ACTIONS]
        return np.int64(0)

    @inner
    def count_round(transfers, fleet):
        """Count a round for the workers that stand blocked."""
        if transfers is not None:
            count_idle_steps(fleet)

    @inner
    def run_instant(fleet):
        """Rounds of this instant, until nothing changes."""
        c = fleet.clock.state
        while True:
            if c[F.DRIVING] == 0:
                released = c[F.RELEASED_COUNT]
                changed = anything_due(fleet.transfers, fleet)
                code = complete_due(fleet)
                if code != DONE:
                    return code
                changed |= actions_left(fleet.transfers) > 0
                code = hand_over(fleet.transfers, fleet)
                if code != DONE:
                    return code
                release_due(fleet)
                changed |= c[F.RELEASED_COUNT] > released
                count_round(fleet.transfers, fleet)
                if c[F.READY_WORKERS] == 0 and actions_left(fleet.transfers) == 0:
                    if changed:
                        # The round in which the reference finds nothing to do.
                        count_round(fleet.transfers, fleet)
                    return DONE
            # An entry that returned in the middle of the drives resumes them.
            c[F.DRIVING] = 1
            code = drive_ready(fleet)
            if code != DONE:
                return code
            c[F.DRIVING] = 0
            c[F.ROUND] += 1

    # --- standstills ------------------------------------------------------------------------------
    @inner
    def fail_stuck(transfers, fleet):
        """Nothing is due any more: fail the blocked head of the lowest rank, prefill before decode.
        Whether there was one."""
        if transfers is None:
            return False
        now = fleet.clock.time[F.NOW]
        for r in range(len(fleet.ranks.fields)):
            s = fleet.ranks.fields[r]
            copy = first_waiting(fleet.requests, s, now)
            pending = copy < 0
            if pending:
                copy = s[R.QUEUE_HEAD]
            if copy < 0:
                continue
            worker = s[R.WORKER]
            q = request_of(transfers, copy)
            count_idle_time(fleet, worker, now)
            if pending:
                s[R.QUEUE_HEAD] = np.int64(fleet.requests.state[Q.NEXT, copy])
                s[R.REFUSED_VERSION] = NONE
            else:
                fail_waiting(fleet.requests, fleet.pools, s, copy, now)
            fail(fleet, copy, s, worker, S.DEADLOCK)
            if s[R.ROLE] == R.SOURCE and reserves_first:
                act(transfers, F.CANCEL_DESTINATION, q)
            elif pending:
                cancel_or_forget(transfers, fleet, q)
            else:
                note_failed(fleet, q, copy)
            wake(fleet.clock, worker)
            s[R.CAPACITY_VERSION] += 1
            if s[R.ROLE] == R.DESTINATION:
                retry(transfers, fleet, np.int64(r))
            return True
        return False

    # --- the outer loop ---------------------------------------------------------------------------
    @inner
    def end_at_horizon(fleet):
        """Apply the passes of runs in flight that end by the horizon, and count what idle workers
        keep until then. Returns DONE, or what has to grow first."""
        workers = fleet.workers
        for k in range(len(workers.state)):
            worker = np.int64(k)
            w = workers.state[worker]
            if w[W.PENDING] != W.RUN:
                continue
            code = room_for(fleet, worker)
            if code != DONE:
                return code
            drop_ahead(workers, worker, fleet.clock.time[F.HORIZON])
            record(fleet, worker)
            passes = w[W.WALKED_PASSES]
            if passes > 0:
                end_run(fleet, worker, passes)
                w[W.PENDING] = W.ONE_PASS  # the next one is under way
        count_to_the_end(fleet, fleet.clock.time[F.NOW])
        return DONE

    @inner
    def next_transfer(transfers):
        """When the next transfer ends, or infinity."""
        if transfers is not None:
            return transfers.ends[1]
        return np.inf

    @inner
    def next_instant(fleet):
        """When something happens next. Nothing does where a run merely has to be walked on."""
        clock = fleet.clock
        other = min(next_transfer(fleet.transfers), next_time(fleet.arrivals))
        latest = min(min(other, clock.time[F.NEXT_TICK]), clock.time[F.HORIZON])
        while clock.ends[1] <= latest and clock.ends[1] < np.inf:
            worker = first_leaf(clock.ends)
            if not goes_on(fleet, worker):
                break
            walk_on(fleet, worker)
        return min(clock.ends[1], other)

    @inner
    def run_clock(fleet):
        """The outer loop: run the present instant, then jump to the next one.

        Returns DONE, PAUSED, TICKED, LOG_FULL, FOREST_FULL or an error code; call it again unless
        that is DONE or an error.
        """
        clock = fleet.clock
        for _ in range(clock.state[F.SEGMENTS]):
            if clock.state[F.INSTANT_OVER] == 0:
                code = run_instant(fleet)
                if code != DONE:
                    return code
                clock.state[F.INSTANT_OVER] = 1
            following = next_instant(fleet)
            if following == np.inf and fail_stuck(fleet.transfers, fleet):
                clock.state[F.INSTANT_OVER] = 0
                continue
            if following == np.inf or following > clock.time[F.HORIZON]:
                return end_at_horizon(fleet)
            if following > clock.time[F.NEXT_TICK]:
                # The caller sets the next tick; nothing happens in between.
                return TICKED
            clock.time[F.NOW] = following
            clock.state[F.ROUND] = 0
            clock.state[F.INSTANT_OVER] = 0
        return PAUSED

    return run_clock
