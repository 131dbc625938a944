"""What happens to a worker of a prefill/decode fleet between its passes: blocks that it keeps for
handoffs, attempts to start a pass that come to nothing.

`fleet` is a `Fleet`, `worker` the place of a worker in it.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.worker import log_segment
from vecsim.kernels.state.fleet import FIRST_WORKER, READY_WORKERS
from vecsim.kernels.state.layout import (
    ACTIVATED_HEAD,
    ARRIVAL,
    ASIDE,
    CAPACITY_VERSION,
    CLOCK,
    COUNTDOWN_END,
    DESTINATION,
    DP_SIZE,
    EFFECT,
    FIRST_RANK,
    FREE,
    IDLE,
    KV_BLOCK_MS,
    NEW_TOKEN_RATIO,
    NEXT,
    NO_PASS,
    NUM_BLOCKS,
    PARTICIPATES,
    PASS_END,
    PENDING,
    PREFILL_LEFT,
    PREFILL_SCHEDULE_INTERVAL,
    QUEUE_HEAD,
    RATIO_INIT,
    READY_HEAD,
    REFUSED_VERSION,
    ROLE,
    RUNNING,
    STEP,
)


@inner
def kept_blocks(s):
    """Blocks that the requests of a rank refer to."""
    return np.float64(s[NUM_BLOCKS] - s[FREE] - s[IDLE])


@inner
def count_idle_time(fleet, worker, now):
    """Count the blocks that an idle worker has kept for handoffs, before that changes."""
    w = fleet.workers.state[worker]
    times = fleet.workers.time[worker]
    held = 0.0
    for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
        held += kept_blocks(fleet.ranks.fields[r]) * (now - times[CLOCK])
    if held > 0.0:
        if len(fleet.scratch.segments[0]) > 0:
            none = np.int64(0)
            first = w[FIRST_RANK]
            s = fleet.ranks.fields[first]
            times[PASS_END] = now
            log_segment(fleet.scratch, w, s, first, times, none, none, none, held)
        times[KV_BLOCK_MS] += held
    times[CLOCK] = now


@inner
def count_idle_ranks(fleet, worker):
    """Count the blocks that ranks keep which take no part in the pass or run that ends."""
    w = fleet.workers.state[worker]
    times = fleet.workers.time[worker]
    for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
        s = fleet.ranks.fields[r]
        if s[PARTICIPATES] == 0:
            times[KV_BLOCK_MS] += kept_blocks(s) * (times[PASS_END] - times[CLOCK])


@inner
def count_to_the_end(fleet, now):
    """Count what idle workers have kept up to the last event, `now` or the end of a cut run."""
    workers = fleet.workers
    for worker in range(len(workers.state)):
        if workers.state[worker, PENDING] != NO_PASS:
            now = max(now, workers.time[worker, CLOCK])
    for worker in range(len(workers.state)):
        if workers.state[worker, PENDING] == NO_PASS:
            count_idle_time(fleet, np.int64(worker), now)


@inner
def has_effect(fleet, w):
    """Whether the pass just opened does anything."""
    effect = np.int64(0)
    for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
        s = fleet.ranks.fields[r]
        if s[PARTICIPATES] != 0:
            effect += s[EFFECT]
    return effect > 0


@inner
def counts_down(fleet, w, now):
    """Where nothing runs, the passes for which prefills are put off take no time, and
    new_token_ratio starts anew. One stands for all of them if there is anybody to look at; else
    whether there is one more at whose end requests can get blocks."""
    if w[PREFILL_LEFT] == 0:
        return False
    waiting = False
    for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
        s = fleet.ranks.fields[r]
        if s[RUNNING] > 0 or s[ACTIVATED_HEAD] >= 0:
            return False
        waiting |= s[READY_HEAD] >= 0
    for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
        f = fleet.ranks.factors[r]
        f[COUNTDOWN_END] = now
        f[NEW_TOKEN_RATIO] = f[RATIO_INIT]
    w[PREFILL_LEFT] = 1 if waiting else w[PREFILL_LEFT] - 1
    return not waiting


@inner
def somebody_is_due(fleet, w):
    """Whether the end of the next pass brings an attempt to reserve blocks."""
    due = False
    for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
        s = fleet.ranks.fields[r]
        waits = s[ROLE] == DESTINATION and s[QUEUE_HEAD] >= 0
        due |= waits and s[REFUSED_VERSION] != s[CAPACITY_VERSION]
    return due


@inner
def count_idle_steps(fleet):
    """The reference tries every round anew to drive those decode workers that stand aside, and
    counts it: with prefill_schedule_interval it matters."""
    workers = fleet.workers
    clock = fleet.clock
    first = clock.pools[1, FIRST_WORKER]
    w = workers.state[first]
    if fleet.ranks.fields[w[FIRST_RANK], PREFILL_SCHEDULE_INTERVAL] == 1 or w[DP_SIZE] == 1:
        return
    for worker in range(first, len(workers.state)):
        workers.state[worker, STEP] += workers.state[worker, ASIDE]
    for i in range(clock.state[READY_WORKERS]):
        worker = clock.ready[i]
        if worker >= first:
            workers.state[worker, STEP] -= workers.state[worker, ASIDE]


@inner
def next_arrival(fleet, w, now):
    """The next time at which a request is through tokenization; blocked ones may stand before
    it."""
    due = np.inf
    for r in range(w[FIRST_RANK], w[FIRST_RANK] + w[DP_SIZE]):
        q = fleet.ranks.fields[r, QUEUE_HEAD]
        while q >= 0 and fleet.requests.time[ARRIVAL, q] <= now:
            q = np.int64(fleet.requests.state[NEXT, q])
        if q >= 0:
            due = min(due, fleet.requests.time[ARRIVAL, q])
    return due
