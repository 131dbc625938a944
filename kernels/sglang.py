"""One scheduler pass of one SGLang rank.

A pass either prefills a batch from the waiting queue, while running requests stand still, or
decodes one token for every running request. `schedule` decides and does all that concerns KV pages;
`apply` makes tokens and completions visible at the end of the pass. Running requests that have a
token decode in step and are kept implicitly, as the *front* (see vllm.py): tokens = GENERATED +
tick, where ticks count the rank's decode passes. (Reference: SGLang backend, sections on passes,
batch formation, decode steps and new_token_ratio.)
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.jit import inner
from vecsim.kernels.layout import (
    ADMISSIONS,
    BATCHED,
    BLOCK_SIZE,
    BUDGET,
    CACHED_PAGES,
    CAPACITY_TOKENS,
    CHUNKED_PREFILL_SIZE,
    CLIP_MAX_NEW_TOKENS,
    COMMITTED_PREFILL,
    COMPLETED,
    COMPUTED,
    COUNTED,
    FAILED,
    FINISH,
    FITS,
    FREE,
    FRESH,
    FRONT,
    FRONT_CONTEXT,
    FRONT_COUNTED,
    FRONT_JOINED,
    GENERATED,
    GROWTH_OFFSET,
    IDLE,
    ISL,
    KV_CAPACITY_EXHAUSTED,
    LAGGING,
    LAST_EMIT,
    LAST_TOKEN,
    LIMIT,
    MAX_NUM_SEQS,
    NEVER,
    NEW_FROM,
    NEW_TOKEN_RATIO,
    NEXT,
    NEXT_FINISH,
    NO_PROGRESS,
    NONE,
    NUM_BLOCKS,
    PAGE_SIZE,
    POLICY_LPM,
    PREEMPTED_ANY,
    PREEMPTED_COUNT,
    PREEMPTIONS,
    PREFILL_ISL,
    PREFILL_PREFIX,
    PREFILL_TOKENS,
    PREFILLS,
    PREFIX_CACHING,
    PROMPT_EXCEEDS_KV_CAPACITY,
    PROMPT_EXCEEDS_TOKEN_BUDGET,
    RATIO_MIN,
    RATIO_STEP,
    READY_HEAD,
    REASON,
    REJECTED,
    REJECTED_HEAD,
    REQUEUED,
    ROOT,
    RUN_OFFSET,
    RUNNING,
    SCHEDULE_POLICY,
    SECOND_TOKEN,
    SETTLED,
    STATUS,
    TERMINAL,
    TERMINALS,
    TICK,
    TOKEN_BUDGET,
    TREE_NODE,
)
from vecsim.kernels.observe import count_gap
from vecsim.kernels.radix import evict, insert, lock_path, match, probe, unlock_path
from vecsim.kernels.records import emit_token, end_rejected, log_admission
from vecsim.kernels.sglang_queue import (
    known_tokens,
    pages_of,
    push_back,
    push_front,
    remove_behind,
    sort_queue,
    take_arrivals,
)
from vecsim.kernels.timing import decode_ms, prefill_ms

LOOKAHEAD_TOKENS = np.int64(20)
"""Room per survivor that a retraction makes."""


# --- pages of a request ---------------------------------------------------------------------------
@inner
def pages_held(requests, s, q):
    """Pages that an explicit request owns or shares."""
    return pages_of(s, np.int64(requests.state[COMPUTED, q]))


@inner
def pages_to_grow(requests, s, q):
    """Pages that an explicit request, computed as far as it is known, needs for one more token."""
    return np.int64(known_tokens(requests, q) % s[PAGE_SIZE] == 0)


@inner
def take_pages(pools, s, count):
    """Take `count` pages, at most all free and evictable ones."""
    evict(pools, s, count - s[FREE])
    s[FREE] -= count


@inner
def cache_computed(requests, pools, s, q):
    """Enter the full pages that `q` has computed into the tree, and hold on to them."""
    state = requests.state
    full = state[COMPUTED, q] // s[PAGE_SIZE]
    cached = np.int64(state[CACHED_PAGES, q])
    if s[PREFIX_CACHING] == 0 or full <= cached:
        return
    start = np.int64(state[TREE_NODE, q])
    end = insert(requests, pools, s, q, start, cached, full)
    lock_path(pools, s, end, start)
    state[TREE_NODE, q] = end
    state[CACHED_PAGES, q] = full


@inner
def give_up_pages(requests, pools, s, q):
    """Back to nothing computed; what is in the tree stays there until it is evicted."""
    state = requests.state
    s[FREE] += pages_held(requests, s, q) - state[CACHED_PAGES, q]
    unlock_path(pools, s, np.int64(state[TREE_NODE, q]))
    state[TREE_NODE, q] = s[ROOT]
    state[CACHED_PAGES, q] = 0
    state[COMPUTED, q] = 0


@inner
def finish(requests, pools, w, s, q, end):
    """Complete an explicit request: what it computed enters the tree, unlocked."""
    state = requests.state
    full = np.int64(state[COMPUTED, q]) // s[PAGE_SIZE]
    if s[PREFIX_CACHING] != 0:
        s[FREE] += pages_held(requests, s, q) - full
        start = np.int64(state[TREE_NODE, q])
        if full > 0:
            insert(requests, pools, s, q, start, np.int64(state[CACHED_PAGES, q]), full)
        unlock_path(pools, s, start)
    else:
        s[FREE] += pages_held(requests, s, q)
    state[STATUS, q] = COMPLETED
    requests.time[TERMINAL, q] = end
    w[TERMINALS] += 1


# --- the decode front -----------------------------------------------------------------------------
@inner
def growth_slot(s, known):
    """Counter of the passes in which a member with `known` + tick tokens needs a page."""
    return s[GROWTH_OFFSET] + (-known) % s[BLOCK_SIZE]


@inner
def join_front(requests, s, lists, q):
    """Append an explicit request, which just emitted a token, to the front."""
    state = requests.state
    generated = np.int64(state[GENERATED, q])
    known = np.int64(state[ISL, q]) + generated
    state[GENERATED, q] = generated - s[TICK]
    state[FINISH, q] = s[TICK] + state[LIMIT, q] - generated
    s[NEXT_FINISH] = min(s[NEXT_FINISH], np.int64(state[FINISH, q]))
    lists[growth_slot(s, known - s[TICK])] += 1
    s[FRONT] += 1
    s[FRONT_CONTEXT] += known
    s[FRONT_COUNTED] += state[COUNTED, q]


@inner
def leave_front(requests, s, lists, q):
    """Make a front member explicit again; the caller adjusts FRONT and the running list."""
    state = requests.state
    lists[growth_slot(s, known_tokens(requests, q))] -= 1
    state[GENERATED, q] += s[TICK]
    known = known_tokens(requests, q)
    state[COMPUTED, q] = known
    s[FRONT_CONTEXT] -= known
    s[FRONT_COUNTED] -= state[COUNTED, q]


@inner
def dissolve_front(requests, s, f, lists):
    """Make all front members explicit."""
    for i in range(s[FRONT]):
        q = np.int64(lists[s[RUN_OFFSET] + i])
        leave_front(requests, s, lists, q)
        if i < s[FRONT_JOINED]:
            requests.time[LAST_TOKEN, q] = f[LAST_EMIT]
    s[FRONT] = 0
    s[FRONT_JOINED] = 0
    s[NEXT_FINISH] = NEVER


# --- schedule: the prefill batch ------------------------------------------------------------------
@inner
def reserved_output(requests, s, q, remaining):
    """Output tokens that admission expects of a request."""
    return min(remaining, s[CLIP_MAX_NEW_TOKENS])


@inner
def room_for_prompts(requests, s, f, lists):
    """Tokens free for new prompts (float64): what is not held, less a share of the running
    requests' remaining output. Summed in running order, as the reference does."""
    room = np.float64(s[FREE] + s[IDLE]) * np.float64(s[PAGE_SIZE])
    ratio = f[NEW_TOKEN_RATIO]
    state = requests.state
    reserved = 0.0
    for i in range(s[RUNNING]):
        q = lists[s[RUN_OFFSET] + i]
        if i < s[FRONT]:
            remaining = np.int64(state[FINISH, q]) - s[TICK]
        else:
            remaining = np.int64(state[LIMIT, q]) - state[GENERATED, q]
        reserved += np.float64(min(remaining, s[CLIP_MAX_NEW_TOKENS])) * ratio
    return room - reserved


