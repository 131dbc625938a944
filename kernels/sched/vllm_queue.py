"""The head of a vLLM or TensorRT-LLM rank's waiting queue: may it come in, and how much of it?

Preempted requests wait in front of the others, the last one first (reference: vLLM backend,
sections 3 and 5; TensorRT-LLM policy, section B1).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.block_pool import blocks_of, find_prefix
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.decode_batch import known_tokens
from vecsim.kernels.state.layout import (
    BLOCK_SIZE,
    BUDGET,
    CHUNKED_PREFILL,
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
    PREEMPTED_COUNT,
    PROMPT_EXCEEDS_KV_CAPACITY,
    PROMPT_EXCEEDS_MAX_MODEL_LEN,
    QUEUE_HEAD,
    READY_HEAD,
    RESERVED,
    RESERVES_OUTPUT,
)


@inner
def drop_head(requests, s):
    """Take the head off the waiting queue."""
    q = s[READY_HEAD]
    if q >= 0:
        s[READY_HEAD] = requests.state[NEXT, q]
        s[PREEMPTED_COUNT] -= 1
    else:
        q = s[QUEUE_HEAD]
        s[QUEUE_HEAD] = requests.state[NEXT, q]


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
    if requests.state[ISL, q] == 0 and s[KEEPS_WHOLE_HIT] == 0:
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
