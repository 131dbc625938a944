"""What a worker asks of an SGLang rank beyond its pass: when it is steady, which arrivals it acts
on, how a decode run is applied, what the ranks of a group count together. `SCHEDULER` names the
whole.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.kv_events import TAKEN, events_have_room
from vecsim.kernels.cache.page_events import count_decode, report, report_after_run, report_is_due
from vecsim.kernels.cache.radix_tree import build_table, clear
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched import waiting_queue
from vecsim.kernels.sched.decode_batch import known_tokens, passes_within
from vecsim.kernels.sched.interface import Scheduler
from vecsim.kernels.sched.sglang import (
    apply,
    decay_ratio,
    finish_decode_batch,
    pass_time,
    price,
    schedule,
    tokens_to_emit,
)
from vecsim.kernels.sched.sglang_batch import (
    chunk_tokens,
    first_to_compute,
    prefills_nothing,
    reserved_output,
)
from vecsim.kernels.sched.sglang_pages import take_pages
from vecsim.kernels.sched.sglang_queue import pages_of
from vecsim.kernels.sched.sglang_transfer import (
    activate,
    cancel,
    fail_waiting,
    first_waiting,
    place,
    refusal,
    release_held,
    reserve,
    try_in_vain,
)
from vecsim.kernels.sched.waiting_queue import queue_head
from vecsim.kernels.state import pools as P
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import UNLIMITED

MARGIN = np.float64(1e-9)
"""Relative doubt about a sum of reservations that was not added up in the reference's order."""


@inner
def sees_every_arrival(s):
    """Whether a pass looks at all that wait, not at the head alone: to sort, or to reject."""
    return s[R.SCHEDULE_POLICY] == R.POLICY_LPM or s[R.MAX_MODEL_LEN] != UNLIMITED


@inner
def notices(requests, s, now):
    """Whether an arrival now would change what the rank does next."""
    if sees_every_arrival(s):
        return True
    return s[R.RUNNING] < s[R.MAX_NUM_SEQS] and queue_head(requests, s, now) < 0


# --- steadiness -----------------------------------------------------------------------------------
@inner
def tokens_asked(requests, pools, s, q):
    """Tokens of room that admitting the queue head takes; UNLIMITED when a budget forbids it."""
    if prefills_nothing(s):
        return UNLIMITED
    start = first_to_compute(requests, pools, s, q)
    left = known_tokens(requests, q) - start
    chunk = chunk_tokens(s, left, s[R.CHUNKED_PREFILL_SIZE])
    cost = pages_of(s, chunk) * s[R.PAGE_SIZE]
    if (chunk == 0 and left > 0) or cost > s[R.TOKEN_BUDGET] or cost > s[R.CHUNKED_PREFILL_SIZE]:
        return UNLIMITED
    if chunk < left:
        return cost
    remaining = np.int64(requests.state[Q.LIMIT, q]) - requests.state[Q.GENERATED, q]
    return cost + reserved_output(requests, s, q, remaining)


@inner
def passes_refused(requests, s, f, lists, asked, passes):
    """For how many of `passes` decode passes, taking free pages only, a queue head that asks for
    `asked` tokens is surely refused."""
    expected = np.int64(0)
    shrinking = np.int64(0)
    for i in range(s[R.DECODING]):
        remaining = np.int64(requests.state[Q.FINISH, lists[s[R.RUN_OFFSET] + i]]) - s[R.TICK]
        expected += reserved_output(requests, s, np.int64(i), remaining)
        if remaining <= s[R.CLIP_MAX_NEW_TOKENS]:
            shrinking += 1
        else:
            passes = min(passes, remaining - s[R.CLIP_MAX_NEW_TOKENS])
    block_size = s[R.BLOCK_SIZE]
    growth = lists[s[R.GROWTH_OFFSET] : s[R.GROWTH_OFFSET] + block_size]
    slot = s[R.TICK] % block_size
    pages = s[R.FREE] + s[R.EVICTABLE]
    ratio = f[R.NEW_TOKEN_RATIO]
    for done in range(passes):
        reserved = np.float64(expected) * ratio
        room = np.float64(pages) * np.float64(s[R.PAGE_SIZE]) - reserved
        if np.float64(asked) < room + MARGIN * (reserved + 1.0):
            return np.int64(done)
        pages -= growth[slot]
        expected -= shrinking
        ratio = max(ratio - f[R.RATIO_STEP], f[R.RATIO_MIN])
        slot += 1
        if slot == block_size:
            slot = np.int64(0)
    return passes


@inner
def decode_passes(requests, pools, w, s, f, lists, now):
    """Passes that the rank can make as pure decodes of its decode batch, whatever they evict; 0
    when it is not steady."""
    if s[R.DECODING] == 0 or s[R.RUNNING] != s[R.DECODING] or s[R.LAGGING] != 0:
        return np.int64(0)
    if s[R.ACTIVATED_HEAD] >= 0 and s[R.RUNNING] < s[R.MAX_NUM_SEQS]:
        return np.int64(0)
    passes = s[R.NEXT_FINISH] - s[R.TICK]
    q = queue_head(requests, s, now)
    if q < 0:
        return passes_within(s, lists, s[R.FREE] + s[R.EVICTABLE], passes)
    if sees_every_arrival(s):
        arriving = s[R.QUEUE_HEAD]
        if s[R.UNSORTED] != 0 or (arriving >= 0 and requests.time[Q.ARRIVAL, arriving] <= now):
            return np.int64(0)
    # While somebody waits, the tree must not change: pages come from the free ones.
    passes = passes_within(s, lists, s[R.FREE], passes)
    if s[R.RUNNING] >= s[R.MAX_NUM_SEQS]:
        return passes
    if w[W.PREFILL_LEFT] > 0:
        return min(passes, w[W.PREFILL_LEFT])
    asked = tokens_asked(requests, pools, s, q)
    return passes_refused(requests, s, f, lists, asked, passes)


