"""What waits between a prefill and a decode pool: actions, workers to drive, turns, transfers."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.event_queue import set_leaf
from vecsim.kernels.fleet.handoff import (
    ACTIONS,
    ACTIVATE,
    AWAKE,
    BANDWIDTH,
    BYTES_PER_TOKEN,
    DEFERRED,
    DESTINATION_MISSING,
    FIRST_ACTION,
    FIRST_DEFERRED,
    LAST_DEFERRED,
    LATENCY_MS,
    NEW_BLOCKS,
    NEXT_DEFERRED,
    NOW,
    ORDINAL,
    TO_DRIVE,
    TRANSFER_BLOCK,
)
from vecsim.kernels.fleet.ready_set import enter_awake
from vecsim.kernels.sched.lifecycle import end_request
from vecsim.kernels.state.layout import (
    ARRIVAL,
    DONE_HEAD,
    DONE_TAIL,
    FAILED,
    ISL,
    NEXT,
    NONE,
    QUEUE_HEAD,
    REASON,
)


@inner
def act(handoff, kind, q):
    """Append an action."""
    h = handoff.state
    ring = np.int64(handoff.actions.shape[1])
    at = (h[FIRST_ACTION] + h[ACTIONS]) % ring
    handoff.actions[0, at] = kind
    handoff.actions[1, at] = q
    h[ACTIONS] += 1


@inner
def defer(handoff, rank, kind, q):
    """Put an action off until the pass of the rank's worker has ended."""
    lists = handoff.lists
    handoff.requests[DEFERRED, q] = kind
    handoff.requests[NEXT_DEFERRED, q] = NONE
    if lists[FIRST_DEFERRED, rank] < 0:
        lists[FIRST_DEFERRED, rank] = q
    else:
        handoff.requests[NEXT_DEFERRED, lists[LAST_DEFERRED, rank]] = q
    lists[LAST_DEFERRED, rank] = q


@inner
def act_deferred(handoff, rank):
    """Append the actions that waited for a rank."""
    q = handoff.lists[FIRST_DEFERRED, rank]
    handoff.lists[FIRST_DEFERRED, rank] = NONE
    while q >= 0:
        act(handoff, np.int64(handoff.requests[DEFERRED, q]), q)
        q = np.int64(handoff.requests[NEXT_DEFERRED, q])


@inner
def append_done(requests, s, q):
    """Append a request to the list of those that the pass of a rank is done with."""
    requests.state[NEXT, q] = NONE
    if s[DONE_HEAD] < 0:
        s[DONE_HEAD] = q
    else:
        requests.state[NEXT, s[DONE_TAIL]] = q
    s[DONE_TAIL] = q


@inner
def wake(handoff, worker):
    """Enter a worker into the list of those to drive."""
    enter_awake(handoff.lists[TO_DRIVE], handoff.state, AWAKE, worker)


@inner
def fail(side, handoff, q, worker, reason):
    """A request ends without success."""
    side.requests.state[REASON, q] = reason
    end_request(side.requests, side.workers.state[worker], q, FAILED, handoff.time[NOW])


@inner
def next_rank(handoff, turn, pin, ranks, dp_size):
    """Round robin over all ranks of a pool, or over those with the pinned number."""
    if pin < 0:
        chosen = handoff.state[turn] % ranks
        handoff.state[turn] = chosen + 1
        return chosen
    worker = handoff.state[turn] % (ranks // dp_size)
    handoff.state[turn] = worker + 1
    return worker * dp_size + pin


@inner
def transfer_ms(handoff, q, prompt, block_size):
    """Time that the transfer of a prompt takes."""
    if handoff.time[BANDWIDTH] <= 0.0:
        return handoff.time[LATENCY_MS]
    tokens = prompt
    if handoff.state[DESTINATION_MISSING] != 0:
        tokens = np.int64(handoff.requests[NEW_BLOCKS, q]) * block_size
    size = np.float64(tokens) * handoff.time[BYTES_PER_TOKEN]
    return size / (handoff.time[BANDWIDTH] * 1e9) * 1000.0


@inner
def start_transfer(decode, handoff, q):
    """The blocks of a held source go to its destination."""
    block_size = handoff.state[TRANSFER_BLOCK]
    delay = transfer_ms(handoff, q, np.int64(decode.requests.state[ISL, q]), block_size)
    if delay > 0.0:
        ordinal = np.int64(handoff.requests[ORDINAL, q])
        set_leaf(handoff.transfers, ordinal, handoff.time[NOW] + delay)
    else:
        act(handoff, ACTIVATE, q)


@inner
def dp_size_of(side):
    """Attention-DP ranks of each worker of a pool."""
    return np.int64(len(side.ranks.fields)) // np.int64(len(side.workers.state))


@inner
def next_arrival(side, worker, dp_size, now):
    """The next time at which a request is through tokenization; blocked ones may stand before
    it."""
    due = np.inf
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        q = side.ranks.fields[r, QUEUE_HEAD]
        while q >= 0 and side.requests.time[ARRIVAL, q] <= now:
            q = np.int64(side.requests.state[NEXT, q])
        if q >= 0:
            due = min(due, side.requests.time[ARRIVAL, q])
    return due
