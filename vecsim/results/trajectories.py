"""Plays of a graph of requests: how each one ended, and how long it took as a whole.

A play is settled when all its requests that were released have ended, none is left to be released,
and no prefill worker holds blocks for one; the next play of its lane does not wait for that. The
first request that ends otherwise than completed makes it fail (reference: traffic, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vecsim.kernels.state import status as S
from vecsim.results.metrics import STATISTICS, exact_statistics

if TYPE_CHECKING:
    import polars as pl

    from vecsim.run.outcome import Outcome
    from vecsim.workload.dependencies import Dependencies

_NAME = "trajectory_e2e_latency_ms"


@dataclass(frozen=True)
class Plays:
    """Plays in their authored order.

    Attributes:
        play_id: strings [plays].
        first_ms: float64 [plays], first release; NaN if it never started.
        last_ms: float64 [plays], last end so far; NaN without one.
        quiet_ms: float64 [plays], last end or release of a source so far; NaN without one.
        settled, failed: bool [plays].
        failure: int64 [plays], row of the request that made it fail; -1 without one.
    """

    play_id: pl.Series
    first_ms: np.ndarray
    last_ms: np.ndarray
    quiet_ms: np.ndarray
    settled: np.ndarray
    failed: np.ndarray
    failure: np.ndarray

    @property
    def completed(self) -> np.ndarray:
        """bool [plays]."""
        return self.settled & ~self.failed


def plays_of(graph: Dependencies, outcome: Outcome) -> Plays:
    """How the plays of a run went."""
    count = len(graph.play_id)
    released = ~np.isnan(outcome.arrival_ms)
    ended = ~np.isnan(outcome.terminal_ms)
    bad = ended & (outcome.status != S.COMPLETED)
    left, left_ms = ended, outcome.terminal_ms
    if outcome.handoff is not None:
        freed_ms = outcome.handoff.source_released_ms
        left = ended & (np.isnan(outcome.handoff.destination_activated_ms) | ~np.isnan(freed_ms))
        left_ms = np.fmax(left_ms, freed_ms)
    first, last, quiet = np.full(count, np.inf), *np.full((2, count), -np.inf)
    np.minimum.at(first, graph.play[released], outcome.arrival_ms[released])
    np.maximum.at(last, graph.play[ended], outcome.terminal_ms[ended])
    np.maximum.at(quiet, graph.play[left], left_ms[left])
    failure = np.full(count, -1, np.int64)
    rows = np.flatnonzero(bad)
    rows = rows[np.lexsort((graph.node[rows], outcome.terminal_ms[rows]))]
    failure[graph.play[rows[::-1]]] = rows[::-1]
    failed = failure >= 0
    in_flight = np.bincount(graph.play[released & ~left], minlength=count)
    waiting = np.bincount(graph.play[~released], minlength=count)
    return Plays(
        play_id=graph.play_id,
        first_ms=np.where(np.isinf(first), np.nan, first),
        last_ms=np.where(np.isinf(last), np.nan, last),
        quiet_ms=np.where(np.isinf(quiet), np.nan, quiet),
        settled=(in_flight == 0) & ((waiting == 0) | failed),
        failed=failed,
        failure=failure,
    )


def trajectory_fields(plays: Plays) -> dict[str, Any]:
    """Counts of plays, and the time from first release to last end of the completed ones; None
    where there are none."""
    done = plays.completed
    statistics = exact_statistics((plays.last_ms - plays.first_ms)[done])
    return {
        "total_trajectories": len(done),
        "completed_trajectories": int(done.sum()),
        "incomplete_trajectories": int((~done).sum()),
        **{f"{name}_{_NAME}": statistics[name] for name in STATISTICS},
        f"p50_{_NAME}": statistics["median"],
    }


def play_outcomes(plays: Plays, outcome: Outcome, request_id: pl.Series) -> list[dict[str, Any]]:
    """One record a play, under the reference's names; what is undefined is left out."""
    records = []
    for k, play_id in enumerate(plays.play_id):
        settled, row = plays.settled[k], int(plays.failure[k])
        record: dict[str, Any] = {"play_id": play_id, "status": "incomplete"}
        if row >= 0:
            record["causal_terminal_ms"] = float(outcome.terminal_ms[row])
            record["failure_request_id"] = request_id[row]
            record["failure_status"] = S.STATUS_NAMES[outcome.status[row]]
        elif not np.isnan(plays.last_ms[k]):
            record["causal_terminal_ms"] = float(plays.last_ms[k])
        if settled:
            record["status"] = "failed" if row >= 0 else "completed"
            record["settled_at_ms"] = float(plays.quiet_ms[k])
        records.append(record)
    return records
