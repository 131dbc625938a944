"""One scheduler pass of one vLLM or TensorRT-LLM rank, and its decode front.

A pass has four steps: schedule (running requests first, then admissions), sum up the work, price
it, apply it. `schedule` and `price` run at the start of a pass, `apply` at its end.

The *front* is the leading part of the running list whose members all emitted a token at the last
pass end and have more to produce. They advance in step, one token a pass, so they are kept
implicitly: tokens = GENERATED + tick, blocks from COMPUTED and the tick; the growth counter of
`tick % block_size` is the number of members that need a block in a pass. A pass over the front
costs O(1). When memory does not suffice, or the budget leaves some of them out, the front is
dissolved and the pass is scheduled request by request. (Reference: vLLM backend, sections 2, 3 and
6.)

TensorRT-LLM runs the same pass under two more rules: admission reserves blocks for the whole output
(RESERVES_OUTPUT), so that nobody is ever preempted, and a fully cached prompt keeps its whole hit
(KEEPS_WHOLE_HIT). Its output clamp is part of LIMIT. (Reference: TensorRT-LLM policy, section B1.)
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.blockpool import (
    blocks_of,
    find_prefix,
    publish,
    release,
    take_blocks,
)
from vecsim.kernels.jit import inner
from vecsim.kernels.layout import (
    ARRIVAL,
    BLOCK_SIZE,
    BUDGET,
    CAPACITY_BOUND,
    CHUNKED_PREFILL,
    COMPLETED,
    COMPUTED,
    COUNTED,
    FINISH,
    FREE,
    FRESH,
    FRONT,
    FRONT_CONTEXT,
    FRONT_COUNTED,
    GENERATED,
    GROWTH_OFFSET,
    IDLE,
    ISL,
    KEEPS_WHOLE_HIT,
    LAST_TOKEN,
    LIMIT,
    MAX_MODEL_LEN,
    NEVER,
    NEXT,
    NEXT_FINISH,
    NONE,
    NUM_BLOCKS,
    PASS_PREFIX,
    PASS_PROMPT,
    PASS_TOKENS,
    PREEMPT_FIRST,
    PREEMPTED_ANY,
    PREEMPTED_COUNT,
    PREEMPTED_HEAD,
    PREEMPTIONS,
    PREFILL_ISL,
    PREFILL_PREFIX,
    PREFILL_SCHEDULE_INTERVAL,
    PREFILL_TOKENS,
    PREFILLS,
    PROMPT_EXCEEDS_KV_CAPACITY,
    PROMPT_EXCEEDS_MAX_MODEL_LEN,
    QUEUE_HEAD,
    RESERVED,
    RESERVES_OUTPUT,
    RETIRED,
    RUN_OFFSET,
    RUNNING,
    STATUS,
    TERMINAL,
    TERMINALS,
    TICK,
    TOKEN_BUDGET,
)
from vecsim.kernels.timing import decode_ms, prefill_ms


# --- the waiting queue ----------------------------------------------------------------------------
@inner
def queue_head(requests, s, now):
    """Request at the head of the waiting queue at `now`, or NONE: preempted ones wait in front."""
    if s[PREEMPTED_HEAD] >= 0:
        return s[PREEMPTED_HEAD]
    q = s[QUEUE_HEAD]
    if q >= 0 and requests.time[ARRIVAL, q] <= now:
        return q
    return NONE


@inner
def drop_head(requests, s, q):
    """Take `q`, the head, off the waiting queue."""
    if s[PREEMPTED_HEAD] >= 0:
        s[PREEMPTED_HEAD] = requests.state[NEXT, q]
        s[PREEMPTED_COUNT] -= 1
    else:
        s[QUEUE_HEAD] = requests.state[NEXT, q]


@inner
def has_work(requests, s, now):
    """Whether a pass of this rank starting at `now` has anybody to look at."""
    return s[RUNNING] > 0 or queue_head(requests, s, now) >= 0


# --- the decode front -----------------------------------------------------------------------------
@inner
def growth_slot(s, prompt, generated):
    """Counter of the passes in which a front member (GENERATED = `generated`) needs a block."""
    return s[GROWTH_OFFSET] + (1 - prompt - generated) % s[BLOCK_SIZE]


@inner
def join_front(requests, s, lists, q):
    """Append an explicit request, which just emitted a token, to the front."""
    state = requests.state
    generated = np.int64(state[GENERATED, q])
    state[GENERATED, q] = generated - s[TICK]
    state[FINISH, q] = s[TICK] + state[LIMIT, q] - generated
    s[NEXT_FINISH] = min(s[NEXT_FINISH], np.int64(state[FINISH, q]))
    lists[growth_slot(s, np.int64(state[ISL, q]), np.int64(state[GENERATED, q]))] += 1
    s[FRONT] += 1
    s[FRONT_CONTEXT] += state[ISL, q] + generated
    s[FRONT_COUNTED] += state[COUNTED, q]


@inner
def leave_front(requests, pools, s, lists, q):
    """Make a front member explicit again; the caller adjusts FRONT and the running list."""
    state = requests.state
    prompt = np.int64(state[ISL, q])
    lists[growth_slot(s, prompt, np.int64(state[GENERATED, q]))] -= 1
    generated = np.int64(state[GENERATED, q]) + s[TICK]
    before = np.int64(state[COMPUTED, q])
    state[GENERATED, q] = generated
    state[COMPUTED, q] = prompt + generated - 1
    s[FRONT_CONTEXT] -= prompt + generated
    s[FRONT_COUNTED] -= state[COUNTED, q]
    block_size = s[BLOCK_SIZE]
    publish(requests, pools, s, q, before // block_size, (prompt + generated - 1) // block_size)


@inner
def dissolve_front(requests, pools, s, lists, now):
    """Make all front members explicit; their last tokens came at `now`."""
    for i in range(s[FRONT]):
        q = np.int64(lists[s[RUN_OFFSET] + i])
        leave_front(requests, pools, s, lists, q)
        requests.time[LAST_TOKEN, q] = now
    s[FRONT] = 0
    s[NEXT_FINISH] = NEVER


# --- schedule: running requests -------------------------------------------------------------------
@inner
def built(requests, q):
    """Whether the whole prompt is computed."""
    return requests.state[COMPUTED, q] >= requests.state[ISL, q]


@inner
def record_work(requests, s, q, tokens, prompt, prefix):
    """Enter a request's share into the summary of the pass."""
    requests.state[PASS_TOKENS, q] = tokens
    requests.state[PASS_PROMPT, q] = prompt
    requests.state[PASS_PREFIX, q] = prefix
    s[BUDGET] -= tokens
    if prompt > 0:
        s[PREFILLS] += 1
        s[PREFILL_ISL] += prefix + prompt
        s[PREFILL_PREFIX] += prefix
        s[PREFILL_TOKENS] += tokens


