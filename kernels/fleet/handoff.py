"""The actions of handoffs: what happens to a request between its prefill and its decode rank.

An action is executed once no pass of its worker is in flight; until then it is deferred. Those that
an action appends come after all that wait (reference: runtimes, section 6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.arrivals import note_end
from vecsim.kernels.fleet.placement import next_in_turn
from vecsim.kernels.fleet.ready_set import wake
from vecsim.kernels.fleet.transfer import (
    act,
    decode_copy,
    defer,
    log_step,
    next_action,
    start_transfer,
)
from vecsim.kernels.fleet.waiting_time import count_idle_time
from vecsim.kernels.sched.interface import Scheduler
from vecsim.kernels.sched.lifecycle import end_request, take_signal
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import DONE, NONE


@inner
def fail(fleet, copy, s, worker, reason):
    """A copy of a request ends without success."""
    fleet.requests.state[Q.REASON, copy] = reason
    w = fleet.workers.state[worker]
    end_request(fleet.requests, w, s, copy, S.FAILED, fleet.clock.time[F.NOW])
    take_signal(fleet.requests, s)  # the caller acts on it


@inner
def note_failed(fleet, q, copy):
    """A request is no more in flight; what was cancelled without an end failed at its
    destination."""
    status = np.int64(fleet.requests.state[Q.STATUS, copy])
    if status == S.UNFINISHED:
        status = S.FAILED
    note_end(fleet.arrivals, q, status, fleet.clock.time[F.NOW])


class HandoffKernels(NamedTuple):
    """The kernels of handoffs for one family of backends, as `bind` describes them."""

    run_actions: Callable
    cancel_or_forget: Callable


def bind(
    scheduler: Scheduler,
    room_for_command: Callable,
    retry: Callable,
    is_idle: Callable,
    submit: Callable,
) -> HandoffKernels:
    """`run_actions(transfers, fleet)` and `cancel_or_forget(transfers, fleet, q)`.

    The clock lends what it does about a worker: `room_for_command(fleet)`, `is_idle(fleet,
    worker)`, `submit(fleet, q)`; `retry` is that of signals.
    """
    place, refusal = scheduler.place, scheduler.refusal
    activate, release_held, cancel = scheduler.activate, scheduler.release_held, scheduler.cancel
    reserves_first = scheduler.reserves_first

    @inner
    def ask_destination(transfers, fleet, q):
        """A request asks a decode rank for blocks."""
        requests = fleet.requests
        copy = decode_copy(transfers, q)
        r = next_in_turn(fleet, np.int64(1), np.int64(fleet.pins[1, q]))
        s = fleet.ranks.fields[r]
        worker = s[R.WORKER]
        reason = refusal(requests, s, copy)
        if reason > 0:
            fail(fleet, copy, s, worker, reason)
            cancel_or_forget(transfers, fleet, q)
            return
        place(requests, fleet.pools, fleet.content, s, copy, r)
        log_step(transfers.steps, F.STEP_ACCEPTED, q, fleet.clock.time[F.NOW])
        requests.state[Q.ORDER, copy] = transfers.state[F.ORDERS]
        transfers.state[F.ORDERS] += 1
        requests.time[Q.ARRIVAL, copy] = np.inf
        requests.state[Q.NEXT, copy] = NONE
        if s[R.QUEUE_HEAD] < 0:
            s[R.QUEUE_HEAD] = copy
            s[R.REFUSED_VERSION] = NONE
        else:
            requests.state[Q.NEXT, s[R.QUEUE_TAIL]] = copy
        s[R.QUEUE_TAIL] = copy
        if s[R.REFUSED_VERSION] == s[R.CAPACITY_VERSION]:
            return
        if is_idle(fleet, worker):
            retry(transfers, fleet, r)
            # While somebody waits for blocks its rank looks at other requests.
            wake(fleet.clock, worker)

    @inner
    def cancel_or_forget(transfers, fleet, q):
        """A request that never got decode blocks ended: its source holds blocks, or there is none
        yet."""
        if reserves_first:
            note_failed(fleet, q, decode_copy(transfers, q))
        else:
            act(transfers, F.CANCEL_SOURCE, q)

    @inner
    def finish_transfer(transfers, fleet, q):
        """The blocks are there: the destination may decode, the source may let go."""
        copy = decode_copy(transfers, q)
        r = np.int64(fleet.requests.state[Q.RANK, copy])
        s = fleet.ranks.fields[r]
        worker = s[R.WORKER]
        if not is_idle(fleet, worker):
            defer(transfers, r, F.ACTIVATE, q)
            return
        now = fleet.clock.time[F.NOW]
        s[R.PREALLOCATED] -= 1
        activate(fleet.requests, fleet.pools, s, copy, now)
        log_step(transfers.steps, F.STEP_ACTIVATED, q, now)
        transfers.instants[F.ACTIVATED_AT, q] = now
        wake(fleet.clock, worker)
        act(transfers, F.RELEASE, q)
        retry(transfers, fleet, r)

    @inner
    def free_source(transfers, fleet, kind, q):
        """Let a prefill rank forget a request, once its worker is idle."""
        r = np.int64(fleet.requests.state[Q.RANK, q])
        s = fleet.ranks.fields[r]
        worker = s[R.WORKER]
        if fleet.workers.state[worker, W.PENDING] != W.NO_PASS:
            defer(transfers, r, kind, q)
            return
        now = fleet.clock.time[F.NOW]
        if transfers.instants[F.HELD_AT, q] >= 0.0:
            count_idle_time(fleet, worker, now)
            release_held(fleet.requests, fleet.pools, s, q, now)
            log_step(transfers.steps, F.STEP_RELEASED, q, now)
            wake(fleet.clock, worker)
        if kind == F.RELEASE:
            transfers.instants[F.RELEASED_AT, q] = now
        elif reserves_first:
            act(transfers, F.CANCEL_DESTINATION, q)
        else:
            note_failed(fleet, q, q)

    @inner
    def cancel_destination(transfers, fleet, q):
        """Let a decode rank forget a request that no prompt comes for."""
        copy = decode_copy(transfers, q)
        r = np.int64(fleet.requests.state[Q.RANK, copy])
        s = fleet.ranks.fields[r]
        worker = s[R.WORKER]
        if not is_idle(fleet, worker):
            defer(transfers, r, F.CANCEL_DESTINATION, q)
            return
        s[R.PREALLOCATED] -= 1
        cancel(fleet.requests, fleet.pools, s, copy)
        wake(fleet.clock, worker)
        note_failed(fleet, q, q)
        retry(transfers, fleet, r)

    @inner
    def run_actions(transfers, fleet):
        """Execute all actions, and those they append. Returns DONE, or what has to grow first."""
        while transfers.state[F.ACTIONS] > 0:
            code = room_for_command(fleet)
            if code != DONE:
                return code
            kind, q = next_action(transfers)
            if kind == F.SUBMIT:
                submit(fleet, q)
            elif kind == F.RESERVE:
                ask_destination(transfers, fleet, q)
            elif kind == F.TRANSFER:
                prompt = np.int64(fleet.requests.state[Q.ISL, decode_copy(transfers, q)])
                start_transfer(transfers, q, prompt, fleet.clock.time[F.NOW])
            elif kind == F.ACTIVATE:
                finish_transfer(transfers, fleet, q)
            elif kind == F.CANCEL_DESTINATION:
                cancel_destination(transfers, fleet, q)
            else:
                free_source(transfers, fleet, kind, q)
        return DONE

    return HandoffKernels(run_actions, cancel_or_forget)
