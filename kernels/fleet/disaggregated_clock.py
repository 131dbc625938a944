"""The clock of a prefill and a decode pool.

Rounds of an instant follow the reference (runtimes, section 2.3): completed passes, ended
transfers, handoff actions until none is left, arrivals, then drives, prefill before decode. A
decode worker's stretch stays in flight until something concerns it: an action that it has to wait
for ends the stretch at the next end of a pass.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.decode_run import cut_ahead, drop_ahead, look_ahead, observe_ahead
from vecsim.kernels.fleet.event_queue import first_leaf, set_leaf
from vecsim.kernels.fleet.handoff import (
    ACTIONS,
    ACTIVATE,
    ACTIVATED_AT,
    AWAKE,
    BY_ORDINAL,
    CANCEL_DESTINATION,
    CANCEL_SOURCE,
    DESTINATION_PIN,
    DESTINATION_TURN,
    DRIVING,
    FIRST_ACTION,
    HELD_AT,
    HORIZON,
    INSTANTS,
    NEW_BLOCKS,
    NOW,
    ORDERS,
    RELEASE,
    RELEASED_AT,
    RESERVE,
    RESERVED_AT,
    ROUND,
    SOURCE_PIN,
    SOURCE_TURN,
    SUBMIT,
    TAKEN,
    TO_DRIVE,
    TOKENIZE_MS,
    TOKENIZE_TOKEN_MS,
    TRANSFER,
    HandoffRank,
)
from vecsim.kernels.fleet.handoff_arrivals import KNOWN_ARRIVALS, HandoffArrivals
from vecsim.kernels.fleet.handoff_passes import (
    count_idle_ranks,
    count_idle_steps,
    count_idle_time,
    count_to_the_end,
    counts_down,
    goes_on,
    has_effect,
    somebody_is_due,
)
from vecsim.kernels.fleet.handoff_queues import (
    act,
    act_deferred,
    defer,
    dp_size_of,
    fail,
    next_arrival,
    next_rank,
    start_transfer,
    wake,
)
from vecsim.kernels.fleet.placement import enqueue, tokenized_at
from vecsim.kernels.fleet.ready_set import drop_driven
from vecsim.kernels.fleet.worker import WorkerKernels
from vecsim.kernels.state.layout import (
    ARRIVAL,
    ASIDE,
    BAD_PRICE,
    CAPACITY_VERSION,
    DEADLOCK,
    DONE,
    DONE_HEAD,
    ISL,
    LAST_ENDED,
    NEXT,
    NO_PASS,
    NONE,
    ONE_PASS,
    ORDER,
    PARTICIPATES,
    PASS_END,
    PAUSED,
    PENDING,
    PENDING_PASSES,
    PROMISED,
    QUEUE_HEAD,
    QUEUE_TAIL,
    RANK,
    REFUSED_VERSION,
    ROLE,
    SOURCE,
    STEP,
    STRETCH,
    TERMINALS,
    WALKED,
    WALKED_PASSES,
)


def bind(
    worker: WorkerKernels,
    rank: HandoffRank,
    source_first: bool,
    arrivals: HandoffArrivals = KNOWN_ARRIVALS,
) -> Callable:
    """The clock `run_clock(prefill, decode, handoff)` for one family of backends.

    Args:
        worker: kernels of its workers, under the rules of both roles.
        rank: what a handoff asks of its ranks.
        source_first: a destination is asked for when the prompt is done, not before.
        arrivals: who comes when, and who has to hear of ends.
    """
    room_for_a_pass, open_pass = worker.room_for_a_pass, worker.open_pass
    close_pass, close_stretch = worker.close_pass, worker.close_stretch
    place, refusal, reserve, activate, release_source = rank[:5]
    first_waiting, fail_waiting, cancel, try_in_vain = rank[5:]
    admit_next, next_release, note_end, note_ends = arrivals

    @inner
    def room_for_commands(prefill, decode):
        """DONE, or what has to grow before a pass ends or an action is executed: neither takes more
        room than a pass. Blocks, which sources that come first have, need no room but their own."""
        if source_first and len(prefill.scratch.segments[0]) == 0:
            return DONE
        first = np.int64(0)
        dp_size = dp_size_of(prefill)
        code = room_for_a_pass(prefill.ranks, prefill.pools, prefill.scratch, first, dp_size)
        if code != DONE:
            return code
        dp_size = dp_size_of(decode)
        return room_for_a_pass(decode.ranks, decode.pools, decode.scratch, first, dp_size)

    # --- destinations -----------------------------------------------------------------------------
    @inner
    def retry(side, handoff, r):
        """One attempt to reserve blocks for the first request that waits for them on a rank.
        Whether it got them."""
        s = side.ranks.fields[r]
        q = s[QUEUE_HEAD]
        if q < 0 or s[REFUSED_VERSION] == s[CAPACITY_VERSION]:
            return False
        new_blocks = reserve(side.requests, side.pools, s, q)
        if new_blocks < 0:
            s[REFUSED_VERSION] = s[CAPACITY_VERSION]
            return False
        s[QUEUE_HEAD] = side.requests.state[NEXT, q]
        s[REFUSED_VERSION] = NONE
        s[PROMISED] += 1
        handoff.requests[NEW_BLOCKS, q] = new_blocks
        handoff.instants[RESERVED_AT, q] = handoff.time[NOW]
        act(handoff, TRANSFER if source_first else SUBMIT, q)
        return True

    # --- the ends of passes -----------------------------------------------------------------------
    @inner
    def cancel_ended(prefill, handoff, w, ended, r):
        """Cancel the requests that ended on a prefill rank since `ended` was the last one of its
        worker."""
        state = prefill.requests.state
        q = w[LAST_ENDED]
        while q != ended:
            if state[RANK, q] == r:
                act(handoff, CANCEL_SOURCE, q)
            q = np.int64(state[NEXT, q])

    @inner
    def tell_held(side, handoff, s):
        """The requests of a prefill rank whose prompts are done now."""
        q = s[DONE_HEAD]
        s[DONE_HEAD] = NONE
        while q >= 0:
            handoff.instants[HELD_AT, q] = handoff.time[NOW]
            act(handoff, RESERVE if source_first else TRANSFER, q)
            q = np.int64(side.requests.state[NEXT, q])

    @inner
    def close_segment(side, handoff, worker, first_rank):
        """Finish the pass or stretch that a worker has in flight and that ends now.

        `first_rank` is the number of the pool's first rank among those of both pools.
        """
        w = side.workers.state[worker]
        dp_size = dp_size_of(side)
        is_source = side.ranks.fields[0, ROLE] == SOURCE
        before = w[TERMINALS]
        ended = w[LAST_ENDED]
        if w[PENDING] == STRETCH:
            passes = w[PENDING_PASSES]
            observe_ahead(side.ranks, side.workers, side.requests, side.scratch, worker, dp_size)
            count_idle_ranks(side, worker, dp_size)
            code = close_stretch(
                side.ranks,
                side.workers,
                side.requests,
                side.pools,
                side.scratch,
                worker,
                dp_size,
                passes,
            )
        else:
            count_idle_ranks(side, worker, dp_size)
            code = close_pass(
                side.ranks,
                side.workers,
                side.requests,
                side.pools,
                side.scratch,
                worker,
                dp_size,
            )
        if code != DONE:
            return code
        for r in range(worker * dp_size, (worker + 1) * dp_size):
            act_deferred(handoff, first_rank + r)
            if is_source:
                cancel_ended(side, handoff, w, ended, r)
                tell_held(side, handoff, side.ranks.fields[r])
            else:
                retry(side, handoff, np.int64(r))
        if not is_source:
            note_ends(handoff, side.requests, w, before, ended)
        return code

    @inner
    def walk_on(decode, handoff, leaf, sources):
        """Record the passes of a stretch up to the end that stands in `handoff.passes`, and look
        further ahead."""
        worker = leaf - sources
        dp_size = dp_size_of(decode)
        observe_ahead(
            decode.ranks, decode.workers, decode.requests, decode.scratch, worker, dp_size
        )
        look_ahead(decode.ranks, decode.workers, decode.scratch, worker, dp_size)
        set_leaf(handoff.passes, leaf, decode.workers.time[worker, PASS_END])

    @inner
    def complete_due(prefill, decode, handoff):
        """Apply all passes that end now, prefill before decode, by worker id."""
        sources = np.int64(len(prefill.workers.state))
        while handoff.passes[1] == handoff.time[NOW]:
            code = room_for_commands(prefill, decode)
            if code != DONE:
                return code
            worker = first_leaf(handoff.passes)
            if goes_on(decode, worker - sources):
                walk_on(decode, handoff, worker, sources)
                continue
            set_leaf(handoff.passes, worker, np.inf)
            wake(handoff, worker)
            if worker >= sources:
                first_rank = np.int64(len(prefill.ranks.fields))
                code = close_segment(decode, handoff, worker - sources, first_rank)
            elif prefill.workers.state[worker, PENDING] != NO_PASS:
                code = close_segment(prefill, handoff, worker, np.int64(0))
            if code != DONE:
                return code
        return DONE

    @inner
    def is_idle(decode, handoff, worker, sources, first_rank):
        """Whether a decode worker has no pass in flight just now; ends its stretch where it may."""
        w = decode.workers.state[worker]
        now = handoff.time[NOW]
        if w[PENDING] == NO_PASS:
            count_idle_time(decode, worker, now)
        if w[PENDING] != STRETCH:
            return w[PENDING] == NO_PASS
        due = now
        if handoff.state[ROUND] > 0:
            # It was driven in an earlier round: a pass that starts now is under way.
            due = np.nextafter(now, np.inf)
        cut_ahead(decode.workers, worker, due)
        end = decode.workers.time[worker, PASS_END]
        if end > now:
            set_leaf(handoff.passes, sources + worker, end)
            return False
        set_leaf(handoff.passes, sources + worker, np.inf)
        close_segment(decode, handoff, worker, first_rank)
        wake(handoff, sources + worker)
        return True

    # --- actions ----------------------------------------------------------------------------------
    @inner
    def submit(prefill, handoff, q):
        """A request joins the queue of a prefill rank."""
        dp_size = dp_size_of(prefill)
        ranks = np.int64(len(prefill.ranks.fields))
        pin = np.int64(handoff.requests[SOURCE_PIN, q])
        r = next_rank(handoff, SOURCE_TURN, pin, ranks, dp_size)
        place(prefill.requests, prefill.pools, prefill.rows, prefill.ranks.fields[r], q, r)
        worker = r // dp_size
        now = handoff.time[NOW]
        arrival = tokenized_at(
            prefill.servers[worker],
            handoff.time[TOKENIZE_MS],
            handoff.time[TOKENIZE_TOKEN_MS],
            prefill.requests.state[ISL, q],
            now,
        )
        enqueue(prefill.requests, prefill.ranks.fields[r], q, arrival)
        if prefill.workers.state[worker, PENDING] == NO_PASS:
            if arrival <= now:
                wake(handoff, worker)
            else:
                due = next_arrival(prefill, worker, dp_size, now)
                set_leaf(handoff.passes, worker, due)

    @inner
    def ask_destination(prefill, decode, handoff, q):
        """A request asks a decode rank for blocks."""
        requests = decode.requests
        dp_size = dp_size_of(decode)
        ranks = np.int64(len(decode.ranks.fields))
        pin = np.int64(handoff.requests[DESTINATION_PIN, q])
        r = next_rank(handoff, DESTINATION_TURN, pin, ranks, dp_size)
        s = decode.ranks.fields[r]
        reason = refusal(requests, s, q)
        if reason > 0:
            fail(decode, handoff, q, r // dp_size, reason)
            cancel_or_forget(decode, handoff, q)
            return
        place(requests, decode.pools, decode.rows, s, q, r)
        requests.state[ORDER, q] = handoff.state[ORDERS]
        handoff.state[ORDERS] += 1
        requests.time[ARRIVAL, q] = np.inf
        requests.state[NEXT, q] = NONE
        if s[QUEUE_HEAD] < 0:
            s[QUEUE_HEAD] = q
            s[REFUSED_VERSION] = NONE
        else:
            requests.state[NEXT, s[QUEUE_TAIL]] = q
        s[QUEUE_TAIL] = q
        if s[REFUSED_VERSION] == s[CAPACITY_VERSION]:
            return
        sources = np.int64(len(prefill.workers.state))
        if is_idle(decode, handoff, r // dp_size, sources, np.int64(len(prefill.ranks.fields))):
            retry(decode, handoff, r)
            # While somebody waits for blocks its rank looks at other requests.
            wake(handoff, sources + r // dp_size)

    @inner
    def cancel_or_forget(decode, handoff, q):
        """A request that never got decode blocks ended: its source holds blocks, or there is none
        yet."""
        if source_first:
            act(handoff, CANCEL_SOURCE, q)
        else:
            note_end(handoff, decode.requests, q)

    @inner
    def finish_transfer(prefill, decode, handoff, q):
        """The blocks are there: the destination may decode, the source may let go."""
        r = np.int64(decode.requests.state[RANK, q])
        worker = r // dp_size_of(decode)
        sources = np.int64(len(prefill.workers.state))
        first_rank = np.int64(len(prefill.ranks.fields))
        if not is_idle(decode, handoff, worker, sources, first_rank):
            defer(handoff, first_rank + r, ACTIVATE, q)
            return
        s = decode.ranks.fields[r]
        s[PROMISED] -= 1
        activate(decode.requests, decode.pools, s, q)
        handoff.instants[ACTIVATED_AT, q] = handoff.time[NOW]
        wake(handoff, sources + worker)
        act(handoff, RELEASE, q)
        retry(decode, handoff, r)

    @inner
    def free_source(prefill, handoff, kind, q):
        """Let a prefill rank forget a request, once its worker is idle. Whether it did."""
        r = np.int64(prefill.requests.state[RANK, q])
        worker = r // dp_size_of(prefill)
        if prefill.workers.state[worker, PENDING] != NO_PASS:
            defer(handoff, r, kind, q)
            return
        if handoff.instants[HELD_AT, q] >= 0.0:
            count_idle_time(prefill, worker, handoff.time[NOW])
            release_source(prefill.requests, prefill.pools, prefill.ranks.fields[r], q)
            wake(handoff, worker)
        if kind == RELEASE:
            handoff.instants[RELEASED_AT, q] = handoff.time[NOW]
        elif source_first:
            note_end(handoff, prefill.requests, q)
        else:
            act(handoff, CANCEL_DESTINATION, q)

    @inner
    def cancel_destination(prefill, decode, handoff, q):
        """Let a decode rank forget a request that no prompt comes for."""
        r = np.int64(decode.requests.state[RANK, q])
        worker = r // dp_size_of(decode)
        sources = np.int64(len(prefill.workers.state))
        first_rank = np.int64(len(prefill.ranks.fields))
        if not is_idle(decode, handoff, worker, sources, first_rank):
            defer(handoff, first_rank + r, CANCEL_DESTINATION, q)
            return
        s = decode.ranks.fields[r]
        s[PROMISED] -= 1
        cancel(decode.requests, decode.pools, s, q)
        wake(handoff, sources + worker)
        note_end(handoff, prefill.requests, q)
        retry(decode, handoff, r)

    @inner
    def run_actions(prefill, decode, handoff):
        """Execute all actions, and those they append. Returns DONE, or what has to grow first."""
        h = handoff.state
        ring = np.int64(handoff.actions.shape[1])
        while h[ACTIONS] > 0:
            code = room_for_commands(prefill, decode)
            if code != DONE:
                return code
            kind = np.int64(handoff.actions[0, h[FIRST_ACTION]])
            q = np.int64(handoff.actions[1, h[FIRST_ACTION]])
            h[FIRST_ACTION] = (h[FIRST_ACTION] + 1) % ring
            h[ACTIONS] -= 1
            if kind == SUBMIT:
                submit(prefill, handoff, q)
            elif kind == RESERVE:
                ask_destination(prefill, decode, handoff, q)
            elif kind == TRANSFER:
                start_transfer(decode, handoff, q)
            elif kind == ACTIVATE:
                finish_transfer(prefill, decode, handoff, q)
            elif source_first or kind != CANCEL_DESTINATION:
                free_source(prefill, handoff, kind, q)
            else:
                cancel_destination(prefill, decode, handoff, q)
        return DONE

    # --- the rounds of an instant -----------------------------------------------------------------
    @inner
    def take_in_due(prefill, decode, handoff):
        """Take in every request that is admissible now."""
        while True:
            q = admit_next(prefill, decode, handoff)
            if q < 0:
                return
            act(handoff, SUBMIT if source_first else RESERVE, q)
            handoff.state[TAKEN] += 1

    @inner
    def drive(side, handoff, worker, first_worker, first_rank):
        """Start passes on an idle worker until one takes time or there is nothing to do."""
        w = side.workers.state[worker]
        now = handoff.time[NOW]
        dp_size = dp_size_of(side)
        is_source = side.ranks.fields[0, ROLE] == SOURCE
        count_idle_time(side, worker, now)
        w[ASIDE] = 0
        while True:
            code = room_for_a_pass(side.ranks, side.pools, side.scratch, worker, dp_size)
            if code != DONE:
                return code
            if not (source_first or is_source) and counts_down(side, worker, dp_size):
                for r in range(worker * dp_size, (worker + 1) * dp_size):
                    retry(side, handoff, np.int64(r))
                continue
            before = w[TERMINALS]
            ended = w[LAST_ENDED]
            code = open_pass(
                side.ranks,
                side.workers,
                side.requests,
                side.pools,
                side.scratch,
                worker,
                dp_size,
            )
            if source_first or not is_source:
                note_ends(handoff, side.requests, w, before, ended)
            else:
                for r in range(worker * dp_size, (worker + 1) * dp_size):
                    cancel_ended(side, handoff, w, ended, r)
            if code != DONE:
                return code
            if w[PENDING] == STRETCH:
                if somebody_is_due(side, worker, dp_size):
                    w[PENDING_PASSES] = 1
                w[WALKED_PASSES] = 0
                side.workers.time[worker, WALKED] = now
                if look_ahead(side.ranks, side.workers, side.scratch, worker, dp_size) == 0:
                    return BAD_PRICE
            end = side.workers.time[worker, PASS_END]
            nothing = w[PENDING] == ONE_PASS and end == now
            if nothing and not has_effect(side, worker, dp_size):
                # It stands aside until something happens to it, but for attempts to reserve.
                w[PENDING] = NO_PASS
                w[ASIDE] = 1
                w[STEP] += 1
                reserved = False
                if not is_source:
                    for r in range(worker * dp_size, (worker + 1) * dp_size):
                        reserved |= retry(side, handoff, np.int64(r))
                if reserved:
                    w[ASIDE] = 0
                    continue
                for r in range(worker * dp_size, (worker + 1) * dp_size):
                    if side.ranks.fields[r, PARTICIPATES] != 0:
                        try_in_vain(side.ranks.factors[r])
            if w[PENDING] == NO_PASS:
                if is_source:
                    due = next_arrival(side, worker, dp_size, now)
                    if due < np.inf:
                        set_leaf(handoff.passes, first_worker + worker, due)
                return DONE
            if end > now:
                set_leaf(handoff.passes, first_worker + worker, end)
                return DONE
            code = close_segment(side, handoff, worker, first_rank)
            if code != DONE:
                return code

    @inner
    def drive_all(prefill, decode, handoff):
        """Drive the workers that are awake, prefill before decode."""
        h = handoff.state
        awake = handoff.lists[TO_DRIVE]
        sources = np.int64(len(prefill.workers.state))
        driven = np.int64(0)
        while driven < h[AWAKE]:
            worker = awake[driven]
            code = DONE
            if worker < sources:
                if prefill.workers.state[worker, PENDING] == NO_PASS:
                    code = drive(prefill, handoff, worker, np.int64(0), np.int64(0))
            elif decode.workers.state[worker - sources, PENDING] == NO_PASS:
                first_rank = np.int64(len(prefill.ranks.fields))
                code = drive(decode, handoff, worker - sources, sources, first_rank)
            if code != DONE:
                drop_driven(awake, h, AWAKE, driven)
                return code
            driven += 1
        h[AWAKE] = 0
        return DONE

    @inner
    def settle_instant(prefill, decode, handoff):
        """Rounds of this instant, until nothing changes."""
        h = handoff.state
        while True:
            if h[DRIVING] == 0:
                taken = h[TAKEN]
                changed = min(handoff.passes[1], handoff.transfers[1]) == handoff.time[NOW]
                code = complete_due(prefill, decode, handoff)
                if code != DONE:
                    return code
                while handoff.transfers[1] == handoff.time[NOW]:
                    ordinal = first_leaf(handoff.transfers)
                    set_leaf(handoff.transfers, ordinal, np.inf)
                    act(handoff, ACTIVATE, np.int64(handoff.requests[BY_ORDINAL, ordinal]))
                changed |= h[ACTIONS] > 0
                code = run_actions(prefill, decode, handoff)
                if code != DONE:
                    return code
                take_in_due(prefill, decode, handoff)
                changed |= h[TAKEN] > taken
                sources = np.int64(len(prefill.workers.state))
                count_idle_steps(decode, handoff, sources)
                if h[AWAKE] == 0 and h[ACTIONS] == 0:
                    if changed:
                        # The round in which the reference finds nothing to do.
                        count_idle_steps(decode, handoff, sources)
                    return DONE
            # An entry that returned in the middle of the drives resumes them.
            h[DRIVING] = 1
            code = drive_all(prefill, decode, handoff)
            if code != DONE:
                return code
            h[DRIVING] = 0
            h[ROUND] += 1

    # --- standstills ------------------------------------------------------------------------------
    @inner
    def settle_deadlock(side, handoff, first_worker):
        """Fail the blocked head of the lowest rank of a pool. Whether there was one."""
        dp_size = dp_size_of(side)
        for r in range(len(side.ranks.fields)):
            s = side.ranks.fields[r]
            worker = np.int64(r) // dp_size
            q = first_waiting(side.requests, s, handoff.time[NOW])
            pending = q < 0
            if pending:
                q = s[QUEUE_HEAD]
            if q < 0:
                continue
            count_idle_time(side, worker, handoff.time[NOW])
            if pending:
                s[QUEUE_HEAD] = side.requests.state[NEXT, q]
                s[REFUSED_VERSION] = NONE
            else:
                fail_waiting(side.requests, side.pools, s, q)
            fail(side, handoff, q, worker, DEADLOCK)
            if first_worker == 0 and not source_first:
                act(handoff, CANCEL_DESTINATION, q)
            elif pending:
                cancel_or_forget(side, handoff, q)
            else:
                note_end(handoff, side.requests, q)
            wake(handoff, first_worker + worker)
            s[CAPACITY_VERSION] += 1
            if first_worker > 0:
                retry(side, handoff, np.int64(r))
            return True
        return False

    # --- the outer loop ---------------------------------------------------------------------------
    @inner
    def end_at_horizon(prefill, decode, handoff):
        """Settle the passes of stretches in flight that end by the horizon, and what idle workers
        keep until then. Returns DONE, or what has to grow first."""
        dp_size = dp_size_of(decode)
        for worker in range(len(decode.workers.state)):
            w = decode.workers.state[worker]
            if w[PENDING] != STRETCH:
                continue
            code = room_for_commands(prefill, decode)
            if code != DONE:
                return code
            drop_ahead(decode.workers, worker, handoff.time[HORIZON])
            observe_ahead(
                decode.ranks,
                decode.workers,
                decode.requests,
                decode.scratch,
                np.int64(worker),
                dp_size,
            )
            passes = w[WALKED_PASSES]
            if passes > 0:
                count_idle_ranks(decode, np.int64(worker), dp_size)
                close_stretch(
                    decode.ranks,
                    decode.workers,
                    decode.requests,
                    decode.pools,
                    decode.scratch,
                    np.int64(worker),
                    dp_size,
                    passes,
                )
                w[PENDING] = ONE_PASS  # the next one is under way
        count_to_the_end(prefill, decode, handoff.time[NOW])
        return DONE

    @inner
    def next_instant(prefill, decode, handoff):
        """When something happens next. Nothing does where a stretch merely has to be walked on."""
        sources = np.int64(len(prefill.workers.state))
        other = min(handoff.transfers[1], next_release(prefill, handoff))
        latest = min(other, handoff.time[HORIZON])
        while handoff.passes[1] <= latest and handoff.passes[1] < np.inf:
            leaf = first_leaf(handoff.passes)
            if not goes_on(decode, leaf - sources):
                break
            walk_on(decode, handoff, leaf, sources)
        return min(handoff.passes[1], other)

    @inner
    def run_clock(prefill, decode, handoff):
        """The outer loop: settle the present instant, then jump to the next one.

        Returns DONE, PAUSED, LOG_FULL, FOREST_FULL or an error code; call it again unless
        that is DONE or an error.
        """
        h = handoff.state
        for _ in range(h[INSTANTS]):
            code = settle_instant(prefill, decode, handoff)
            if code != DONE:
                return code
            following = next_instant(prefill, decode, handoff)
            if following == np.inf:
                if settle_deadlock(prefill, handoff, np.int64(0)):
                    continue
                sources = np.int64(len(prefill.workers.state))
                if settle_deadlock(decode, handoff, sources):
                    continue
            if following == np.inf or following > handoff.time[HORIZON]:
                return end_at_horizon(prefill, decode, handoff)
            handoff.time[NOW] = following
            h[ROUND] = 0
        return PAUSED

    return run_clock
