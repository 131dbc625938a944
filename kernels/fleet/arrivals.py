"""Requests that wait for other requests: who is ready when.

A request without edges is ready at its own time; one with edges when all have fired, at the latest
of its own time and, over its edges, trigger instant + delay. An edge is triggered by the release of
its source or by its end. Plays, which no edge leaves, may have to wait for a lane. Sessions are
plays of a chain of turns (reference: traffic, sections 2.3 to 2.5 and 4.2).

The room knows no pool: `next_ready` says when somebody is due, `take_due` hands out who is due and
fires what waits for the release, `note_end` hears how a request ended. Ties go to the lower
request, so requests are numbered in the reference's order: session and turn, or node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state.layout import COMPLETED, NONE, REJECTED

# --- `Arrivals.state` -----------------------------------------------------------------------------
(
    READY,  # requests in the heap
    OWN_TIME,  # entries of FIRST
    CURSOR,  # entries of FIRST that were handed out, or belong to failed plays
    NEXT_PLAY,  # next play that waits for a lane
    REJECTION_FAILS,  # a rejected request ends its play; otherwise it counts as an end like others
) = (np.int64(k) for k in range(5))
ARRIVALS_STATE = 5

# --- rows of `Arrivals.requests`, `Arrivals.edges`, `Arrivals.plays` ------------------------------
(
    MISSING,  # edges that have not fired
    PLAY,
    HEAP,  # heap of those that are ready or will be at a known time, by (due, request)
    FIRST,  # those without edges whose play has started from the outset, by (due, request)
    MEMBER,  # requests grouped by play
) = (np.int64(k) for k in range(5))
REQUEST_ROWS = 5
TARGET, ON_COMPLETION = (np.int64(k) for k in range(2))
EDGE_ROWS = 2
(
    LEFT,  # requests that were not released yet; none once the play has failed
    IN_FLIGHT,  # requests that were released and have not ended
    FAILED_PLAY,
) = (np.int64(k) for k in range(3))
PLAY_ROWS = 3


class Arrivals(NamedTuple):
    """The requests of a run that wait, in the order in which ties are broken."""

    state: np.ndarray  # int64 [ARRIVALS_STATE]
    due: np.ndarray  # float64 [n]: earliest release as known so far (ms); of a play that waits for
    # a lane, relative to its start
    requests: np.ndarray  # int32 [REQUEST_ROWS, n]
    followers: np.ndarray  # int64 [n + 1]: span of each request in the edges that it triggers
    edges: np.ndarray  # int32 [EDGE_ROWS, m]
    delays: np.ndarray  # float64 [m] (ms)
    plays: np.ndarray  # int32 [PLAY_ROWS, plays]
    members: np.ndarray  # int64 [plays + 1]: span of each play in MEMBER


@inner
def precedes(arrivals, one, other):
    """Whether `one` is released before `other`."""
    due = arrivals.due
    return due[one] < due[other] or (due[one] == due[other] and one < other)


@inner
def push(arrivals, q):
    """Enter a request with its final time into the heap."""
    heap = arrivals.requests[HEAP]
    at = arrivals.state[READY]
    arrivals.state[READY] += 1
    while at > 0:
        above = (at - 1) // 2
        other = np.int64(heap[above])
        if precedes(arrivals, other, q):
            break
        heap[at] = other
        at = above
    heap[at] = q


@inner
def pop(arrivals):
    """Take the first request off the heap."""
    heap = arrivals.requests[HEAP]
    arrivals.state[READY] -= 1
    size = arrivals.state[READY]
    q = np.int64(heap[size])
    at = np.int64(0)
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and precedes(
            arrivals, np.int64(heap[below + 1]), np.int64(heap[below])
        ):
            below += 1
        if precedes(arrivals, q, np.int64(heap[below])):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = q


@inner
def has_failed(arrivals, q):
    """Whether the play of a request has failed, so that it is never released."""
    return arrivals.plays[FAILED_PLAY, arrivals.requests[PLAY, q]] != 0


@inner
def skip_failed(arrivals):
    """Drop requests of failed plays that would be handed out next."""
    state = arrivals.state
    requests = arrivals.requests
    while state[CURSOR] < state[OWN_TIME] and has_failed(arrivals, requests[FIRST, state[CURSOR]]):
        state[CURSOR] += 1
    while state[READY] > 0 and has_failed(arrivals, requests[HEAP, 0]):
        pop(arrivals)


@inner
def first_in_line(arrivals):
    """Request that is handed out next, or NONE."""
    state = arrivals.state
    q = NONE
    if state[CURSOR] < state[OWN_TIME]:
        q = np.int64(arrivals.requests[FIRST, state[CURSOR]])
    if state[READY] > 0:
        other = np.int64(arrivals.requests[HEAP, 0])
        if q < 0 or precedes(arrivals, other, q):
            q = other
    return q


@inner
def next_ready(arrivals):
    """When the next request is due, or infinity."""
    q = first_in_line(arrivals)
    if q < 0:
        return np.inf
    return arrivals.due[q]


@inner
def fire(arrivals, source, on_completion, now):
    """The edges that a release, or an end, triggers."""
    requests = arrivals.requests
    edges = arrivals.edges
    for k in range(arrivals.followers[source], arrivals.followers[source + 1]):
        if edges[ON_COMPLETION, k] != on_completion:
            continue
        q = np.int64(edges[TARGET, k])
        arrivals.due[q] = max(arrivals.due[q], now + arrivals.delays[k])
        requests[MISSING, q] -= 1
        if requests[MISSING, q] == 0 and not has_failed(arrivals, q):
            push(arrivals, q)


@inner
def take_due(arrivals, now):
    """The request that is released next, if that is `now`, else NONE."""
    q = first_in_line(arrivals)
    if q < 0 or arrivals.due[q] > now:
        return NONE
    state = arrivals.state
    if state[READY] > 0 and arrivals.requests[HEAP, 0] == q:
        pop(arrivals)
    else:
        state[CURSOR] += 1
    play = arrivals.requests[PLAY, q]
    arrivals.plays[LEFT, play] -= 1
    arrivals.plays[IN_FLIGHT, play] += 1
    fire(arrivals, q, np.int64(0), now)
    skip_failed(arrivals)
    return q


@inner
def start_play(arrivals, play, now):
    """A lane is free for a play: its times count from `now`."""
    requests = arrivals.requests
    for k in range(arrivals.members[play], arrivals.members[play + 1]):
        q = np.int64(requests[MEMBER, k])
        arrivals.due[q] += now
        if requests[MISSING, q] == 0:
            push(arrivals, q)


@inner
def note_end(arrivals, q, status, now):
    """A released request ended `now`; its followers and the next play of its lane hear of it."""
    state = arrivals.state
    plays = arrivals.plays
    play = np.int64(arrivals.requests[PLAY, q])
    plays[IN_FLIGHT, play] -= 1
    if status == COMPLETED or (status == REJECTED and state[REJECTION_FAILS] == 0):
        fire(arrivals, q, np.int64(1), now)
    else:
        plays[FAILED_PLAY, play] = 1
        plays[LEFT, play] = 0
        skip_failed(arrivals)
    if plays[LEFT, play] == 0 and plays[IN_FLIGHT, play] == 0:
        following = state[NEXT_PLAY]
        if following < len(plays[0]):
            state[NEXT_PLAY] += 1
            start_play(arrivals, following, now)
