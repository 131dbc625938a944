"""One scheduler pass of one SGLang rank.

A pass either prefills a batch from the waiting queue, while running requests stand still, or
decodes one token for every running request. `schedule` decides and does all that concerns KV pages;
`apply` makes tokens and completions visible at the end of the pass. Running requests that have a
token form the decode batch (see decode_batch.py), whose ticks count the rank's decode passes.
(Reference: SGLang backend, sections on passes, decode steps and new_token_ratio.)

The ROLE of a rank adds small rules. A prefill rank (SOURCE) produces one hidden token of a request
and keeps its pages until they are released. On a decode rank (DESTINATION) activated requests run
before anything that the rank would have to prefill itself, and while any of them, or anybody who
waits for pages, is there nothing is prefilled (sglang_transfer.py; reference: runtimes, section 7;
SGLang backend, A11).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.page_events import count_pass, report_after_pass
from vecsim.kernels.cache.radix_tree import evict
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.decode_batch import (
    advance_decode_batch,
    close_gaps,
    empty_decode_batch,
    join_decode_batch,
    known_tokens,
    leave_decode_batch,
)
from vecsim.kernels.sched.lifecycle import begin_pass, emit_token, end_rejected, log_admission
from vecsim.kernels.sched.sglang_batch import form_batch
from vecsim.kernels.sched.sglang_pages import (
    cache_activated,
    cache_computed,
    end_stuck_request,
    finish,
    give_up_pages,
    pages_to_grow,
    take_pages,
)
from vecsim.kernels.sched.sglang_queue import (
    pages_of,
    push_back,
    push_front,
    remove_behind,
    sort_queue,
    take_arrivals,
)
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import NONE
from vecsim.kernels.timing.durations import decode_ms, prefill_ms
from vecsim.kernels.timing.itl_histogram import count_gap

LOOKAHEAD_TOKENS = np.int64(20)
"""Room per survivor that a retraction makes."""


# --- the decode batch -----------------------------------------------------------------------------
@inner
def dissolve_decode_batch(requests, s, f, lists):
    """Make all members of the decode batch explicit."""
    for i in range(s[R.DECODING]):
        q = np.int64(lists[s[R.RUN_OFFSET] + i])
        leave_decode_batch(requests, s, lists, q, np.int64(0))
        if i < s[R.DECODING_JOINED]:
            requests.time[Q.LAST_TOKEN, q] = f[R.LAST_EMIT]
    empty_decode_batch(s)


# --- schedule: a prefill pass ---------------------------------------------------------------------
@inner
def cache_prompts(requests, pools, s, lists, first, last, ending):
    """Enter prompts at first..last-1 of the running list into the tree: of the requests that end
    with their first token, or of those that go on."""
    state = requests.state
    for i in range(first, last):
        q = np.int64(lists[i])
        remaining = np.int64(state[Q.LIMIT, q]) - state[Q.GENERATED, q]
        if remaining > 0 and (remaining == 1) == ending:
            cache_computed(requests, pools, s, q)


@inner
def start_prefill(requests, pools, s, lists):
    """Unfinished prompts go back to the queue, finished ones join the running list; room is made
    for the first tokens of those that need more than one. Pages that the batch computed twice are
    free before room is checked, but too late to avoid an eviction."""
    state = requests.state
    s[R.NEW_FROM] = s[R.RUNNING]
    first = s[R.RUN_OFFSET] + s[R.RUNNING]
    need = np.int64(0)
    for i in range(first, first + s[R.BATCHED]):
        q = np.int64(lists[i])
        state[Q.RETIRED, q] = 1
        if state[Q.COMPUTED, q] < known_tokens(requests, q):
            # At most one. What is left of the chunk is less than a page: enough for those behind it
            # that have nothing to compute.
            cache_computed(requests, pools, s, q)
            push_front(requests, s, q)
            continue
        lists[s[R.RUN_OFFSET] + s[R.RUNNING]] = q
        s[R.RUNNING] += 1
        if state[Q.LIMIT, q] - state[Q.GENERATED, q] > 1:
            need += pages_to_grow(requests, s, q)
    evict(requests, pools, s, need - s[R.FREE])
    last = s[R.RUN_OFFSET] + s[R.RUNNING]
    cache_prompts(requests, pools, s, lists, first, last, False)
    cache_prompts(requests, pools, s, lists, first, last, True)
    s[R.FITS] = np.int64(s[R.FREE] >= need)
    if s[R.FITS] == 0:
        return
    s[R.FREE] -= need
    for i in range(first, last):
        q = lists[i]
        if state[Q.LIMIT, q] - state[Q.GENERATED, q] > 1:
            state[Q.COMPUTED, q] += 1


# --- schedule: the decode step --------------------------------------------------------------------
@inner
def decode_growth(requests, s, lists):
    """Pages that all running requests together need for one more token each."""
    need = np.int64(0)
    if s[R.DECODING] > 0:
        need += lists[s[R.GROWTH_OFFSET] + s[R.TICK] % s[R.BLOCK_SIZE]]
    for i in range(s[R.DECODING], s[R.RUNNING]):
        need += pages_to_grow(requests, s, np.int64(lists[s[R.RUN_OFFSET] + i]))
    return need


@inner
def sort_running(requests, s, lists):
    """Most outputs first, then the shortest prompt, otherwise as before."""
    state = requests.state
    start = s[R.RUN_OFFSET]
    for i in range(start + 1, start + s[R.RUNNING]):
        q = lists[i]
        at = np.int64(i)
        while at > start:
            other = lists[at - 1]
            ahead = np.int64(state[Q.GENERATED, other]) - state[Q.GENERATED, q]
            if ahead > 0 or (ahead == 0 and state[Q.ISL, other] <= state[Q.ISL, q]):
                break
            lists[at] = other
            at -= 1
        lists[at] = q


@inner
def retract(requests, pools, s, lists, need):
    """Retract the last running requests until the others can grow. Returns the pages they need.

    Expects all running requests to be explicit. The retracted ones go to the back of the queue."""
    state = requests.state
    sort_running(requests, s, lists)
    while s[R.FREE] + s[R.EVICTABLE] < need and s[R.RUNNING] > 1:
        s[R.RUNNING] -= 1
        q = np.int64(lists[s[R.RUN_OFFSET] + s[R.RUNNING]])
        need -= pages_to_grow(requests, s, q)
        give_up_pages(requests, pools, s, q)
        push_back(requests, s, q)
        state[Q.FRESH, q] = 0
        s[R.PREEMPTED_COUNT] += 1
        s[R.PREEMPTIONS] += 1
        s[R.PREEMPTED_ANY] = 1
        lacking = pages_of(s, LOOKAHEAD_TOKENS * s[R.RUNNING] - s[R.FREE] * s[R.PAGE_SIZE])
        evict(requests, pools, s, lacking)
    return need


@inner
def estimated_ratio(requests, s, lists):
    """new_token_ratio after a retraction, from the survivors' progress."""
    produced = np.int64(0)
    asked = np.int64(0)
    for i in range(s[R.RUNNING]):
        q = lists[s[R.RUN_OFFSET] + i]
        produced += requests.state[Q.GENERATED, q]
        asked += requests.state[Q.LIMIT, q]
    share = np.float64(produced + LOOKAHEAD_TOKENS * s[R.RUNNING]) / np.float64(asked + 1)
    return min(1.0, share)


