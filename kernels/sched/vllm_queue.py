"""The waiting list of a vLLM or TensorRT-LLM rank: who is looked at next, may it come in, and how
much of it?

Preempted requests wait in front of the others, the last one first (reference: vLLM backend,
sections 3 and 5; TensorRT-LLM policy, section B1). On a decode rank the ready list holds the
activated requests beside the preempted ones, in the order in which their blocks were asked for;
those that still wait for blocks stand in the arrival list (QUEUE_HEAD), invisible to a pass, and
while there are any, preempted requests are passed over (reference: runtimes, section 7).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.block_pool import blocks_of, find_prefix
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.decode_batch import known_tokens
from vecsim.kernels.sched.waiting_queue import queue_head
from vecsim.kernels.state.layout import (
    ACTIVATED,
    BLOCK_SIZE,
    BUDGET,
    CHUNKED_PREFILL,
    COMPUTED,
    DESTINATION,
    FREE,
    FRESH,
    GENERATED,
    IDLE,
    ISL,
    KEEPS_WHOLE_HIT,
    LIMIT,
    MAX_MODEL_LEN,
    NEXT,
    NONE,
    NUM_BLOCKS,
    ORDER,
    PREEMPTED_COUNT,
    PROMPT_EXCEEDS_KV_CAPACITY,
    PROMPT_EXCEEDS_MAX_MODEL_LEN,
    QUEUE_HEAD,
    READY_HEAD,
    READY_TAIL,
    RESERVED,
    RESERVES_OUTPUT,
    ROLE,
)


# --- the list -------------------------------------------------------------------------------------
@inner
def next_candidate(requests, s, now):
    """The waiting request that is looked at next, or NONE."""
    q = queue_head(requests, s, now)
    if s[ROLE] == DESTINATION and s[QUEUE_HEAD] >= 0:
        while q >= 0 and requests.state[COMPUTED, q] < requests.state[ISL, q]:
            q = np.int64(requests.state[NEXT, q])
    return q


@inner
def is_prebuilt(requests, s, q):
    """Whether the waiting `q` was activated and never preempted: nothing has to be computed."""
    return s[ROLE] == DESTINATION and requests.state[FRESH, q] != 0


@inner
def leave_queue(requests, s, q):
    """Take a request that was looked at off the waiting list."""
    state = requests.state
    if q == s[QUEUE_HEAD]:
        s[QUEUE_HEAD] = np.int64(state[NEXT, q])
        return
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
    if s[ROLE] == DESTINATION:
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


# --- admission ------------------------------------------------------------------------------------
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
    computes_all = s[KEEPS_WHOLE_HIT] == 0 or s[ROLE] == DESTINATION
    if requests.state[ISL, q] == 0 and computes_all:
        return np.int64(0), np.int64(0)
    if requests.state[LIMIT, q] > 0 and s[KEEPS_WHOLE_HIT] == 0:
        most = max(known - 1, np.int64(0)) // s[BLOCK_SIZE]
    else:
        most = known // s[BLOCK_SIZE]
    return find_prefix(requests, pools, s, q, most)


@inner
def gate_is_shut(requests, s, q, active):
    """Whether the footprint, less what others hold already, exceeds the blocks nobody counts on.
    Those are none where empty prompts took more than was left."""
    return footprint(requests, s, q) - active > max(s[FREE] + s[IDLE] - s[RESERVED], np.int64(0))


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
    known = known_tokens(requests, q)
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
def can_admit(requests, pools, s, q, defer):
    """(hits, tokens) of a waiting request: its cached blocks, and the tokens that it computes on
    admission within BUDGET; tokens are NONE where it has to wait."""
    known = known_tokens(requests, q)
    hits, active = reusable_blocks(requests, pools, s, q, known)
    if not passes_the_gate(requests, s, q, hits, active, defer):
        return hits, NONE
    return hits, tokens_to_admit(requests, s, q, known, hits * s[BLOCK_SIZE])