@inner
def passes_without_eviction(next_uses, s, lists, passes):
    """What Belady evicts depends on what other workers admit meanwhile: only free pages are taken
    in a run then."""
    if next_uses is not None:
        return passes_within(s, lists, s[R.FREE], passes)
    return passes


@inner
def steady_passes(requests, pools, w, s, f, lists, now):
    """Passes that the rank can make as pure decodes of its decode batch; 0 when it is not
    steady."""
    passes = decode_passes(requests, pools, w, s, f, lists, now)
    return passes_without_eviction(pools.next_uses, s, lists, passes)


@inner
def has_work(requests, s, now):
    """Whether a pass starting at `now` has anybody to look at."""
    return s[R.ACTIVATED_HEAD] >= 0 or waiting_queue.has_work(requests, s, now)


# --- the group ------------------------------------------------------------------------------------
@inner
def defers(requests, w, s, f, lists, now, dp_size):
    """Whether the pass about to start puts off prefills."""
    return w[W.PREFILL_LEFT] > 0 and now <= f[R.COUNTDOWN_END]


@inner
def close_group(ranks, requests, w, first, dp_size, passes, start, end):
    """Count down prefill_decode_interval. With nothing to decode, the passes that are left take no
    time, so that one stands for all, and new_token_ratio starts anew; but a destination may get
    something to decode at this very instant (see `handoff_passes.counts_down`)."""
    interval = ranks.fields[first, R.PREFILL_DECODE_INTERVAL]
    if interval == 0:
        return
    prefilled = np.int64(0)
    running = np.int64(0)
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        running += s[R.RUNNING]
        if s[R.PARTICIPATES] != 0:
            prefilled += s[R.PREFILL_TOKENS]
    countdown_end = np.inf
    idle = w[W.PREFILL_LEFT] > 0 and ranks.factors[first, R.COUNTDOWN_END] == start
    if prefilled > 0:
        w[W.PREFILL_LEFT] = interval
    else:
        w[W.PREFILL_LEFT] = max(w[W.PREFILL_LEFT] - passes, np.int64(0))
    if running == 0 and w[W.PREFILL_LEFT] > 0 and ranks.fields[first, R.ROLE] != R.DESTINATION:
        idle = True
        w[W.PREFILL_LEFT] = 1
        countdown_end = end
    for r in range(first, first + dp_size):
        ranks.factors[r, R.COUNTDOWN_END] = countdown_end
        if idle:
            ranks.factors[r, R.NEW_TOKEN_RATIO] = ranks.factors[r, R.RATIO_INIT]


@inner
def room(ranks, pools, first, dp_size):
    """Whether there is room for whatever a pass of the worker may do: tree nodes, and in the log of
    KV events."""
    if pools.state[P.TABLE_STALE] != 0:
        build_table(pools)
    left = np.int64(len(pools.nodes[0])) - pools.state[P.NODE_BUMP] + pools.state[P.UNUSED_COUNT]
    for r in range(first, first + dp_size):
        left -= ranks.fields[r, R.TREE_ROOM]
    return left >= 0 and events_have_room(pools.events)


@inner
def forget(ranks, pools):
    """A worker that advanced on its own is done: the next one starts with empty trees."""
    clear(pools, np.int64(len(ranks.fields)))


# --- a decode run ---------------------------------------------------------------------------------
@inner
def apply_run(requests, pools, w, s, f, lists, passes, start, end):
    """Enter a walked decode run of `passes` passes into pages and requests."""
    take_pages(requests, pools, s, s[R.GROWN])
    s[R.PREFILL_TOKENS] = 0
    decay_ratio(f, passes)
    pass_time(s, f, passes, end)
    if s[R.TICK] >= s[R.NEXT_FINISH]:
        finish_decode_batch(requests, pools, w, s, lists, end)
    s[R.DECODING_JOINED] = s[R.DECODING]
    report_after_run(pools.events, s, end)


@inner
def log_run(requests, pools, s, lists, ends, done, count, start):
    """The pages that each of `count` passes of a decode run, after `done` others, takes for the
    decode batch. The report of the last one waits: what it ends is stored first."""
    taken = pools.events.ranks[TAKEN]
    rank = s[R.SCHEDULER_ID]
    if done == 0:
        taken[rank] = 0
    s[R.FREE] -= taken[rank]
    block_size = s[R.BLOCK_SIZE]
    pass_start = start
    for k in range(count):
        if done + k > 0 and report_is_due(pools.events, s):
            report(pools.events, s, pass_start)
        growth = np.int64(lists[s[R.GROWTH_OFFSET] + (s[R.TICK] + done + k) % block_size])
        if growth > 0:
            take_pages(requests, pools, s, growth)
            taken[rank] += growth
        count_decode(pools.events, s)
        pass_start = ends[k]
    s[R.FREE] += taken[rank]


SCHEDULER = Scheduler(
    has_work=has_work,
    notices=notices,
    steady_passes=steady_passes,
    defers=defers,
    schedule=schedule,
    price=price,
    tokens_to_emit=tokens_to_emit,
    apply=apply,
    apply_run=apply_run,
    log_run=log_run,
    close_group=close_group,
    room=room,
    forget=forget,
    reserves_first=True,
    place=place,
    refusal=refusal,
    reserve=reserve,
    activate=activate,
    release_held=release_held,
    first_waiting=first_waiting,
    fail_waiting=fail_waiting,
    cancel=cancel,
    try_in_vain=try_in_vain,
)
