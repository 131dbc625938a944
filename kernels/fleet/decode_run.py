"""Decode runs: pure decode passes that follow each other, walked as one.

The clock of a run is that of pass-by-pass stepping, addition for addition; what it does to blocks
and requests is applied once, at its end, by the scheduler of the rank.

A worker that advances on its own walks a whole run at once: `walk_run`. On the fleet's clock a run
in flight may be cut short by anything that concerns its worker, and is walked chunk by chunk as
time goes by: `look_ahead` finds the ends of the next passes, and keeps them with the worker;
`record_ahead` records them once they have come.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.lifecycle import mark_second_tokens
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import worker as W
from vecsim.kernels.timing.durations import decode_series
from vecsim.kernels.timing.itl_histogram import count_gaps


@inner
def price_chunk(ranks, scratch, first, dp_size, done, count):
    """Durations of up to `count` group passes after `done` ones of the run; returns how many,
    fewer before a bad price."""
    chunk = scratch.chunk
    for k in range(count):
        chunk[W.DURATIONS, k] = 0.0
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        if s[R.PARTICIPATES] == 0:
            continue
        context = s[R.DECODING_CONTEXT] + done * s[R.DECODING]
        f = ranks.factors[r]
        count = decode_series(s, f, s[R.DECODING], context, count, chunk)
    return count


@inner
def chunk_end(scratch, count, start, arrival, until):
    """Add up the durations in order. Returns how many of the `count` passes belong to the run:
    up to the first that ends at or after `arrival`, without those that end after `until`."""
    ends = scratch.chunk[W.ENDS]
    durations = scratch.chunk[W.DURATIONS]
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
def log_passes(
    events, log_run, ranks, requests, pools, scratch, first, dp_size, done, count, start
):
    """KV events of the passes of a chunk, rank by rank."""
    if events is not None:
        for r in range(first, first + dp_size):
            s = ranks.fields[r]
            if s[R.PARTICIPATES] != 0:
                ends = scratch.chunk[W.ENDS]
                log_run(requests, pools, s, ranks.lists, ends, done, count, start)


@inner
def record_chunk(
    ranks, times, requests, pools, scratch, first, dp_size, done, count, start, log_run
):
    """Record `count` walked passes: gaps, second tokens, held blocks, KV events."""
    ends = scratch.chunk[W.ENDS]
    gaps = scratch.chunk[W.GAPS]
    gaps[0] = ends[0] - start
    for k in range(1, count):
        gaps[k] = ends[k] - ends[k - 1]
    weight = np.int64(0)
    held = 0.0
    for r in range(first, first + dp_size):
        s = ranks.fields[r]
        if s[R.PARTICIPATES] == 0:
            continue
        if done == 0:
            s[R.GROWN] = 0
            mark_second_tokens(requests, s, ranks.lists, ends[0])
        weight += s[R.DECODING_COUNTED]
        block_size = s[R.BLOCK_SIZE]
        growth = ranks.lists[s[R.GROWTH_OFFSET] : s[R.GROWTH_OFFSET] + block_size]
        active = s[R.NUM_BLOCKS] - s[R.FREE] - s[R.EVICTABLE] + s[R.GROWN]
        held += np.float64(active) * (ends[count - 1] - start)
        slot = (s[R.TICK] + done) % block_size
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
        s[R.GROWN] += grown
    times[W.KV_BLOCK_MS] += held
    count_gaps(times, scratch, count, weight)
    log_passes(
        pools.events,
        log_run,
        ranks,
        requests,
        pools,
        scratch,
        first,
        dp_size,
        done,
        count,
        start,
    )


@inner
def walk_run(ranks, workers, requests, pools, scratch, worker, passes, arrival, until, log_run):
    """Walk and record up to `passes` steady passes from the clock; PASS_END is the end of the last.

    Returns the number of passes: fewer when one ends at or after `arrival` or would end after
    `until`, or before a bad price; negative if the first has one.
    """
    times = workers.time[worker]
    first = workers.state[worker, W.FIRST_RANK]
    dp_size = workers.state[worker, W.DP_SIZE]
    end = times[W.CLOCK]
    done = np.int64(0)
    while done < passes:
        count = min(np.int64(W.CHUNK), passes - done)
        count = price_chunk(ranks, scratch, first, dp_size, done, count)
        if count == 0:
            if done == 0:
                return np.int64(-1)
            break
        taken = chunk_end(scratch, count, end, arrival, until)
        if taken > 0:
            record_chunk(
                ranks,
                times,
                requests,
                pools,
                scratch,
                first,
                dp_size,
                done,
                taken,
                end,
                log_run,
            )
            end = scratch.chunk[W.ENDS, taken - 1]
            done += taken
        if taken < count or end >= arrival:
            break
    times[W.PASS_END] = end
    return done


# --- on the fleet's clock -------------------------------------------------------------------------
@inner
def look_ahead(ranks, workers, scratch, worker):
    """Find the ends of the passes after those walked, one chunk at most; PASS_END is the last.

    PENDING_PASSES becomes smaller where a pass ends at or after WAKE_AT, before a bad price, and
    where time stands still at the end of the chunk. Returns how many ends there are.
    """
    w = workers.state[worker]
    times = workers.time[worker]
    end = times[W.WALKED]
    wanted = min(np.int64(W.CHUNK), w[W.PENDING_PASSES] - w[W.WALKED_PASSES])
    priced = price_chunk(ranks, scratch, w[W.FIRST_RANK], w[W.DP_SIZE], w[W.WALKED_PASSES], wanted)
    before = end
    count = np.int64(0)
    while count < priced and (count == 0 or end < times[W.WAKE_AT]):
        before = end
        end += scratch.chunk[W.DURATIONS, count]
        times[W.WORKER_TIME + count] = end
        count += 1
    if count < wanted or end == before or end >= times[W.WAKE_AT]:
        w[W.PENDING_PASSES] = w[W.WALKED_PASSES] + count
    w[W.AHEAD] = count
    times[W.PASS_END] = end
    return count


@inner
def is_last_ahead(w):
    """Whether the run in flight is known to its end."""
    return w[W.WALKED_PASSES] + w[W.AHEAD] == w[W.PENDING_PASSES]


@inner
def cut_ahead(workers, worker, due):
    """Let the run in flight end with the first pass that ends at or after `due`, a time that has
    not gone by; if that pass is not known yet, WAKE_AT remembers it."""
    w = workers.state[worker]
    times = workers.time[worker]
    if w[W.WALKED_PASSES] > 0 and times[W.WALKED] >= due:
        w[W.AHEAD] = 0
        times[W.PASS_END] = times[W.WALKED]
        w[W.PENDING_PASSES] = w[W.WALKED_PASSES]
        return
    k = np.int64(0)
    while k < w[W.AHEAD] and times[W.WORKER_TIME + k] < due:
        k += 1
    if k == w[W.AHEAD]:
        times[W.WAKE_AT] = min(times[W.WAKE_AT], due)
        return
    w[W.AHEAD] = k + 1
    times[W.PASS_END] = times[W.WORKER_TIME + k]
    w[W.PENDING_PASSES] = w[W.WALKED_PASSES] + w[W.AHEAD]


@inner
def drop_ahead(workers, worker, until):
    """Forget the passes of the run in flight that end after `until`."""
    w = workers.state[worker]
    times = workers.time[worker]
    while w[W.AHEAD] > 0 and times[W.PASS_END] > until:
        w[W.AHEAD] -= 1
        times[W.PASS_END] = times[W.WALKED]
        if w[W.AHEAD] > 0:
            times[W.PASS_END] = times[W.WORKER_TIME + w[W.AHEAD] - 1]


@inner
def record_ahead(ranks, workers, requests, pools, scratch, worker, log_run):
    """Record the passes whose ends are known: they are walked now."""
    w = workers.state[worker]
    times = workers.time[worker]
    count = w[W.AHEAD]
    if count == 0:
        return
    for k in range(count):
        scratch.chunk[W.ENDS, k] = times[W.WORKER_TIME + k]
    record_chunk(
        ranks,
        times,
        requests,
        pools,
        scratch,
        w[W.FIRST_RANK],
        w[W.DP_SIZE],
        w[W.WALKED_PASSES],
        count,
        times[W.WALKED],
        log_run,
    )
    w[W.WALKED_PASSES] += count
    w[W.AHEAD] = 0
    times[W.WALKED] = times[W.PASS_END]
