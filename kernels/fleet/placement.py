"""Where a request goes when it is released, and how it reaches its rank: through the tokenizers of
its worker into the waiting queue.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import entry, inner
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import NONE


# --- round robin ----------------------------------------------------------------------------------
@inner
def next_in_turn(fleet, pool, pin):
    """Rank that round robin gives the next request of a pool.

    An aggregated pool takes its workers in turn, and the ranks of a worker in turn unless the
    request is pinned to one. Pools of a prefill/decode fleet take all ranks in turn, or the
    workers, for the rank with the pinned number (reference: runtimes, sections 5.1 and 5.2).
    """
    own = fleet.clock.pools[pool]
    turn = own[F.POOL_TURN]
    w = fleet.workers.state[own[F.FIRST_WORKER]]
    if fleet.ranks.fields[w[W.FIRST_RANK], R.ROLE] == R.AGGREGATED:
        worker = own[F.FIRST_WORKER] + turn % own[F.WORKER_COUNT]
        own[F.POOL_TURN] = turn + 1
        w = fleet.workers.state[worker]
        if pin < 0:
            pin = w[W.TURN] % w[W.DP_SIZE]
            w[W.TURN] = pin + 1
        return w[W.FIRST_RANK] + pin
    if pin >= 0:
        turn %= own[F.WORKER_COUNT]
        own[F.POOL_TURN] = turn + 1
        return fleet.workers.state[own[F.FIRST_WORKER] + turn, W.FIRST_RANK] + pin
    turn %= own[F.WORKER_COUNT] * w[W.DP_SIZE]
    own[F.POOL_TURN] = turn + 1
    return w[W.FIRST_RANK] + turn


# --- prompts that grow ----------------------------------------------------------------------------
@inner
def grow_prompt(requests, s, q, answered):
    """Put the conversation so far in front of a later turn; turns follow each other in the columns.
    A turn that produced less than planned leaves the path that was known ahead.

    `answered` is the copy of the turn before that holds what was produced.
    """
    state = requests.state
    before = q - 1
    said = np.int64(state[Q.ISL, answered]) + state[Q.GENERATED, answered]
    prompt = said + state[Q.ISL, q]
    state[Q.ISL, q] = prompt
    known = min(np.int64(state[Q.SHARED, q]), np.int64(state[Q.OWN_FROM, before]))
    if state[Q.STATUS, answered] != S.COMPLETED or state[Q.REASON, answered] != S.NO_REASON:
        known = min(known, said // s[R.BLOCK_SIZE])
    state[Q.SHARED, q] = known
    # Rows that are known ahead (SGLang's pages) begin with the first block of the family.
    state[Q.OWN_ROWS, q] += known - state[Q.OWN_FROM, q]
    state[Q.OWN_FROM, q] = known
    limit = np.int64(state[Q.LIMIT, q])
    room = max(s[R.MAX_MODEL_LEN] - prompt, np.int64(0))
    if room < limit:
        limit = room
        state[Q.REASON, q] = S.LENGTH
    room = s[R.CAPACITY_TOKENS] - prompt
    if s[R.RESERVES_OUTPUT] != 0 and room > 0 and room < limit:
        limit = room
        state[Q.REASON, q] = S.KV_CAPACITY_EXHAUSTED
    state[Q.LIMIT, q] = limit


# --- tokenization and the queue -------------------------------------------------------------------
@inner
def tokenized_at(servers, base_ms, per_token_ms, prompt, now):
    """When a prompt that comes `now` leaves the tokenizers of its worker: first come, first served.

    `servers` float64 [servers]: when each becomes free; none = no such stage.
    """
    if len(servers) == 0:
        return now
    first = 0
    for k in range(len(servers)):
        if servers[k] < servers[first]:
            first = k
    servers[first] = max(now, servers[first]) + (base_ms + per_token_ms * np.float64(prompt))
    return servers[first]


@entry
def tokenize_all(servers, base_ms, per_token_ms, dp_size, ranks, prompts, released, arrivals):
    """Send all requests, in order of release, through the tokenizers of their workers.

    Args:
        servers: float64 [workers, servers], zeros.
        base_ms, per_token_ms: service time of a request and of each of its prompt tokens.
        dp_size: ranks per worker.
        ranks, prompts: int32 [n], scheduler id and prompt tokens.
        released: float64 [n], ascending (ms).
        arrivals: float64 [n], filled: when each joins its rank's waiting queue (ms).
    """
    for q in range(len(ranks)):
        own = servers[np.int64(ranks[q]) // dp_size]
        arrivals[q] = tokenized_at(own, base_ms, per_token_ms, prompts[q], released[q])


@inner
def enqueue(requests, s, q, arrival):
    """Enter a request into its rank's waiting queue, by arrival; it is visible from then on."""
    state = requests.state
    time = requests.time
    time[Q.ARRIVAL, q] = arrival
    before = s[R.QUEUE_TAIL] if s[R.QUEUE_HEAD] >= 0 else NONE
    if before >= 0 and time[Q.ARRIVAL, before] > arrival:
        before = NONE
        following = s[R.QUEUE_HEAD]
        while time[Q.ARRIVAL, following] <= arrival:
            before = following
            following = np.int64(state[Q.NEXT, following])
    if before < 0:
        state[Q.NEXT, q] = s[R.QUEUE_HEAD]
        s[R.QUEUE_HEAD] = q
    else:
        state[Q.NEXT, q] = state[Q.NEXT, before]
        state[Q.NEXT, before] = q
    if state[Q.NEXT, q] < 0:
        s[R.QUEUE_TAIL] = q