@inner
def undo_work(requests, s, q):
    """Take a request's share, if any, out of the summary of the pass."""
    state = requests.state
    s[BUDGET] += state[PASS_TOKENS, q]
    if state[PASS_PROMPT, q] > 0:
        s[PREFILLS] -= 1
        s[PREFILL_ISL] -= state[PASS_PREFIX, q] + state[PASS_PROMPT, q]
        s[PREFILL_PREFIX] -= state[PASS_PREFIX, q]
        s[PREFILL_TOKENS] -= state[PASS_TOKENS, q]
    state[PASS_TOKENS, q] = 0
    state[PASS_PROMPT, q] = 0


@inner
def preempt(requests, pools, s, lists):
    """Preempt the last (or first) running request; it waits in front of the queue. Returns it."""
    state = requests.state
    start = s[RUN_OFFSET]
    end = start + s[RUNNING]
    if s[PREEMPT_FIRST] != 0:
        victim = np.int64(lists[start])
        for i in range(start + 1, end):
            lists[i - 1] = lists[i]
    else:
        victim = np.int64(lists[end - 1])
    s[RUNNING] -= 1
    release(requests, pools, s, victim, np.int64(state[COMPUTED, victim]))
    undo_work(requests, s, victim)
    state[COMPUTED, victim] = 0
    state[FRESH, victim] = 0
    state[NEXT, victim] = s[PREEMPTED_HEAD]
    s[PREEMPTED_HEAD] = victim
    s[PREEMPTED_COUNT] += 1
    s[PREEMPTED_ANY] = 1
    s[PREEMPTIONS] += 1
    return victim