@inner
def free_a_holder(requests, pools, w, s, now):
    """A half-prefilled request in the queue gives back the pages that the last running request
    needs: once it is requeued, the second time it is rejected. False when there is none."""
    state = requests.state
    before = NONE
    q = s[R.READY_HEAD]
    while q >= 0 and state[Q.COMPUTED, q] == 0:
        before = q
        q = np.int64(state[Q.NEXT, q])
    if q < 0:
        return False
    remove_behind(requests, s, before, q)
    if state[Q.REQUEUED, q] != 0:
        end_stuck_request(requests, pools, w, s, q, S.NO_PROGRESS, now)
    else:
        give_up_pages(requests, pools, s, q)
        state[Q.REQUEUED, q] = 1
        push_back(requests, s, q)
        s[R.PREEMPTED_COUNT] += 1
        s[R.STUCK_ENDED] += 1
    return True


@inner
def make_room_for_runner(requests, pools, w, s, f, lists, need, now):
    """The last running request cannot grow: it outgrew the pool, or others hold its pages; those of
    a decode rank may give them back. Whether it can now."""
    q = np.int64(lists[s[R.RUN_OFFSET]])
    dissolve_decode_batch(requests, s, f, lists)
    if pages_of(s, known_tokens(requests, q) + 1) > s[R.NUM_BLOCKS]:
        s[R.RUNNING] = 0
        end_stuck_request(requests, pools, w, s, q, S.KV_CAPACITY_EXHAUSTED, now)
        requests.state[Q.STATUS, q] = S.FAILED
        return False
    if s[R.PREALLOCATED] > 0 or s[R.ACTIVATED_HEAD] >= 0 or s[R.ENDING_HEAD] >= 0:
        return False
    while s[R.FREE] + s[R.EVICTABLE] < need:
        if not free_a_holder(requests, pools, w, s, now):
            return False
    return True


