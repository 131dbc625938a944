"""Requests that wait for other requests: turns of sessions, and graphs of dependencies.

Both are authored facts, as columns beside those of a workload. What follows from them during a run
(arrivals of later turns, grown prompts) is state of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from vecsim.columns import check_ratio, offsets_of

if TYPE_CHECKING:
    from vecsim.descriptors import Traffic
    from vecsim.workload import Workload


def session_cap(traffic: Traffic | None, workload: Workload) -> int | None:
    """Sessions in flight at once: what `traffic` says, else the workload; None = open loop."""
    if traffic is not None and traffic.replay_concurrency is not None:
        return traffic.replay_concurrency
    return workload.session_cap


@dataclass(frozen=True, eq=False)
class Sessions:
    """Turns that follow completions.

    Turn k + 1 is ready at the terminal time of turn k plus its own `delay_ms`; a rejected turn
    counts as ended, a failed or cancelled one ends its session. First turns arrive at the
    workload's `arrival_ms`, which for later turns repeats that of the first (a lower bound). What
    is ready at one instant is released by session index, then turn.

    Attributes:
        session: int32 [n], index of each row's session, by first appearance.
        turn: int32 [n], place of each row in its session, from 0.
        delay_ms: float64 [n], wait after the previous turn; 0 for first turns.
        count: number of sessions.
        accumulate: whether `input_length` and the content of a later turn only hold what is new:
            its prompt is the prompt before, the tokens generated then, and those.
    """

    session: np.ndarray
    turn: np.ndarray
    delay_ms: np.ndarray
    count: int
    accumulate: bool = False

    @property
    def single(self) -> bool:
        """Whether every session has one turn."""
        return len(self.session) == self.count

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [count + 1] offsets, int64 [n] rows): the rows of each session in turn order."""
        counts = np.bincount(self.session, minlength=self.count)
        return offsets_of(counts), np.lexsort((self.turn, self.session))

    def speedup(self, ratio: float) -> Sessions:
        """The same sessions with every delay divided by `ratio`."""
        return replace(self, delay_ms=self.delay_ms / check_ratio("ratio", ratio))

    def take(self, rows: np.ndarray) -> Sessions:
        """The sessions of some rows (int64, rising); each must keep a run of first turns."""
        session, index = np.unique(self.session[rows], return_inverse=True)
        return replace(
            self,
            session=index.astype(np.int32),
            turn=self.turn[rows],
            delay_ms=self.delay_ms[rows],
            count=len(session),
        )


@dataclass(frozen=True, eq=False)
class Dependencies:
    """A graph of requests, in plays that do not touch each other.

    A row without edges is ready at its `not_before_ms`; one with edges when all have fired, at the
    latest of `not_before_ms` and, over its edges, trigger instant + `delay_ms`. The trigger is the
    release of the source, or its end. What is ready at one instant is released by `node`. A request
    that fails (a rejection too) ends its play: what is not released yet never is.

    With lanes, so many plays run at once, in play order: the first ones start at 0, the next when
    all requests of a running play have ended. `not_before_ms` then counts from the play's earliest
    root, and from the start of the play.

    Attributes:
        offsets: int64 [n + 1], span of each row in the edge columns.
        source: int32 [m], row that the edge waits for.
        on_completion: bool [m], trigger: True = end of the source, False = its release.
        delay_ms: float64 [m], wait after the trigger.
        not_before_ms: float64 [n], earliest release; the smallest of all rows is 0.
        node: int32 [n], place of each row in the order of request ids.
        play: int32 [n], index of each row's play in their authored order.
        play_id: strings [plays].
        lanes: number of lanes, or None: every play starts at its own times.
    """

    offsets: np.ndarray
    source: np.ndarray
    on_completion: np.ndarray
    delay_ms: np.ndarray
    not_before_ms: np.ndarray
    node: np.ndarray
    play: np.ndarray
    play_id: pl.Series
    lanes: int | None = None

    def speedup(self, ratio: float) -> Dependencies:
        """The same graph with every `not_before_ms` and delay divided by `ratio`."""
        ratio = check_ratio("ratio", ratio)
        return replace(
            self, delay_ms=self.delay_ms / ratio, not_before_ms=self.not_before_ms / ratio
        )

    def take(self, rows: np.ndarray) -> Dependencies:
        """The graph of some rows (int64, rising), which must be whole plays."""
        position = np.full(len(self.node), -1, np.int64)
        position[rows] = np.arange(len(rows))
        counts = np.diff(self.offsets)
        kept = np.repeat(position >= 0, counts)
        play, index = np.unique(self.play[rows], return_inverse=True)
        return replace(
            self,
            offsets=offsets_of(counts[rows]),
            source=position[self.source[kept]].astype(np.int32),
            on_completion=self.on_completion[kept],
            delay_ms=self.delay_ms[kept],
            not_before_ms=self.not_before_ms[rows] - self.not_before_ms[rows].min(initial=np.inf)
            if len(rows)
            else self.not_before_ms[rows],
            node=np.argsort(np.argsort(self.node[rows])).astype(np.int32),
            play=index.astype(np.int32),
            play_id=self.play_id.gather(play),
        )
