"""A fleet: what its workers have between them, and the bundle of everything."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vecsim.kernels.state.pools import Forest, Pools
from vecsim.kernels.state.rank import Ranks
from vecsim.kernels.state.request import Requests
from vecsim.kernels.state.worker import Scratch, Workers

# --- rows of `Clock.state` ------------------------------------------------------------------------
(
    SEGMENTS,  # passes and runs (independent workers), or instants, after which an entry is PAUSED
    NEXT_WORKER,  # independent workers: the one being advanced
    END_WORKER,  # ... one past the last of this call
    RELEASED_COUNT,  # requests released so far
    READY_WORKERS,  # workers to drive in this round
    ROUND,  # rounds of the present instant that are over
    DRIVING,  # the drives of this round have begun
    INSTANT_OVER,  # nothing is left to do at this instant
) = (np.int64(k) for k in range(8))
CLOCK_STATE = 8

NOW, HORIZON, NEXT_TICK, TOKENIZE_MS, TOKENIZE_TOKEN_MS = (np.int64(k) for k in range(5))
"""An entry returns TICKED when all instants up to NEXT_TICK are over; infinity: never."""
CLOCK_TIME = 5

# --- columns of `Clock.pools`, int64 [pools, POOL_FIELDS] -----------------------------------------
FIRST_WORKER, WORKER_COUNT, POOL_TURN = (np.int64(k) for k in range(3))
"""Workers of a pool stand side by side, prefill before decode; POOL_TURN is the round robin's."""
POOL_FIELDS = 3


class Clock(NamedTuple):
    """The time of a fleet, and who is due next."""

    state: np.ndarray  # int64 [CLOCK_STATE]
    time: np.ndarray  # float64 [CLOCK_TIME]
    ends: np.ndarray  # float64: event queue of the workers: next end, or next wake-up when idle
    ready: np.ndarray  # int64 [workers]: the ready set, ascending
    servers: np.ndarray  # float64 [workers, servers]: when each tokenizer is free
    pools: np.ndarray  # int64 [1 or 2, POOL_FIELDS]


# --- `Arrivals` (arrivals.py) ---------------------------------------------------------------------
(
    WAITING,  # requests in the heap
    OWN_TIME,  # entries of FIRST
    CURSOR,  # entries of FIRST that were handed out, or belong to failed trajectories
    NEXT_TRAJECTORY,  # next trajectory that waits for a lane
    REJECTION_FAILS,  # a rejected request ends its trajectory; otherwise it counts as an end
    ENDED_COUNT,  # released requests that have ended
) = (np.int64(k) for k in range(6))
ARRIVALS_STATE = 6

(
    MISSING,  # edges that have not fired
    TRAJECTORY,
    HEAP,  # heap of those that are ready or will be at a known time, by (due, request)
    FIRST,  # those without edges whose trajectory has started from the outset, by (due, request)
    MEMBER,  # requests grouped by trajectory
) = (np.int64(k) for k in range(5))
ARRIVAL_ROWS = 5
TARGET, ON_COMPLETION = (np.int64(k) for k in range(2))
EDGE_ROWS = 2
(
    LEFT,  # requests that were not released yet; none once the trajectory has failed
    IN_FLIGHT,  # requests that were released and have not ended
    FAILED_TRAJECTORY,
) = (np.int64(k) for k in range(3))
TRAJECTORY_ROWS = 3


class Arrivals(NamedTuple):
    """The requests of a run that are to come, in the order in which ties are broken."""

    state: np.ndarray  # int64 [ARRIVALS_STATE]
    due: np.ndarray  # float64 [n]: earliest release as known so far (ms); of a trajectory that
    # waits for a lane, relative to its start
    requests: np.ndarray  # int32 [ARRIVAL_ROWS, n]
    followers: np.ndarray  # int64 [n + 1]: span of each request in the edges that it triggers
    edges: np.ndarray  # int32 [EDGE_ROWS, m]
    delays: np.ndarray  # float64 [m] (ms)
    trajectories: np.ndarray  # int32 [TRAJECTORY_ROWS, trajectories]
    members: np.ndarray  # int64 [trajectories + 1]: span of each trajectory in MEMBER


# --- `Content` (content.py) -----------------------------------------------------------------------
ROWS_USED, COPIES_USED, OWN_KEYS, OWN_WHOLE = (np.int64(k) for k in range(4))
"""Rows and copies handed out; the first key that is a family's; whether a family has rows for all
its blocks, as how much of the known path its turns follow turns out later."""
CONTENT_STATE = 4
CONTENT_KEY, CONTENT_ROW = (np.int64(k) for k in range(2))