@inner
def leave_without_token(requests, s, lists):
    """Running requests with nothing to produce end with this pass, and take no part in it."""
    state = requests.state
    start = s[R.RUN_OFFSET]
    kept = s[R.DECODING]
    for i in range(s[R.DECODING], s[R.RUNNING]):
        q = np.int64(lists[start + i])
        if state[Q.LIMIT, q] == state[Q.GENERATED, q]:
            state[Q.NEXT, q] = NONE
            if s[R.ENDING_HEAD] < 0:
                s[R.ENDING_HEAD] = q
            else:
                state[Q.NEXT, s[R.ENDING_TAIL]] = q
            s[R.ENDING_TAIL] = q
            continue
        lists[start + kept] = q
        kept += 1
    s[R.RUNNING] = kept


@inner
def start_decode(requests, pools, w, s, f, lists, now):
    """Make room for one more token of every running request."""
    if s[R.ROLE] == R.DESTINATION:
        leave_without_token(requests, s, lists)
    need = decode_growth(requests, s, lists)
    if s[R.FREE] + s[R.EVICTABLE] < need and s[R.RUNNING] > 1:
        dissolve_decode_batch(requests, s, f, lists)
        need = retract(requests, pools, s, lists, need)
        f[R.NEW_TOKEN_RATIO] = estimated_ratio(requests, s, lists)
    if need <= s[R.FREE] + s[R.EVICTABLE] or make_room_for_runner(
        requests, pools, w, s, f, lists, need, now
    ):
        take_pages(requests, pools, s, need)
    else:
        s[R.BLOCKED] = np.int64(s[R.RUNNING] > 0)


@inner
def decodes(s):
    """Whether the running requests get tokens in a pass that prefills nobody: a destination's last
    one may have to wait for its pages."""
    return np.int64(s[R.RUNNING] > 0 and s[R.BLOCKED] == 0)


@inner
def decay_ratio(f, passes):
    """new_token_ratio after `passes` decode passes without retraction."""
    ratio = f[R.NEW_TOKEN_RATIO]
    for _ in range(passes):
        following = max(ratio - f[R.RATIO_STEP], f[R.RATIO_MIN])
        if following == ratio:
            break
        ratio = following
    f[R.NEW_TOKEN_RATIO] = ratio


@inner
def admit_activated(requests, pools, scratch, s, lists, now):
    """Activated requests run, first come, first served, while there are slots. Their prompts can be
    found from now on; pages that are there twice may make room for others."""
    while s[R.ACTIVATED_HEAD] >= 0 and s[R.RUNNING] < s[R.MAX_NUM_SEQS]:
        q = s[R.ACTIVATED_HEAD]
        s[R.ACTIVATED_HEAD] = np.int64(requests.state[Q.NEXT, q])
        lists[s[R.RUN_OFFSET] + s[R.RUNNING]] = q
        s[R.RUNNING] += 1
        log_admission(requests, scratch, q, now, np.int64(0))
        cache_activated(requests, pools, s, q)
        s[R.CAPACITY_VERSION] += 1


@inner
def retire_rejected(next_uses, requests, s):
    """Belady's next_uses: the requests rejected in this pass are no future use any more, after it
    has made its room (found by comparison with the reference)."""
    if next_uses is not None:
        q = s[R.REJECTED_HEAD]
        while q >= 0:
            requests.state[Q.RETIRED, q] = 1
            q = np.int64(requests.state[Q.NEXT, q])


