"""Requests of a prefill/decode run that wait for other requests.

The room of `arrivals` says who is due, and hears of every end: of a decode terminal with its pass,
of a request that failed or was rejected when its source has been cancelled (reference: runtimes,
section 3). Requests get rows of the prefix index when they are placed, on both sides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vecsim.kernels.cache.session_content import grow_prompt, settle_blocks
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet import arrivals
from vecsim.kernels.fleet.handoff import BY_ORDINAL, ENDED, NOW, ORDINAL, TAKEN
from vecsim.kernels.fleet.handoff_arrivals import HandoffArrivals
from vecsim.kernels.state.layout import (
    FAILED,
    FAMILY,
    LAST_ENDED,
    NEXT,
    RANK,
    RELEASED,
    STATUS,
    UNFINISHED,
)


class WaitingHandoff(NamedTuple):
    """`handoff.Handoff`, and the room of those that wait."""

    state: np.ndarray
    time: np.ndarray
    requests: np.ndarray
    instants: np.ndarray
    actions: np.ndarray
    passes: np.ndarray
    transfers: np.ndarray
    lists: np.ndarray
    arrivals: arrivals.Arrivals


@inner
def admit_next(prefill, decode, handoff):
    """The request that the room releases next; its prompt is whole then, on both sides."""
    now = handoff.time[NOW]
    q = arrivals.take_due(handoff.arrivals, now)
    if q < 0:
        return q
    prefill.requests.time[RELEASED, q] = now
    ordinal = handoff.state[TAKEN]
    handoff.requests[ORDINAL, q] = ordinal
    handoff.requests[BY_ORDINAL, ordinal] = q
    if decode.requests.state[FAMILY, q] != q:
        grow_prompt(prefill.requests, decode.requests, prefill.ranks.fields[0], q)
        grow_prompt(decode.requests, decode.requests, decode.ranks.fields[0], q)
    return q


@inner
def next_release(prefill, handoff):
    """When the room releases somebody."""
    return arrivals.next_ready(handoff.arrivals)


@inner
def note_end(handoff, requests, q):
    """The room hears of it. What was cancelled without an end here failed at its destination."""
    status = np.int64(requests.state[STATUS, q])
    if status == UNFINISHED:
        status = FAILED
    handoff.state[ENDED] += 1
    arrivals.note_end(handoff.arrivals, q, status, handoff.time[NOW])


@inner
def note_ends(handoff, requests, w, terminals, last):
    """The room hears of each."""
    q = w[LAST_ENDED]
    while q != last:
        note_end(handoff, requests, q)
        q = np.int64(requests.state[NEXT, q])


@inner
def seat_blocks(requests, pools, seats, s, q, rank):
    """Place `q` on a rank (see `handoff.HandoffRank.place`)."""
    requests.state[RANK, q] = rank
    settle_blocks(requests, pools, s, seats, np.int64(rank), q)


WAITING_ARRIVALS = HandoffArrivals(admit_next, next_release, note_end, note_ends)
