"""What a worker asks of a vLLM-style rank (vLLM, TensorRT-LLM) beyond its pass: when it is steady,
which arrivals it acts on, how a decode run is applied. `SCHEDULER` names the whole.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.kv_events import AT_PASS_END, TAKEN, events_have_room, mark_visible
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.decode_batch import advance_decode_batch, passes_within
from vecsim.kernels.sched.interface import Scheduler
from vecsim.kernels.sched.vllm import (
    apply,
    finish_decode_batch,
    grow_running,
    is_deferring,
    price,
    schedule,
    step_decode_batch,
    tokens_to_emit,
)
from vecsim.kernels.sched.vllm_queue import can_admit, is_prebuilt, next_candidate, rejection
from vecsim.kernels.sched.vllm_transfer import (
    activate,
    cancel,
    fail_waiting,
    place,
    refusal,
    release_held,
    reserve,
    try_in_vain,
)
from vecsim.kernels.sched.waiting_queue import has_work, queue_head
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import worker as W


@inner
def head_keeps_waiting(requests, pools, s, q):
    """Whether the queue head stays where it is as long as nobody leaves the decode batch."""
    if s[R.RUNNING] >= s[R.MAX_NUM_SEQS]:
        return True
    if is_prebuilt(requests, s, q) or rejection(requests, s, q) > 0:
        return False
    s[R.BUDGET] = s[R.TOKEN_BUDGET] - s[R.DECODING]
    _, tokens = can_admit(requests, pools, s, q, np.bool_(False))
    return tokens < 0


@inner
def steady_passes(requests, pools, w, s, f, lists, now):
    """Passes that the rank can make as pure decodes of its decode batch; 0 when it is not
    steady."""
    if s[R.DECODING] == 0 or s[R.RUNNING] != s[R.DECODING] or s[R.DECODING] > s[R.TOKEN_BUDGET]:
        return np.int64(0)
    q = next_candidate(requests, s, now)
    if q >= 0 and not head_keeps_waiting(requests, pools, s, q):
        return np.int64(0)
    blocks = s[R.FREE]
    if s[R.EVICTION_POLICY] != R.EVICT_BELADY:
        # Belady's victim depends on what other workers admit meanwhile.
        blocks += s[R.EVICTABLE]
    return passes_within(s, lists, blocks, s[R.NEXT_FINISH] - s[R.TICK])


@inner
def notices(requests, s, now):
    """Whether an arrival now would change what the rank does next."""
    has_slot = s[R.RUNNING] < s[R.MAX_NUM_SEQS] or s[R.PREFILL_SCHEDULE_INTERVAL] > 1
    return has_slot and queue_head(requests, s, now) < 0


@inner
def defers(requests, w, s, f, lists, now, dp_size):
    """Whether the pass about to start puts off prefills."""
    return dp_size > 1 and is_deferring(requests, s, lists, w[W.STEP])


@inner
def apply_run(requests, pools, w, s, f, lists, passes, start, end):
    """Enter a walked decode run of `passes` passes into blocks and requests."""
    grow_running(requests, pools, s, s[R.GROWN])
    interval = s[R.PREFILL_SCHEDULE_INTERVAL]
    to_next_admission = (interval - w[W.STEP] % interval) % interval
    if s[R.CAPACITY_BOUND] != 0 or to_next_admission < passes:
        s[R.CAPACITY_BOUND] = np.int64(queue_head(requests, s, start) >= 0)
    advance_decode_batch(s, passes)
    if s[R.TICK] >= s[R.NEXT_FINISH]:
        finish_decode_batch(requests, pools, w, s, lists, end)
    s[R.DECODING_JOINED] = s[R.DECODING]


@inner
def log_run(requests, pools, s, lists, ends, done, count, start):
    """What each of `count` passes of a decode run, after `done` others, does to the decode batch's
    blocks.

    To everybody else it looks as if they were still to be taken at the end of the run: FREE and
    GROWN are those of a run that is not observed.
    """
    taken = pools.events.ranks[TAKEN]
    rank = s[R.SCHEDULER_ID]
    if done == 0:
        taken[rank] = 0
    s[R.FREE] -= taken[rank]
    for k in range(count):
        taken[rank] += step_decode_batch(requests, pools, s, lists, s[R.TICK] + done + k)
        mark_visible(pools.events, s, ends[k], AT_PASS_END)
    s[R.FREE] += taken[rank]


@inner
def close_group(ranks, requests, w, first, dp_size, passes, start, end):
    """Count the group's passes; an idle worker that owns nothing counts from zero again."""
    w[W.STEP] += passes
    if dp_size == 1:
        return
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        if has_work(requests, s, start) or s[R.HELD] + s[R.PREALLOCATED] > 0:
            return
        q = s[R.QUEUE_HEAD]
        if q >= 0 and (requests.time[Q.ARRIVAL, q] < end or s[R.ROLE] == R.DESTINATION):
            return
    w[W.STEP] = 0


@inner
def room(ranks, pools, first, dp_size):
    """Whether there is room for whatever a pass may do: in the log of KV events."""
    return events_have_room(pools.events)


@inner
def forget(ranks, pools):
    """A worker that advanced on its own is done: each rank has copies of its own, nothing to do."""


SCHEDULER = Scheduler(
    has_work=has_work,
    notices=notices,
    steady_passes=steady_passes,
    defers=defers,
    schedule=schedule,
    price=price,
    tokens_to_emit=tokens_to_emit,
    apply=apply,
    apply_run=apply_run,
    log_run=log_run,
    close_group=close_group,
    room=room,
    forget=forget,
    reserves_first=False,
    place=place,
    refusal=refusal,
    reserve=reserve,
    activate=activate,
    release_held=release_held,
    first_waiting=queue_head,
    fail_waiting=fail_waiting,
    cancel=cancel,
    try_in_vain=try_in_vain,
)