@inner
def note_effect(s, admitted, counting):
    """What a scheduled pass of a prefill or decode rank means to handoffs: whether anything comes
    of it (activated requests were admitted, prefills are put off), and whether it may be easier to
    reserve pages."""
    if s[R.ROLE] == R.DESTINATION:
        s[R.CAPACITY_VERSION] += s[R.PREEMPTED_ANY] + s[R.STUCK_ENDED]
        admitted |= s[R.ENDING_HEAD] >= 0
    ran = s[R.BATCHED] > 0 or (s[R.RUNNING] > 0 and s[R.BLOCKED] == 0)
    ended = s[R.STUCK_ENDED] > 0 or s[R.REJECTED_HEAD] >= 0 or s[R.PREEMPTED_ANY] != 0
    s[R.EFFECT] = np.int64(ran or ended or admitted or counting)


@inner
def schedule(requests, pools, scratch, w, s, f, lists, now, defer):
    """Step 1 of a pass: form a prefill batch, or else decode; all effects on KV pages."""
    begin_pass(s)
    s[R.BATCHED] = 0
    s[R.BLOCKED] = 0
    counting = w[W.PREFILL_LEFT] > 0
    running = s[R.RUNNING]
    admit_activated(requests, pools, scratch, s, lists, now)
    admitted = s[R.RUNNING] > running
    take_arrivals(requests, s, now)
    if s[R.SCHEDULE_POLICY] == R.POLICY_LPM and s[R.PREFIX_CACHING] != 0:
        sort_queue(requests, pools, s)
    if not defer:
        form_batch(requests, pools, scratch, w, s, f, lists, now)
    if s[R.BATCHED] > 0:
        start_prefill(requests, pools, s, lists)
    else:
        start_decode(requests, pools, w, s, f, lists, now)
        if s[R.PREEMPTED_ANY] == 0:
            decay_ratio(f, np.int64(1))
    retire_rejected(pools.next_uses, requests, s)
    s[R.BUDGET] = s[R.TOKEN_BUDGET] - s[R.PREFILL_TOKENS]
    if s[R.ROLE] != R.AGGREGATED:
        note_effect(s, admitted, counting)


# --- price ----------------------------------------------------------------------------------------
@inner
def price(requests, s, f, lists, start):
    """End of the scheduled pass that begins at `start`, or a negative number for a bad price."""
    duration = 0.0
    if s[R.PREFILLS] > 0:
        duration = prefill_ms(s, f, s[R.PREFILLS], s[R.PREFILL_ISL], s[R.PREFILL_PREFIX])
    elif s[R.BATCHED] == 0 and decodes(s):
        context = s[R.DECODING_CONTEXT]
        for i in range(s[R.DECODING], s[R.RUNNING]):
            context += known_tokens(requests, np.int64(lists[s[R.RUN_OFFSET] + i]))
        duration = decode_ms(s, f, s[R.RUNNING], context)
    if duration < 0.0:
        return -1.0
    return start + duration


@inner
def tokens_to_emit(requests, s, lists):
    """Visible tokens that the pass in flight emits at its end."""
    if s[R.ROLE] == R.SOURCE:
        return np.int64(0)
    if s[R.BATCHED] == 0:
        return s[R.RUNNING] * decodes(s)
    tokens = np.int64(0)
    for i in range(s[R.NEW_FROM], s[R.RUNNING]):
        q = lists[s[R.RUN_OFFSET] + i]
        remaining = np.int64(requests.state[Q.LIMIT, q]) - requests.state[Q.GENERATED, q]
        tokens += np.int64(remaining == 1 or (remaining > 1 and s[R.FITS] != 0))
    return tokens


# --- apply ----------------------------------------------------------------------------------------
@inner
def end_prefill(requests, pools, times, scratch, w, s, lists, end):
    """First tokens of the new running requests; those with nothing more to produce leave."""
    state = requests.state
    start = s[R.RUN_OFFSET]
    for i in range(s[R.NEW_FROM], s[R.RUNNING]):
        q = np.int64(lists[start + i])
        if state[Q.LIMIT, q] == state[Q.GENERATED, q]:
            finish(requests, pools, w, s, q, end)
            lists[start + i] = NONE
    kept = s[R.NEW_FROM]
    s[R.LAGGING] = np.int64(s[R.DECODING] > 0)
    for i in range(s[R.NEW_FROM], s[R.RUNNING]):
        q = np.int64(lists[start + i])
        if q < 0:
            continue
        last = state[Q.LIMIT, q] - state[Q.GENERATED, q] == 1
        emitted = last or s[R.FITS] != 0
        if emitted:
            emit_token(requests, times, scratch, s, q, end)
        if last:
            finish(requests, pools, w, s, q, end)
            continue
        lists[start + kept] = q
        kept += 1
        if emitted and kept == s[R.DECODING] + 1:
            join_decode_batch(requests, s, lists, q)
    s[R.RUNNING] = kept


