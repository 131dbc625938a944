"""Prefill and decode ranks of SGLang: small rules around the pass of sglang.py.

A *source* (prefill rank) produces one hidden token of a request and keeps its pages until they are
released. A *destination* (decode rank) keeps requests that wait for pages in its arrival list
(QUEUE_HEAD, never visible to a pass) and reserves pages for the first of them, one at a time.
Activated requests form a list of their own, in order of activation; they run before anything that
the rank would have to prefill itself, and while any of them, or anybody who waits for pages, is
there nothing is prefilled. (Reference: runtimes, section 7; SGLang backend, A11.)

The pass is that of an aggregated rank with other callees (see rebinding.py).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.radix_tree import evict, lock_path, match, probe, unlock_path
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.handoff import HandoffRank
from vecsim.kernels.fleet.handoff_queues import append_done
from vecsim.kernels.rebinding import rebound
from vecsim.kernels.sched import sglang, sglang_batch, sglang_pages, sglang_rank, waiting_queue
from vecsim.kernels.sched.decode_batch import known_tokens
from vecsim.kernels.sched.lifecycle import begin_pass, log_admission
from vecsim.kernels.sched.sglang_queue import pages_of, remove_behind
from vecsim.kernels.state.layout import (
    ACTIVATED_HEAD,
    ACTIVATED_TAIL,
    ADMISSIONS,
    BATCHED,
    BLOCKED,
    CACHED_PAGES,
    CAPACITY_VERSION,
    COMPUTED,
    DESTINATION,
    DONE_HEAD,
    EFFECT,
    FREE,
    FRONT,
    FRUITLESS,
    GENERATED,
    HELD,
    IDLE,
    ISL,
    LIMIT,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NEW_TOKEN_RATIO,
    NEXT,
    NONE,
    NUM_BLOCKS,
    PAGE_SIZE,
    PREEMPTED_ANY,
    PREEMPTED_COUNT,
    PREFILL_LEFT,
    PREFIX_CACHING,
    PROMISED,
    PROMPT_EXCEEDS_KV_CAPACITY,
    PROMPT_EXCEEDS_MAX_MODEL_LEN,
    QUEUE_HEAD,
    RANK,
    RATIO_MIN,
    RATIO_STEP,
    READY_HEAD,
    REJECTED_HEAD,
    ROLE,
    ROOT,
    RUN_OFFSET,
    RUNNING,
    SETTLED,
    SOURCE,
    TREE_NODE,
    UNLIMITED,
)


# --- activated requests ---------------------------------------------------------------------------
@inner
def admit_activated(requests, pools, scratch, s, lists, now):
    """Activated requests run, first come, first served, while there are slots. Their prompts can be
    found from now on; pages that are there twice may make room for others."""
    while s[ACTIVATED_HEAD] >= 0 and s[RUNNING] < s[MAX_NUM_SEQS]:
        q = s[ACTIVATED_HEAD]
        s[ACTIVATED_HEAD] = np.int64(requests.state[NEXT, q])
        lists[s[RUN_OFFSET] + s[RUNNING]] = q
        s[RUNNING] += 1
        log_admission(requests, scratch, q, now, np.int64(0))
        sglang_pages.cache_computed(requests, pools, s, q)
        s[CAPACITY_VERSION] += 1


@inner
def has_work(requests, s, now):
    """Whether a pass starting at `now` has anybody to look at."""
    return s[ACTIVATED_HEAD] >= 0 or waiting_queue.has_work(requests, s, now)


# --- the pass -------------------------------------------------------------------------------------
@inner
def prefills_nothing(s):
    """Whether a rank keeps its pages for those that come from sources."""
    return s[ROLE] == DESTINATION and (s[ACTIVATED_HEAD] >= 0 or s[QUEUE_HEAD] >= 0)


@inner
def form_batch(requests, pools, scratch, w, s, f, lists, now, evict):
    """The prefill batch of an aggregated rank, unless nothing may be prefilled."""
    if not prefills_nothing(s):
        sglang_batch.form_batch(requests, pools, scratch, w, s, f, lists, now, evict)


@inner
def leave_without_token(requests, s, lists):
    """Running requests with nothing to produce end with this pass, and take no part in it."""
    state = requests.state
    start = s[RUN_OFFSET]
    kept = s[FRONT]
    for i in range(s[FRONT], s[RUNNING]):
        q = np.int64(lists[start + i])
        if state[LIMIT, q] == state[GENERATED, q]:
            append_done(requests, s, q)
            continue
        lists[start + kept] = q
        kept += 1
    s[RUNNING] = kept


@inner
def settle_runner(requests, pools, w, s, f, lists, need, now):
    """The last running request cannot grow; it waits for those that hold its pages. Whether
    it can now."""
    sglang.dissolve_front(requests, s, f, lists)
    pages = pages_of(s, known_tokens(requests, np.int64(lists[s[RUN_OFFSET]])) + 1)
    others = s[PROMISED] > 0 or s[ACTIVATED_HEAD] >= 0 or s[DONE_HEAD] >= 0
    going_on = False
    if not others or pages > s[NUM_BLOCKS]:
        going_on = _settle_runner(requests, pools, w, s, f, lists, need, now)
    s[BLOCKED] = np.int64(not going_on and s[RUNNING] > 0)
    return going_on


_settle_runner = sglang.settle_runner
_start_decode = rebound(sglang, settle_runner=settle_runner).start_decode


@inner
def start_decode(requests, pools, w, s, f, lists, now, evict):
    """Make room for one more token of every running request."""
    if s[ROLE] == DESTINATION:
        leave_without_token(requests, s, lists)
    _start_decode(requests, pools, w, s, f, lists, now, evict)


@inner
def finish(requests, pools, w, s, q, end):
    """The request has produced what this role asks of it. Pages of a prompt are in the tree from
    now on, though a source keeps them."""
    if s[ROLE] == DESTINATION:
        s[CAPACITY_VERSION] += 1
        sglang_pages.finish(requests, pools, w, s, q, end)
        return
    w[FRUITLESS] = 0
    sglang_pages.cache_computed(requests, pools, s, q)
    s[HELD] += 1
    append_done(requests, s, q)


_pass = rebound(sglang, form_batch=form_batch, start_decode=start_decode, finish=finish)


@inner
def tokens_asked(requests, pools, s, q):
    """Tokens of room that admitting the queue head takes; UNLIMITED when nobody is admitted."""
    if prefills_nothing(s):
        return UNLIMITED
    return sglang_rank.tokens_asked(requests, pools, s, q)


_rank = rebound(sglang_rank, _pass, tokens_asked=tokens_asked)
_plain = _rank.bind(evict)
_schedule, _steady_passes, _apply = _plain.schedule, _plain.steady_passes, _plain.apply


@inner
def steady_passes(requests, pools, w, s, f, lists, now):
    """Passes that the rank can make as pure decodes of its front; 0 when it is not steady."""
    if s[ACTIVATED_HEAD] >= 0 and s[RUNNING] < s[MAX_NUM_SEQS]:
        return np.int64(0)
    return _steady_passes(requests, pools, w, s, f, lists, now)


@inner
def schedule(requests, pools, scratch, w, s, f, lists, now, defer):
    """Step 1 of a pass; notes whether anything comes of it."""
    begin_pass(s)
    s[BLOCKED] = 0
    counting = w[PREFILL_LEFT] > 0
    running = s[RUNNING]
    admit_activated(requests, pools, scratch, s, lists, now)
    admitted = s[RUNNING] > running
    _schedule(requests, pools, scratch, w, s, f, lists, now, defer)
    if s[ROLE] == DESTINATION:
        s[CAPACITY_VERSION] += s[PREEMPTED_ANY] + s[SETTLED]
        admitted |= s[DONE_HEAD] >= 0
    ran = s[BATCHED] > 0 or (s[RUNNING] > 0 and s[BLOCKED] == 0)
    ended = s[SETTLED] > 0 or s[REJECTED_HEAD] >= 0 or s[PREEMPTED_ANY] != 0
    s[EFFECT] = np.int64(ran or ended or admitted or counting)


@inner
def tokens_to_emit(requests, s, lists):
    """Visible tokens that the pass in flight emits at its end."""
    if s[ROLE] == SOURCE:
        return np.int64(0)
    return sglang.tokens_to_emit(requests, s, lists)


@inner
def apply(requests, pools, times, scratch, w, s, f, lists, start, end):
    """Step 4 of a pass: tokens, completions, rejections at its end. Returns held pages x ms."""
    held = np.float64(s[NUM_BLOCKS] - s[FREE] - s[IDLE]) * (end - start)
    if s[ROLE] == DESTINATION:
        q = s[DONE_HEAD]
        s[DONE_HEAD] = NONE
        while q >= 0:
            following = np.int64(requests.state[NEXT, q])
            finish(requests, pools, w, s, q, end)
            q = following
    _apply(requests, pools, times, scratch, w, s, f, lists, start, end)
    return held


SCHEDULER = _plain._replace(
    has_work=has_work,
    steady_passes=steady_passes,
    schedule=schedule,
    tokens_to_emit=tokens_to_emit,
    apply=apply,
)


# --- the handoff ----------------------------------------------------------------------------------
@inner
def place(requests, pools, rows, s, q, rank):
    """Place `q` on a rank: its path begins at the root of the rank's tree."""
    requests.state[RANK, q] = rank
    requests.state[TREE_NODE, q] = s[ROOT]


