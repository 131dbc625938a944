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
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NONE


# --- the list -------------------------------------------------------------------------------------
@inner
def next_candidate(requests, s, now):
    """The waiting request that is looked at next, or NONE."""
    q = queue_head(requests, s, now)
    if s[R.ROLE] == R.DESTINATION and s[R.QUEUE_HEAD] >= 0:
        while q >= 0 and requests.state[Q.COMPUTED, q] < requests.state[Q.ISL, q]:
            q = np.int64(requests.state[Q.NEXT, q])
    return q


@inner
def is_prebuilt(requests, s, q):
    """Whether the waiting `q` was activated and never preempted: nothing has to be computed."""
    return s[R.ROLE] == R.DESTINATION and requests.state[Q.FRESH, q] != 0


@inner
def leave_queue(requests, s, q):
    """Take a request that was looked at off the waiting list."""
    state = requests.state
    if q == s[R.QUEUE_HEAD]:
        s[R.QUEUE_HEAD] = np.int64(state[Q.NEXT, q])
        return
    before = NONE
    other = s[R.READY_HEAD]
    while other != q:
        before = other
        other = np.int64(state[Q.NEXT, other])
    following = np.int64(state[Q.NEXT, q])
    if before < 0:
        s[R.READY_HEAD] = following
    else:
        state[Q.NEXT, before] = following
    if following < 0:
        s[R.READY_TAIL] = before
    s[R.PREEMPTED_COUNT] -= 1
    if s[R.ROLE] == R.DESTINATION:
        s[R.ACTIVATED] -= np.int64(state[Q.FRESH, q])


@inner
def queue_activated(requests, s, q):
    """Enter an activated request before the first one that asked for its blocks later."""
    state = requests.state
    before = NONE
    following = s[R.READY_HEAD]
    in_order = s[R.ACTIVATED] == s[R.PREEMPTED_COUNT]
    if following >= 0 and in_order and state[Q.ORDER, s[R.READY_TAIL]] < state[Q.ORDER, q]:
        before = s[R.READY_TAIL]
        following = NONE
    while following >= 0 and state[Q.ORDER, following] < state[Q.ORDER, q]:
        before = following
        following = np.int64(state[Q.NEXT, following])
    state[Q.NEXT, q] = following
    if before < 0:
        s[R.READY_HEAD] = q
    else:
        state[Q.NEXT, before] = q
    if following < 0:
        s[R.READY_TAIL] = q
    s[R.PREEMPTED_COUNT] += 1
    s[R.ACTIVATED] += 1


# --- admission ------------------------------------------------------------------------------------
@inner
def footprint(requests, s, q):
    """Blocks that a request must be able to own for its admission."""
    state = requests.state
    tokens = np.int64(state[Q.ISL, q])
    if s[R.RESERVES_OUTPUT] != 0:
        tokens += state[Q.LIMIT, q]
    else:
        tokens += state[Q.GENERATED, q]
    return blocks_of(tokens, s[R.BLOCK_SIZE])


@inner
def rejection(requests, s, q):
    """Reason to reject the queue head, or 0. A preempted request is never rejected."""
    if requests.state[Q.FRESH, q] == 0:
        return np.int64(0)
    if requests.state[Q.ISL, q] >= s[R.MAX_MODEL_LEN]:
        return S.PROMPT_EXCEEDS_MAX_MODEL_LEN
    if footprint(requests, s, q) > s[R.NUM_BLOCKS]:
        return S.PROMPT_EXCEEDS_KV_CAPACITY
    return np.int64(0)


@inner
def reusable_blocks(requests, pools, s, q, known):
    """(hits, active) of a request with `known` tokens. vLLM always computes one token at least, and
    looks nothing up for an empty prompt."""
    computes_all = s[R.KEEPS_WHOLE_HIT] == 0 or s[R.ROLE] == R.DESTINATION
    if requests.state[Q.ISL, q] == 0 and computes_all:
        return np.int64(0), np.int64(0)
    if requests.state[Q.LIMIT, q] > 0 and s[R.KEEPS_WHOLE_HIT] == 0:
        most = max(known - 1, np.int64(0)) // s[R.BLOCK_SIZE]
    else:
        most = known // s[R.BLOCK_SIZE]
    return find_prefix(requests, pools, s, q, most)


@inner
def gate_is_shut(requests, s, q, active):
    """Whether the footprint, less what others hold already, exceeds the blocks nobody counts on.
    Those are none where empty prompts took more than was left."""
    return footprint(requests, s, q) - active > max(
        s[R.FREE] + s[R.EVICTABLE] - s[R.RESERVED], np.int64(0)
    )


@inner
def passes_the_gate(requests, s, q, hits, active, defer):
    """Whether memory and the prefill interval let the queue head in.

    The reference waves an empty prompt through, whatever it generated before a preemption, and
    preempts for it. One that outgrew the pool would be admitted and preempted for ever: it waits.
    """
    if requests.state[Q.ISL, q] == 0:
        return footprint(requests, s, q) <= s[R.NUM_BLOCKS]
    if gate_is_shut(requests, s, q, active):
        return False
    known = known_tokens(requests, q)
    return not (defer and known - hits * s[R.BLOCK_SIZE] > 1)


@inner
def tokens_to_admit(requests, s, q, known, cached):
    """Tokens that the queue head computes on admission, or NONE when the budget blocks it."""
    prompt_left = np.int64(requests.state[Q.ISL, q]) - cached
    if s[R.CHUNKED_PREFILL] == 0 and prompt_left > 0 and prompt_left > s[R.BUDGET]:
        return NONE
    tokens = min(known - cached, s[R.BUDGET])
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
    return hits, tokens_to_admit(requests, s, q, known, hits * s[R.BLOCK_SIZE])