@inner
def emit_decode_batch(requests, times, scratch, s, f, lists, end):
    """One token of every member of the decode batch. Those that joined since the last decode pass
    got theirs before in prefill passes of their own."""
    counted = s[R.DECODING_COUNTED]
    for i in range(s[R.DECODING_JOINED], s[R.DECODING]):
        q = np.int64(lists[s[R.RUN_OFFSET] + i])
        count = np.int64(requests.state[Q.COUNTED, q])
        counted -= count
        count_gap(times, scratch, end - requests.time[Q.LAST_TOKEN, q], count)
        if np.isnan(requests.time[Q.SECOND_TOKEN, q]):
            requests.time[Q.SECOND_TOKEN, q] = end
    if s[R.DECODING_JOINED] > 0:
        count_gap(times, scratch, end - f[R.LAST_EMIT], counted)


@inner
def pass_time(s, f, passes, end):
    """`passes` decode passes went by for every member of the decode batch, the last until `end`."""
    advance_decode_batch(s, passes)
    s[R.LAGGING] = 0
    f[R.LAST_EMIT] = end


@inner
def finish_decode_batch(requests, pools, w, s, lists, end):
    """Complete the members of the decode batch whose last token came at `end`."""
    start = s[R.RUN_OFFSET]
    for i in range(start, start + s[R.DECODING]):
        q = np.int64(lists[i])
        if requests.state[Q.FINISH, q] <= s[R.TICK]:
            leave_decode_batch(requests, s, lists, q, np.int64(0))
            requests.time[Q.LAST_TOKEN, q] = end
            finish(requests, pools, w, s, q, end)
            lists[i] = NONE
    close_gaps(requests, s, lists)


@inner
def end_decode(requests, pools, times, scratch, w, s, f, lists, end):
    """One token of every running request; the explicit ones join the decode batch."""
    state = requests.state
    emit_decode_batch(requests, times, scratch, s, f, lists, end)
    pass_time(s, f, np.int64(1), end)
    if s[R.TICK] >= s[R.NEXT_FINISH]:
        finish_decode_batch(requests, pools, w, s, lists, end)
    s[R.DECODING_JOINED] = s[R.DECODING]
    start = s[R.RUN_OFFSET]
    kept = s[R.DECODING]
    for i in range(s[R.DECODING], s[R.RUNNING]):
        q = np.int64(lists[start + i])
        state[Q.COMPUTED, q] += 1
        emit_token(requests, times, scratch, s, q, end)
        if state[Q.GENERATED, q] == state[Q.LIMIT, q]:
            finish(requests, pools, w, s, q, end)
            continue
        lists[start + kept] = q
        kept += 1
        join_decode_batch(requests, s, lists, q)
    s[R.RUNNING] = kept


@inner
def end_without_token(requests, pools, w, s, end):
    """Complete the requests of a decode rank that took no part in the pass."""
    q = s[R.ENDING_HEAD]
    s[R.ENDING_HEAD] = NONE
    while q >= 0:
        following = np.int64(requests.state[Q.NEXT, q])
        finish(requests, pools, w, s, q, end)
        q = following


@inner
def apply(requests, pools, times, scratch, w, s, f, lists, start, end):
    """Step 4 of a pass: tokens, completions, rejections at its end, and the report of KV events.
    Returns held pages x ms."""
    held = np.float64(s[R.NUM_BLOCKS] - s[R.FREE] - s[R.EVICTABLE]) * (end - start)
    end_without_token(requests, pools, w, s, end)
    is_decode = s[R.BATCHED] == 0 and decodes(s) != 0
    due = count_pass(pools.events, s, is_decode)
    if s[R.BATCHED] > 0:
        end_prefill(requests, pools, times, scratch, w, s, lists, end)
    elif is_decode:
        end_decode(requests, pools, times, scratch, w, s, f, lists, end)
    end_rejected(requests, w, s, end)
    s[R.COMMITTED_PREFILL] += s[R.PREFILL_TOKENS]
    report_after_pass(pools.events, s, due, end)
    return held
