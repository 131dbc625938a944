"""Whether a fleet sustains a load: the queue must stay bounded, however long the load goes on.

A replay ends with its trace, so a queue that grows slowly looks like one that is long. The workload
is therefore played twice in a row (more often where requests take longer than a round), each time
with prompts of its own, and the requests in the system (arrived and not ended) at the end of the
last round are held against those at the end of the round before. A work-conserving queue that
serves no less than arrives in a round ends every round as it ended the first (Lindley's recursion,
repeated); one that serves less gains the difference in each round.

At the very limit a queue is bounded and yet as long as chance and the length of the trace make it:
of order rho S / (2 (1 - rho)) for one server with constant service time S (Pollaczek-Khinchine).
So a load is called

- *stable* when the queue is bounded even if all requests come 5 % faster;
- *saturated* when it is bounded as it is, but not 5 % faster;
- *growing* when it is not bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vecsim.run.outcome import Outcome
from vecsim.workload.workload import Workload

STABLE, SATURATED, GROWING = LOAD_STATES = ("stable", "saturated", "growing")
HEADROOM = 1.05
"""How much faster requests must be able to come."""
ROUNDS_REPLAYED = 5
"""Rounds that one point costs: its own replay, and up to two of two rounds."""

_MOST_ROUNDS = 8
_GROWTH_SHARE = 0.005  # requests gained in a round that count, as a share of a round
_END_SHARE = 0.05  # of a round: over its end the requests in the system are averaged


def can_be_repeated(workload: Workload) -> bool:
    """Whether arrivals are the workload's own, at more than one instant: no turns or graphs that
    wait for completions, no closed loop."""
    waits = (workload.sessions, workload.dependencies, workload.session_cap)
    return all(one is None for one in waits) and _round_ms(workload.arrival_ms) > 0.0


def load_state(workload: Workload, latency_ms: float, run: Callable[[Workload], Outcome]) -> str:
    """One of `LOAD_STATES`.

    Args:
        workload: what `can_be_repeated` allows.
        latency_ms: how long most requests of a round take from arrival to end.
        run: replays a workload.
    """
    if not _grows(workload.speedup(HEADROOM), latency_ms, run):
        return STABLE
    return GROWING if _grows(workload, latency_ms, run) else SATURATED


def _grows(workload: Workload, latency_ms: float, run: Callable[[Workload], Outcome]) -> bool:
    round_ms = _round_ms(workload.arrival_ms)
    rounds = min(1 + max(math.ceil(latency_ms / round_ms), 1), _MOST_ROUNDS)
    outcome = run(repeated(workload, rounds))
    start = float(workload.arrival_ms.min())
    ended = np.where(np.isnan(outcome.terminal_ms), np.inf, outcome.terminal_ms)
    before, last = (
        _mean_present(outcome.arrival_ms, ended, end - _END_SHARE * round_ms, end)
        for end in (start + (rounds - 1) * round_ms, start + rounds * round_ms)
    )
    return last - before > max(1.0, _GROWTH_SHARE * len(workload))


def _round_ms(arrival_ms: np.ndarray) -> float:
    """Span of the arrivals and one mean gap more, so that the rate does not change (ms)."""
    if len(arrival_ms) < 2:
        return 0.0
    span = float(arrival_ms.max() - arrival_ms.min())
    return span * len(arrival_ms) / (len(arrival_ms) - 1)


def _mean_present(arrival: np.ndarray, ended: np.ndarray, start: float, end: float) -> float:
    """Time average over [start, end] of the requests between `arrival` and `ended`."""
    present = np.clip(ended, start, end) - np.clip(arrival, start, end)
    return float(np.maximum(present, 0.0).sum()) / (end - start)


def repeated(workload: Workload, rounds: int) -> Workload:
    """The workload `rounds` times in a row, each with contents of its own; names are left out."""
    again = {}
    for name in ("input_length", "output_length", "dp_rank", "prefill_dp_rank"):
        again[name] = np.tile(getattr(workload, name), rounds)
    arrival, round_ms = workload.arrival_ms, _round_ms(workload.arrival_ms)
    again["arrival_ms"] = np.concatenate([arrival + k * round_ms for k in range(rounds)])
    for offsets, ids in (("block_offsets", "block_ids"), ("output_offsets", "output_token_ids")):
        spans = getattr(workload, offsets)
        if spans is not None:
            starts = [spans[1:] + k * spans[-1] for k in range(rounds)]
            again[offsets] = np.concatenate([spans[:1], *starts])
            again[ids] = _renamed(workload, getattr(workload, ids), rounds)
    names = dict.fromkeys(("request_id", "session_id", "turn_index", "metadata"))
    return replace(workload, **again, **names, _trees={})


def _renamed(workload: Workload, ids: np.ndarray, rounds: int) -> np.ndarray:
    """Ids (uint32 [k]) as they are, and after them, for each further round, as many that occur
    nowhere else, equal ones for equal ones."""
    used = [x for x in (workload.block_ids, workload.output_token_ids) if x is not None]
    distinct = np.unique(np.concatenate(used))
    count = len(distinct)
    free = np.setdiff1d(np.arange(rounds * count, dtype=np.uint32), distinct, assume_unique=True)
    place = np.searchsorted(distinct, ids)
    return np.concatenate([ids, *(free[k * count + place] for k in range(rounds - 1))])
