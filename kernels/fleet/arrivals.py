"""The one source of requests: who is released when.

A request without edges is due at its own time; one with edges when all have fired, at the latest of
its own time and, over its edges, trigger instant + delay. An edge is triggered by the release of
its source or by its end. Trajectories, which no edge leaves, may have to wait for a lane. An open
loop has no edges and no lanes; a closed loop is lanes of trajectories of one request, a session a
trajectory of turns, a graph many trajectories (reference: traffic, sections 2.3 to 2.5 and 4.2).

`next_time` says when somebody is due, `take_due` hands out who is and fires what waits for the
release, `note_end` enters how a request ended. Ties go to the lower request, so requests are
numbered in the reference's order: arrival, session and turn, or node.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NONE


@inner
def precedes(arrivals, one, other):
    """Whether `one` is released before `other`."""
    due = arrivals.due
    return due[one] < due[other] or (due[one] == due[other] and one < other)


@inner
def push(arrivals, q):
    """Enter a request with its final time into the heap."""
    heap = arrivals.requests[F.HEAP]
    at = arrivals.state[F.WAITING]
    arrivals.state[F.WAITING] += 1
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
    heap = arrivals.requests[F.HEAP]
    arrivals.state[F.WAITING] -= 1
    size = arrivals.state[F.WAITING]
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
    """Whether the trajectory of a request has failed, so that it is never released."""
    return arrivals.trajectories[F.FAILED_TRAJECTORY, arrivals.requests[F.TRAJECTORY, q]] != 0


@inner
def skip_failed(arrivals):
    """Drop requests of failed trajectories that would be handed out next."""
    state = arrivals.state
    requests = arrivals.requests
    while state[F.CURSOR] < state[F.OWN_TIME] and has_failed(
        arrivals, requests[F.FIRST, state[F.CURSOR]]
    ):
        state[F.CURSOR] += 1
    while state[F.WAITING] > 0 and has_failed(arrivals, requests[F.HEAP, 0]):
        pop(arrivals)


@inner
def first_in_line(arrivals):
    """Request that is handed out next, or NONE."""
    state = arrivals.state
    q = NONE
    if state[F.CURSOR] < state[F.OWN_TIME]:
        q = np.int64(arrivals.requests[F.FIRST, state[F.CURSOR]])
    if state[F.WAITING] > 0:
        other = np.int64(arrivals.requests[F.HEAP, 0])
        if q < 0 or precedes(arrivals, other, q):
            q = other
    return q


@inner
def next_time(arrivals):
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
        if edges[F.ON_COMPLETION, k] != on_completion:
            continue
        q = np.int64(edges[F.TARGET, k])
        arrivals.due[q] = max(arrivals.due[q], now + arrivals.delays[k])
        requests[F.MISSING, q] -= 1
        if requests[F.MISSING, q] == 0 and not has_failed(arrivals, q):
            push(arrivals, q)


@inner
def take_due(arrivals, now):
    """The request that is released next, if that is `now`, else NONE."""
    q = first_in_line(arrivals)
    if q < 0 or arrivals.due[q] > now:
        return NONE
    state = arrivals.state
    if state[F.WAITING] > 0 and arrivals.requests[F.HEAP, 0] == q:
        pop(arrivals)
    else:
        state[F.CURSOR] += 1
    trajectory = arrivals.requests[F.TRAJECTORY, q]
    arrivals.trajectories[F.LEFT, trajectory] -= 1
    arrivals.trajectories[F.IN_FLIGHT, trajectory] += 1
    fire(arrivals, q, np.int64(0), now)
    skip_failed(arrivals)
    return q


@inner
def start_trajectory(arrivals, trajectory, now):
    """A lane is free for a trajectory: its times count from `now`."""
    requests = arrivals.requests
    for k in range(arrivals.members[trajectory], arrivals.members[trajectory + 1]):
        q = np.int64(requests[F.MEMBER, k])
        arrivals.due[q] += now
        if requests[F.MISSING, q] == 0:
            push(arrivals, q)


@inner
def note_end(arrivals, q, status, now):
    """A released request ended `now`: what waits for its end fires, and if its trajectory is over,
    the next one starts in its lane."""
    state = arrivals.state
    state[F.ENDED_COUNT] += 1
    trajectories = arrivals.trajectories
    trajectory = np.int64(arrivals.requests[F.TRAJECTORY, q])
    trajectories[F.IN_FLIGHT, trajectory] -= 1
    if status == S.COMPLETED or (status == S.REJECTED and state[F.REJECTION_FAILS] == 0):
        fire(arrivals, q, np.int64(1), now)
    else:
        trajectories[F.FAILED_TRAJECTORY, trajectory] = 1
        trajectories[F.LEFT, trajectory] = 0
        skip_failed(arrivals)
    if trajectories[F.LEFT, trajectory] == 0 and trajectories[F.IN_FLIGHT, trajectory] == 0:
        following = state[F.NEXT_TRAJECTORY]
        if following < len(trajectories[0]):
            state[F.NEXT_TRAJECTORY] += 1
            start_trajectory(arrivals, following, now)
