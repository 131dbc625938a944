"""Prefill and decode ranks of vLLM and TensorRT-LLM: small rules around the pass of vllm_pass.py.

A *source* (prefill rank) produces one hidden token of a request and holds its blocks until they are
released. A *destination* (decode rank) keeps requests that wait for blocks in its arrival list
(QUEUE_HEAD, never visible to a pass), reserves blocks for the first of them, one at a time, and
queues it for decoding once it is activated: in the order in which reservations were asked for, and
together with preempted requests, in the list of PREEMPTED_HEAD. While somebody waits for blocks
preempted requests are passed over. (Reference: runtimes, section 7; vLLM backend, section 10.)
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels import vllm, vllm_rank
from vecsim.kernels.blockpool import (
    blocks_of,
    find_prefix,
    publish,
    reference_prefix,
    release,
    take_blocks,
)
from vecsim.kernels.handoff import HandoffRank
from vecsim.kernels.jit import inner
from vecsim.kernels.layout import (
    ACTIVATED,
    BLOCK_SIZE,
    BUDGET,
    CAPACITY_VERSION,
    COMPUTED,
    DESTINATION,
    DONE_HEAD,
    DONE_TAIL,
    EFFECT,
    FREE,
    FRESH,
    FRONT,
    GENERATED,
    HELD,
    HITS,
    IDLE,
    ISL,
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
    PREEMPTED_HEAD,
    PROMISED,
    PROMPT_EXCEEDS_KV_CAPACITY,
    PROMPT_EXCEEDS_MAX_MODEL_LEN,
    QUEUE_HEAD,
    READY_TAIL,
    REJECTED_HEAD,
    REJECTED_TOLD,
    RESERVED,
    RESERVES_OUTPUT,
    ROLE,
    RUN_OFFSET,
    RUNNING,
    SETTLED,
    SOURCE,
    STEP,
    TOKEN_BUDGET,
)
from vecsim.kernels.placing import place_blocks
from vecsim.kernels.records import log_admission
from vecsim.kernels.vllm import footprint, gate_is_shut, queue_head
from vecsim.kernels.vllm_pass import Rules


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
    """Take `q`, which `head` named, off the waiting list."""
    state = requests.state
    if s[ROLE] == SOURCE:
        vllm.drop_head(requests, s, q)
        return
    before = NONE
    other = s[PREEMPTED_HEAD]
    while other != q:
        before = other
        other = np.int64(state[NEXT, other])
    following = np.int64(state[NEXT, q])
    if before < 0:
        s[PREEMPTED_HEAD] = following
    else:
        state[NEXT, before] = following
    if following < 0:
        s[READY_TAIL] = before
    s[PREEMPTED_COUNT] -= 1
    if state[FRESH, q] != 0:
        s[ACTIVATED] -= 1


@inner
def queue_activated(requests, s, q):
    """Enter an activated request before the first one that asked for its blocks later."""
    state = requests.state
    before = NONE
    following = s[PREEMPTED_HEAD]
    in_order = s[ACTIVATED] == s[PREEMPTED_COUNT]
    if following >= 0 and in_order and state[ORDER, s[READY_TAIL]] < state[ORDER, q]:
        before = s[READY_TAIL]
        following = NONE
    while following >= 0 and state[ORDER, following] < state[ORDER, q]:
        before = following
        following = np.int64(state[NEXT, following])
    state[NEXT, q] = following
    if before < 0:
        s[PREEMPTED_HEAD] = q
    else:
        state[NEXT, before] = q
    if following < 0:
        s[READY_TAIL] = q
    s[PREEMPTED_COUNT] += 1
    s[ACTIVATED] += 1


@inner
def make_room(requests, pools, s, lists, q, need, now):
    """As of an aggregated rank, but reserved blocks may stand in the way: then `q` goes back."""
    before = s[PREEMPTED_COUNT]
    if vllm.make_room(requests, pools, s, lists, q, need, now):
        return True
    victims = s[PREEMPTED_COUNT] - before
    s[PREEMPTED_COUNT] += 1
    state = requests.state
    if victims == 0:
        state[NEXT, q] = s[PREEMPTED_HEAD]
        s[PREEMPTED_HEAD] = q
        return False
    ahead = s[PREEMPTED_HEAD]
    for _ in range(victims - 1):
        ahead = np.int64(state[NEXT, ahead])
    state[NEXT, q] = state[NEXT, ahead]
    state[NEXT, ahead] = q
    return False


# --- the pass -------------------------------------------------------------------------------------
@inner
def is_prebuilt(requests, s, q):
    """Whether the waiting `q` was activated and never preempted: nothing has to be computed."""
    return s[ROLE] == DESTINATION and requests.state[FRESH, q] != 0


@inner
def admit_prebuilt(requests, scratch, s, lists, q, now):
    """Admit `q` if it is an activated request: no look at memory, no tokens. Whether it was."""
    if not is_prebuilt(requests, s, q):
        return False
    drop(requests, s, q)
    lists[s[RUN_OFFSET] + s[RUNNING]] = q
    s[RUNNING] += 1
    log_admission(requests, scratch, q, now, np.int64(0))
    return True


@inner
def may_start_later(requests, s, q, active):
    """Whether a release, or the end of a destination, may let the refused head in."""
    if s[ROLE] == SOURCE:
        return s[HELD] > 0 and gate_is_shut(requests, s, q, active)
    known = np.int64(requests.state[ISL, q]) + requests.state[GENERATED, q]
    if blocks_of(known, s[BLOCK_SIZE]) > s[NUM_BLOCKS]:
        return False
    return s[QUEUE_HEAD] >= 0 or s[PROMISED] > 0 or s[PREEMPTED_COUNT] > 1


@inner
def finish(requests, pools, w, s, q, end):
    """The request has produced what this role asks of it."""
    if s[ROLE] == DESTINATION:
        s[CAPACITY_VERSION] += 1
        vllm.finish(requests, pools, w, s, q, end)
        return
    state = requests.state
    if s[RESERVES_OUTPUT] != 0:
        computed = np.int64(state[COMPUTED, q])
        s[RESERVED] -= footprint(requests, s, q) - blocks_of(computed, s[BLOCK_SIZE])
    s[HELD] += 1
    state[NEXT, q] = NONE
    if s[DONE_HEAD] < 0:
        s[DONE_HEAD] = q
    else:
        state[NEXT, s[DONE_TAIL]] = q
    s[DONE_TAIL] = q


RULES = Rules(head, drop, make_room, finish, admit_prebuilt, may_start_later, is_prebuilt)
_PLAIN = vllm_rank.bind(RULES)
_schedule, _close_group = _PLAIN.schedule, _PLAIN.close_group
_tokens_to_emit = _PLAIN.tokens_to_emit


@inner
def schedule(requests, pools, scratch, w, s, f, lists, now, defer):
    """Step 1 of a pass; notes whether anything comes of it."""
    running = s[RUNNING]
    _schedule(requests, pools, scratch, w, s, f, lists, now, defer)
    moved = s[RUNNING] != running or s[BUDGET] != s[TOKEN_BUDGET] or s[PREEMPTED_ANY] != 0
    s[EFFECT] = np.int64(moved or s[SETTLED] > 0 or s[REJECTED_HEAD] >= 0)
    s[REJECTED_TOLD] = s[REJECTED_HEAD]
    if s[ROLE] == DESTINATION:
        s[CAPACITY_VERSION] += s[PREEMPTED_ANY]
        # Every token of a destination costs a decode step.
        for i in range(s[FRONT], s[RUNNING]):
            requests.state[PASS_PROMPT, lists[s[RUN_OFFSET] + i]] = 0


@inner
def tokens_to_emit(requests, s, lists):
    """Visible tokens that the pass in flight emits at its end."""
    if s[ROLE] == SOURCE:
        return np.int64(0)
    return _tokens_to_emit(requests, s, lists)


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
    _close_group(ranks, requests, w, first, dp_size, passes, start, end)
    if owned > 0:
        w[STEP] = step + passes


SCHEDULER = _PLAIN._replace(
    schedule=schedule, tokens_to_emit=tokens_to_emit, close_group=close_group
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
def cancel_reserved(requests, pools, s, q):
    """Give reserved blocks back. Where the source comes first nothing ever asks for it."""


@inner
def fail_waiting(requests, pools, s, q):
    """Take a blocked request off the waiting list of its rank, with its blocks."""
    drop(requests, s, q)
    computed = np.int64(requests.state[COMPUTED, q])
    if s[RESERVES_OUTPUT] != 0 and computed > 0:
        s[RESERVED] -= footprint(requests, s, q) - blocks_of(computed, s[BLOCK_SIZE])
    release(requests, pools, s, q, computed)


HANDOFF = HandoffRank(
    place=place_blocks,
    refusal=refusal,
    reserve=reserve,
    activate=activate,
    release_source=release_source,
    cancel_reserved=cancel_reserved,
    first_waiting=queue_head,
    fail_waiting=fail_waiting,
)
