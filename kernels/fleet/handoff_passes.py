"""What the clock of a prefill and a decode pool asks about the passes of a worker."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.decode_run import is_last_ahead
from vecsim.kernels.fleet.handoff import AWAKE, TO_DRIVE
from vecsim.kernels.fleet.handoff_queues import dp_size_of
from vecsim.kernels.fleet.worker import log_segment
from vecsim.kernels.state.layout import (
    ACTIVATED_HEAD,
    ASIDE,
    CAPACITY_VERSION,
    CLOCK,
    COUNTDOWN_END,
    EFFECT,
    FREE,
    IDLE,
    KV_BLOCK_MS,
    NEW_TOKEN_RATIO,
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
    RUNNING,
    STEP,
    STRETCH,
)


@inner
def has_effect(side, worker, dp_size):
    """Whether the pass just opened does anything."""
    effect = np.int64(0)
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        s = side.ranks.fields[r]
        if s[PARTICIPATES] != 0:
            effect += s[EFFECT]
    return effect > 0


@inner
def goes_on(decode, worker):
    """Whether a decode worker, or a negative number, is in a stretch that is not known to its
    end."""
    if worker < 0:
        return False
    w = decode.workers.state[worker]
    return w[PENDING] == STRETCH and not is_last_ahead(w)


@inner
def counts_down(side, worker, dp_size):
    """Where nothing runs, the passes for which prefills are put off take no time, and
    new_token_ratio starts anew. One stands for all of them if there is anybody to look at; else
    whether there is one more at whose end requests can get blocks."""
    w = side.workers.state[worker]
    if w[PREFILL_LEFT] == 0:
        return False
    waiting = False
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        s = side.ranks.fields[r]
        if s[RUNNING] > 0 or s[ACTIVATED_HEAD] >= 0:
            return False
        waiting |= s[READY_HEAD] >= 0
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        f = side.ranks.factors[r]
        f[COUNTDOWN_END] = side.workers.time[worker, CLOCK]
        f[NEW_TOKEN_RATIO] = f[RATIO_INIT]
    w[PREFILL_LEFT] = 1 if waiting else w[PREFILL_LEFT] - 1
    return not waiting


@inner
def somebody_is_due(side, worker, dp_size):
    """Whether the end of the next pass brings an attempt to reserve blocks."""
    due = False
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        s = side.ranks.fields[r]
        due |= s[QUEUE_HEAD] >= 0 and s[REFUSED_VERSION] != s[CAPACITY_VERSION]
    return due


@inner
def count_idle_steps(decode, handoff, sources):
    """The reference tries every round anew to drive those that stand aside, and counts it:
    with prefill_schedule_interval it matters."""
    interval = decode.ranks.fields[0, PREFILL_SCHEDULE_INTERVAL]
    if interval == 1 or dp_size_of(decode) == 1:
        return
    for worker in range(len(decode.workers.state)):
        decode.workers.state[worker, STEP] += decode.workers.state[worker, ASIDE]
    for i in range(handoff.state[AWAKE]):
        worker = handoff.lists[TO_DRIVE, i] - sources
        if worker >= 0:
            decode.workers.state[worker, STEP] -= decode.workers.state[worker, ASIDE]


@inner
def kept_blocks(s):
    """Blocks that the requests of a rank refer to."""
    return np.float64(s[NUM_BLOCKS] - s[FREE] - s[IDLE])


@inner
def count_idle_time(side, worker, now):
    """Count the blocks that an idle worker has kept for handoffs, before that changes."""
    times = side.workers.time[worker]
    dp_size = dp_size_of(side)
    first = worker * dp_size
    held = 0.0
    for r in range(first, first + dp_size):
        held += kept_blocks(side.ranks.fields[r]) * (now - times[CLOCK])
    if held > 0.0:
        if len(side.scratch.segments[0]) > 0:
            w, s = side.workers.state[worker], side.ranks.fields[first]
            none = np.int64(0)
            times[PASS_END] = now
            log_segment(side.scratch, w, s, first, times, none, none, none, held)
        times[KV_BLOCK_MS] += held
    times[CLOCK] = now


@inner
def count_to_the_end(prefill, decode, now):
    """Count what idle workers have kept up to the last event, `now` or the end of a cut stretch."""
    for worker in range(len(decode.workers.state)):
        now = max(now, decode.workers.time[worker, CLOCK])
    for worker in range(len(prefill.workers.state)):
        if prefill.workers.state[worker, PENDING] == NO_PASS:
            count_idle_time(prefill, np.int64(worker), now)
    for worker in range(len(decode.workers.state)):
        if decode.workers.state[worker, PENDING] == NO_PASS:
            count_idle_time(decode, np.int64(worker), now)


@inner
def count_idle_ranks(side, worker, dp_size):
    """Count the blocks that ranks keep which take no part in the pass or stretch that ends."""
    times = side.workers.time[worker]
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        s = side.ranks.fields[r]
        if s[PARTICIPATES] == 0:
            times[KV_BLOCK_MS] += kept_blocks(s) * (times[PASS_END] - times[CLOCK])
