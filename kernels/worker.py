"""One logical worker: its attention-DP ranks, the group barrier, fused stretches, advance.

All ranks with work start a pass together and end together, at the latest rank's end (reference:
runtimes, section 4). When every one of them is *steady* (its running requests all decode in step,
and nobody can be admitted), the following passes differ only in their durations: they are walked as
one *stretch*, whose clock is that of pass-by-pass stepping, addition for addition, and whose
effects on blocks and requests are settled once, at its end.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.jit import inner
from vecsim.kernels.layout import (
    ARRIVAL,
    BAD_PRICE,
    BLOCK_SIZE,
    BUDGET,
    BUSY_MS,
    CAPACITY_BOUND,
    CHUNK,
    CLOCK,
    DONE,
    DURATIONS,
    ENDS,
    EVICT_BELADY,
    EVICTION_POLICY,
    FREE,
    FRONT,
    FRONT_CONTEXT,
    FRONT_COUNTED,
    FRONT_JOINED,
    FRUITLESS,
    GAPS,
    GENERATED,
    GROWN,
    GROWTH_OFFSET,
    IDLE,
    ISL,
    KV_BLOCK_MS,
    LOG_FULL,
    MAX_NUM_SEQS,
    NEXT_FINISH,
    NO_MOVE,
    NO_PASS,
    NUM_BLOCKS,
    ONE_PASS,
    PARTICIPATES,
    PASS_END,
    PASSES,
    PAUSED,
    PENDING,
    PENDING_PASSES,
    PREEMPTED_ANY,
    PREEMPTED_COUNT,
    PREEMPTIONS,
    PREFILL_SCHEDULE_INTERVAL,
    PREFILL_TOKENS,
    QUEUE_HEAD,
    REJECTED_HEAD,
    RUNNING,
    SEGMENT_BLOCKS,
    SEGMENT_END,
    SEGMENT_FIRST,
    SEGMENT_HELD,
    SEGMENT_OUTPUT,
    SEGMENT_PASSES,
    SEGMENT_PREEMPTIONS,
    SEGMENT_PREFILL,
    SEGMENT_RANK,
    SEGMENT_RUNNING,
    SEGMENT_START,
    SETTLED,
    STEP,
    STRETCH,
    TERMINALS,
    TICK,
    TICKS_EXHAUSTED,
    TOKEN_BUDGET,
    UNLIMITED,
)
from vecsim.kernels.observe import count_gaps
from vecsim.kernels.timing import decode_series
from vecsim.kernels.vllm import (
    advance_front,
    apply,
    finish_front,
    grow_running,
    has_work,
    is_deferring,
    mark_second_tokens,
    passes_the_gate,
    price,
    queue_head,
    rejection,
    reusable_blocks,
    schedule,
    tokens_to_admit,
    tokens_to_emit,
)

FRUITLESS_LIMIT = np.int64(1 << 12)
"""The progress guard trips after so many passes that only preempt: no token, no end."""

LAST_TICK = np.int64(1 << 30)
"""Ticks are kept in 32 bits, and a request adds up to 2**30 tokens to one."""


# --- steadiness of one rank -----------------------------------------------------------------------
@inner
def head_keeps_waiting(requests, pools, s, q):
    """Whether the queue head stays where it is as long as nobody leaves the front."""
    if s[RUNNING] >= s[MAX_NUM_SEQS]:
        return True
    if rejection(requests, s, q) > 0:
        return False
    known = np.int64(requests.state[ISL, q]) + requests.state[GENERATED, q]
    hits, active = reusable_blocks(requests, pools, s, q, known)
    if not passes_the_gate(requests, s, q, hits, active, False):
        return True
    s[BUDGET] = s[TOKEN_BUDGET] - s[FRONT]
    return tokens_to_admit(requests, s, q, known, hits * s[BLOCK_SIZE]) < 0


@inner
def passes_within(s, lists, blocks, passes):
    """How many of `passes` pure decode passes the given number of blocks suffices for."""
    front = s[FRONT]
    block_size = s[BLOCK_SIZE]
    if front * (passes // block_size + 1) <= blocks:
        return passes
    covered = (blocks // front) * block_size
    left = blocks % front
    growth = lists[s[GROWTH_OFFSET] : s[GROWTH_OFFSET] + block_size]
    slot = s[TICK] % block_size
    while covered < passes and growth[slot] <= left:
        left -= growth[slot]
        covered += 1
        slot += 1
        if slot == block_size:
            slot = np.int64(0)
    return min(covered, passes)


@inner
def steady_passes(requests, pools, s, lists, now):
    """Passes that the rank can make as pure decodes of its front; 0 when it is not steady."""
    if s[FRONT] == 0 or s[RUNNING] != s[FRONT] or s[FRONT] > s[TOKEN_BUDGET]:
        return np.int64(0)
    q = queue_head(requests, s, now)
    if q >= 0 and not head_keeps_waiting(requests, pools, s, q):
        return np.int64(0)
    blocks = s[FREE]
    if s[EVICTION_POLICY] != EVICT_BELADY:
        # Belady's victim depends on what other workers admit meanwhile.
        blocks += s[IDLE]
    return passes_within(s, lists, blocks, s[NEXT_FINISH] - s[TICK])


@inner
def watched_arrival(requests, s, now):
    """Time of the next arrival that this rank would act on during a stretch."""
    q = s[QUEUE_HEAD]
    if q < 0 or queue_head(requests, s, now) >= 0:
        return np.inf
    if s[RUNNING] >= s[MAX_NUM_SEQS] and s[PREFILL_SCHEDULE_INTERVAL] == 1:
        return np.inf
    return requests.time[ARRIVAL, q]


# --- opening a pass or a stretch ------------------------------------------------------------------
@inner
def open_pass(ranks, workers, requests, pools, scratch, worker, dp_size):
    """Start what the worker does next at its clock: nothing, one pass (scheduled and priced), or a
    stretch of PENDING_PASSES passes at most (still to be walked). Returns DONE or BAD_PRICE."""
    w = workers.state[worker]
    now = workers.time[worker, CLOCK]
    first = worker * dp_size
    passes = UNLIMITED
    working = np.int64(0)
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        s[PARTICIPATES] = np.int64(has_work(requests, s, now))
        if s[PARTICIPATES] != 0:
            working += 1
            if passes > 0:
                steady = steady_passes(requests, pools, s, ranks.lists, now)
                passes = min(passes, steady)
    w[PENDING] = NO_PASS
    if working == 0:
        return DONE
    if passes > 0:
        w[PENDING] = STRETCH
        w[PENDING_PASSES] = passes
        return DONE
    end = now
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        if s[PARTICIPATES] == 0:
            continue
        lists = ranks.lists
        defer = dp_size > 1 and is_deferring(requests, s, lists, w[STEP])
        schedule(requests, pools, scratch, w, s, lists, now, defer)
        rank_end = price(requests, s, ranks.factors[r], lists, now)
        if rank_end < 0.0:
            return BAD_PRICE
        end = max(end, rank_end)
    w[PENDING] = ONE_PASS
    w[PENDING_PASSES] = 1
    workers.time[worker, PASS_END] = end
    return DONE


@inner
def first_watched_arrival(ranks, workers, requests, worker, dp_size):
    """Earliest arrival that ends a stretch of this worker, or infinity."""
    now = workers.time[worker, CLOCK]
    earliest = np.inf
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        arrival = watched_arrival(requests, ranks.fields[r], now)
        earliest = min(earliest, arrival)
    return earliest


# --- walking a stretch ----------------------------------------------------------------------------
@inner
def price_chunk(ranks, scratch, first, dp_size, done, count):
    """Durations of up to `count` group passes after `done` ones of the stretch; returns how many,
    fewer before a bad price."""
    chunk = scratch.chunk
    for k in range(count):
        chunk[DURATIONS, k] = 0.0
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        if s[PARTICIPATES] == 0:
            continue
        context = s[FRONT_CONTEXT] + done * s[FRONT]
        f = ranks.factors[r]
        count = decode_series(s, f, s[FRONT], context, count, chunk)
    return count


@inner
def chunk_end(scratch, count, start, arrival, until):
    """Add up the durations in order. Returns how many of the `count` passes belong to the stretch:
    up to the first that ends at or after `arrival`, without those that end after `until`."""
    ends = scratch.chunk[ENDS]
    durations = scratch.chunk[DURATIONS]
    end = start
    for k in range(count):
        end += durations[k]
        ends[k] = end
    if end < arrival and end <= until:
        return count
    for k in range(count):
        if ends[k] > until:
            return np.int64(k)
        if ends[k] >= arrival:
            return np.int64(k) + 1
    return count


@inner
def observe_chunk(ranks, times, requests, scratch, first, dp_size, done, count, start):
    """Record `count` walked passes: gaps, second tokens, held blocks."""
    ends = scratch.chunk[ENDS]
    gaps = scratch.chunk[GAPS]
    gaps[0] = ends[0] - start
    for k in range(1, count):
        gaps[k] = ends[k] - ends[k - 1]
    weight = np.int64(0)
    held = 0.0
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        if s[PARTICIPATES] == 0:
            continue
        if done == 0:
            s[GROWN] = 0
            mark_second_tokens(requests, s, ranks.lists, ends[0])
        weight += s[FRONT_COUNTED]
        block_size = s[BLOCK_SIZE]
        growth = ranks.lists[s[GROWTH_OFFSET] : s[GROWTH_OFFSET] + block_size]
        active = s[NUM_BLOCKS] - s[FREE] - s[IDLE] + s[GROWN]
        held += np.float64(active) * (ends[count - 1] - start)
        slot = (s[TICK] + done) % block_size
        pass_start = start
        grown = np.int64(0)
        for k in range(count):
            if growth[slot] != 0:
                grown += growth[slot]
                held += np.float64(growth[slot]) * (ends[count - 1] - pass_start)
            pass_start = ends[k]
            slot += 1
            if slot == block_size:
                slot = np.int64(0)
        s[GROWN] += grown
    times[KV_BLOCK_MS] += held
    count_gaps(times, scratch, count, weight)


@inner
def walk_stretch(
    ranks, workers, requests, scratch, worker, dp_size, passes, arrival, until, observe
):
    """Walk up to `passes` steady passes from the clock; PASS_END is the end of the last one.

    Returns the number of passes: fewer when one ends at or after `arrival` or would end after
    `until`, or before a bad price; negative if the first has one. Records them only if `observe`.
    """
    times = workers.time[worker]
    first = worker * dp_size
    end = times[CLOCK]
    done = np.int64(0)
    while done < passes:
        count = min(np.int64(CHUNK), passes - done)
        count = price_chunk(ranks, scratch, first, dp_size, done, count)
        if count == 0:
            if done == 0:
                return np.int64(-1)
            break
        taken = chunk_end(scratch, count, end, arrival, until)
        if taken > 0:
            if observe:
                observe_chunk(ranks, times, requests, scratch, first, dp_size, done, taken, end)
            end = scratch.chunk[ENDS, taken - 1]
            done += taken
        if taken < count or end >= arrival:
            break
    times[PASS_END] = end
    return done


# --- closing --------------------------------------------------------------------------------------
@inner
def is_drained(requests, ranks, first, dp_size, start, end):
    """Whether no request that came before `end` is waiting or running on any rank."""
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        if has_work(requests, s, start):
            return False
        q = s[QUEUE_HEAD]
        if q >= 0 and requests.time[ARRIVAL, q] < end:
            return False
    return True


@inner
def log_segment(scratch, w, s, rank, times, passes, output, prefill, held):
    """Write what one rank did in a pass or stretch that is about to be closed."""
    line = scratch.log_length[1]
    segments = scratch.segments
    segments[SEGMENT_RANK, line] = rank
    segments[SEGMENT_FIRST, line] = w[PASSES]
    segments[SEGMENT_START, line] = times[CLOCK]
    segments[SEGMENT_END, line] = times[PASS_END]
    segments[SEGMENT_PASSES, line] = passes
    segments[SEGMENT_RUNNING, line] = s[RUNNING]
    segments[SEGMENT_OUTPUT, line] = output
    segments[SEGMENT_PREFILL, line] = prefill
    segments[SEGMENT_BLOCKS, line] = s[NUM_BLOCKS] - s[FREE] - s[IDLE]
    segments[SEGMENT_HELD, line] = times[KV_BLOCK_MS] + held
    segments[SEGMENT_PREEMPTIONS, line] = s[PREEMPTIONS]
    scratch.log_length[1] = line + 1


@inner
def close(ranks, workers, requests, worker, dp_size, passes):
    """Bookkeeping of a finished pass or stretch; the clock moves to its end."""
    w = workers.state[worker]
    times = workers.time[worker]
    start = times[CLOCK]
    times[BUSY_MS] += times[PASS_END] - start
    times[CLOCK] = times[PASS_END]
    w[PASSES] += passes
    w[PENDING] = NO_PASS
    w[STEP] += passes
    if dp_size > 1 and is_drained(
        requests, ranks, worker * dp_size, dp_size, start, times[PASS_END]
    ):
        w[STEP] = 0


@inner
def close_pass(ranks, workers, requests, pools, scratch, worker, dp_size):
    """Apply the pass in flight on every rank. Returns DONE, NO_MOVE or TICKS_EXHAUSTED."""
    w = workers.state[worker]
    times = workers.time[worker]
    before = w[TERMINALS]
    moved = False
    strained = False
    exhausted = False
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        s = ranks.fields[r]
        if s[PARTICIPATES] == 0:
            continue
        strained |= s[PREEMPTED_ANY] != 0 or s[BUDGET] == s[TOKEN_BUDGET]
        moved |= s[SETTLED] > 0 or s[REJECTED_HEAD] >= 0
        if scratch.segments.shape[1] > 0:
            held = np.float64(s[NUM_BLOCKS] - s[FREE] - s[IDLE]) * (times[PASS_END] - times[CLOCK])
            tokens = tokens_to_emit(requests, s, ranks.lists)
            log_segment(scratch, w, s, r, times, np.int64(1), tokens, s[PREFILL_TOKENS], held)
        times[KV_BLOCK_MS] += apply(
            requests,
            pools,
            times,
            scratch,
            w,
            s,
            ranks.lists,
            times[CLOCK],
            times[PASS_END],
        )
        moved |= s[FRONT] > 0
        exhausted |= s[TICK] > LAST_TICK
    close(ranks, workers, requests, worker, dp_size, np.int64(1))
    if moved or w[TERMINALS] > before:
        w[FRUITLESS] = 0
    elif strained:
        w[FRUITLESS] += 1
    if w[FRUITLESS] > FRUITLESS_LIMIT:
        return NO_MOVE
    return TICKS_EXHAUSTED if exhausted else DONE


@inner
def close_stretch(ranks, workers, requests, pools, scratch, worker, dp_size, passes):
    """Settle a stretch of `passes` walked passes that ends at PASS_END."""
    w = workers.state[worker]
    times = workers.time[worker]
    end = times[PASS_END]
    exhausted = False
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        s = ranks.fields[r]
        if s[PARTICIPATES] == 0:
            continue
        if scratch.segments.shape[1] > 0:
            log_segment(scratch, w, s, r, times, passes, s[FRONT] * passes, np.int64(0), 0.0)
        grow_running(requests, pools, s, s[GROWN])
        interval = s[PREFILL_SCHEDULE_INTERVAL]
        to_next_admission = (interval - w[STEP] % interval) % interval
        if s[CAPACITY_BOUND] != 0 or to_next_admission < passes:
            s[CAPACITY_BOUND] = np.int64(queue_head(requests, s, times[CLOCK]) >= 0)
        advance_front(s, passes)
        if s[TICK] >= s[NEXT_FINISH]:
            finish_front(requests, pools, w, s, ranks.lists, end)
        s[FRONT_JOINED] = s[FRONT]
        exhausted |= s[TICK] > LAST_TICK
    close(ranks, workers, requests, worker, dp_size, passes)
    w[FRUITLESS] = 0
    return TICKS_EXHAUSTED if exhausted else DONE


# --- advancing a worker that nobody else looks at -------------------------------------------------
@inner
def log_has_room(ranks, scratch, worker, dp_size):
    """Whether every preempted request of the worker could be readmitted without filling the log,
    and every rank could log the segment that it has in flight."""
    if scratch.segments.shape[1] > 0:
        lines_left = np.int64(scratch.segments.shape[1]) - scratch.log_length[1]
        if lines_left < np.int64(ranks.fields.shape[0]):
            return False
    room = np.int64(scratch.log.shape[1]) - scratch.log_length[0]
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        room -= ranks.fields[r, PREEMPTED_COUNT]
    return room >= 0


@inner
def earliest_arrival(ranks, requests, worker, dp_size):
    """Arrival of the first request in the queues of an idle worker, or infinity."""
    earliest = np.inf
    for r in range(worker * dp_size, (worker + 1) * dp_size):
        q = ranks.fields[r, QUEUE_HEAD]
        if q >= 0:
            earliest = min(earliest, requests.time[ARRIVAL, q])
    return earliest


@inner
def jump_to_arrival(ranks, workers, requests, worker, dp_size, until):
    """Move an idle worker's clock to its next arrival; False when none is due by `until`."""
    earliest = earliest_arrival(ranks, requests, worker, dp_size)
    if earliest == np.inf or earliest > until:
        return False
    workers.time[worker, CLOCK] = earliest
    return True


