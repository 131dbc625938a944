"""What waits between a prefill and a decode pool: actions, deferred ones, transfers, steps."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.event_queue import first_leaf, set_leaf
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state.codes import NONE


# --- the two copies of a request ------------------------------------------------------------------
@inner
def request_of(transfers, copy):
    """The request whose copy, on either side, this is."""
    n = np.int64(len(transfers.requests[0]))
    return copy - n if copy >= n else copy


@inner
def decode_copy(transfers, q):
    """The copy of a request on the decode side."""
    return q + np.int64(len(transfers.requests[0]))


# --- actions --------------------------------------------------------------------------------------
@inner
def act(transfers, kind, q):
    """Append an action."""
    t = transfers.state
    ring = np.int64(transfers.actions.shape[1])
    at = (t[F.FIRST_ACTION] + t[F.ACTIONS]) % ring
    transfers.actions[0, at] = kind
    transfers.actions[1, at] = q
    t[F.ACTIONS] += 1


@inner
def next_action(transfers):
    """Take the first action: (kind, request)."""
    t = transfers.state
    at = t[F.FIRST_ACTION]
    t[F.FIRST_ACTION] = (at + 1) % np.int64(transfers.actions.shape[1])
    t[F.ACTIONS] -= 1
    return np.int64(transfers.actions[0, at]), np.int64(transfers.actions[1, at])


@inner
def defer(transfers, rank, kind, q):
    """Put an action off until the pass of the rank's worker has ended."""
    deferred = transfers.deferred
    transfers.requests[F.DEFERRED, q] = kind
    transfers.requests[F.NEXT_DEFERRED, q] = NONE
    if deferred[F.FIRST_DEFERRED, rank] < 0:
        deferred[F.FIRST_DEFERRED, rank] = q
    else:
        transfers.requests[F.NEXT_DEFERRED, deferred[F.LAST_DEFERRED, rank]] = q
    deferred[F.LAST_DEFERRED, rank] = q


@inner
def act_deferred(transfers, rank):
    """Append the actions that waited for a rank."""
    q = transfers.deferred[F.FIRST_DEFERRED, rank]
    transfers.deferred[F.FIRST_DEFERRED, rank] = NONE
    while q >= 0:
        act(transfers, np.int64(transfers.requests[F.DEFERRED, q]), q)
        q = np.int64(transfers.requests[F.NEXT_DEFERRED, q])


# --- transfers ------------------------------------------------------------------------------------
@inner
def transfer_ms(transfers, q, prompt):
    """Time that the transfer of a prompt takes."""
    if transfers.time[F.BANDWIDTH] <= 0.0:
        return transfers.time[F.LATENCY_MS]
    tokens = prompt
    if transfers.state[F.DESTINATION_MISSING] != 0:
        tokens = np.int64(transfers.requests[F.NEW_BLOCKS, q]) * transfers.state[F.TRANSFER_BLOCK]
    size = np.float64(tokens) * transfers.time[F.BYTES_PER_TOKEN]
    return size / (transfers.time[F.BANDWIDTH] * 1e9) * 1000.0


@inner
def start_transfer(transfers, q, prompt, now):
    """The blocks of a held prompt go to its destination."""
    delay = transfer_ms(transfers, q, prompt)
    if delay > 0.0:
        set_leaf(transfers.ends, np.int64(transfers.requests[F.ORDINAL, q]), now + delay)
    else:
        act(transfers, F.ACTIVATE, q)


@inner
def end_transfers(transfers, now):
    """The transfers that end now; ties by the order of release. Whether there was one."""
    ended = False
    while transfers.ends[1] == now:
        ordinal = first_leaf(transfers.ends)
        set_leaf(transfers.ends, ordinal, np.inf)
        act(transfers, F.ACTIVATE, np.int64(transfers.requests[F.BY_ORDINAL, ordinal]))
        ended = True
    return ended


# --- steps ----------------------------------------------------------------------------------------
@inner
def log_step(steps, kind, q, now):
    """Enter a step of the handoff of `q`, where steps are kept."""
    if steps is not None:
        line = steps.length[0]
        steps.lines[F.STEP_KIND, line] = kind
        steps.lines[F.STEP_REQUEST, line] = q
        steps.lines[F.STEP_MS, line] = now
        steps.length[0] = line + 1
