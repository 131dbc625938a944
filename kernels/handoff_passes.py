"""What the clock of a prefill and a decode pool asks about the passes of a worker."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.handoff import AWAKE, TO_DRIVE
from vecsim.kernels.handoff_queues import dp_size_of
from vecsim.kernels.jit import inner
from vecsim.kernels.layout import (
    ACTIVATED_HEAD,
    ASIDE,
    CAPACITY_VERSION,
    CLOCK,
    COUNTDOWN_END,
    EFFECT,
    NEW_TOKEN_RATIO,
    PARTICIPATES,
    PREFILL_LEFT,
    PREFILL_SCHEDULE_INTERVAL,
    QUEUE_HEAD,
    RATIO_INIT,
    READY_HEAD,
    REFUSED_VERSION,
    RUNNING,
    STEP,
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