@inner
def first_to_compute(requests, pools, s, q):
    """Tokens of a waiting request that are there already: its own chunks, or cached pages."""
    state = requests.state
    if state[COMPUTED, q] > 0 or s[PREFIX_CACHING] == 0:
        return np.int64(state[COMPUTED, q])
    known = known_tokens(requests, q)
    if state[LIMIT, q] > 0:
        # One token at least is always computed.
        known = max(known - 1, np.int64(0))
    return probe(requests, pools, s, q, known // s[PAGE_SIZE]) * s[PAGE_SIZE]


@inner
def chunk_tokens(s, left, chunk_left):
    """Tokens that the next member computes of its `left` ones; 0 may mean there is no budget."""
    if pages_of(s, left) * s[PAGE_SIZE] <= chunk_left:
        return left
    return min(chunk_left // s[PAGE_SIZE] * s[PAGE_SIZE], left)


@inner
def allocate(requests, pools, s, q, start, end):
    """Give a waiting request pages for its tokens start..end. False changes nothing, but the
    cached prefix of a fresh request has been touched."""
    state = requests.state
    fresh = state[COMPUTED, q] == 0
    held = pages_held(requests, s, q)
    node = np.int64(state[TREE_NODE, q])
    if fresh:
        held = start // s[PAGE_SIZE]
        node = match(requests, pools, s, q, held)
        lock_path(pools, s, node, s[ROOT])
    need = pages_of(s, end) - held
    if need > s[FREE] + s[IDLE]:
        if fresh:
            unlock_path(pools, s, node)
        return False
    if fresh:
        state[TREE_NODE, q] = node
        state[CACHED_PAGES, q] = held
    take_pages(pools, s, need)
    return True


@inner
def settle_head(requests, pools, w, s, q, now):
    """End a queue head that can never be admitted although nothing runs on its rank."""
    state = requests.state
    known = known_tokens(requests, q)
    produced = np.int64(state[GENERATED, q])
    whole = pages_of(s, known) * s[PAGE_SIZE]
    first = min(whole, s[CHUNKED_PREFILL_SIZE] // s[PAGE_SIZE] * s[PAGE_SIZE])
    reason = NO_PROGRESS
    expected = reserved_output(requests, s, q, np.int64(state[LIMIT, q]) - produced)
    if pages_of(s, known) > s[NUM_BLOCKS] or whole + expected >= s[CAPACITY_TOKENS]:
        reason = KV_CAPACITY_EXHAUSTED if produced > 0 else PROMPT_EXCEEDS_KV_CAPACITY
    elif first > s[TOKEN_BUDGET] or (first == 0 and known > 0):
        reason = PROMPT_EXCEEDS_TOKEN_BUDGET
    end_settled(requests, pools, w, s, q, reason, now)


@inner
def end_settled(requests, pools, w, s, q, reason, now):
    """End a request that has left its queue, because nothing else would let the rank go on."""
    state = requests.state
    if state[COMPUTED, q] == 0 and state[ADMISSIONS, q] > 0:
        s[PREEMPTED_COUNT] -= 1
    give_up_pages(requests, pools, s, q)
    state[STATUS, q] = FAILED if state[GENERATED, q] > 0 else REJECTED
    state[REASON, q] = reason
    requests.time[TERMINAL, q] = now
    s[SETTLED] += 1
    w[TERMINALS] += 1


@inner
def enter_batch(requests, s, scratch, q, start, chunk, now):
    """Note a member of the batch in the summary of the pass, and its admission."""
    state = requests.state
    if state[COMPUTED, q] == 0:
        if state[ADMISSIONS, q] > 0:
            s[PREEMPTED_COUNT] -= 1
        log_admission(requests, scratch, q, now, start)
    state[COMPUTED, q] = start + chunk
    if chunk > 0:
        s[PREFILLS] += 1
        s[PREFILL_ISL] += start + chunk
        s[PREFILL_PREFIX] += start
        s[PREFILL_TOKENS] += chunk


@inner
def form_batch(requests, pools, scratch, w, s, f, lists, now):
    """Take requests off the queue, strictly in order, while budgets and memory allow. They stand
    behind the running ones in the running list, BATCHED of them."""
    state = requests.state
    if s[READY_HEAD] < 0 or s[RUNNING] >= s[MAX_NUM_SEQS]:
        return
    room = room_for_prompts(requests, s, f, lists)
    budget = s[TOKEN_BUDGET]
    chunk_left = s[CHUNKED_PREFILL_SIZE]
    while s[RUNNING] + s[BATCHED] < s[MAX_NUM_SEQS] and s[READY_HEAD] >= 0:
        q = s[READY_HEAD]
        start = first_to_compute(requests, pools, s, q)
        left = known_tokens(requests, q) - start
        chunk = chunk_tokens(s, left, chunk_left)
        cost = pages_of(s, chunk) * s[PAGE_SIZE]
        expected = np.int64(0)
        if chunk == left:
            remaining = np.int64(state[LIMIT, q]) - state[GENERATED, q]
            expected = reserved_output(requests, s, q, remaining)
        refused = chunk == 0 and left > 0
        refused |= np.float64(cost + expected) >= room or cost > budget or cost > chunk_left
        if refused or not allocate(requests, pools, s, q, start, start + chunk):
            if s[BATCHED] > 0 or s[RUNNING] > 0 or s[REJECTED_HEAD] >= 0:
                return
            remove_behind(requests, s, NONE, q)
            settle_head(requests, pools, w, s, q, now)
            room = room_for_prompts(requests, s, f, lists)
            continue
        remove_behind(requests, s, NONE, q)
        enter_batch(requests, s, scratch, q, start, chunk, now)
        lists[s[RUN_OFFSET] + s[RUNNING] + s[BATCHED]] = q
        s[BATCHED] += 1
        room -= np.float64(cost + expected)
        budget -= cost
        chunk_left -= cost
        if chunk_left <= 0:
            return


@inner
def start_prefill(requests, pools, s, lists):
    """Unfinished prompts go back to the queue, finished ones join the running list; room is made
    for the first tokens of those that need more than one."""
    state = requests.state
    s[NEW_FROM] = s[RUNNING]
    first = s[RUN_OFFSET] + s[RUNNING]
    need = np.int64(0)
    for i in range(first, first + s[BATCHED]):
        q = np.int64(lists[i])
        if state[COMPUTED, q] < known_tokens(requests, q):
            # At most one, the last.
            cache_computed(requests, pools, s, q)
            push_front(requests, s, q)
            continue
        s[RUNNING] += 1
        if state[LIMIT, q] - state[GENERATED, q] > 1:
            need += pages_to_grow(requests, s, q)
    evict(pools, s, need - s[FREE])
    last = s[RUN_OFFSET] + s[RUNNING]
    for i in range(first, last):
        q = np.int64(lists[i])
        if state[LIMIT, q] - state[GENERATED, q] > 1:
            cache_computed(requests, pools, s, q)
    s[FITS] = np.int64(s[FREE] >= need)
    if s[FITS] == 0:
        return
    s[FREE] -= need
    for i in range(first, last):
        q = lists[i]
        if state[LIMIT, q] - state[GENERATED, q] > 1:
            state[COMPUTED, q] += 1


# --- schedule: the decode step --------------------------------------------------------------------
@inner
def decode_growth(requests, s, lists):
    """Pages that all running requests together need for one more token each."""
    need = np.int64(0)
    if s[FRONT] > 0:
        need += lists[s[GROWTH_OFFSET] + s[TICK] % s[BLOCK_SIZE]]
    for i in range(s[FRONT], s[RUNNING]):
        need += pages_to_grow(requests, s, np.int64(lists[s[RUN_OFFSET] + i]))
    return need


@inner
def sort_running(requests, s, lists):
    """Most outputs first, then the shortest prompt, otherwise as before."""
    state = requests.state
    start = s[RUN_OFFSET]
    for i in range(start + 1, start + s[RUNNING]):
        q = lists[i]
        at = np.int64(i)
        while at > start:
            other = lists[at - 1]
            ahead = np.int64(state[GENERATED, other]) - state[GENERATED, q]
            if ahead > 0 or (ahead == 0 and state[ISL, other] <= state[ISL, q]):
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
    while s[FREE] + s[IDLE] < need and s[RUNNING] > 1:
        s[RUNNING] -= 1
        q = np.int64(lists[s[RUN_OFFSET] + s[RUNNING]])
        need -= pages_to_grow(requests, s, q)
        give_up_pages(requests, pools, s, q)
        push_back(requests, s, q)
        state[FRESH, q] = 0
        s[PREEMPTED_COUNT] += 1
        s[PREEMPTIONS] += 1
        s[PREEMPTED_ANY] = 1
        evict(pools, s, pages_of(s, LOOKAHEAD_TOKENS * s[RUNNING] - s[FREE] * s[PAGE_SIZE]))
    return need


@inner
def estimated_ratio(requests, s, lists):
    """new_token_ratio after a retraction, from the survivors' progress."""
    produced = np.int64(0)
    asked = np.int64(0)
    for i in range(s[RUNNING]):
        q = lists[s[RUN_OFFSET] + i]
        produced += requests.state[GENERATED, q]
        asked += requests.state[LIMIT, q]
    share = np.float64(produced + LOOKAHEAD_TOKENS * s[RUNNING]) / np.float64(asked + 1)
    return min(1.0, share)


@inner
def free_a_holder(requests, pools, w, s, now):
    """A half-prefilled request in the queue gives back the pages that the last running request
    needs: once it is requeued, the second time it is rejected. False when there is none."""
    state = requests.state
    before = NONE
    q = s[READY_HEAD]
    while q >= 0 and state[COMPUTED, q] == 0:
        before = q
        q = np.int64(state[NEXT, q])
    if q < 0:
        return False
    remove_behind(requests, s, before, q)
    if state[REQUEUED, q] != 0:
        end_settled(requests, pools, w, s, q, NO_PROGRESS, now)
    else:
        give_up_pages(requests, pools, s, q)
        state[REQUEUED, q] = 1
        push_back(requests, s, q)
        s[PREEMPTED_COUNT] += 1
        s[SETTLED] += 1
    return True


@inner
def settle_runner(requests, pools, w, s, f, lists, need, now):
    """The last running request cannot grow: it outgrew the pool, or others hold its pages."""
    q = np.int64(lists[s[RUN_OFFSET]])
    dissolve_front(requests, s, f, lists)
    if pages_of(s, known_tokens(requests, q) + 1) > s[NUM_BLOCKS]:
        s[RUNNING] = 0
        end_settled(requests, pools, w, s, q, KV_CAPACITY_EXHAUSTED, now)
        requests.state[STATUS, q] = FAILED
        return
    while s[FREE] + s[IDLE] < need:
        if not free_a_holder(requests, pools, w, s, now):
            return


@inner
def start_decode(requests, pools, w, s, f, lists, now):
    """Make room for one more token of every running request."""
    need = decode_growth(requests, s, lists)
    if s[FREE] + s[IDLE] < need and s[RUNNING] > 1:
        dissolve_front(requests, s, f, lists)
        need = retract(requests, pools, s, lists, need)
        f[NEW_TOKEN_RATIO] = estimated_ratio(requests, s, lists)
    if s[FREE] + s[IDLE] < need:
        settle_runner(requests, pools, w, s, f, lists, need, now)
    if s[RUNNING] > 0:
        take_pages(pools, s, need)


@inner
def decay_ratio(f, passes):
    """new_token_ratio after `passes` decode passes without retraction."""
    ratio = f[NEW_TOKEN_RATIO]
    for _ in range(passes):
        following = max(ratio - f[RATIO_STEP], f[RATIO_MIN])
        if following == ratio:
            break
        ratio = following
    f[NEW_TOKEN_RATIO] = ratio


@inner
def schedule(requests, pools, scratch, w, s, f, lists, now, defer):
    """Step 1 of a pass: form a prefill batch, or else decode; all effects on KV pages."""
    if s[RUNNING] == 0:
        # Ticks are kept in 32 bits; without a front nothing counts from them.
        s[TICK] = 0
    s[PREEMPTED_ANY] = 0
    s[SETTLED] = 0
    s[REJECTED_HEAD] = NONE
    s[PREFILLS] = 0
    s[PREFILL_ISL] = 0
    s[PREFILL_PREFIX] = 0
    s[PREFILL_TOKENS] = 0
    s[BATCHED] = 0
    take_arrivals(requests, s, now)
    if s[SCHEDULE_POLICY] == POLICY_LPM and s[PREFIX_CACHING] != 0:
        sort_queue(requests, pools, s)
    if not defer:
        form_batch(requests, pools, scratch, w, s, f, lists, now)
    if s[BATCHED] > 0:
        start_prefill(requests, pools, s, lists)
    else:
        start_decode(requests, pools, w, s, f, lists, now)
        if s[PREEMPTED_ANY] == 0:
            decay_ratio(f, np.int64(1))
    s[BUDGET] = s[TOKEN_BUDGET] - s[PREFILL_TOKENS]


# --- price ----------------------------------------------------------------------------------------
@inner
def price(requests, s, f, lists, start):
    """End of the scheduled pass that begins at `start`, or a negative number for a bad price."""
    duration = 0.0
    if s[PREFILLS] > 0:
        duration = prefill_ms(s, f, s[PREFILLS], s[PREFILL_ISL], s[PREFILL_PREFIX])
    elif s[BATCHED] == 0 and s[RUNNING] > 0:
        context = s[FRONT_CONTEXT]
        for i in range(s[FRONT], s[RUNNING]):
            context += known_tokens(requests, np.int64(lists[s[RUN_OFFSET] + i]))
        duration = decode_ms(s, f, s[RUNNING], context)
    if duration < 0.0:
        return -1.0
    return start + duration


@inner
def tokens_to_emit(requests, s, lists):
    """Tokens that the pass in flight emits at its end."""
    if s[BATCHED] == 0:
        return s[RUNNING]
    tokens = np.int64(0)
    for i in range(s[NEW_FROM], s[RUNNING]):
        q = lists[s[RUN_OFFSET] + i]
        remaining = np.int64(requests.state[LIMIT, q]) - requests.state[GENERATED, q]
        tokens += np.int64(remaining == 1 or (remaining > 1 and s[FITS] != 0))
    return tokens


# --- apply ----------------------------------------------------------------------------------------
@inner
def end_prefill(requests, pools, times, scratch, w, s, lists, end):
    """First tokens of the new running requests; those with nothing more to produce leave."""
    state = requests.state
    start = s[RUN_OFFSET]
    for i in range(s[NEW_FROM], s[RUNNING]):
        q = np.int64(lists[start + i])
        if state[LIMIT, q] == state[GENERATED, q]:
            finish(requests, pools, w, s, q, end)
            lists[start + i] = NONE
    kept = s[NEW_FROM]
    s[LAGGING] = np.int64(s[FRONT] > 0)
    for i in range(s[NEW_FROM], s[RUNNING]):
        q = np.int64(lists[start + i])
        if q < 0:
            continue
        last = state[LIMIT, q] - state[GENERATED, q] == 1
        emitted = last or s[FITS] != 0
        if emitted:
            emit_token(requests, times, scratch, q, end)
        if last:
            finish(requests, pools, w, s, q, end)
            continue
        lists[start + kept] = q
        kept += 1
        if emitted and kept == s[FRONT] + 1:
            join_front(requests, s, lists, q)
    s[RUNNING] = kept


@inner
def emit_front(requests, times, scratch, s, f, lists, end):
    """One token of every front member. Those that joined since the last decode pass got theirs
    before in prefill passes of their own."""
    counted = s[FRONT_COUNTED]
    for i in range(s[FRONT_JOINED], s[FRONT]):
        q = np.int64(lists[s[RUN_OFFSET] + i])
        count = np.int64(requests.state[COUNTED, q])
        counted -= count
        count_gap(times, scratch, end - requests.time[LAST_TOKEN, q], count)
        if np.isnan(requests.time[SECOND_TOKEN, q]):
            requests.time[SECOND_TOKEN, q] = end
    if s[FRONT_JOINED] > 0:
        count_gap(times, scratch, end - f[LAST_EMIT], counted)


@inner
def advance_front(s, f, passes, end):
    """`passes` decode passes went by for every front member, the last until `end`."""
    s[TICK] += passes
    s[FRONT_CONTEXT] += passes * s[FRONT]
    s[LAGGING] = 0
    f[LAST_EMIT] = end


@inner
def finish_front(requests, pools, w, s, lists, end):
    """Complete the front members whose last token came at `end`."""
    start = s[RUN_OFFSET]
    kept = np.int64(0)
    next_finish = NEVER
    for i in range(s[FRONT]):
        q = np.int64(lists[start + i])
        if requests.state[FINISH, q] <= s[TICK]:
            leave_front(requests, s, lists, q)
            requests.time[LAST_TOKEN, q] = end
            finish(requests, pools, w, s, q, end)
        else:
            next_finish = min(next_finish, np.int64(requests.state[FINISH, q]))
            lists[start + kept] = q
            kept += 1
    gone = s[FRONT] - kept
    s[FRONT] = kept
    s[NEXT_FINISH] = next_finish
    for i in range(kept + gone, s[RUNNING]):
        lists[start + i - gone] = lists[start + i]
    s[RUNNING] -= gone


@inner
def end_decode(requests, pools, times, scratch, w, s, f, lists, end):
    """One token of every running request; the explicit ones join the front."""
    state = requests.state
    emit_front(requests, times, scratch, s, f, lists, end)
    advance_front(s, f, np.int64(1), end)
    if s[TICK] >= s[NEXT_FINISH]:
        finish_front(requests, pools, w, s, lists, end)
    s[FRONT_JOINED] = s[FRONT]
    start = s[RUN_OFFSET]
    kept = s[FRONT]
    for i in range(s[FRONT], s[RUNNING]):
        q = np.int64(lists[start + i])
        state[COMPUTED, q] += 1
        emit_token(requests, times, scratch, q, end)
        if state[GENERATED, q] == state[LIMIT, q]:
            finish(requests, pools, w, s, q, end)
            continue
        lists[start + kept] = q
        kept += 1
        join_front(requests, s, lists, q)
    s[RUNNING] = kept


@inner
def apply(requests, pools, times, scratch, w, s, f, lists, start, end):
    """Step 4 of a pass: tokens, completions, rejections at its end. Returns held pages x ms."""
    held = np.float64(s[NUM_BLOCKS] - s[FREE] - s[IDLE]) * (end - start)
    if s[BATCHED] > 0:
        end_prefill(requests, pools, times, scratch, w, s, lists, end)
    elif s[RUNNING] > 0:
        end_decode(requests, pools, times, scratch, w, s, f, lists, end)
    end_rejected(requests, w, s, end)
    s[COMMITTED_PREFILL] += s[PREFILL_TOKENS]
    return held