@inner
def refusal(requests, s, q):
    """Reason why the destination can never hold the prompt, or 0."""
    prompt = np.int64(requests.state[ISL, q])
    if prompt >= s[MAX_MODEL_LEN]:
        return PROMPT_EXCEEDS_MAX_MODEL_LEN
    if pages_of(s, prompt) > s[NUM_BLOCKS]:
        return PROMPT_EXCEEDS_KV_CAPACITY
    return np.int64(0)


@inner
def reserve(requests, pools, s, q):
    """Reserve pages for the prompt of `q`; those of prompts that are in the tree are shared.
    Returns how many of them are new, or NONE: no room, but the shared ones have been touched."""
    state = requests.state
    prompt = np.int64(state[ISL, q])
    hits = np.int64(0)
    node = s[ROOT]
    if s[PREFIX_CACHING] != 0:
        hits = probe(requests, pools, s, q, prompt // s[PAGE_SIZE])
        node = match(requests, pools, s, q, hits)
        lock_path(pools, s, node, s[ROOT])
    need = pages_of(s, prompt) - hits
    if need > s[FREE] + s[IDLE]:
        unlock_path(pools, s, node)
        return NONE
    state[TREE_NODE, q] = node
    state[CACHED_PAGES, q] = hits
    state[COMPUTED, q] = prompt
    sglang_pages.take_pages(requests, pools, s, need, evict)
    return need


@inner
def activate(requests, pools, s, q):
    """The prompt has arrived: it waits for a slot."""
    requests.state[NEXT, q] = NONE
    if s[ACTIVATED_HEAD] < 0:
        s[ACTIVATED_HEAD] = q
    else:
        requests.state[NEXT, s[ACTIVATED_TAIL]] = q
    s[ACTIVATED_TAIL] = q


@inner
def release_source(requests, pools, s, q):
    """Give the pages of a held request back."""
    s[HELD] -= 1
    sglang_pages.leave_pages(requests, pools, s, q)


@inner
def cancel(requests, pools, s, q):
    """Take the pages of a reserved request back."""
    s[CAPACITY_VERSION] += 1
    sglang_pages.give_up_pages(requests, pools, s, q)


@inner
def try_in_vain(f):
    """A pass that lowers new_token_ratio and has no other effect is tried again at the same
    instant, until the ratio is as low as it gets (reference: runtimes, section 9)."""
    ratio = f[NEW_TOKEN_RATIO]
    lowered = ratio - f[RATIO_STEP] < ratio
    f[NEW_TOKEN_RATIO] = f[RATIO_MIN] if lowered else max(ratio, f[RATIO_MIN])


@inner
def first_waiting(requests, s, now):
    """The request that a deadlock ends, or NONE."""
    q = waiting_queue.queue_head(requests, s, now)
    return s[ACTIVATED_HEAD] if q < 0 else q


@inner
def fail_waiting(requests, pools, s, q):
    """Take `q`, the first that waits, off its list, with its pages."""
    state = requests.state
    if s[READY_HEAD] == q:
        remove_behind(requests, s, NONE, q)
        if state[COMPUTED, q] == 0 and state[ADMISSIONS, q] > 0:
            s[PREEMPTED_COUNT] -= 1
    else:
        s[ACTIVATED_HEAD] = np.int64(state[NEXT, q])
    sglang_pages.give_up_pages(requests, pools, s, q)


HANDOFF = HandoffRank(
    place=place,
    refusal=refusal,
    reserve=reserve,
    activate=activate,
    release_source=release_source,
    first_waiting=first_waiting,
    fail_waiting=fail_waiting,
    cancel=cancel,
    try_in_vain=try_in_vain,
)
