"""Memory of a prefill/decode run: its two sides, what passes between them, and what a rank must do.

Requests have a copy on each side, under the same number. The order in which they are taken in
breaks the ties of transfers; with known arrivals it is that of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vecsim.kernels.cache.session_content import Seats
from vecsim.kernels.state.layout import Forest, Pools, Ranks, Requests, Scratch, Workers

# --- rows of `Handoff.state`, int64 ---------------------------------------------------------------
(
    MAX_IN_FLIGHT,  # closed loop: cap on requests in flight; 0 = open loop
    INSTANTS,  # instants after which an entry returns PAUSED
    TAKEN,  # requests taken in so far
    ENDED,  # requests that are no more in flight
    ROUND,  # rounds of the present instant that are over
    DRIVING,  # the drives of this round have begun
    AWAKE,  # workers to drive in this round
    FIRST_ACTION,  # ring of actions: position of the first, and how many there are
    ACTIONS,
    ORDERS,  # reservations asked for so far
    SOURCE_TURN,  # counters of round robin
    DESTINATION_TURN,
    DESTINATION_MISSING,  # kv_transfer_timing_mode: only the blocks that the destination lacks
    TRANSFER_BLOCK,  # tokens of such a block
) = (np.int64(k) for k in range(14))
HANDOFF_STATE = 14

# --- rows of `Handoff.time`, float64 --------------------------------------------------------------
(
    NOW,
    HORIZON,
    LATENCY_MS,  # a transfer's time, unless ...
    BYTES_PER_TOKEN,
    BANDWIDTH,  # ... this is > 0 (GB/s)
    TOKENIZE_MS,
    TOKENIZE_TOKEN_MS,
) = (np.int64(k) for k in range(7))
HANDOFF_TIME = 7

# --- rows of `Handoff.requests`, int32 ------------------------------------------------------------
(
    SOURCE_PIN,  # rank it is pinned to, or NONE
    DESTINATION_PIN,
    NEW_BLOCKS,  # blocks that its destination did not have
    DEFERRED,  # action that waits for the end of a pass
    NEXT_DEFERRED,  # next request with an action that waits for the same rank
    ORDINAL,  # position in which it was taken in
    BY_ORDINAL,  # the request that was taken in at this position
) = (np.int64(k) for k in range(7))
HANDOFF_REQUEST = 7

# --- rows of `Handoff.instants`, float64: when each happened (ms), NaN = not yet ------------------
HELD_AT, RESERVED_AT, ACTIVATED_AT, RELEASED_AT = (np.int64(k) for k in range(4))
HANDOFF_INSTANTS = 4

# --- rows of `Handoff.lists`; ranks and workers count through both pools, prefill first -----------
FIRST_DEFERRED, LAST_DEFERRED, TO_DRIVE = (np.int64(k) for k in range(3))
"""By rank, the requests with an action that waits for the end of its worker's pass; then the
workers to drive in this round, ascending."""
LISTS = 3

# --- actions --------------------------------------------------------------------------------------
SUBMIT, RESERVE, TRANSFER, ACTIVATE, RELEASE, CANCEL_SOURCE, CANCEL_DESTINATION = (
    np.int64(k) for k in range(7)
)


class Side(NamedTuple):
    """One pool and its copies of the requests."""

    ranks: Ranks
    workers: Workers
    requests: Requests
    pools: Pools | Forest
    scratch: Scratch
    rows: np.ndarray | Seats  # int64 [..., 2]: index rows by rank and content (placing.py); of
    # requests that wait for others, what they are given when they are placed (seating.py)
    servers: np.ndarray  # float64 [workers, servers]: when each tokenizer is free


class Handoff(NamedTuple):
    """What the two sides have between them."""

    state: np.ndarray  # int64 [HANDOFF_STATE]
    time: np.ndarray  # float64 [HANDOFF_TIME]
    requests: np.ndarray  # int32 [HANDOFF_REQUEST, n]
    instants: np.ndarray  # float64 [HANDOFF_INSTANTS, n]
    actions: np.ndarray  # int32 [2, ring]: kind and request
    passes: np.ndarray  # float64: tournament tree of the workers' next ends
    transfers: np.ndarray  # float64: tournament tree of the transfers' ends, by request
    lists: np.ndarray  # int64 [LISTS, ...]


class HandoffRank(NamedTuple):
    """What a handoff asks of a rank; bound into the clock.

    `s` is the rank's row; `q` a request of that side.

    Attributes:
        place: (requests, pools, rows, s, q, r): place it on the rank with number `r`.
        refusal: (requests, s, q): reason why the rank can never hold it, or 0.
        reserve: (requests, pools, s, q): reserve blocks for its prompt; how many of them are new,
            or NONE: no room.
        activate: (requests, pools, s, q): its prompt has arrived, it waits to be decoded.
        release_source: (requests, pools, s, q): give the blocks of a held request back.
        first_waiting: (requests, s, now): the request that a deadlock ends, or NONE.
        fail_waiting: (requests, pools, s, q): take it off its list, with its blocks.
        cancel: (requests, pools, s, q): give the blocks of a reserved request back; not called
            where a destination is asked for only when the prompt is done.
        try_in_vain: (f): what many attempts to start a pass, without effect, do to the factors of a
            rank.
    """

    place: Callable
    refusal: Callable
    reserve: Callable
    activate: Callable
    release_source: Callable
    first_waiting: Callable
    fail_waiting: Callable
    cancel: Callable
    try_in_vain: Callable
