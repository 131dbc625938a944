"""Prefill and decode ranks of vLLM and TensorRT-LLM: small rules around the pass of vllm.py.

A *source* (prefill rank) produces one hidden token of a request and holds its blocks until they are
released. A *destination* (decode rank) keeps requests that wait for blocks in its arrival list
(QUEUE_HEAD, never visible to a pass), reserves blocks for the first of them, one at a time, and
queues it for decoding once it is activated: in the order in which reservations were asked for, and
together with preempted requests, in the ready list. While somebody waits for blocks preempted
requests are passed over. (Reference: runtimes, section 7; vLLM backend, section 10.)

The pass is that of an aggregated rank with other callees (see rebinding.py): what it takes for the
head of the queue, and what becomes of a request that has produced all it may.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.block_pool import (
    blocks_of,
    find_prefix,
    publish,
    reference_prefix,
    release,
    take_blocks,
)
from vecsim.kernels.cache.content import place_blocks
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.handoff import HandoffRank
from vecsim.kernels.fleet.handoff_queues import append_done
from vecsim.kernels.rebinding import rebound
from vecsim.kernels.sched import vllm, vllm_queue, vllm_rank
from vecsim.kernels.sched.decode_batch import known_tokens
from vecsim.kernels.sched.lifecycle import log_admission, settle
from vecsim.kernels.sched.vllm_queue import (
    footprint,
    gate_is_shut,
    reusable_blocks,
    tokens_to_admit,
)
from vecsim.kernels.sched.waiting_queue import queue_head
from vecsim.kernels.state.layout import (
    ACTIVATED,
    BLOCK_SIZE,
    BLOCKED,
    BUDGET,
    CAPACITY_VERSION,
    COMPUTED,
    DESTINATION,
    EFFECT,
    FAILED,
    FREE,
    FRESH,
    FRONT,
    FRUITLESS,
    HELD,
    HITS,
    IDLE,
    ISL,
    KV_CAPACITY_EXHAUSTED,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NEXT,
    NONE,
    NUM_BLOCKS,
    ORDER,
    OWN_TAIL,
    PASS_PROMPT,
    PREEMPTED_ANY,
    PREEMPTED_COUNT,
    PROMISED,
    PROMPT_EXCEEDS_KV_CAPACITY,
    PROMPT_EXCEEDS_MAX_MODEL_LEN,
    QUEUE_HEAD,
    READY_HEAD,
    READY_TAIL,
    REJECTED_HEAD,
    RESERVED,
    RESERVES_OUTPUT,
    ROLE,
    RUN_OFFSET,
    RUNNING,
    SETTLED,
    SOURCE,
    STEP,
    STRAINED,
    TOKEN_BUDGET,
)


# --- the waiting list of a destination ------------------------------------------------------------
@inner
def head(requests, s, now):
    """The waiting request that is looked at next, or NONE."""
    q = queue_head(requests, s, now)
    if s[ROLE] == DESTINATION and s[QUEUE_HEAD] >= 0:
        while q >= 0 and requests.state[COMPUTED, q] < requests.state[ISL, q]:
            q = np.int64(requests.state[NEXT, q])
    return q


@inner
def drop(requests, s, q):
    """Take a request off the waiting list of a destination."""
    state = requests.state
    before = NONE
    other = s[READY_HEAD]
    while other != q:
        before = other
        other = np.int64(state[NEXT, other])
    following = np.int64(state[NEXT, q])
    if before < 0:
        s[READY_HEAD] = following
    else:
        state[NEXT, before] = following
    if following < 0:
        s[READY_TAIL] = before
    s[PREEMPTED_COUNT] -= 1
    s[ACTIVATED] -= np.int64(state[FRESH, q])


@inner
def queue_activated(requests, s, q):
    """Enter an activated request before the first one that asked for its blocks later."""
    state = requests.state
    before = NONE
    following = s[READY_HEAD]
    in_order = s[ACTIVATED] == s[PREEMPTED_COUNT]
    if following >= 0 and in_order and state[ORDER, s[READY_TAIL]] < state[ORDER, q]:
        before = s[READY_TAIL]
        following = NONE
    while following >= 0 and state[ORDER, following] < state[ORDER, q]:
        before = following
        following = np.int64(state[NEXT, following])
    state[NEXT, q] = following
    if before < 0:
        s[READY_HEAD] = q
    else:
        state[NEXT, before] = q
    if following < 0:
        s[READY_TAIL] = q
    s[PREEMPTED_COUNT] += 1
    s[ACTIVATED] += 1


# --- admissions that are not those of an aggregated rank ------------------------------------------
@inner
def is_prebuilt(requests, s, q):
    """Whether the waiting `q` was activated and never preempted: nothing has to be computed."""
    return s[ROLE] == DESTINATION and requests.state[FRESH, q] != 0


@inner
def is_let_past(requests, s, q):
    """Whether `q` is an empty prompt that a destination preempts for (see `passes_the_gate`)."""
    empty = s[ROLE] == DESTINATION and requests.state[ISL, q] == 0
    return empty and footprint(requests, s, q) <= s[NUM_BLOCKS]


@inner
def ordinary_head(requests, s, now):
    """The head, unless it is admitted otherwise or has to wait."""
    q = head(requests, s, now)
    if q >= 0 and (s[BLOCKED] != 0 or is_prebuilt(requests, s, q) or is_let_past(requests, s, q)):
        return NONE
    return q


@inner
def drop_head(requests, s):
    """Take the head off the waiting queue."""
    if s[ROLE] == SOURCE:
        vllm_queue.drop_head(requests, s)
    else:
        drop(requests, s, head(requests, s, np.inf))


@inner
def enter(requests, scratch, s, lists, q, now):
    """Append an admitted request to the running list."""
    drop(requests, s, q)
    lists[s[RUN_OFFSET] + s[RUNNING]] = q
    s[RUNNING] += 1
    log_admission(requests, scratch, q, now, np.int64(0))


@inner
def make_room(requests, pools, s, lists, need, now):
    """Preempt until `need` blocks can be taken; reserved ones may stand in the way. Whether it
    could."""
    if need > s[FREE] + s[IDLE]:
        vllm.dissolve_scheduled_front(requests, pools, s, lists, now)
    while need > s[FREE] + s[IDLE] and s[RUNNING] > 0:
        vllm.preempt(requests, pools, s, lists)
    return need <= s[FREE] + s[IDLE]


@inner
def admit_specially(requests, pools, scratch, s, lists, now):
    """Admit the head if it is prebuilt, or an empty prompt. Returns whether to go on with the next
    one: budget and memory are left."""
    q = head(requests, s, now)
    if is_prebuilt(requests, s, q):
        enter(requests, scratch, s, lists, q, now)
        return s[BUDGET] > 0
    known = known_tokens(requests, q)
    tokens = tokens_to_admit(requests, s, q, known, np.int64(0))
    need = blocks_of(tokens, s[BLOCK_SIZE])
    # The victims stand in front of it then.
    if tokens < 0 or not make_room(requests, pools, s, lists, need, now):
        return False
    enter(requests, scratch, s, lists, q, now)
    requests.state[COMPUTED, q] = 0
    take_blocks(requests, pools, s, need)
    vllm.compute(requests, pools, s, q, tokens)
    return s[PREEMPTED_ANY] == 0


@inner
def settle_standstill(requests, pools, w, s, q, now):
    """End a head that can never be admitted; one that a release, or the end of a destination, may
    let in has to wait."""
    if s[ROLE] == SOURCE:
        _, active = reusable_blocks(requests, pools, s, q, known_tokens(requests, q))
        s[BLOCKED] = np.int64(s[HELD] > 0 and gate_is_shut(requests, s, q, active))
    elif blocks_of(known_tokens(requests, q), s[BLOCK_SIZE]) <= s[NUM_BLOCKS]:
        others = s[QUEUE_HEAD] >= 0 or s[PROMISED] > 0 or s[PREEMPTED_COUNT] > 1
        s[BLOCKED] = np.int64(others)
    if s[BLOCKED] == 0:
        _settle_standstill(requests, pools, w, s, q, now)


_settle_standstill = rebound(vllm, drop_head=drop_head).settle_standstill
_admit_ordinary = rebound(
    vllm, queue_head=ordinary_head, drop_head=drop_head, settle_standstill=settle_standstill
).admit_waiting


@inner
def admit_waiting(requests, pools, scratch, w, s, lists, now, defer):
    """Phase 2 of a pass: admit from the head of the queue, strictly in order."""
    s[BLOCKED] = 0
    going_on = True
    while going_on:
        _admit_ordinary(requests, pools, scratch, w, s, lists, now, defer)
        going_on = s[PREEMPTED_ANY] == 0 and s[RUNNING] < s[MAX_NUM_SEQS] and s[BLOCKED] == 0
        if going_on:
            q = head(requests, s, now)
            special = q >= 0 and (is_prebuilt(requests, s, q) or is_let_past(requests, s, q))
            going_on = special and admit_specially(requests, pools, scratch, s, lists, now)


# --- the pass -------------------------------------------------------------------------------------
@inner
def finish(requests, pools, w, s, q, end):
    """The request has produced what this role asks of it."""
    if s[ROLE] == DESTINATION:
        s[CAPACITY_VERSION] += 1
        vllm.finish(requests, pools, w, s, q, end)
        return
    state = requests.state
    w[FRUITLESS] = 0
    if s[RESERVES_OUTPUT] != 0:
        computed = np.int64(state[COMPUTED, q])
        s[RESERVED] -= footprint(requests, s, q) - blocks_of(computed, s[BLOCK_SIZE])
    s[HELD] += 1
    append_done(requests, s, q)


@inner
def head_keeps_waiting(requests, pools, s, q):
    """As of an aggregated rank; a prebuilt request needs a slot, no more."""
    if is_prebuilt(requests, s, q):
        return s[RUNNING] >= s[MAX_NUM_SEQS]
    return vllm_rank.head_keeps_waiting(requests, pools, s, q)


_pass = rebound(vllm, admit_waiting=admit_waiting, finish=finish)
_rank = rebound(vllm_rank, _pass)
_steady = rebound(vllm_rank, _pass, queue_head=head, head_keeps_waiting=head_keeps_waiting)


@inner
def fail_empty_prompt(requests, w, s, now):
    """Reserved blocks in its way, an empty prompt preempts all others and still cannot run: fail
    the first one that waits."""
    q = s[READY_HEAD]
    while q >= 0 and requests.state[ISL, q] > 0:
        q = np.int64(requests.state[NEXT, q])
    s[STRAINED] = 0
    if q >= 0:
        drop(requests, s, q)
        settle(requests, w, s, q, FAILED, KV_CAPACITY_EXHAUSTED, now)


@inner
def schedule(requests, pools, scratch, w, s, f, lists, now, defer):
    """Step 1 of a pass; notes whether anything comes of it."""
    running = s[RUNNING]
    _rank.schedule(requests, pools, scratch, w, s, f, lists, now, defer)
    if s[STRAINED] > vllm.STRAINED_LIMIT:
        fail_empty_prompt(requests, w, s, now)
    moved = s[RUNNING] != running or s[BUDGET] != s[TOKEN_BUDGET] or s[PREEMPTED_ANY] != 0
    s[EFFECT] = np.int64(moved or s[SETTLED] > 0 or s[REJECTED_HEAD] >= 0)
    if s[ROLE] == DESTINATION:
        s[CAPACITY_VERSION] += s[PREEMPTED_ANY] + s[SETTLED]
        # Every token of a destination costs a decode step.
        for i in range(s[FRONT], s[RUNNING]):
            requests.state[PASS_PROMPT, lists[s[RUN_OFFSET] + i]] = 0


@inner
def tokens_to_emit(requests, s, lists):
    """Visible tokens that the pass in flight emits at its end."""
    if s[ROLE] == SOURCE:
        return np.int64(0)
    return vllm.tokens_to_emit(requests, s, lists)


@inner
def close_group(ranks, requests, w, first, dp_size, passes, start, end):
    """Count the group's passes; one that owns nothing any more counts from zero again."""
    owned = np.int64(0)
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        owned += s[HELD] + s[PROMISED]
        if s[ROLE] == DESTINATION:
            owned += np.int64(s[QUEUE_HEAD] >= 0)
    step = w[STEP]
    vllm_rank.close_group(ranks, requests, w, first, dp_size, passes, start, end)
    if owned > 0:
        w[STEP] = step + passes