@inner
def advance(ranks, workers, requests, pools, scratch, worker, dp_size, until, segments):
    """Run every pass of the worker that ends at or before `until`, at most `segments` passes and
    stretches. Returns DONE, PAUSED (segments used up), LOG_FULL or an error; all but errors can
    be continued by calling again."""
    w = workers.state[worker]
    for _ in range(segments):
        if not log_has_room(ranks, scratch, worker, dp_size):
            return LOG_FULL
        code = open_pass(ranks, workers, requests, pools, scratch, worker, dp_size)
        if code != DONE:
            return code
        if w[PENDING] == NO_PASS:
            if not jump_to_arrival(ranks, workers, requests, worker, dp_size, until):
                return DONE
        elif w[PENDING] == STRETCH:
            arrival = first_watched_arrival(ranks, workers, requests, worker, dp_size)
            passes = walk_stretch(
                ranks,
                workers,
                requests,
                scratch,
                worker,
                dp_size,
                w[PENDING_PASSES],
                arrival,
                until,
                True,
            )
            if passes < 0:
                return BAD_PRICE
            if passes == 0:
                return DONE
            code = close_stretch(ranks, workers, requests, pools, scratch, worker, dp_size, passes)
        else:
            if workers.time[worker, PASS_END] > until:
                return DONE
            code = close_pass(ranks, workers, requests, pools, scratch, worker, dp_size)
        if code != DONE:
            return code
    return PAUSED