class Content(NamedTuple):
    """Rows of the prefix index and copies of blocks, handed out as requests are placed."""

    state: np.ndarray  # int64 [CONTENT_STATE]
    own: np.ndarray  # int32 [requests]: blocks of a family that have rows of its own, by its first
    # request
    table: np.ndarray  # int64 [slots, 2], slots a power of two: CONTENT_KEY, -1 = empty, and
    # CONTENT_ROW: before a content has rows, -1 minus the only request that has it on the rank


# --- rows of `Transfers.state`, int64 -------------------------------------------------------------
(
    FIRST_ACTION,  # ring of actions: position of the first, and how many there are
    ACTIONS,
    ORDERS,  # reservations asked for so far
    DESTINATION_MISSING,  # kv_transfer_timing_mode: only the blocks that the destination lacks
    TRANSFER_BLOCK,  # tokens of such a block
) = (np.int64(k) for k in range(5))
TRANSFERS_STATE = 5

# --- rows of `Transfers.time`, float64 ------------------------------------------------------------
(
    LATENCY_MS,  # a transfer's time, unless ...
    BYTES_PER_TOKEN,
    BANDWIDTH,  # ... this is > 0 (GB/s)
) = (np.int64(k) for k in range(3))
TRANSFERS_TIME = 3

# --- rows of `Transfers.requests`, int32 ----------------------------------------------------------
(
    NEW_BLOCKS,  # blocks that its destination did not have
    DEFERRED,  # action that waits for the end of a pass
    NEXT_DEFERRED,  # next request with an action that waits for the same rank
    ORDINAL,  # position in which it was released
    BY_ORDINAL,  # the request that was released at this position
) = (np.int64(k) for k in range(5))
TRANSFER_REQUEST = 5

# --- rows of `Transfers.instants`, float64: when each happened (ms), NaN = not yet ----------------
HELD_AT, RESERVED_AT, ACTIVATED_AT, RELEASED_AT = (np.int64(k) for k in range(4))
TRANSFER_INSTANTS = 4

FIRST_DEFERRED, LAST_DEFERRED = (np.int64(k) for k in range(2))
"""Rows of `Transfers.deferred`: the requests with an action that waits for the end of the pass of
the rank's worker."""

# --- actions --------------------------------------------------------------------------------------
SUBMIT, RESERVE, TRANSFER, ACTIVATE, RELEASE, CANCEL_SOURCE, CANCEL_DESTINATION = (
    np.int64(k) for k in range(7)
)

# --- steps of handoffs ----------------------------------------------------------------------------
STEP_HELD, STEP_ACCEPTED, STEP_RESERVED, STEP_ACTIVATED, STEP_RELEASED, STEP_COMPLETED = (
    np.int64(k) for k in range(6)
)
"""Kinds; every request makes each of them once at most."""
STEP_KINDS = 6
STEP_KIND, STEP_REQUEST, STEP_MS = (np.int64(k) for k in range(3))
STEP_FIELDS = 3


class Steps(NamedTuple):
    """Steps of all handoffs in the order in which they happened, which instants alone do not tell:
    several fall on one (reference: runtimes, sections 10 and 11)."""

    lines: np.ndarray  # float64 [STEP_FIELDS, STEP_KINDS * n]
    length: np.ndarray  # int64 [1]: lines in use


class Transfers(NamedTuple):
    """What passes between a prefill and a decode pool.

    Requests have two copies, with columns of their own in `Requests`: that of the prefill pool has
    the request's number q, that of the decode pool n + q.
    """

    state: np.ndarray  # int64 [TRANSFERS_STATE]
    time: np.ndarray  # float64 [TRANSFERS_TIME]
    requests: np.ndarray  # int32 [TRANSFER_REQUEST, n]
    instants: np.ndarray  # float64 [TRANSFER_INSTANTS, n]
    actions: np.ndarray  # int32 [2, ring]: kind and request
    ends: np.ndarray  # float64: event queue of the transfers, by ORDINAL
    deferred: np.ndarray  # int64 [2, ranks]
    steps: Steps | None


class Fleet(NamedTuple):
    """Everything that a run on the fleet's clock reads and writes."""

    ranks: Ranks
    workers: Workers
    requests: Requests
    pools: Pools | Forest
    scratch: Scratch
    clock: Clock
    arrivals: Arrivals
    content: Content
    pins: np.ndarray  # int32 [pools, n]: rank of its worker that a request is pinned to, or -1
    transfers: Transfers | None
