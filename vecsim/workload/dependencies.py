"""Requests that wait for other requests: turns of sessions, and graphs of dependencies.

Both are authored facts, as columns beside those of a workload. What follows from them during a run
(arrivals of later turns, grown prompts) is state of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.workload.columns import check_ratio, float_column, int_column, offsets_of, positive_int

if TYPE_CHECKING:
    from vecsim.config.schema import Traffic
    from vecsim.workload.workload import Workload


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

    def checked(self, n: int) -> Sessions:
        """The same sessions of n rows, with columns of the dtypes above.

        Raises:
            InputError: a column of the wrong length or range, turns that are not 0, 1, 2 ...
        """
        count = positive_int("count", self.count)
        expected = f"a session below count = {count}"
        session = int_column("session", self.session, n, 0, count - 1, expected)
        turn = int_column("turn", self.turn, n, 0, n, "the place of the row in its session")
        delay_ms = _floats("delay_ms", self.delay_ms, n)
        sizes = np.bincount(session, minlength=count)
        rows = np.lexsort((turn, session))
        places = np.arange(n) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        _refuse_first("turn", turn, rows[turn[rows] != places], "0, 1, 2 ... in each session")
        if not sizes.all():
            raise InputError("count", count, "the number of sessions, each with a row")
        early = np.flatnonzero((turn == 0) & (delay_ms != 0.0))
        _refuse_first("delay_ms", delay_ms, early, "0 for a first turn")
        return replace(
            self, session=session.astype(np.int32), turn=turn.astype(np.int32), delay_ms=delay_ms
        )

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

    def checked(self, n: int) -> Dependencies:
        """The same graph of n rows, with columns of the dtypes above.

        Raises:
            InputError: a column of the wrong length or range, an edge to another play, a cycle.
        """
        offsets = int_column("offsets", self.offsets, n + 1, 0, len(self.source), "a position")
        if offsets[0] != 0 or offsets[-1] != len(self.source) or (np.diff(offsets) < 0).any():
            raise InputError("offsets", offsets.tolist(), "a rising sequence over all edges")
        edges = len(self.source)
        source = int_column("source", self.source, edges, 0, n - 1, "a row")
        completion = np.asarray(self.on_completion)
        if completion.dtype == bool:
            completion = completion.astype(np.int8)
        completion = int_column("on_completion", completion, edges, 0, 1, "true or false")
        node = int_column("node", self.node, n, 0, n - 1, "a place in the order of the rows")
        if len(np.unique(node)) != n:
            raise InputError("node", "a place twice", "every place once")
        plays = len(self.play_id)
        play = int_column("play", self.play, n, 0, plays - 1, "an index of play_id")
        target = np.repeat(np.arange(n), np.diff(offsets))
        expected = "a row of the same play"
        _refuse_first("source", source, np.flatnonzero(play[source] != play[target]), expected)
        _check_order(n, source, target)
        if self.lanes is not None:
            positive_int("lanes", self.lanes)
        return replace(
            self,
            offsets=offsets,
            source=source.astype(np.int32),
            on_completion=completion.astype(bool),
            delay_ms=_floats("delay_ms", self.delay_ms, edges),
            not_before_ms=_floats("not_before_ms", self.not_before_ms, n),
            node=node.astype(np.int32),
            play=play.astype(np.int32),
        )

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


def _floats(name: str, values: np.ndarray, n: int) -> np.ndarray:
    """float64 [n], finite and 0 or more."""
    column = float_column(name, values)
    if len(column) != n:
        raise InputError(name, f"{len(column)} values", f"{n} values")
    return column


def _refuse_first(name: str, column: np.ndarray, rows: np.ndarray, expected: str) -> None:
    if rows.size:
        row = int(rows[0])
        raise InputError(f"{name}[{row}]", column[row].item(), expected)


def _check_order(n: int, source: np.ndarray, target: np.ndarray) -> None:
    """Raise InputError where requests wait for each other in a circle."""
    missing = np.bincount(target, minlength=n)
    by_source = target[np.argsort(source, kind="stable")]
    followers = offsets_of(np.bincount(source, minlength=n))
    ready = np.flatnonzero(missing == 0).tolist()
    reached = 0
    while ready:
        row = ready.pop()
        reached += 1
        for other in by_source[followers[row] : followers[row + 1]].tolist():
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    if reached < n:
        row = int(np.flatnonzero(missing)[0])
        raise InputError(f"source of row {row}", "a cycle", "rows that can be put in an order")
