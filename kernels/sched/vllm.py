"""One scheduler pass of one vLLM or TensorRT-LLM rank.

A pass has four steps: schedule (running requests first, then admissions), sum up the work, price
it, apply it. `schedule` and `price` run at the start of a pass, `apply` at its end. Running
requests that emitted a token at the last pass end form the decode batch (see decode_batch.py). When
memory does not suffice, or the budget leaves some of them out, the decode batch is dissolved and
the pass is scheduled request by request. (Reference: vLLM backend, sections 2, 3 and 6.)

TensorRT-LLM runs the same pass under two more rules: admission reserves blocks for the whole output
(RESERVES_OUTPUT), so that nobody is ever preempted, and a fully cached prompt keeps its whole hit
(KEEPS_WHOLE_HIT). Its output clamp is part of LIMIT. (Reference: TensorRT-LLM policy, section B1.)

The ROLE of a rank adds small rules. A prefill rank (SOURCE) produces one hidden token of a request
and holds its blocks until they are released. A decode rank (DESTINATION) admits activated requests
without computing anything, charges a decode step for each of their tokens, and shares its blocks
with reservations (vllm_transfer.py; reference: runtimes, section 7; vLLM backend, section 10).

Where KV events are observed every full block has an identity and a copy of its own (SINGLE_COPIES).
Whatever a pass allocates without preempting makes one Removed event; the blocks that a request
completes in a pass make Stored events, one for each run of consecutive blocks that nobody could
find before (reference: vLLM backend, section 12).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.block_pool import (
    blocks_of,
    cache_full_blocks,
    reference_prefix,
    release,
    take_blocks,
)
from vecsim.kernels.cache.kv_events import mark_pass_end
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.decode_batch import (
    advance_decode_batch,
    close_gaps,
    empty_decode_batch,
    join_decode_batch,
    known_tokens,
    leave_decode_batch,
)
from vecsim.kernels.sched.lifecycle import (
    begin_pass,
    complete,
    emit_token,
    end_rejected,
    end_stuck,
    hold,
    log_admission,
    mark_second_tokens,
    reject,
)
from vecsim.kernels.sched.vllm_queue import (
    can_admit,
    footprint,
    gate_is_shut,
    is_prebuilt,
    leave_queue,
    next_candidate,
    rejection,
    reusable_blocks,
)
from vecsim.kernels.sched.waiting_queue import queue_head
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NONE
from vecsim.kernels.timing.durations import decode_ms, prefill_ms
from vecsim.kernels.timing.itl_histogram import count_gap

PREEMPTING_LIMIT = np.int64(1024)
"""So many passes preempt without a token or an end before an empty prompt has to fail."""


# --- the decode batch -----------------------------------------------------------------------------
@inner
def leave(requests, pools, s, lists, q):
    """Make a member of the decode batch explicit again: all but its newest token are computed, and
    published."""
    before = np.int64(requests.state[Q.COMPUTED, q])
    leave_decode_batch(requests, s, lists, q, np.int64(1))
    computed = np.int64(requests.state[Q.COMPUTED, q])
    cache_full_blocks(requests, pools, s, q, before // s[R.BLOCK_SIZE], computed // s[R.BLOCK_SIZE])


@inner
def dissolve_decode_batch(requests, pools, s, lists, now):
    """Make all members of the decode batch explicit; their last tokens came at `now`."""
    for i in range(s[R.DECODING]):
        q = np.int64(lists[s[R.RUN_OFFSET] + i])
        leave(requests, pools, s, lists, q)
        requests.time[Q.LAST_TOKEN, q] = now
    empty_decode_batch(s)


# --- schedule: running requests -------------------------------------------------------------------
@inner
def built(requests, q):
    """Whether the whole prompt is computed."""
    return requests.state[Q.COMPUTED, q] >= requests.state[Q.ISL, q]


@inner
def record_work(requests, s, q, tokens, prompt, prefix):
    """Enter a request's share into the summary of the pass."""
    requests.state[Q.PASS_TOKENS, q] = tokens
    requests.state[Q.PASS_PROMPT, q] = prompt
    requests.state[Q.PASS_PREFIX, q] = prefix
    s[R.BUDGET] -= tokens
    if prompt > 0:
        s[R.PREFILLS] += 1
        s[R.PREFILL_ISL] += prefix + prompt
        s[R.PREFILL_PREFIX] += prefix
        s[R.PREFILL_TOKENS] += tokens