SCHEDULER = vllm_rank.SCHEDULER._replace(
    steady_passes=_steady.steady_passes,
    schedule=schedule,
    tokens_to_emit=tokens_to_emit,
    apply=_rank.apply,
    settle_stretch=_rank.settle_stretch,
    close_group=close_group,
)


# --- the handoff ----------------------------------------------------------------------------------
@inner
def refusal(requests, s, q):
    """Reason why the destination can never hold the prompt, or 0."""
    if requests.state[ISL, q] >= s[MAX_MODEL_LEN]:
        return PROMPT_EXCEEDS_MAX_MODEL_LEN
    if footprint(requests, s, q) > s[NUM_BLOCKS]:
        return PROMPT_EXCEEDS_KV_CAPACITY
    return np.int64(0)


@inner
def reserve(requests, pools, s, q):
    """Reserve blocks for the prompt of `q`. Returns how many of them are new, or NONE: no room.

    Blocks of prompts that are there are shared; TensorRT-LLM shares none, and counts on the output.
    """
    state = requests.state
    if s[RUNNING] >= s[MAX_NUM_SEQS]:
        return NONE
    prompt = np.int64(state[ISL, q])
    need = blocks_of(prompt, s[BLOCK_SIZE])
    if s[RESERVES_OUTPUT] != 0:
        if gate_is_shut(requests, s, q, np.int64(0)):
            return NONE
        s[RESERVED] += footprint(requests, s, q) - need
        take_blocks(requests, pools, s, need)
        state[HITS, q] = 0
        state[OWN_TAIL, q] = NONE
        return need
    hits, active = find_prefix(requests, pools, s, q, prompt // s[BLOCK_SIZE])
    need -= hits
    if need > s[FREE] + s[IDLE] - (hits - active):
        return NONE
    reference_prefix(requests, pools, s, q, hits)
    take_blocks(requests, pools, s, need)
    return need


@inner
def activate(requests, pools, s, q):
    """The prompt has arrived: its blocks can be found, and it waits to be decoded."""
    state = requests.state
    prompt = np.int64(state[ISL, q])
    publish(requests, pools, s, q, np.int64(state[HITS, q]), prompt // s[BLOCK_SIZE])
    state[COMPUTED, q] = prompt
    queue_activated(requests, s, q)


@inner
def release_source(requests, pools, s, q):
    """Give the blocks of a held request back."""
    s[HELD] -= 1
    release(requests, pools, s, q, np.int64(requests.state[COMPUTED, q]))


@inner
def fail_waiting(requests, pools, s, q):
    """Take a blocked request, the first of the waiting list of its rank, off it, with its
    blocks."""
    if s[ROLE] == SOURCE:
        vllm_queue.drop_head(requests, s)
    else:
        drop(requests, s, q)
    computed = np.int64(requests.state[COMPUTED, q])
    if s[RESERVES_OUTPUT] != 0 and computed > 0:
        s[RESERVED] -= footprint(requests, s, q) - blocks_of(computed, s[BLOCK_SIZE])
    release(requests, pools, s, q, computed)


@inner
def keep_reservation(requests, pools, s, q):
    """Never asked for: the prompt of a reserved request is done."""


@inner
def try_in_vain(f):
    """An attempt leaves no trace."""


HANDOFF = HandoffRank(
    place=place_blocks,
    refusal=refusal,
    reserve=reserve,
    activate=activate,
    release_source=release_source,
    first_waiting=queue_head,
    fail_waiting=fail_waiting,
    cancel=keep_reservation,
    try_in_vain=try_in_vain,
)
