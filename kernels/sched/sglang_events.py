"""SGLang ranks whose KV events are logged.

Events follow the tree: pages are stored when they enter it, complete ones only, and removed when
they are evicted. An event goes on with what comes next if that is of its kind: removed pages, or
stored pages of which the first follows its last. Events are seen when the rank reports: at the end
of every prefill pass that computes tokens, of every 40th decode pass, and of any that leaves
nothing running. (The reference's behaviour; its readable source is older and stores earlier.)

On a decode rank there are prompts that were stored before they enter the tree (see
sglang_roles_events.py): as long as they wait, none of their pages is stored or removed.

The front takes its pages pass by pass while a stretch is walked (see vllm_events.py).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache import radix_tree
from vecsim.kernels.cache.block_pool import row_run
from vecsim.kernels.cache.kv_events import (
    AT_PASS_END,
    DECODES,
    LAST_STORED,
    NEXT_REMOVED,
    REMOVED_FIRST,
    REMOVED_NEXT,
    STORED_FIRST,
    STORED_NEXT,
    TAKEN,
    log_blocks,
    log_has_room,
    mark_visible,
)
from vecsim.kernels.cache.radix_tree import common_depth
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet import decode_run
from vecsim.kernels.fleet.worker import Scheduler
from vecsim.kernels.rebinding import rebound
from vecsim.kernels.sched import sglang, sglang_batch, sglang_belady, sglang_pages, sglang_rank
from vecsim.kernels.state.layout import (
    ACTIVATED_HEAD,
    BATCHED,
    BLOCK_SIZE,
    END,
    ENDS,
    FREE,
    GROWTH_OFFSET,
    ISL,
    NEXT,
    NONE,
    OWNER,
    PAGE_SIZE,
    PARTICIPATES,
    PREFILL_TOKENS,
    RUNNING,
    SCHEDULER_ID,
    TICK,
)

DECODES_A_REPORT = np.int64(40)


# --- the tree -------------------------------------------------------------------------------------
@inner
def log_pages(pools, s, q, first, end, kind, following):
    """Log the pages first..end-1 of a request's path, the first as `kind`, others as `following`.
    Returns the last row."""
    page = first
    last = NONE
    while page < end:
        row, count = row_run(pools.named, s, q, page)
        count = min(count, end - page)
        log_blocks(pools.events, s, kind, row, count)
        kind = following
        last = row + count - 1
        page += count
    return last


@inner
def pages_activated(pools, s, q, pages):
    """How many of the first `pages` pages of a request's path belong to prompts that were activated
    and wait for a slot."""
    state = pools.named.state
    depth = np.int64(0)
    other = s[ACTIVATED_HEAD]
    while other >= 0 and depth < pages:
        full = min(np.int64(state[ISL, other]) // s[PAGE_SIZE], pages)
        if full > depth:
            depth = max(depth, common_depth(pools.named, s, q, other, np.int64(0), full))
        other = np.int64(state[NEXT, other])
    return depth


@inner
def cut_tail(pools, s, leaf, pages):
    """Take the last `pages` pages off a leaf, which are gone."""
    end = np.int64(pools.nodes[END, leaf])
    owner = np.int64(pools.nodes[OWNER, leaf])
    first = max(end - pages, pages_activated(pools, s, owner, end))
    if first < end:
        state = pools.events.ranks[:, s[SCHEDULER_ID]]
        log_pages(pools, s, owner, first, end, state[NEXT_REMOVED], REMOVED_NEXT)
        state[NEXT_REMOVED] = REMOVED_NEXT
        state[LAST_STORED] = NONE
    pools.nodes[END, leaf] = end - pages


@inner
def cut_page_by_page(pools, s, leaf, pages):
    """The same, the last page first: so pages go that a forecast picks."""
    for _ in range(pages):
        cut_tail(pools, s, leaf, np.int64(1))


_tree = rebound(radix_tree, cut_tail=cut_tail)
_forecast_tree = rebound(radix_tree, cut_tail=cut_page_by_page)


@inner
def continues(pools, s, q, page, state):
    """Whether a page follows the one that was stored last."""
    if page == 0 or state[LAST_STORED] < 0:
        return False
    row, _ = row_run(pools.named, s, q, page - 1)
    return row == state[LAST_STORED]


@inner
def insert(requests, pools, s, q, start, depth, last):
    """Hand pages to the tree (see `radix.insert`); those that were not there are stored."""
    free = s[FREE]
    end = _tree.insert(requests, pools, s, q, start, depth, last)
    first = max(depth + s[FREE] - free, pages_activated(pools, s, q, last))
    if first < last:
        state = pools.events.ranks[:, s[SCHEDULER_ID]]
        kind = STORED_NEXT if continues(pools, s, q, first, state) else STORED_FIRST
        state[LAST_STORED] = log_pages(pools, s, q, first, last, kind, STORED_NEXT)
        state[NEXT_REMOVED] = REMOVED_FIRST
    return end


_pages = rebound(sglang_pages, _tree, insert=insert)
_batch = rebound(sglang_batch, _tree, _pages)
_sglang = rebound(sglang, _tree, _pages, _batch)


# --- reports --------------------------------------------------------------------------------------
@inner
def hand_over(pools, s, now, occasion):
    """All that was logged can be seen from `now` on."""
    mark_visible(pools.events, s, now, occasion)
    state = pools.events.ranks[:, s[SCHEDULER_ID]]
    state[NEXT_REMOVED] = REMOVED_FIRST
    state[LAST_STORED] = NONE


@inner
def report(pools, s, now):
    """All that passes brought about can be seen from `now` on."""
    hand_over(pools, s, now, AT_PASS_END)


@inner
def report_is_due(pools, s):
    """Whether the decode pass that was counted last is one after which the rank reports."""
    return pools.events.ranks[DECODES, s[SCHEDULER_ID]] == 0


@inner
def count_decode(pools, s):
    """Count a decode pass."""
    rank = s[SCHEDULER_ID]
    decodes = pools.events.ranks[DECODES, rank] + 1
    pools.events.ranks[DECODES, rank] = decodes % DECODES_A_REPORT


# --- a stretch ------------------------------------------------------------------------------------
@inner
def observe_chunk(ranks, times, requests, scratch, first, dp_size, done, count, start):
    """Record `count` walked passes, and the pages that each takes for the front. The report of the
    last one waits: what it ends is stored first."""
    decode_run.observe_chunk(ranks, times, requests, scratch, first, dp_size, done, count, start)
    pools = scratch.pools
    taken = pools.events.ranks[TAKEN]
    ends = scratch.chunk[ENDS]
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        if s[PARTICIPATES] == 0:
            continue
        if done == 0:
            taken[r] = 0
        s[FREE] -= taken[r]
        block_size = s[BLOCK_SIZE]
        pass_start = start
        for k in range(count):
            if done + k > 0 and report_is_due(pools, s):
                report(pools, s, pass_start)
            growth = np.int64(ranks.lists[s[GROWTH_OFFSET] + (s[TICK] + done + k) % block_size])
            if growth > 0:
                _pages.take_pages(requests, pools, s, growth, _tree.evict)
                taken[r] += growth
            count_decode(pools, s)
            pass_start = ends[k]
        s[FREE] += taken[r]


walking = rebound(decode_run, observe_chunk=observe_chunk)


# --- what a worker asks of a rank -----------------------------------------------------------------
_rank = rebound(sglang_rank, _tree, _pages, _batch, _sglang)


def observing(plain: Scheduler) -> Scheduler:
    """The scheduler of `_rank` with reports."""
    apply_pass, settle_passes, has_room = plain.apply, plain.settle_stretch, plain.room

    @inner
    def apply(requests, pools, times, scratch, w, s, f, lists, start, end):
        """Step 4 of a pass, and the report after it."""
        due = s[PREFILL_TOKENS] > 0
        if s[BATCHED] == 0 and sglang.decodes(s):
            count_decode(pools, s)
            due = report_is_due(pools, s)
        held = apply_pass(requests, pools, times, scratch, w, s, f, lists, start, end)
        if due or s[RUNNING] == 0:
            report(pools, s, end)
        return held

    @inner
    def settle_stretch(requests, pools, w, s, f, lists, passes, start, end):
        """Enter a walked stretch into pages and requests, and the report after it."""
        settle_passes(requests, pools, w, s, f, lists, passes, start, end)
        if report_is_due(pools, s) or s[RUNNING] == 0:
            report(pools, s, end)

    @inner
    def room(ranks, pools, first, dp_size):
        """Whether tree and log have room for whatever a pass of the worker may do."""
        return has_room(ranks, pools, first, dp_size) and log_has_room(pools.events)

    return plain._replace(apply=apply, settle_stretch=settle_stretch, room=room)


SCHEDULER = observing(_rank.bind(_tree.evict))

_forecasting = _rank.bind(_forecast_tree.evict_by_forecast)
_belady = rebound(
    sglang_belady, _schedule=_forecasting.schedule, _steady_passes=_forecasting.steady_passes
)
FORECASTING = observing(
    _forecasting._replace(schedule=_belady.schedule, steady_passes=_belady.steady_passes)
)
"""With eviction by forecast."""
