"""The arrival source against a plain list that is sorted at every step."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import arrivals
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NONE
from vecsim.run.lower.arrivals import graph_arrivals
from vecsim.workload.dependencies import Dependencies


@entry
def take(room, now):
    """`take_due`."""
    return arrivals.take_due(room, now)


@entry
def following(room):
    """`next_time`."""
    return arrivals.next_time(room)


@entry
def end(room, q, status, now):
    """`note_end`."""
    arrivals.note_end(room, q, status, now)


class Plain:
    """Requests with their earliest times; who is due is searched for."""

    def __init__(self, graph: Dependencies) -> None:
        n = len(graph.node)
        self.graph = graph
        spans = [range(graph.offsets[row], graph.offsets[row + 1]) for row in range(n)]
        self.open = [{int(k) for k in span} for span in spans]
        self.due = graph.not_before_ms.tolist()
        self.waiting = set(range(n))
        self.in_flight: list[int] = []
        plays = len(graph.play_id)
        self.started = set(range(plays if graph.lanes is None else min(graph.lanes, plays)))
        if graph.lanes is not None:
            roots = [row for row in range(n) if not self.open[row]]
            first = {int(graph.play[r]): np.inf for r in roots}
            for r in roots:
                first[int(graph.play[r])] = min(first[int(graph.play[r])], self.due[r])
            self.due = [max(0.0, self.due[row] - first[int(graph.play[row])]) for row in range(n)]

    def ready(self) -> list[tuple[float, int]]:
        return sorted(
            (self.due[row], row)
            for row in self.waiting
            if not self.open[row] and int(self.graph.play[row]) in self.started
        )

    def fire(self, source: int, on_completion: bool, now: float) -> None:
        for row in range(len(self.open)):
            for k in list(self.open[row]):
                same = self.graph.source[k] == source
                if same and bool(self.graph.on_completion[k]) == on_completion:
                    self.open[row].discard(k)
                    self.due[row] = max(self.due[row], now + self.graph.delay_ms[k])

    def take(self, now: float) -> int:
        ready = self.ready()
        if not ready or ready[0][0] > now:
            return -1
        row = ready[0][1]
        self.waiting.discard(row)
        self.in_flight.append(row)
        self.fire(row, False, now)
        return row

    def end(self, row: int, completed: bool, now: float) -> None:
        play = int(self.graph.play[row])
        self.in_flight.remove(row)
        if completed:
            self.fire(row, True, now)
        else:
            self.waiting = {r for r in self.waiting if self.graph.play[r] != play}
        busy = [r for r in (*self.waiting, *self.in_flight) if self.graph.play[r] == play]
        after = max(self.started) + 1
        if not busy and self.graph.lanes is not None and after < len(self.graph.play_id):
            self.started.add(after)
            for r in self.waiting:
                if self.graph.play[r] == after:
                    self.due[r] += now


@st.composite
def graphs(draw) -> Dependencies:
    n = draw(st.integers(1, 12))
    plays = draw(st.integers(1, min(n, 4)))
    play = sorted([*range(plays), *(draw(st.integers(0, plays - 1)) for _ in range(n - plays))])
    times = st.sampled_from([0.0, 1.0, 2.0, 5.0])
    offsets, source, completion, delay = [0], [], [], []
    for row in range(n):
        mates = [r for r in range(row) if play[r] == play[row]]
        for r in draw(st.lists(st.sampled_from(mates), max_size=3)) if mates else ():
            source.append(r)
            completion.append(draw(st.booleans()))
            delay.append(draw(times))
        offsets.append(len(source))
    return Dependencies(
        offsets=np.array(offsets, np.int64),
        source=np.array(source, np.int32),
        on_completion=np.array(completion, bool),
        delay_ms=np.array(delay, np.float64),
        not_before_ms=np.array([draw(times) for _ in range(n)]),
        node=np.arange(n, dtype=np.int32),
        play=np.array(play, np.int32),
        play_id=[f"p{k}" for k in range(plays)],
        lanes=draw(st.one_of(st.none(), st.integers(1, 3))),
    )


@settings(max_examples=300, deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_equals_a_sorted_list(graph, random) -> None:
    plain = Plain(graph)
    room = graph_arrivals(graph, np.arange(len(graph.node)))
    now = 0.0
    while True:
        ready = plain.ready()
        assert following(room) == (ready[0][0] if ready else np.inf)
        while (row := plain.take(now)) >= 0:
            assert take(room, now) == row
        assert take(room, now) == NONE
        if not plain.in_flight and not plain.ready():
            return
        now = max(now, min([now + 1.0, *(due for due, _ in plain.ready()[:1])]))
        if plain.in_flight and random.random() < 0.7:
            row = random.choice(plain.in_flight)
            completed = random.random() < 0.9
            plain.end(row, completed, now)
            status = S.COMPLETED if completed else S.REJECTED
            end(room, np.int64(row), status, now)
