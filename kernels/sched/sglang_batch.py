"""The prefill batch of an SGLang rank: who comes off the queue, and how much of each is computed.

The queue is served strictly in order while chunk and token budgets last and the pool has room for
the prompts beside a share of the running requests' remaining output (reference: SGLang backend,
batch formation).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.radix_tree import lock_path, match, probe, unlock_path
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.decode_batch import known_tokens
from vecsim.kernels.sched.lifecycle import log_admission
from vecsim.kernels.sched.sglang_pages import end_stuck_request, pages_held, take_pages
from vecsim.kernels.sched.sglang_queue import pages_of, remove_behind
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NONE


@inner
def reserved_output(requests, s, q, remaining):
    """Output tokens that admission expects of a request."""
    return min(remaining, s[R.CLIP_MAX_NEW_TOKENS])


@inner
def room_for_prompts(requests, s, f, lists):
    """Tokens free for new prompts (float64): what is not held, less a share of the running
    requests' remaining output. Summed in running order, as the reference does."""
    room = np.float64(s[R.FREE] + s[R.EVICTABLE]) * np.float64(s[R.PAGE_SIZE])
    ratio = f[R.NEW_TOKEN_RATIO]
    state = requests.state
    reserved = 0.0
    for i in range(s[R.RUNNING]):
        q = lists[s[R.RUN_OFFSET] + i]
        if i < s[R.DECODING]:
            remaining = np.int64(state[Q.FINISH, q]) - s[R.TICK]
        else:
            remaining = np.int64(state[Q.LIMIT, q]) - state[Q.GENERATED, q]
        reserved += np.float64(min(remaining, s[R.CLIP_MAX_NEW_TOKENS])) * ratio
    return room - reserved


