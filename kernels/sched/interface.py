"""What a worker and a fleet ask of a rank, whatever its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Scheduler(NamedTuple):
    """The inner kernels of one family of backends.

    `requests`, `pools`, `ranks`, `scratch` and `content` are the bundles of `state`; `s` is a
    rank's row, int64 [RANK_FIELDS], `f` its factors, float64 [FACTORS], `w` its worker's row, int64
    [WORKER_STATE], `lists` int32 as in `Ranks`; times are float64 ms. A pass has four steps:
    schedule, sum up the work, price, apply.

    Attributes:
        has_work: (requests, s, now): whether a pass starting now has anybody to look at.
        notices: (requests, s, now): whether an arrival now would change what follows.
        steady_passes: (requests, pools, w, s, f, lists, now): pure decode passes that the rank's
            decode batch can make as a run; 0 when it is not steady.
        defers: (requests, w, s, f, lists, now, dp_size): whether the pass about to start puts off
            prefills.
        schedule: (requests, pools, scratch, w, s, f, lists, now, defer): step 1 of a pass; sums up
            its work, too.
        price: (requests, s, f, lists, start): its end, negative for a bad price.
        tokens_to_emit: (requests, s, lists): visible tokens that come out of it.
        apply: (requests, pools, times, scratch, w, s, f, lists, start, end): step 4; returns held
            blocks x ms.
        apply_run: (requests, pools, w, s, f, lists, passes, start, end): the same of a whole run.
        log_run: (requests, pools, s, lists, ends, done, count, start): KV events of `count` passes
            of a run, whose ends are `ends`, after `done` others; only where events are observed.
        close_group: (ranks, requests, w, first rank, dp_size, passes, start, end): what the ranks
            of a worker count together.
        room: (ranks, pools, first rank, dp_size): whether the pools have room for a pass.
        forget: (ranks, pools): a worker that advanced on its own is done.

    A handoff asks:
        reserves_first: a decode rank is asked for blocks when a request arrives, not when its
            prompt is done.
        place: (requests, pools, content, s, q, r): place `q` on the rank with number `r`.
        refusal: (requests, s, q): reason why the rank can never hold it, or 0.
        reserve: (requests, pools, s, q, now): reserve blocks for its prompt; how many of them are
            new, or NONE: no room.
        activate: (requests, pools, s, q, now): its prompt has arrived, it waits to be decoded.
        release_held: (requests, pools, s, q, now): give the blocks of a held request back.
        first_waiting: (requests, s, now): the request that a deadlock ends, or NONE.
        fail_waiting: (requests, pools, s, q, now): take it off its list, with its blocks.
        cancel: (requests, pools, s, q): give the blocks of a reserved request back; only called
            where ranks reserve first.
        try_in_vain: (f): what many attempts to start a pass, without effect, do to the factors.
    """

    has_work: Callable
    notices: Callable
    steady_passes: Callable
    defers: Callable
    schedule: Callable
    price: Callable
    tokens_to_emit: Callable
    apply: Callable
    apply_run: Callable
    log_run: Callable
    close_group: Callable
    room: Callable
    forget: Callable
    reserves_first: bool
    place: Callable
    refusal: Callable
    reserve: Callable
    activate: Callable
    release_held: Callable
    first_waiting: Callable
    fail_waiting: Callable
    cancel: Callable
    try_in_vain: Callable
