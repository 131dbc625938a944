"""The waiting queue of an SGLang rank.

Requests that have not been seen by a pass wait in the arrival list (QUEUE_HEAD); the others form
the *ready* list, in the order in which they are served: chunked prompts come back to its decode
batch, retracted requests to its back, and the policy `lpm` sorts it by cached prefix before every
pass (reference: SGLang backend, waiting-queue policy).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.radix_tree import probe
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.decode_batch import known_tokens
from vecsim.kernels.sched.lifecycle import reject
from vecsim.kernels.state import pools as P
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NONE

DUPLICATE_TOKENS = np.int64(32)


@inner
def pages_of(s, tokens):
    """Pages that hold `tokens` tokens."""
    return (tokens + s[R.PAGE_SIZE] - 1) // s[R.PAGE_SIZE]


@inner
def push_back(requests, s, q):
    """Append a request to the ready list."""
    requests.state[Q.NEXT, q] = NONE
    if s[R.READY_HEAD] < 0:
        s[R.READY_HEAD] = q
    else:
        requests.state[Q.NEXT, s[R.READY_TAIL]] = q
    s[R.READY_TAIL] = q
    s[R.READY_COUNT] += 1
    s[R.UNSORTED] = 1


@inner
def push_front(requests, s, q):
    """Put a request at the head of the ready list."""
    requests.state[Q.NEXT, q] = s[R.READY_HEAD]
    if s[R.READY_HEAD] < 0:
        s[R.READY_TAIL] = q
    s[R.READY_HEAD] = q
    s[R.READY_COUNT] += 1
    s[R.UNSORTED] = 1


@inner
def remove_behind(requests, s, before, q):
    """Take `q`, which follows `before` (NONE: is the head), out of the ready list."""
    following = np.int64(requests.state[Q.NEXT, q])
    if before < 0:
        s[R.READY_HEAD] = following
    else:
        requests.state[Q.NEXT, before] = following
    if following < 0:
        s[R.READY_TAIL] = before
    s[R.READY_COUNT] -= 1


@inner
def take_arrivals(requests, s, now):
    """Move what has arrived to the ready list; prompts as long as max_model_len are rejected."""
    q = s[R.QUEUE_HEAD]
    while q >= 0 and requests.time[Q.ARRIVAL, q] <= now:
        following = np.int64(requests.state[Q.NEXT, q])
        if requests.state[Q.ISL, q] >= s[R.MAX_MODEL_LEN]:
            reject(requests, s, q, S.PROMPT_EXCEEDS_MAX_MODEL_LEN)
        else:
            push_back(requests, s, q)
        q = following
    s[R.QUEUE_HEAD] = q


@inner
def is_duplicate(order, prefix, count):
    """Whether one of the first `count` requests of the scan has the same first tokens."""
    for i in range(count):
        if order[P.QUEUE_PREFIX, i] == prefix:
            return np.int64(1)
    return np.int64(0)


@inner
def scan_queue(requests, pools, s):
    """Fill `order` with the cached prefix (pages) of every ready request, and whether it should
    wait for another one with the same beginning."""
    order = pools.order
    state = requests.state
    page = s[R.PAGE_SIZE]
    prefix_pages = pages_of(s, DUPLICATE_TOKENS)
    q = s[R.READY_HEAD]
    for i in range(s[R.READY_COUNT]):
        pages = known_tokens(requests, q) // page
        score = probe(requests, pools, s, q, pages)
        prefix = -2 - q
        duplicate = np.int64(0)
        if score * page <= DUPLICATE_TOKENS and pages >= prefix_pages:
            if prefix_pages <= state[Q.SHARED, q]:
                entry = state[Q.PATH, q] + (prefix_pages - 1) // s[R.BLOCKS_PER_NODE]
                prefix = np.int64(requests.path_rows[entry])
            duplicate = is_duplicate(order, prefix, np.int64(i))
        order[P.QUEUE_DUPLICATE, i] = duplicate
        order[P.QUEUE_SCORE, i] = score
        order[P.QUEUE_REQUEST, i] = q
        order[P.QUEUE_PREFIX, i] = prefix
        q = np.int64(state[Q.NEXT, q])


@inner
def sort_queue(requests, pools, s):
    """Policy lpm: longest cached prefix first, duplicates last, otherwise as before."""
    if s[R.READY_COUNT] > P.LPM_LIMIT or s[R.READY_COUNT] < 2:
        s[R.UNSORTED] = 0
        return
    scan_queue(requests, pools, s)
    order = pools.order
    for i in range(1, s[R.READY_COUNT]):
        duplicate = order[P.QUEUE_DUPLICATE, i]
        score = order[P.QUEUE_SCORE, i]
        q = order[P.QUEUE_REQUEST, i]
        at = np.int64(i)
        while at > 0 and (
            order[P.QUEUE_DUPLICATE, at - 1] > duplicate
            or (
                order[P.QUEUE_DUPLICATE, at - 1] == duplicate
                and order[P.QUEUE_SCORE, at - 1] < score
            )
        ):
            order[P.QUEUE_DUPLICATE, at] = order[P.QUEUE_DUPLICATE, at - 1]
            order[P.QUEUE_SCORE, at] = order[P.QUEUE_SCORE, at - 1]
            order[P.QUEUE_REQUEST, at] = order[P.QUEUE_REQUEST, at - 1]
            at -= 1
        order[P.QUEUE_DUPLICATE, at] = duplicate
        order[P.QUEUE_SCORE, at] = score
        order[P.QUEUE_REQUEST, at] = q
    count = s[R.READY_COUNT]
    s[R.READY_HEAD] = NONE
    s[R.READY_COUNT] = 0
    for i in range(count):
        push_back(requests, s, order[P.QUEUE_REQUEST, i])
    s[R.UNSORTED] = 0