@inner
def first_to_compute(requests, pools, s, q):
    """Tokens of a waiting request that are there already: its own chunks, or cached pages."""
    state = requests.state
    if state[Q.COMPUTED, q] > 0 or s[R.PREFIX_CACHING] == 0:
        return np.int64(state[Q.COMPUTED, q])
    known = known_tokens(requests, q)
    if state[Q.LIMIT, q] > 0:
        # One token at least is always computed.
        known = max(known - 1, np.int64(0))
    return probe(requests, pools, s, q, known // s[R.PAGE_SIZE]) * s[R.PAGE_SIZE]


@inner
def chunk_tokens(s, left, chunk_left):
    """Tokens that the next member computes of its `left` ones; 0 may mean there is no budget."""
    if pages_of(s, left) * s[R.PAGE_SIZE] <= chunk_left:
        return left
    return min(chunk_left // s[R.PAGE_SIZE] * s[R.PAGE_SIZE], left)


@inner
def allocate(requests, pools, s, q, start, end):
    """Give a waiting request pages for its tokens start..end. False changes nothing, but the
    cached prefix of a fresh request has been touched."""
    state = requests.state
    fresh = state[Q.COMPUTED, q] == 0
    held = pages_held(requests, s, q)
    node = np.int64(state[Q.TREE_NODE, q])
    if fresh:
        held = start // s[R.PAGE_SIZE]
        node = match(requests, pools, s, q, held)
        lock_path(pools, s, node, s[R.ROOT])
    need = pages_of(s, end) - held
    if need > s[R.FREE] + s[R.EVICTABLE]:
        if fresh:
            unlock_path(pools, s, node)
        return False
    if fresh:
        state[Q.TREE_NODE, q] = node
        state[Q.CACHED_PAGES, q] = held
    take_pages(requests, pools, s, need)
    return True


@inner
def end_stuck_head(requests, pools, w, s, q, now):
    """End a queue head that can never be admitted although nothing runs on its rank."""
    state = requests.state
    known = known_tokens(requests, q)
    produced = np.int64(state[Q.GENERATED, q])
    whole = pages_of(s, known) * s[R.PAGE_SIZE]
    first = min(whole, s[R.CHUNKED_PREFILL_SIZE] // s[R.PAGE_SIZE] * s[R.PAGE_SIZE])
    reason = S.NO_PROGRESS
    expected = reserved_output(requests, s, q, np.int64(state[Q.LIMIT, q]) - produced)
    if pages_of(s, known) > s[R.NUM_BLOCKS] or whole + expected >= s[R.CAPACITY_TOKENS]:
        reason = S.KV_CAPACITY_EXHAUSTED if produced > 0 else S.PROMPT_EXCEEDS_KV_CAPACITY
    elif first > s[R.TOKEN_BUDGET] or (first == 0 and known > 0):
        reason = S.PROMPT_EXCEEDS_TOKEN_BUDGET
    end_stuck_request(requests, pools, w, s, q, reason, now)


@inner
def may_still_start(s):
    """Whether requests of the rank that run, or that a handoff holds pages for, may let a refused
    head in when they end."""
    return s[R.RUNNING] + s[R.HELD] + s[R.PREALLOCATED] > 0


@inner
def enter_batch(requests, s, scratch, q, start, chunk, now):
    """Note a member of the batch in the summary of the pass, and its admission."""
    state = requests.state
    if state[Q.COMPUTED, q] == 0:
        if state[Q.ADMISSIONS, q] > 0:
            s[R.PREEMPTED_COUNT] -= 1
        log_admission(requests, scratch, q, now, start)
    state[Q.COMPUTED, q] = start + chunk
    if chunk > 0:
        s[R.PREFILLS] += 1
        s[R.PREFILL_ISL] += start + chunk
        s[R.PREFILL_PREFIX] += start
        s[R.PREFILL_TOKENS] += chunk


@inner
def prefills_nothing(s):
    """Whether a decode rank keeps its pages for those that come from prefill ranks."""
    return s[R.ROLE] == R.DESTINATION and (s[R.ACTIVATED_HEAD] >= 0 or s[R.QUEUE_HEAD] >= 0)


@inner
def form_batch(requests, pools, scratch, w, s, f, lists, now):
    """Take requests off the queue, strictly in order, while budgets and memory allow. They stand
    behind the running ones in the running list, BATCHED of them."""
    state = requests.state
    if s[R.READY_HEAD] < 0 or s[R.RUNNING] >= s[R.MAX_NUM_SEQS] or prefills_nothing(s):
        return
    room = room_for_prompts(requests, s, f, lists)
    budget = s[R.TOKEN_BUDGET]
    chunk_left = s[R.CHUNKED_PREFILL_SIZE]
    while s[R.RUNNING] + s[R.BATCHED] < s[R.MAX_NUM_SEQS] and s[R.READY_HEAD] >= 0:
        q = s[R.READY_HEAD]
        start = first_to_compute(requests, pools, s, q)
        left = known_tokens(requests, q) - start
        chunk = chunk_tokens(s, left, chunk_left)
        cost = pages_of(s, chunk) * s[R.PAGE_SIZE]
        expected = np.int64(0)
        if chunk == left:
            remaining = np.int64(state[Q.LIMIT, q]) - state[Q.GENERATED, q]
            expected = reserved_output(requests, s, q, remaining)
        refused = chunk == 0 and left > 0
        refused |= np.float64(cost + expected) >= room or cost > budget or cost > chunk_left
        if refused or not allocate(requests, pools, s, q, start, start + chunk):
            if s[R.BATCHED] > 0 or s[R.REJECTED_HEAD] >= 0 or may_still_start(s):
                return
            remove_behind(requests, s, NONE, q)
            end_stuck_head(requests, pools, w, s, q, now)
            room = room_for_prompts(requests, s, f, lists)
            continue
        remove_behind(requests, s, NONE, q)
        enter_batch(requests, s, scratch, q, start, chunk, now)
        lists[s[R.RUN_OFFSET] + s[R.RUNNING] + s[R.BATCHED]] = q
        s[R.BATCHED] += 1
        room -= np.float64(cost + expected)
        budget -= cost
        chunk_left -= cost
        if chunk_left <= 0:
            return