@inner
def undo_work(requests, s, q):
    """Take a request's share, if any, out of the summary of the pass."""
    state = requests.state
    s[R.BUDGET] += state[Q.PASS_TOKENS, q]
    if state[Q.PASS_PROMPT, q] > 0:
        s[R.PREFILLS] -= 1
        s[R.PREFILL_ISL] -= state[Q.PASS_PREFIX, q] + state[Q.PASS_PROMPT, q]
        s[R.PREFILL_PREFIX] -= state[Q.PASS_PREFIX, q]
        s[R.PREFILL_TOKENS] -= state[Q.PASS_TOKENS, q]
    state[Q.PASS_TOKENS, q] = 0
    state[Q.PASS_PROMPT, q] = 0


@inner
def give_back(requests, pools, s, q):
    """Release the blocks of a request that ends, and what admission reserved for it."""
    computed = np.int64(requests.state[Q.COMPUTED, q])
    if s[R.RESERVES_OUTPUT] != 0:
        s[R.RESERVED] -= footprint(requests, s, q) - blocks_of(computed, s[R.BLOCK_SIZE])
    release(requests, pools, s, q, computed)


@inner
def preempt(requests, pools, s, lists):
    """Preempt the last (or first) running request; it waits in front of the queue. Returns it."""
    state = requests.state
    start = s[R.RUN_OFFSET]
    end = start + s[R.RUNNING]
    if s[R.PREEMPT_FIRST] != 0:
        victim = np.int64(lists[start])
        for i in range(start + 1, end):
            lists[i - 1] = lists[i]
    else:
        victim = np.int64(lists[end - 1])
    s[R.RUNNING] -= 1
    release(requests, pools, s, victim, np.int64(state[Q.COMPUTED, victim]))
    undo_work(requests, s, victim)
    state[Q.COMPUTED, victim] = 0
    state[Q.FRESH, victim] = 0
    state[Q.NEXT, victim] = s[R.READY_HEAD]
    s[R.READY_HEAD] = victim
    s[R.PREEMPTED_COUNT] += 1
    s[R.PREEMPTED_ANY] = 1
    s[R.PREEMPTIONS] += 1
    return victim


@inner
def grow_running(requests, pools, s, count):
    """Take blocks for running requests, out of what their admission reserved."""
    take_blocks(requests, pools, s, count)
    if s[R.RESERVES_OUTPUT] != 0:
        s[R.RESERVED] -= count


@inner
def tokens_to_schedule(requests, s, q):
    """Tokens that an explicit running request computes in this pass, or NONE when it is blocked."""
    computed = np.int64(requests.state[Q.COMPUTED, q])
    prompt = np.int64(requests.state[Q.ISL, q])
    if s[R.CHUNKED_PREFILL] == 0 and prompt > computed and prompt - computed > s[R.BUDGET]:
        return NONE
    left = prompt + requests.state[Q.GENERATED, q] - computed
    return min(left, s[R.BUDGET])


