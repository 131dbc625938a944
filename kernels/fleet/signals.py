"""What the fleet does about the signals of a pass: first tokens, held prompts, ends.

On a prefill rank they move handoffs on. On a decode rank blocks may have come free, so that the
request that waits longest for them makes an attempt to reserve some. `transfers` is None in an
aggregated fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.arrivals import note_end
from vecsim.kernels.fleet.transfer import act, act_deferred, log_step, request_of
from vecsim.kernels.sched.interface import Scheduler
from vecsim.kernels.sched.lifecycle import take_signal
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import NONE


class SignalKernels(NamedTuple):
    """The kernels of signals for one family of backends, as `bind` describes them."""

    retry: Callable
    retry_all: Callable
    act_on_pass: Callable
    act_on_start: Callable


def bind(scheduler: Scheduler) -> SignalKernels:
    """The kernels of signals: `retry(transfers, fleet, r)` and `retry_all(transfers, fleet, w)`
    attempt to reserve blocks, `act_on_pass(transfers, fleet, worker)` acts on the signals of a pass
    that ended, `act_on_start` on those of one that starts."""
    reserve, reserves_first = scheduler.reserve, scheduler.reserves_first

    # --- destinations -----------------------------------------------------------------------------
    @inner
    def retry(transfers, fleet, r):
        """One attempt to reserve blocks for the first request that waits for them on a rank.
        Whether it got them."""
        s = fleet.ranks.fields[r]
        copy = s[R.QUEUE_HEAD]
        if copy < 0 or s[R.REFUSED_VERSION] == s[R.CAPACITY_VERSION]:
            return False
        now = fleet.clock.time[F.NOW]
        new_blocks = reserve(fleet.requests, fleet.pools, s, copy, now)
        if new_blocks < 0:
            s[R.REFUSED_VERSION] = s[R.CAPACITY_VERSION]
            return False
        q = request_of(transfers, copy)
        log_step(transfers.steps, F.STEP_RESERVED, q, now)
        s[R.QUEUE_HEAD] = np.int64(fleet.requests.state[Q.NEXT, copy])
        s[R.REFUSED_VERSION] = NONE
        s[R.PREALLOCATED] += 1
        transfers.requests[F.NEW_BLOCKS, q] = new_blocks
        transfers.instants[F.RESERVED_AT, q] = now
        act(transfers, F.SUBMIT if reserves_first else F.TRANSFER, q)
        return True

    @inner
    def retry_all(transfers, fleet, w):
        """An attempt on every rank of a worker. Whether one got blocks."""
        reserved = False
        for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
            reserved |= retry(transfers, fleet, np.int64(r))
        return reserved

    # --- signals ----------------------------------------------------------------------------------
    @inner
    def log_outputs(transfers, fleet, w):
        """The steps of handoffs that a pass brought about."""
        if transfers.steps is not None:
            state = fleet.requests.state
            for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
                copy = fleet.ranks.fields[r, R.SIGNAL_HEAD]
                while copy >= 0:
                    what = np.int64(state[Q.SIGNALS, copy])
                    q = request_of(transfers, copy)
                    now = fleet.clock.time[F.NOW]
                    if what & Q.HELD_OUTPUT:
                        log_step(transfers.steps, F.STEP_HELD, q, now)
                    elif what & Q.ENDED and state[Q.STATUS, copy] == S.COMPLETED:
                        log_step(transfers.steps, F.STEP_COMPLETED, q, now)
                    copy = np.int64(state[Q.NEXT_SIGNAL, copy])

    @inner
    def cancel_ended(transfers, fleet, s):
        """Cancel the handoffs of the requests that ended on a prefill rank, which holds nothing of
        them; a destination that waits is told at once (found by comparison with the reference)."""
        state = fleet.requests.state
        kind = F.CANCEL_DESTINATION if reserves_first else F.CANCEL_SOURCE
        copy = s[R.SIGNAL_HEAD]
        while copy >= 0:
            if np.int64(state[Q.SIGNALS, copy]) & Q.ENDED:
                act(transfers, kind, copy)
            copy = np.int64(state[Q.NEXT_SIGNAL, copy])

    @inner
    def act_on_held(transfers, fleet, s):
        """The requests of a prefill rank whose prompts are done now."""
        copy, what = take_signal(fleet.requests, s)
        while copy >= 0:
            if what & Q.HELD_OUTPUT:
                transfers.instants[F.HELD_AT, copy] = fleet.clock.time[F.NOW]
                act(transfers, F.TRANSFER if reserves_first else F.RESERVE, copy)
            copy, what = take_signal(fleet.requests, s)

    @inner
    def note_ended(transfers, fleet, s, counts):
        """Take all signals off the list of a rank; if it `counts`, the requests that ended there
        are no more in flight."""
        copy, what = take_signal(fleet.requests, s)
        while copy >= 0:
            if counts and what & Q.ENDED:
                q = copy
                if transfers is not None:
                    q = request_of(transfers, copy)
                status = np.int64(fleet.requests.state[Q.STATUS, copy])
                note_end(fleet.arrivals, q, status, fleet.clock.time[F.NOW])
            copy, what = take_signal(fleet.requests, s)

    @inner
    def act_on_pass(transfers, fleet, worker):
        """Act on the signals of a pass or run that has ended."""
        w = fleet.workers.state[worker]
        if transfers is not None:
            log_outputs(transfers, fleet, w)
        for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
            s = fleet.ranks.fields[r]
            if transfers is not None:
                act_deferred(transfers, np.int64(r))
                if s[R.ROLE] == R.SOURCE:
                    cancel_ended(transfers, fleet, s)
                    act_on_held(transfers, fleet, s)
                else:
                    note_ended(transfers, fleet, s, True)
                    retry(transfers, fleet, np.int64(r))
            else:
                note_ended(transfers, fleet, s, True)

    @inner
    def cancel_first(transfers, fleet, s):
        """Cancel the handoffs of requests that ended on a rank, if destinations wait for them."""
        if transfers is not None and reserves_first and s[R.ROLE] == R.SOURCE:
            cancel_ended(transfers, fleet, s)
            return False
        return True

    @inner
    def act_on_start(transfers, fleet, worker):
        """Act on the signals of a pass that starts: requests that a standstill ended."""
        w = fleet.workers.state[worker]
        for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
            s = fleet.ranks.fields[r]
            if s[R.SIGNAL_HEAD] >= 0:
                counts = cancel_first(transfers, fleet, s)
                note_ended(transfers, fleet, s, counts)

    return SignalKernels(retry, retry_all, act_on_pass, act_on_start)