@inner
def grow_running(requests, pools, s, count):
    """Take blocks for running requests, out of what their admission reserved."""
    take_blocks(requests, pools, s, count)
    if s[RESERVES_OUTPUT] != 0:
        s[RESERVED] -= count


@inner
def footprint(requests, s, q):
    """Blocks that a request must be able to own for its admission."""
    state = requests.state
    tokens = np.int64(state[ISL, q])
    if s[RESERVES_OUTPUT] != 0:
        tokens += state[LIMIT, q]
    else:
        tokens += state[GENERATED, q]
    return blocks_of(tokens, s[BLOCK_SIZE])


@inner
def tokens_to_schedule(requests, s, q):
    """Tokens that an explicit running request computes in this pass, or NONE when it is blocked."""
    computed = np.int64(requests.state[COMPUTED, q])
    prompt = np.int64(requests.state[ISL, q])
    if s[CHUNKED_PREFILL] == 0 and prompt > computed and prompt - computed > s[BUDGET]:
        return NONE
    left = prompt + requests.state[GENERATED, q] - computed
    return min(left, s[BUDGET])


@inner
def compute(requests, pools, s, q, tokens):
    """Compute `tokens` more tokens of a request whose blocks are there."""
    state = requests.state
    computed = np.int64(state[COMPUTED, q])
    prompt = np.int64(state[ISL, q])
    after = computed + tokens
    prefix = min(computed, prompt)
    state[COMPUTED, q] = after
    publish(requests, pools, s, q, computed // s[BLOCK_SIZE], after // s[BLOCK_SIZE])
    record_work(requests, s, q, tokens, max(min(after, prompt) - prefix, np.int64(0)), prefix)


@inner
def schedule_explicit(requests, pools, s, lists, first, defer):
    """Schedule the explicit running requests from position `first` on, preempting for blocks."""
    i = first
    while i < s[RUNNING] and s[BUDGET] > 0:
        q = np.int64(lists[s[RUN_OFFSET] + i])
        if defer and not built(requests, q):
            i += 1
            continue
        tokens = tokens_to_schedule(requests, s, q)
        if tokens < 0:
            return
        computed = np.int64(requests.state[COMPUTED, q])
        need = blocks_of(computed + tokens, s[BLOCK_SIZE]) - blocks_of(computed, s[BLOCK_SIZE])
        if s[RESERVES_OUTPUT] != 0 and need > s[FREE] + s[IDLE]:
            # An empty prompt, let in past the gate, took what was promised: it waits.
            return
        victim = NONE
        while victim != q and need > s[FREE] + s[IDLE]:
            victim = preempt(requests, pools, s, lists)
        if victim == q:
            continue
        grow_running(requests, pools, s, need)
        compute(requests, pools, s, q, tokens)
        # The reference does not correct its position when a victim stood before it.
        i += 1


@inner
def fits_without_preemption(requests, s, lists, defer):
    """Whether the front fits the budget, and all running requests the blocks at hand."""
    front = s[FRONT]
    if front > s[TOKEN_BUDGET]:
        return False
    need = np.int64(lists[s[GROWTH_OFFSET] + s[TICK] % s[BLOCK_SIZE]])
    budget = s[TOKEN_BUDGET] - front
    for i in range(front, s[RUNNING]):
        q = np.int64(lists[s[RUN_OFFSET] + i])
        if defer and not built(requests, q):
            continue
        computed = np.int64(requests.state[COMPUTED, q])
        left = np.int64(requests.state[ISL, q]) + requests.state[GENERATED, q] - computed
        tokens = min(left, budget)
        need += blocks_of(computed + tokens, s[BLOCK_SIZE]) - blocks_of(computed, s[BLOCK_SIZE])
        budget -= tokens
    return need <= s[FREE] + s[IDLE]


@inner
def schedule_running(requests, pools, s, lists, now, defer):
    """Phase 1 of a pass: one token for each decode, the next chunk of unfinished prompts."""
    if fits_without_preemption(requests, s, lists, defer):
        growth = np.int64(lists[s[GROWTH_OFFSET] + s[TICK] % s[BLOCK_SIZE]])
        grow_running(requests, pools, s, growth)
        s[BUDGET] -= s[FRONT]
    else:
        dissolve_front(requests, pools, s, lists, now)
    schedule_explicit(requests, pools, s, lists, s[FRONT], defer)


@inner
def dissolve_scheduled_front(requests, pools, s, lists, now):
    """Make all front members explicit after their token of this pass was scheduled."""
    state = requests.state
    front = s[FRONT]
    dissolve_front(requests, pools, s, lists, now)
    for i in range(front):
        q = np.int64(lists[s[RUN_OFFSET] + i])
        computed = np.int64(state[COMPUTED, q])
        state[COMPUTED, q] = computed + 1
        state[PASS_TOKENS, q] = 1
        block_size = s[BLOCK_SIZE]
        publish(requests, pools, s, q, computed // block_size, (computed + 1) // block_size)


@inner
def make_room(requests, pools, s, lists, q, need, now):
    """Preempt until `q`, which no gate held back, can take `need` blocks: they are there then."""
    if need > s[FREE] + s[IDLE]:
        dissolve_scheduled_front(requests, pools, s, lists, now)
    while need > s[FREE] + s[IDLE] and s[RUNNING] > 0:
        preempt(requests, pools, s, lists)
    return need <= s[FREE] + s[IDLE]


# --- schedule: admissions -------------------------------------------------------------------------
@inner
def rejection(requests, s, q):
    """Reason to reject the queue head, or 0. A preempted request is never rejected."""
    if requests.state[FRESH, q] == 0:
        return np.int64(0)
    if requests.state[ISL, q] >= s[MAX_MODEL_LEN]:
        return PROMPT_EXCEEDS_MAX_MODEL_LEN
    if footprint(requests, s, q) > s[NUM_BLOCKS]:
        return PROMPT_EXCEEDS_KV_CAPACITY
    return np.int64(0)


@inner
def reusable_blocks(requests, pools, s, q, known):
    """(hits, active) of a request with `known` tokens. vLLM always computes one token at least, and
    looks nothing up for an empty prompt."""
    if requests.state[ISL, q] == 0 and s[KEEPS_WHOLE_HIT] == 0:
        return np.int64(0), np.int64(0)
    if requests.state[LIMIT, q] > 0 and s[KEEPS_WHOLE_HIT] == 0:
        most = max(known - 1, np.int64(0)) // s[BLOCK_SIZE]
    else:
        most = known // s[BLOCK_SIZE]
    return find_prefix(requests, pools, s, q, most)


@inner
def gate_is_shut(requests, s, q, active):
    """Whether the footprint, less what others hold already, exceeds the blocks nobody counts on."""
    return footprint(requests, s, q) - active > s[FREE] + s[IDLE] - s[RESERVED]


@inner
def passes_the_gate(requests, s, q, hits, active, defer):
    """Whether memory and the prefill interval let the queue head in.

    The reference waves an empty prompt through, whatever it generated before a preemption, and
    preempts for it. One that outgrew the pool would be admitted and preempted for ever: it waits.
    """
    if requests.state[ISL, q] == 0:
        return footprint(requests, s, q) <= s[NUM_BLOCKS]
    if gate_is_shut(requests, s, q, active):
        return False
    known = np.int64(requests.state[ISL, q]) + requests.state[GENERATED, q]
    return not (defer and known - hits * s[BLOCK_SIZE] > 1)


@inner
def tokens_to_admit(requests, s, q, known, cached):
    """Tokens that the queue head computes on admission, or NONE when the budget blocks it."""
    prompt_left = np.int64(requests.state[ISL, q]) - cached
    if s[CHUNKED_PREFILL] == 0 and prompt_left > 0 and prompt_left > s[BUDGET]:
        return NONE
    tokens = min(known - cached, s[BUDGET])
    if tokens == 0 and known > cached:
        return NONE
    return tokens


@inner
def retire_running(requests, s, lists):
    """Belady's forecast: the requests admitted by now are no future use any more."""
    for i in range(s[RUNNING]):
        requests.state[RETIRED, lists[s[RUN_OFFSET] + i]] = 1


@inner
def is_deferring(requests, s, lists, step):
    """Whether this group pass puts off prefills (prefill_schedule_interval)."""
    if step % s[PREFILL_SCHEDULE_INTERVAL] == 0 or s[CAPACITY_BOUND] != 0:
        return False
    if s[FRONT] > 0:
        return True
    built_ones = np.int64(0)
    for i in range(s[RUNNING]):
        built_ones += np.int64(built(requests, np.int64(lists[s[RUN_OFFSET] + i])))
    return built_ones > 0


# --- work summary and price -----------------------------------------------------------------------
@inner
def is_ready(requests, q):
    """Whether all known tokens of an explicit request are computed."""
    state = requests.state
    return state[COMPUTED, q] >= np.int64(state[ISL, q]) + state[GENERATED, q]


@inner
def price(requests, s, f, lists, start):
    """End of the scheduled pass that begins at `start`, or a negative number for a bad price."""
    state = requests.state
    end = start
    if s[PREFILLS] > 0:
        duration = prefill_ms(s, f, s[PREFILLS], s[PREFILL_ISL], s[PREFILL_PREFIX])
        if duration < 0.0:
            return -1.0
        end += duration
    batch = s[FRONT]
    context = s[FRONT_CONTEXT]
    for i in range(s[FRONT], s[RUNNING]):
        q = np.int64(lists[s[RUN_OFFSET] + i])
        if not is_ready(requests, q) or state[GENERATED, q] >= state[LIMIT, q]:
            continue
        # The first token comes out of the pass that finishes the prompt, free of charge.
        if state[GENERATED, q] > 0 or state[PASS_PROMPT, q] == 0:
            batch += 1
            context += np.int64(state[ISL, q]) + state[GENERATED, q]
    if batch > 0:
        duration = decode_ms(s, f, batch, context)
        if duration < 0.0:
            return -1.0
        end += duration
    return end


# --- apply ----------------------------------------------------------------------------------------
@inner
def finish(requests, pools, w, s, q, end):
    """Complete an explicit request and release its blocks."""
    computed = np.int64(requests.state[COMPUTED, q])
    if s[RESERVES_OUTPUT] != 0:
        s[RESERVED] -= footprint(requests, s, q) - blocks_of(computed, s[BLOCK_SIZE])
    release(requests, pools, s, q, computed)
    requests.state[STATUS, q] = COMPLETED
    requests.time[TERMINAL, q] = end
    w[TERMINALS] += 1


@inner
def tokens_to_emit(requests, s, lists):
    """Tokens that the pass in flight emits at its end."""
    tokens = s[FRONT]
    for i in range(s[FRONT], s[RUNNING]):
        q = np.int64(lists[s[RUN_OFFSET] + i])
        tokens += np.int64(requests.state[LIMIT, q] > 0 and is_ready(requests, q))
    return tokens


@inner
def advance_front(s, passes):
    """`passes` passes went by for every front member."""
    s[TICK] += passes
    s[FRONT_CONTEXT] += passes * s[FRONT]
