"""KV events of SGLang's radix trees.

Pages are stored when they enter a tree, complete ones only, and removed when they are evicted. An
event goes on with what comes next if that is of its kind: removed pages, or stored pages of which
the first follows its last. Events are seen when the rank reports: at the end of every prefill pass
that computes tokens, of every 40th decode pass, and of any that leaves nothing running. (The
reference's behaviour; its readable source is older and stores earlier.)

On a decode rank prompts are stored when they are activated, before they enter the tree; as long as
they wait, none of their pages is stored again or removed (sglang_transfer.py).

`events` is an `EventLog`, or None: then nothing is logged. Pages have the rows that `events.named`
gives its requests.
"""

from __future__ import annotations

import numpy as np

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
    log_blocks,
    mark_visible,
)
from vecsim.kernels.cache.page_keys import common_depth
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import pools as P
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state.codes import NONE

DECODES_A_REPORT = np.int64(40)


# --- pages ----------------------------------------------------------------------------------------
@inner
def log_pages(events, s, q, first, end, kind, following):
    """Log the pages first..end-1 of a request's path, the first as `kind`, others as `following`.
    Returns the last row."""
    page = first
    last = NONE
    while page < end:
        row, count = row_run(events.named, s, q, page)
        count = min(count, end - page)
        log_blocks(events, s, kind, row, count)
        kind = following
        last = row + count - 1
        page += count
    return last


@inner
def pages_activated(events, s, q, pages):
    """How many of the first `pages` pages of a request's path belong to prompts that were activated
    and wait for a slot."""
    state = events.named.state
    depth = np.int64(0)
    other = s[R.ACTIVATED_HEAD]
    while other >= 0 and depth < pages:
        full = min(np.int64(state[Q.ISL, other]) // s[R.PAGE_SIZE], pages)
        if full > depth:
            depth = max(depth, common_depth(events.named, s, q, other, np.int64(0), full))
        other = np.int64(state[Q.NEXT, other])
    return depth


@inner
def pages_at_once(next_uses, pages):
    """How many of so many pages go at once: a next_uses picks them one by one."""
    if next_uses is not None:
        return min(pages, np.int64(1))
    return pages


@inner
def log_cut(events, next_uses, pools, s, leaf, pages):
    """The last `pages` pages of a leaf are about to go, the last page first."""
    if events is not None:
        state = events.ranks[:, s[R.SCHEDULER_ID]]
        owner = np.int64(pools.nodes[P.OWNER, leaf])
        end = np.int64(pools.nodes[P.END, leaf])
        stop = end - pages
        step = pages_at_once(next_uses, pages)
        while end > stop:
            first = max(end - step, pages_activated(events, s, owner, end))
            if first < end:
                log_pages(events, s, owner, first, end, state[NEXT_REMOVED], REMOVED_NEXT)
                state[NEXT_REMOVED] = REMOVED_NEXT
                state[LAST_STORED] = NONE
            end -= step


@inner
def continues(events, s, q, page):
    """Whether a page follows the one that was stored last."""
    last = events.ranks[LAST_STORED, s[R.SCHEDULER_ID]]
    if page == 0 or last < 0:
        return False
    row, _ = row_run(events.named, s, q, page - 1)
    return row == last


@inner
def log_inserted(events, s, q, first, last):
    """The pages first..last-1 of a request have entered the tree."""
    if events is not None:
        first = max(first, pages_activated(events, s, q, last))
        if first < last:
            state = events.ranks[:, s[R.SCHEDULER_ID]]
            kind = STORED_NEXT if continues(events, s, q, first) else STORED_FIRST
            state[LAST_STORED] = log_pages(events, s, q, first, last, kind, STORED_NEXT)
            state[NEXT_REMOVED] = REMOVED_FIRST


# --- reports --------------------------------------------------------------------------------------
@inner
def hand_over(events, s, now, occasion):
    """All that was logged can be seen from `now` on."""
    mark_visible(events, s, now, occasion)
    events.ranks[NEXT_REMOVED, s[R.SCHEDULER_ID]] = REMOVED_FIRST
    events.ranks[LAST_STORED, s[R.SCHEDULER_ID]] = NONE


@inner
def report(events, s, now):
    """All that passes brought about can be seen from `now` on."""
    hand_over(events, s, now, AT_PASS_END)


@inner
def report_is_due(events, s):
    """Whether the decode pass that was counted last is one after which the rank reports."""
    return events.ranks[DECODES, s[R.SCHEDULER_ID]] == 0


@inner
def count_decode(events, s):
    """Count a decode pass."""
    rank = s[R.SCHEDULER_ID]
    events.ranks[DECODES, rank] = (events.ranks[DECODES, rank] + 1) % DECODES_A_REPORT


@inner
def count_pass(events, s, is_decode):
    """Count a pass that ends; whether a report follows it, unless nothing is left running."""
    if events is not None:
        if is_decode:
            count_decode(events, s)
            return report_is_due(events, s)
        return s[R.PREFILL_TOKENS] > 0
    return False


@inner
def report_after_pass(events, s, due, end):
    """The report of a pass, if it is `due` or nothing is left running."""
    if events is not None and (due or s[R.RUNNING] == 0):
        report(events, s, end)


@inner
def report_after_run(events, s, end):
    """The report of the last pass of a decode run, after what it ends was stored."""
    if events is not None and (report_is_due(events, s) or s[R.RUNNING] == 0):
        report(events, s, end)
