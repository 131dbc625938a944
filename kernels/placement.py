"""Who gets the next request.

Round robin needs nothing but the order of arrival, so it is decided once, before the clock starts
(reference: runtimes, section 5.1).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.jit import entry, inner
from vecsim.kernels.layout import ARRIVAL, NEXT, NONE, QUEUE_HEAD, QUEUE_TAIL, RANK


@entry
def place_round_robin(pins, rank_turns, dp_size, ranks):
    """Choose the rank of every request, in order of arrival.

    Args:
        pins: int32 [n], pinned rank of the worker, -1 where free.
        rank_turns: int64 [workers], zeros: the rank counters.
        dp_size: ranks per worker.
        ranks: int32 [n], filled with scheduler ids.

    A pinned request takes a turn of the worker, not of its ranks.
    """
    workers = np.int64(rank_turns.shape[0])
    for q in range(pins.shape[0]):
        worker = np.int64(q) % workers
        rank = np.int64(pins[q])
        if rank < 0:
            rank = rank_turns[worker] % dp_size
            rank_turns[worker] = rank + 1
        ranks[q] = worker * dp_size + rank


@inner
def enqueue(requests, s, q, arrival):
    """Append a request to its rank's waiting queue; it is visible from `arrival` (ms) on."""
    requests.time[ARRIVAL, q] = arrival
    requests.state[NEXT, q] = NONE
    if s[QUEUE_HEAD] < 0:
        s[QUEUE_HEAD] = q
    else:
        requests.state[NEXT, s[QUEUE_TAIL]] = q
    s[QUEUE_TAIL] = q


@inner
def enqueue_all(ranks, requests):
    """Queue every request at its authored arrival; nobody else decides when it comes."""
    for q in range(requests.state.shape[1]):
        s = ranks.fields[requests.state[RANK, q]]
        enqueue(requests, s, np.int64(q), requests.time[ARRIVAL, q])
