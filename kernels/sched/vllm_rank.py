"""What a worker asks of a vLLM-style rank (vLLM, TensorRT-LLM) beyond its pass.

When it is steady, which arrivals it acts on, how a stretch is settled. `SCHEDULER` names the whole
for `worker.bind`.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.decode_run import passes_within
from vecsim.kernels.fleet.worker import Scheduler
from vecsim.kernels.sched import vllm
from vecsim.kernels.sched.decode_batch import advance_front, known_tokens
from vecsim.kernels.sched.vllm import finish_front, grow_running, is_deferring
from vecsim.kernels.sched.vllm_queue import (
    passes_the_gate,
    rejection,
    reusable_blocks,
    tokens_to_admit,
)
from vecsim.kernels.sched.waiting_queue import has_work, queue_head
from vecsim.kernels.state.layout import (
    ARRIVAL,
    BLOCK_SIZE,
    BUDGET,
    CAPACITY_BOUND,
    EVICT_BELADY,
    EVICTION_POLICY,
    FREE,
    FRONT,
    FRONT_JOINED,
    GROWN,
    IDLE,
    MAX_NUM_SEQS,
    NEXT_FINISH,
    PREFILL_SCHEDULE_INTERVAL,
    QUEUE_HEAD,
    RUNNING,
    STEP,
    TICK,
    TOKEN_BUDGET,
)


@inner
def head_keeps_waiting(requests, pools, s, q):
    """Whether the queue head stays where it is as long as nobody leaves the front."""
    if s[RUNNING] >= s[MAX_NUM_SEQS]:
        return True
    if rejection(requests, s, q) > 0:
        return False
    known = known_tokens(requests, q)
    hits, active = reusable_blocks(requests, pools, s, q, known)
    if not passes_the_gate(requests, s, q, hits, active, np.bool_(False)):
        return True
    s[BUDGET] = s[TOKEN_BUDGET] - s[FRONT]
    return tokens_to_admit(requests, s, q, known, hits * s[BLOCK_SIZE]) < 0


@inner
def steady_passes(requests, pools, w, s, f, lists, now):
    """Passes that the rank can make as pure decodes of its front; 0 when it is not steady."""
    if s[FRONT] == 0 or s[RUNNING] != s[FRONT] or s[FRONT] > s[TOKEN_BUDGET]:
        return np.int64(0)
    q = queue_head(requests, s, now)
    if q >= 0 and not head_keeps_waiting(requests, pools, s, q):
        return np.int64(0)
    blocks = s[FREE]
    if s[EVICTION_POLICY] != EVICT_BELADY:
        # Belady's victim depends on what other workers admit meanwhile.
        blocks += s[IDLE]
    return passes_within(s, lists, blocks, s[NEXT_FINISH] - s[TICK])


@inner
def notices(requests, s, now):
    """Whether an arrival now would change what the rank does next."""
    has_slot = s[RUNNING] < s[MAX_NUM_SEQS] or s[PREFILL_SCHEDULE_INTERVAL] > 1
    return has_slot and queue_head(requests, s, now) < 0


@inner
def defers(requests, w, s, f, lists, now, dp_size):
    """Whether the pass about to start puts off prefills."""
    return dp_size > 1 and is_deferring(requests, s, lists, w[STEP])


@inner
def schedule(requests, pools, scratch, w, s, f, lists, now, defer):
    """Step 1 of a pass."""
    vllm.schedule(requests, pools, scratch, w, s, lists, now, defer)


@inner
def apply(requests, pools, times, scratch, w, s, f, lists, start, end):
    """Step 4 of a pass. Returns held blocks x ms."""
    return vllm.apply(requests, pools, times, scratch, w, s, lists, start, end)


@inner
def settle_stretch(requests, pools, w, s, f, lists, passes, start, end):
    """Enter a walked stretch of `passes` passes into blocks and requests."""
    grow_running(requests, pools, s, s[GROWN])
    interval = s[PREFILL_SCHEDULE_INTERVAL]
    to_next_admission = (interval - w[STEP] % interval) % interval
    if s[CAPACITY_BOUND] != 0 or to_next_admission < passes:
        s[CAPACITY_BOUND] = np.int64(queue_head(requests, s, start) >= 0)
    advance_front(s, passes)
    if s[TICK] >= s[NEXT_FINISH]:
        finish_front(requests, pools, w, s, lists, end)
    s[FRONT_JOINED] = s[FRONT]


@inner
def close_group(ranks, requests, w, first, dp_size, passes, start, end):
    """Count the group's passes; an idle worker counts from zero again."""
    w[STEP] += passes
    if dp_size == 1:
        return
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        if has_work(requests, s, start):
            return
        q = s[QUEUE_HEAD]
        if q >= 0 and requests.time[ARRIVAL, q] < end:
            return
    w[STEP] = 0


@inner
def room(ranks, pools, first, dp_size):
    """Whether the pools have room for whatever a pass may do: always."""
    return True


@inner
def forget(ranks, pools):
    """A worker that advanced on its own is done: each rank has copies of its own, nothing to do."""


SCHEDULER = Scheduler(
    has_work=has_work,
    notices=notices,
    steady_passes=steady_passes,
    defers=defers,
    schedule=schedule,
    price=vllm.price,
    tokens_to_emit=vllm.tokens_to_emit,
    apply=apply,
    settle_stretch=settle_stretch,
    close_group=close_group,
    room=room,
    forget=forget,
)
