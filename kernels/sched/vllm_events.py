"""vLLM-style ranks (vLLM, TensorRT-LLM) whose KV events are logged.

Every full block has an identity and a copy of its own (SINGLE_COPIES), so that each can be named
when it is stored and when it goes. Whatever a pass allocates without preempting makes one Removed
event; the blocks that a request completes in a pass make Stored events, one for each run of
consecutive blocks that nobody could find before (reference: vLLM backend, section 12).

The front takes and completes its blocks pass by pass, in running order, while a stretch is walked.
To everybody else it looks as if they were still to be taken at the end of the stretch: FREE and
GROWN are those of an unobserved stretch.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache import block_pool
from vecsim.kernels.cache.kv_events import (
    AT_PASS_END,
    REMOVED_FIRST,
    REMOVED_NEXT,
    STORED_FIRST,
    STORED_NEXT,
    TAKEN,
    log_blocks,
    log_has_room,
    mark_visible,
)
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet import decode_run
from vecsim.kernels.rebinding import rebound
from vecsim.kernels.sched import vllm, vllm_rank
from vecsim.kernels.state.layout import (
    BLOCK_SIZE,
    BUDGET,
    COMPUTED,
    EVICT_BELADY,
    EVICTION_POLICY,
    FREE,
    FRONT,
    GENERATED,
    GROWTH_OFFSET,
    IDLE,
    IDLE_HEAD,
    ISL,
    NONE,
    OWN_BEFORE,
    OWN_TAIL,
    PARTICIPATES,
    PASS_TOKENS,
    PREFIX_CACHING,
    PRIMARY,
    RESERVED,
    RESERVES_OUTPUT,
    ROW,
    RUN_OFFSET,
    TICK,
)


# --- the pool -------------------------------------------------------------------------------------
@inner
def evict(requests, pools, s, count):
    """Evict `count` idle blocks, and log those of which no copy is left."""
    s[IDLE] -= count
    kind = REMOVED_FIRST
    first = NONE
    run = np.int64(0)
    for _ in range(count):
        copy = s[IDLE_HEAD]
        if s[EVICTION_POLICY] == EVICT_BELADY:
            copy = block_pool.belady_victim(requests, pools, s)
        row = np.int64(pools.nodes[ROW, copy])
        block_pool.unlink_idle(pools, s, copy)
        block_pool.forget_copy(pools, s, copy)
        if pools.index[PRIMARY, row] >= 0:
            continue
        if run > 0 and row != first - run:
            log_blocks(pools.events, s, kind, first, -run)
            kind = REMOVED_NEXT
            run = np.int64(0)
        if run == 0:
            first = row
        run += 1
    if run > 0:
        log_blocks(pools.events, s, kind, first, -run)


@inner
def publish(requests, pools, s, q, first, end):
    """Make the just computed full blocks first..end-1 findable, and log those that were not."""
    if s[PREFIX_CACHING] == 0:
        return
    kind = STORED_FIRST
    begin = NONE
    run = np.int64(0)
    block = first
    while block < end:
        row, count = block_pool.row_run(requests, s, q, block)
        for _ in range(min(count, end - block)):
            found = pools.index[PRIMARY, row] >= 0
            if run > 0 and (found or row != begin + run):
                log_blocks(pools.events, s, kind, begin, run)
                kind = STORED_NEXT
                run = np.int64(0)
            if found:
                kind = STORED_FIRST
            else:
                if run == 0:
                    begin = row
                run += 1
            copy = block_pool.new_copy(pools, s, row)
            pools.nodes[OWN_BEFORE, copy] = requests.state[OWN_TAIL, q]
            requests.state[OWN_TAIL, q] = copy
            block += 1
            row += 1
    if run > 0:
        log_blocks(pools.events, s, kind, begin, run)


pool = rebound(block_pool, evict=evict, publish=publish)
take_blocks = pool.take_blocks


# --- a pass ---------------------------------------------------------------------------------------
@inner
def step_front(requests, pools, s, lists, tick):
    """Blocks that front members begin and complete in the pass at `tick`, in running order.
    Returns how many were taken."""
    block_size = s[BLOCK_SIZE]
    growth = s[GROWTH_OFFSET]
    taken = np.int64(0)
    # Who completes a block in this pass needs the next one in the following.
    if lists[growth + tick % block_size] == 0 and lists[growth + (tick + 1) % block_size] == 0:
        return taken
    state = requests.state
    for i in range(s[FRONT]):
        q = np.int64(lists[s[RUN_OFFSET] + i])
        computed = np.int64(state[ISL, q]) + state[GENERATED, q] + tick - 1
        block = computed // block_size
        inside = computed - block * block_size
        if inside == 0:
            take_blocks(requests, pools, s, np.int64(1))
            taken += 1
        if inside == block_size - 1:
            publish(requests, pools, s, q, block, block + 1)
            state[COMPUTED, q] = computed + 1
    return taken


@inner
def schedule_running(requests, pools, s, lists, now, defer):
    """Phase 1 of a pass (see `vllm.schedule_running`), the front block by block."""
    if observed_vllm.fits_without_preemption(requests, s, lists, defer):
        taken = step_front(requests, pools, s, lists, s[TICK])
        if s[RESERVES_OUTPUT] != 0:
            s[RESERVED] -= taken
        s[BUDGET] -= s[FRONT]
    else:
        observed_vllm.dissolve_front(requests, pools, s, lists, now)
    observed_vllm.schedule_explicit(requests, pools, s, lists, s[FRONT], defer)


@inner
def dissolve_scheduled_front(requests, pools, s, lists, now):
    """Make all front members explicit after their token of this pass, whose blocks are there."""
    state = requests.state
    front = s[FRONT]
    observed_vllm.dissolve_front(requests, pools, s, lists, now)
    for i in range(front):
        q = np.int64(lists[s[RUN_OFFSET] + i])
        state[COMPUTED, q] += 1
        state[PASS_TOKENS, q] = 1


observed_vllm = rebound(
    vllm,
    pool,
    schedule_running=schedule_running,
    dissolve_scheduled_front=dissolve_scheduled_front,
)


# --- a stretch ------------------------------------------------------------------------------------
@inner
def observe_chunk(ranks, times, requests, scratch, first, dp_size, done, count, start):
    """Record `count` walked passes, and what each does to the front's blocks."""
    decode_run.observe_chunk(ranks, times, requests, scratch, first, dp_size, done, count, start)
    pools = scratch.pools
    events = pools.events
    ends = scratch.chunk[decode_run.ENDS]
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        if s[PARTICIPATES] == 0:
            continue
        if done == 0:
            events.ranks[TAKEN, r] = 0
        s[FREE] -= events.ranks[TAKEN, r]
        for k in range(count):
            tick = s[TICK] + done + k
            events.ranks[TAKEN, r] += step_front(requests, pools, s, ranks.lists, tick)
            mark_visible(events, s, ends[k], AT_PASS_END)
        s[FREE] += events.ranks[TAKEN, r]


walking = rebound(decode_run, observe_chunk=observe_chunk)


# --- what a worker asks of a rank -----------------------------------------------------------------
_rank = rebound(vllm_rank, observed_vllm)


@inner
def apply(requests, pools, times, scratch, w, s, f, lists, start, end):
    """Step 4 of a pass: what was logged when it was scheduled becomes visible at its end."""
    mark_visible(pools.events, s, end, AT_PASS_END)
    return _rank.apply(requests, pools, times, scratch, w, s, f, lists, start, end)


@inner
def room(ranks, pools, first, dp_size):
    """Whether the log has room for whatever a pass may do."""
    return log_has_room(pools.events)


SCHEDULER = vllm_rank.SCHEDULER._replace(
    schedule=_rank.schedule,
    apply=apply,
    settle_stretch=_rank.settle_stretch,
    room=room,
)