@inner
def compute(requests, pools, s, q, tokens):
    """Compute `tokens` more tokens of a request whose blocks are there."""
    state = requests.state
    computed = np.int64(state[Q.COMPUTED, q])
    prompt = np.int64(state[Q.ISL, q])
    after = computed + tokens
    prefix = min(computed, prompt)
    state[Q.COMPUTED, q] = after
    cache_full_blocks(requests, pools, s, q, computed // s[R.BLOCK_SIZE], after // s[R.BLOCK_SIZE])
    record_work(requests, s, q, tokens, max(min(after, prompt) - prefix, np.int64(0)), prefix)


@inner
def schedule_explicit(requests, pools, s, lists, first, defer):
    """Schedule the explicit running requests from position `first` on, preempting for blocks."""
    i = first
    while i < s[R.RUNNING] and s[R.BUDGET] > 0:
        q = np.int64(lists[s[R.RUN_OFFSET] + i])
        if defer and not built(requests, q):
            i += 1
            continue
        tokens = tokens_to_schedule(requests, s, q)
        if tokens < 0:
            return
        computed = np.int64(requests.state[Q.COMPUTED, q])
        need = blocks_of(computed + tokens, s[R.BLOCK_SIZE]) - blocks_of(computed, s[R.BLOCK_SIZE])
        if s[R.RESERVES_OUTPUT] != 0 and need > s[R.FREE] + s[R.EVICTABLE]:
            # An empty prompt, let in past the gate, took what was promised: it waits.
            return
        victim = NONE
        while victim != q and need > s[R.FREE] + s[R.EVICTABLE]:
            victim = preempt(requests, pools, s, lists)
        if victim == q:
            continue
        grow_running(requests, pools, s, need)
        compute(requests, pools, s, q, tokens)
        # The reference does not correct its position when a victim stood before it.
        i += 1


@inner
def fits_without_preemption(requests, s, lists, defer):
    """Whether the decode batch fits the budget, and all running requests the blocks at hand."""
    decodes = s[R.DECODING]
    if decodes > s[R.TOKEN_BUDGET]:
        return False
    need = np.int64(lists[s[R.GROWTH_OFFSET] + s[R.TICK] % s[R.BLOCK_SIZE]])
    budget = s[R.TOKEN_BUDGET] - decodes
    for i in range(decodes, s[R.RUNNING]):
        q = np.int64(lists[s[R.RUN_OFFSET] + i])
        if defer and not built(requests, q):
            continue
        computed = np.int64(requests.state[Q.COMPUTED, q])
        left = known_tokens(requests, q) - computed
        tokens = min(left, budget)
        need += blocks_of(computed + tokens, s[R.BLOCK_SIZE]) - blocks_of(computed, s[R.BLOCK_SIZE])
        budget -= tokens
    return need <= s[R.FREE] + s[R.EVICTABLE]


@inner
def step_decode_batch(requests, pools, s, lists, tick):
    """Blocks that members of the decode batch begin and complete in the pass at `tick`, in running
    order. Returns how many were taken."""
    block_size = s[R.BLOCK_SIZE]
    growth = s[R.GROWTH_OFFSET]
    taken = np.int64(0)
    # Who completes a block in this pass needs the next one in the following.
    if lists[growth + tick % block_size] == 0 and lists[growth + (tick + 1) % block_size] == 0:
        return taken
    state = requests.state
    for i in range(s[R.DECODING]):
        q = np.int64(lists[s[R.RUN_OFFSET] + i])
        computed = np.int64(state[Q.ISL, q]) + state[Q.GENERATED, q] + tick - 1
        block = computed // block_size
        inside = computed - block * block_size
        if inside == 0:
            take_blocks(requests, pools, s, np.int64(1))
            taken += 1
        if inside == block_size - 1:
            cache_full_blocks(requests, pools, s, q, block, block + 1)
            state[Q.COMPUTED, q] = computed + 1
    return taken


@inner
def grow_decode_batch(events, requests, pools, s, lists):
    """Take the blocks that members of the decode batch begin in this pass; where events are
    observed, block by block. Returns how many."""
    if events is not None:
        return step_decode_batch(requests, pools, s, lists, s[R.TICK])
    growth = np.int64(lists[s[R.GROWTH_OFFSET] + s[R.TICK] % s[R.BLOCK_SIZE]])
    take_blocks(requests, pools, s, growth)
    return growth


@inner
def schedule_running(requests, pools, s, lists, now, defer):
    """Phase 1 of a pass: one token for each decode, the next chunk of unfinished prompts."""
    if fits_without_preemption(requests, s, lists, defer):
        growth = grow_decode_batch(pools.events, requests, pools, s, lists)
        if s[R.RESERVES_OUTPUT] != 0:
            s[R.RESERVED] -= growth
        s[R.BUDGET] -= s[R.DECODING]
    else:
        dissolve_decode_batch(requests, pools, s, lists, now)
    schedule_explicit(requests, pools, s, lists, s[R.DECODING], defer)


@inner
def cache_scheduled_block(events, requests, pools, s, q):
    """Make the block findable that the scheduled token of a former member of the decode batch
    completes; where events are observed `step_decode_batch` has done it."""
    if events is None:
        computed = np.int64(requests.state[Q.COMPUTED, q])
        block_size = s[R.BLOCK_SIZE]
        cache_full_blocks(
            requests, pools, s, q, computed // block_size, (computed + 1) // block_size
        )


@inner
def dissolve_scheduled_batch(requests, pools, s, lists, now):
    """Make all members of the decode batch explicit after their token of this pass was
    scheduled."""
    state = requests.state
    decodes = s[R.DECODING]
    dissolve_decode_batch(requests, pools, s, lists, now)
    for i in range(decodes):
        q = np.int64(lists[s[R.RUN_OFFSET] + i])
        cache_scheduled_block(pools.events, requests, pools, s, q)
        state[Q.COMPUTED, q] += 1
        state[Q.PASS_TOKENS, q] = 1


@inner
def make_room(requests, pools, s, lists, need, now):
    """Preempt until `need` blocks can be taken, for a request that no gate held back; reserved ones
    may stand in the way. Whether it could."""
    if need > s[R.FREE] + s[R.EVICTABLE]:
        dissolve_scheduled_batch(requests, pools, s, lists, now)
    while need > s[R.FREE] + s[R.EVICTABLE] and s[R.RUNNING] > 0:
        preempt(requests, pools, s, lists)
    return need <= s[R.FREE] + s[R.EVICTABLE]


# --- schedule: admissions -------------------------------------------------------------------------
@inner
def waits_for_others(requests, pools, s, q):
    """Whether a queue head that nothing on its rank can let in may still come in: when a held
    prompt is released, or when requests of a decode rank end that do not run yet."""
    if s[R.ROLE] == R.SOURCE:
        _, active = reusable_blocks(requests, pools, s, q, known_tokens(requests, q))
        return s[R.HELD] > 0 and gate_is_shut(requests, s, q, active)
    if s[R.ROLE] == R.DESTINATION and (
        blocks_of(known_tokens(requests, q), s[R.BLOCK_SIZE]) <= s[R.NUM_BLOCKS]
    ):
        return s[R.QUEUE_HEAD] >= 0 or s[R.PREALLOCATED] > 0 or s[R.PREEMPTED_COUNT] > 1
    return False


@inner
def end_stuck_head(requests, pools, w, s, q, now):
    """End a queue head that can never be admitted although nothing runs on its rank."""
    state = requests.state
    produced = np.int64(state[Q.GENERATED, q])
    status = S.FAILED if produced > 0 else S.REJECTED
    reason = S.NO_PROGRESS
    if blocks_of(np.int64(state[Q.ISL, q]) + produced, s[R.BLOCK_SIZE]) > s[R.NUM_BLOCKS]:
        reason = S.KV_CAPACITY_EXHAUSTED if produced > 0 else S.PROMPT_EXCEEDS_KV_CAPACITY
    elif s[R.CHUNKED_PREFILL] == 0 and state[Q.ISL, q] > s[R.TOKEN_BUDGET]:
        reason = S.PROMPT_EXCEEDS_TOKEN_BUDGET
    if s[R.EVICTION_POLICY] == R.EVICT_BELADY:
        state[Q.RETIRED, q] = 1
    leave_queue(requests, s, q)
    end_stuck(requests, w, s, q, status, reason, now)


@inner
def start_running(requests, scratch, s, lists, q, now, cached):
    """Append an admitted request, `cached` tokens of which are reused, to the running list."""
    leave_queue(requests, s, q)
    lists[s[R.RUN_OFFSET] + s[R.RUNNING]] = q
    s[R.RUNNING] += 1
    log_admission(requests, scratch, q, now, cached)


@inner
def admit_waiting(requests, pools, scratch, w, s, lists, now, defer):
    """Phase 2 of a pass: admit from the head of the queue, strictly in order."""
    state = requests.state
    s[R.BLOCKED] = 0
    while s[R.PREEMPTED_ANY] == 0 and s[R.RUNNING] < s[R.MAX_NUM_SEQS]:
        q = next_candidate(requests, s, now)
        if q < 0:
            return
        if is_prebuilt(requests, s, q):
            start_running(requests, scratch, s, lists, q, now, np.int64(0))
            if s[R.BUDGET] == 0:
                return
            continue
        reason = rejection(requests, s, q)
        if reason > 0:
            leave_queue(requests, s, q)
            reject(requests, s, q, reason)
            if s[R.EVICTION_POLICY] == R.EVICT_BELADY:
                state[Q.RETIRED, q] = 1
            continue
        hits, tokens = can_admit(requests, pools, s, q, defer)
        if tokens < 0:
            if s[R.RUNNING] > 0 or s[R.REJECTED_HEAD] >= 0:
                return
            s[R.BLOCKED] = np.int64(waits_for_others(requests, pools, s, q))
            if s[R.BLOCKED] != 0:
                return
            end_stuck_head(requests, pools, w, s, q, now)
            continue
        cached = hits * s[R.BLOCK_SIZE]
        need = blocks_of(cached + tokens, s[R.BLOCK_SIZE]) - hits
        reference_prefix(requests, pools, s, q, hits)
        # The victims stand in front of an empty prompt that finds no room all the same.
        if state[Q.ISL, q] == 0 and not make_room(requests, pools, s, lists, need, now):
            return
        start_running(requests, scratch, s, lists, q, now, cached)
        take_blocks(requests, pools, s, need)
        state[Q.COMPUTED, q] = cached
        # A decode rank never takes back what it reserved for an empty prompt.
        if s[R.RESERVES_OUTPUT] != 0 and not (s[R.ROLE] == R.DESTINATION and state[Q.ISL, q] == 0):
            s[R.RESERVED] += footprint(requests, s, q) - blocks_of(cached + tokens, s[R.BLOCK_SIZE])
        no_budget = s[R.BUDGET] == 0
        compute(requests, pools, s, q, tokens)
        if no_budget:
            return


@inner
def retire_running(requests, s, lists):
    """Belady's next_uses: the requests admitted by now are no future use any more."""
    for i in range(s[R.RUNNING]):
        requests.state[Q.RETIRED, lists[s[R.RUN_OFFSET] + i]] = 1


@inner
def is_deferring(requests, s, lists, step):
    """Whether this group pass puts off prefills (prefill_schedule_interval)."""
    if step % s[R.PREFILL_SCHEDULE_INTERVAL] == 0 or s[R.CAPACITY_BOUND] != 0:
        return False
    if s[R.DECODING] > 0:
        return True
    built_ones = np.int64(0)
    for i in range(s[R.RUNNING]):
        built_ones += np.int64(built(requests, np.int64(lists[s[R.RUN_OFFSET] + i])))
    return built_ones > 0


@inner
def note_effect(requests, w, s, lists, running, now):
    """What a scheduled pass of a prefill or decode rank, `running` requests before, means to
    handoffs: whether anything comes of it, and whether it may be easier to reserve blocks."""
    if s[R.PREEMPTING_PASSES] > PREEMPTING_LIMIT:
        fail_empty_prompt(requests, w, s, now)
    moved = s[R.RUNNING] != running or s[R.BUDGET] != s[R.TOKEN_BUDGET] or s[R.PREEMPTED_ANY] != 0
    s[R.EFFECT] = np.int64(moved or s[R.STUCK_ENDED] > 0 or s[R.REJECTED_HEAD] >= 0)
    if s[R.ROLE] == R.DESTINATION:
        s[R.CAPACITY_VERSION] += s[R.PREEMPTED_ANY] + s[R.STUCK_ENDED]
        # Every token of a destination costs a decode step.
        for i in range(s[R.DECODING], s[R.RUNNING]):
            requests.state[Q.PASS_PROMPT, lists[s[R.RUN_OFFSET] + i]] = 0


@inner
def schedule(requests, pools, scratch, w, s, f, lists, now, defer):
    """Step 1 of a pass: decide what every running and waiting request computes."""
    running = s[R.RUNNING]
    begin_pass(s)
    s[R.BUDGET] = s[R.TOKEN_BUDGET]
    schedule_running(requests, pools, s, lists, now, defer)
    admit_waiting(requests, pools, scratch, w, s, lists, now, defer)
    if s[R.EVICTION_POLICY] == R.EVICT_BELADY:
        retire_running(requests, s, lists)
    fail_overcommitment(requests, pools, w, s, lists, now, defer)
    if not defer and s[R.PREEMPTED_ANY] == 0:
        s[R.CAPACITY_BOUND] = np.int64(queue_head(requests, s, now) >= 0)
    if s[R.ROLE] != R.AGGREGATED:
        note_effect(requests, w, s, lists, running, now)


# --- standstills of running requests --------------------------------------------------------------
@inner
def is_ready(requests, q):
    """Whether all known tokens of an explicit request are computed."""
    state = requests.state
    return state[Q.COMPUTED, q] >= known_tokens(requests, q)


@inner
def somebody_goes_on(requests, s, lists):
    """Whether the scheduled pass lets a request produce a token or end."""
    if s[R.DECODING] > 0 or s[R.REJECTED_HEAD] >= 0 or s[R.STUCK_ENDED] > 0:
        return True
    ready = np.int64(0)
    for i in range(s[R.RUNNING]):
        ready += np.int64(is_ready(requests, np.int64(lists[s[R.RUN_OFFSET] + i])))
    return ready > 0


@inner
def fail_overcommitted(requests, pools, w, s, lists, now):
    """Fail the empty prompt that came in last, past the gate, when there are not enough blocks for
    all: it gives back its own. All running requests are explicit."""
    start = s[R.RUN_OFFSET]
    at = start + s[R.RUNNING] - 1
    while at >= start and requests.state[Q.ISL, lists[at]] > 0:
        at -= 1
    if at < start:
        return
    q = np.int64(lists[at])
    for i in range(at + 1, start + s[R.RUNNING]):
        lists[i - 1] = lists[i]
    s[R.RUNNING] -= 1
    s[R.PREEMPTING_PASSES] = 0
    undo_work(requests, s, q)
    give_back(requests, pools, s, q)
    end_stuck(requests, w, s, q, S.FAILED, S.KV_CAPACITY_EXHAUSTED, now)


@inner
def fail_overcommitment(requests, pools, w, s, lists, now, defer):
    """Empty prompts come in whatever blocks are left. Where admission reserves blocks, running
    requests may then wait for each other; elsewhere they may preempt each other for ever."""
    waits = s[R.RESERVES_OUTPUT] != 0 and s[R.RUNNING] > 0 and s[R.BUDGET] == s[R.TOKEN_BUDGET]
    if not waits and s[R.PREEMPTED_ANY] == 0 and s[R.PREEMPTING_PASSES] == 0:
        return
    if somebody_goes_on(requests, s, lists):
        s[R.PREEMPTING_PASSES] = 0
        return
    s[R.PREEMPTING_PASSES] += s[R.PREEMPTED_ANY]
    if s[R.PREEMPTING_PASSES] > PREEMPTING_LIMIT or (waits and not defer):
        fail_overcommitted(requests, pools, w, s, lists, now)


@inner
def fail_empty_prompt(requests, w, s, now):
    """Reserved blocks in its way, an empty prompt preempts all others and still cannot run: fail
    the first one that waits."""
    q = s[R.READY_HEAD]
    while q >= 0 and requests.state[Q.ISL, q] > 0:
        q = np.int64(requests.state[Q.NEXT, q])
    s[R.PREEMPTING_PASSES] = 0
    if q >= 0:
        leave_queue(requests, s, q)
        end_stuck(requests, w, s, q, S.FAILED, S.KV_CAPACITY_EXHAUSTED, now)


# --- work summary and price -----------------------------------------------------------------------
@inner
def price(requests, s, f, lists, start):
    """End of the scheduled pass that begins at `start`, or a negative number for a bad price."""
    state = requests.state
    end = start
    if s[R.PREFILLS] > 0:
        duration = prefill_ms(s, f, s[R.PREFILLS], s[R.PREFILL_ISL], s[R.PREFILL_PREFIX])
        if duration < 0.0:
            return -1.0
        end += duration
    batch = s[R.DECODING]
    context = s[R.DECODING_CONTEXT]
    for i in range(s[R.DECODING], s[R.RUNNING]):
        q = np.int64(lists[s[R.RUN_OFFSET] + i])
        if not is_ready(requests, q) or state[Q.GENERATED, q] >= state[Q.LIMIT, q]:
            continue
        # The first token comes out of the pass that finishes the prompt, free of charge.
        if state[Q.GENERATED, q] > 0 or state[Q.PASS_PROMPT, q] == 0:
            batch += 1
            context += known_tokens(requests, q)
    if batch > 0:
        duration = decode_ms(s, f, batch, context)
        if duration < 0.0:
            return -1.0
        end += duration
    return end


# --- apply ----------------------------------------------------------------------------------------
@inner
def finish(requests, pools, w, s, q, end):
    """An explicit request has produced what the rank asks of it: complete it and release its
    blocks; a prefill rank keeps them, and what admission reserved for the output is free."""
    if s[R.ROLE] != R.SOURCE:
        s[R.CAPACITY_VERSION] += 1
        give_back(requests, pools, s, q)
        complete(requests, w, s, q, end)
        return
    if s[R.RESERVES_OUTPUT] != 0:
        computed = np.int64(requests.state[Q.COMPUTED, q])
        s[R.RESERVED] -= footprint(requests, s, q) - blocks_of(computed, s[R.BLOCK_SIZE])
    hold(requests, w, s, q)


@inner
def finish_without_output(requests, pools, w, s, lists, end):
    """Complete the ready requests that have nothing to produce; they leave before all others."""
    start = s[R.RUN_OFFSET]
    kept = s[R.DECODING]
    for i in range(s[R.DECODING], s[R.RUNNING]):
        q = np.int64(lists[start + i])
        if requests.state[Q.LIMIT, q] == 0 and is_ready(requests, q):
            requests.state[Q.PASS_TOKENS, q] = 0
            requests.state[Q.PASS_PROMPT, q] = 0
            finish(requests, pools, w, s, q, end)
        else:
            lists[start + kept] = q
            kept += 1
    s[R.RUNNING] = kept


@inner
def finish_decode_batch(requests, pools, w, s, lists, end):
    """Complete the members of the decode batch whose last token came at `end`."""
    start = s[R.RUN_OFFSET]
    for i in range(start, start + s[R.DECODING]):
        q = np.int64(lists[i])
        if requests.state[Q.FINISH, q] <= s[R.TICK]:
            leave(requests, pools, s, lists, q)
            requests.time[Q.LAST_TOKEN, q] = end
            finish(requests, pools, w, s, q, end)
            lists[i] = NONE
    close_gaps(requests, s, lists)


@inner
def emit_explicit(requests, pools, times, scratch, w, s, lists, end):
    """Tokens of the explicit requests, in order; who has more to produce joins the decode batch."""
    state = requests.state
    start = s[R.RUN_OFFSET]
    kept = s[R.DECODING]
    for i in range(s[R.DECODING], s[R.RUNNING]):
        q = np.int64(lists[start + i])
        state[Q.PASS_TOKENS, q] = 0
        state[Q.PASS_PROMPT, q] = 0
        emitted = is_ready(requests, q)
        if emitted:
            emit_token(requests, times, scratch, s, q, end)
            if state[Q.GENERATED, q] == state[Q.LIMIT, q]:
                finish(requests, pools, w, s, q, end)
                continue
        lists[start + kept] = q
        kept += 1
        if emitted and kept == s[R.DECODING] + 1 and state[Q.PRIVATE, q] == 0:
            join_decode_batch(requests, s, lists, q)
    s[R.RUNNING] = kept


@inner
def tokens_to_emit(requests, s, lists):
    """Visible tokens that the pass in flight emits at its end."""
    if s[R.ROLE] == R.SOURCE:
        return np.int64(0)
    tokens = s[R.DECODING]
    for i in range(s[R.DECODING], s[R.RUNNING]):
        q = np.int64(lists[s[R.RUN_OFFSET] + i])
        tokens += np.int64(requests.state[Q.LIMIT, q] > 0 and is_ready(requests, q))
    return tokens


@inner
def apply(requests, pools, times, scratch, w, s, f, lists, start, end):
    """Step 4 of a pass: tokens, completions, rejections at its end, and the KV events of what was
    scheduled at its start. Returns held blocks x ms."""
    mark_pass_end(pools.events, s, end)
    if s[R.DECODING] > 0:
        count_gap(times, scratch, end - start, s[R.DECODING_COUNTED])
        mark_second_tokens(requests, s, lists, end)
    held = np.float64(s[R.NUM_BLOCKS] - s[R.FREE] - s[R.EVICTABLE]) * (end - start)
    advance_decode_batch(s, np.int64(1))
    if s[R.RUNNING] > s[R.DECODING]:
        finish_without_output(requests, pools, w, s, lists, end)
    if s[R.TICK] >= s[R.NEXT_FINISH]:
        finish_decode_batch(requests, pools, w, s, lists, end)
    s[R.DECODING_JOINED] = s[R.DECODING]
    emit_explicit(requests, pools, times, scratch, w, s, lists, end)
    end_rejected(requests, w, s, end)
    s[R.COMMITTED_PREFILL] += s[R.PREFILL_TOKENS]
    return held
