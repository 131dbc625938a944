"""What happens to a worker of a prefill/decode fleet between its passes: blocks that it keeps for
handoffs, attempts to start a pass that come to nothing.

`fleet` is a `Fleet`, `worker` the place of a worker in it.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.worker import log_segment
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import worker as W


@inner
def kept_blocks(s):
    """Blocks that the requests of a rank refer to."""
    return np.float64(s[R.NUM_BLOCKS] - s[R.FREE] - s[R.EVICTABLE])


@inner
def count_idle_time(fleet, worker, now):
    """Count the blocks that an idle worker has kept for handoffs, before that changes."""
    w = fleet.workers.state[worker]
    times = fleet.workers.time[worker]
    held = 0.0
    for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
        held += kept_blocks(fleet.ranks.fields[r]) * (now - times[W.CLOCK])
    if held > 0.0:
        if len(fleet.scratch.segments[0]) > 0:
            none = np.int64(0)
            first = w[W.FIRST_RANK]
            s = fleet.ranks.fields[first]
            times[W.PASS_END] = now
            log_segment(fleet.scratch, w, s, first, times, none, none, none, held)
        times[W.KV_BLOCK_MS] += held
    times[W.CLOCK] = now


@inner
def count_idle_ranks(fleet, worker):
    """Count the blocks that ranks keep which take no part in the pass or run that ends."""
    w = fleet.workers.state[worker]
    times = fleet.workers.time[worker]
    for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
        s = fleet.ranks.fields[r]
        if s[R.PARTICIPATES] == 0:
            times[W.KV_BLOCK_MS] += kept_blocks(s) * (times[W.PASS_END] - times[W.CLOCK])


@inner
def count_to_the_end(fleet, now):
    """Count what idle workers have kept up to the last event, `now` or the end of a cut run."""
    workers = fleet.workers
    for worker in range(len(workers.state)):
        if workers.state[worker, W.PENDING] != W.NO_PASS:
            now = max(now, workers.time[worker, W.CLOCK])
    for worker in range(len(workers.state)):
        if workers.state[worker, W.PENDING] == W.NO_PASS:
            count_idle_time(fleet, np.int64(worker), now)


@inner
def has_effect(fleet, w):
    """Whether the pass just opened does anything."""
    effect = np.int64(0)
    for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
        s = fleet.ranks.fields[r]
        if s[R.PARTICIPATES] != 0:
            effect += s[R.EFFECT]
    return effect > 0


@inner
def counts_down(fleet, w, now):
    """Where nothing runs, the passes for which prefills are put off take no time, and
    new_token_ratio starts anew. One stands for all of them if there is anybody to look at; else
    whether there is one more at whose end requests can get blocks."""
    if w[W.PREFILL_LEFT] == 0:
        return False
    waiting = False
    for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
        s = fleet.ranks.fields[r]
        if s[R.RUNNING] > 0 or s[R.ACTIVATED_HEAD] >= 0:
            return False
        waiting |= s[R.READY_HEAD] >= 0
    for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
        f = fleet.ranks.factors[r]
        f[R.COUNTDOWN_END] = now
        f[R.NEW_TOKEN_RATIO] = f[R.RATIO_INIT]
    w[W.PREFILL_LEFT] = 1 if waiting else w[W.PREFILL_LEFT] - 1
    return not waiting


@inner
def somebody_is_due(fleet, w):
    """Whether the end of the next pass brings an attempt to reserve blocks."""
    due = False
    for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
        s = fleet.ranks.fields[r]
        waits = s[R.ROLE] == R.DESTINATION and s[R.QUEUE_HEAD] >= 0
        due |= waits and s[R.REFUSED_VERSION] != s[R.CAPACITY_VERSION]
    return due


@inner
def count_idle_steps(fleet):
    """The reference tries every round anew to drive those decode workers that stand blocked, and
    counts it: with prefill_schedule_interval it matters."""
    workers = fleet.workers
    clock = fleet.clock
    first = clock.pools[1, F.FIRST_WORKER]
    w = workers.state[first]
    if fleet.ranks.fields[w[W.FIRST_RANK], R.PREFILL_SCHEDULE_INTERVAL] == 1 or w[W.DP_SIZE] == 1:
        return
    for worker in range(first, len(workers.state)):
        workers.state[worker, W.STEP] += workers.state[worker, W.STANDS_BLOCKED]
    for i in range(clock.state[F.READY_WORKERS]):
        worker = clock.ready[i]
        if worker >= first:
            workers.state[worker, W.STEP] -= workers.state[worker, W.STANDS_BLOCKED]


@inner
def next_arrival(fleet, w, now):
    """The next time at which a request is through tokenization; blocked ones may stand before
    it."""
    due = np.inf
    for r in range(w[W.FIRST_RANK], w[W.FIRST_RANK] + w[W.DP_SIZE]):
        q = fleet.ranks.fields[r, R.QUEUE_HEAD]
        while q >= 0 and fleet.requests.time[Q.ARRIVAL, q] <= now:
            q = np.int64(fleet.requests.state[Q.NEXT, q])
        if q >= 0:
            due = min(due, fleet.requests.time[Q.ARRIVAL, q])
    return due
