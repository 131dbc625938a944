"""A slow, plain model of requests that wait for others: sessions, caps on them, graphs, lanes.

It drives the ranks of `tests.models.slow_model`, or of `tests.models.slow_disaggregated`, from the
columns of a workload, and is the oracle for the rules of `vecsim.workload.dependencies` (reference:
traffic, sections 2.3 to 2.5, 3 and 4.2).
"""

from __future__ import annotations

import heapq

from tests.models import slow_disaggregated, slow_model, slow_sglang
from tests.models.slow_model import SlowOutcome
from tests.models.slow_rank import Request
from vecsim.workload.workload import Workload


def simulate(payload: dict, workload: Workload) -> SlowOutcome:
    """Replays a workload against the spec of a payload."""
    aggregated = payload.get("spec", payload)["topology"]["kind"] == "aggregated"
    fleet = run(FLEETS[aggregated, workload.dependencies is not None], payload, workload)
    return (slow_model if aggregated else slow_disaggregated)._outcome(fleet)


def run(kind: type[Waiting], payload: dict, workload: Workload) -> Waiting:
    """A fleet of a kind after its run."""
    spec = {**payload.get("spec", payload), "requests": [], "max_in_flight": None}
    fleet = kind({**payload, "spec": spec}, workload)
    fleet.run()
    return fleet


class Waiting:
    """Requests that become ready during the run: a heap of (time, index, turn, row). Mixed into a
    fleet, which calls `_heard` when a request is no more in flight."""

    def __init__(self, payload: dict, workload: Workload) -> None:
        super().__init__(payload)
        self.workload = workload
        self.ready: list[tuple[float, int, int, int]] = []
        self._prepare()
        self.requests = [self._request(row, self._tokens(row)) for row in range(len(workload))]

    def _tokens(self, row: int) -> list:
        """The authored tokens of a row; those of a private row equal no other."""
        w = self.workload
        length = int(w.input_length[row])
        if w.block_offsets is None or w.block_offsets[row] == w.block_offsets[row + 1]:
            return [("private", row, k) for k in range(length)]
        blocks = w.block_ids[w.block_offsets[row] : w.block_offsets[row + 1]].tolist()
        return [token for token in blocks for _ in range(w.block_tokens)][:length]

    def _authored(self, row: int, tokens: list) -> dict:
        w = self.workload
        plan = None
        if w.output_offsets is not None:
            plan = w.output_token_ids[w.output_offsets[row] : w.output_offsets[row + 1]].tolist()
        return {
            "arrival_time_ms": float(w.arrival_ms[row]),
            "input_tokens": len(tokens),
            "output_tokens": int(w.output_length[row]),
            "output_token_ids": plan or None,
            "input_token_ids": tokens,
            "dp_rank": None if w.dp_rank[row] < 0 else int(w.dp_rank[row]),
        }

    def _due(self) -> list[int]:
        """Rows that are released now, in order."""
        rows = []
        while self.ready and self.ready[0][0] <= self.now:
            ready_ms, _, _, row = heapq.heappop(self.ready)
            rows.append(row)
            self._grow(row)
            self.requests[row].arrival_ms = self._arrival_ms(ready_ms)
            self._released(row)
        return rows

    def _grow(self, row: int) -> None:
        """Make the prompt of a row whole."""

    def _arrival_ms(self, ready_ms: float) -> float:
        return ready_ms

    def _released(self, row: int) -> None:
        """A row was released."""


class WaitingFleet(Waiting, slow_model.Fleet):
    """Aggregated workers."""

    def _prepare(self) -> None:
        rank = self.workers[0].ranks[0]
        self.pages = isinstance(rank, slow_sglang.Rank)
        self.names: dict | None = {} if rank.caching or self.pages else None
        self.block_size = rank.page if self.pages else rank.block_size

    def _request(self, row: int, tokens: list) -> Request:
        request = slow_sglang.Request if self.pages else Request
        return request(row, self._authored(row, tokens), self.block_size, self.names)

    def _spoken(self, row: int) -> list:
        return self.requests[row].tokens

    def run(self) -> None:
        self._drain()
        while True:
            times = [w.end_ms for w in self.workers if w.flight is not None]
            times += [
                w.tokenizer.pending[0][0]
                for w in self.workers
                if w.tokenizer and w.tokenizer.pending
            ]
            if self.ready:
                times.append(self.ready[0][0])
            if not times or (self.limit_ms is not None and min(times) > self.limit_ms):
                return
            self.now = min(times)
            self._drain()

    def _take_arrivals(self) -> bool:
        rows = self._due()
        for row in rows:
            self.in_flight += 1
            self._place(self.requests[row])
        return bool(rows)

    def _end(self, q: Request) -> None:
        super()._end(q)
        self._heard(q.index, q.status)


class WaitingPools(Waiting, slow_disaggregated.Fleet):
    """A prefill and a decode pool."""

    def _prepare(self) -> None:
        self.queue = []

    def _request(self, row: int, tokens: list) -> slow_disaggregated.Handoff:
        authored = self._authored(row, tokens)
        pin = int(self.workload.prefill_dp_rank[row])
        if pin >= 0:
            authored["prefill_dp_rank"] = pin
        return self._handoff(row, authored)

    def _spoken(self, row: int) -> list:
        return self.requests[row].target.tokens

    def _next_arrivals(self) -> list[float]:
        return [self.ready[0][0]] if self.ready else []

    def _take_arrivals(self) -> bool:
        rows = self._due()
        self.handoffs = self.requests
        for row in rows:
            h = self.requests[row]
            h.ordinal = self.taken
            self._take(h)
        return bool(rows)

    def _leave(self, h: slow_disaggregated.Handoff) -> None:
        super()._leave(h)
        self._heard(h.index, h.status)


class Sessions:
    """Turns follow completions; with a cap, sessions follow sessions."""

    def __init__(self, payload: dict, workload: Workload) -> None:
        super().__init__(payload, workload)
        sessions = workload.sessions
        n = len(workload)
        self.session = list(range(n)) if sessions is None else sessions.session.tolist()
        self.turn_of = [0] * n if sessions is None else sessions.turn.tolist()
        self.delay = [0.0] * n if sessions is None else sessions.delay_ms.tolist()
        self.accumulate = sessions is not None and sessions.accumulate
        self.turns: dict[int, list[int]] = {}
        for row in sorted(range(n), key=lambda row: self.turn_of[row]):
            self.turns.setdefault(self.session[row], []).append(row)
        self.pending = sorted(self.turns)
        cap = (payload.get("traffic") or {}).get("replay_concurrency", workload.session_cap)
        self.capped = cap is not None
        for session in self.pending if cap is None else self.pending[:cap]:
            row = self.turns[session][0]
            self._push(row, 0.0 if self.capped else float(workload.arrival_ms[row]))
        self.pending = [] if cap is None else self.pending[cap:]

    def _push(self, row: int, ready_ms: float) -> None:
        heapq.heappush(self.ready, (ready_ms, self.session[row], self.turn_of[row], row))

    def _grow(self, row: int) -> None:
        turn = self.turn_of[row]
        if self.accumulate and turn:
            before = self.turns[self.session[row]][turn - 1]
            self.requests[row] = self._request(row, self._spoken(before) + self._tokens(row))

    def _arrival_ms(self, ready_ms: float) -> float:
        return self.now if self.capped else ready_ms

    def _heard(self, row: int, status: str) -> None:
        turns = self.turns[self.session[row]]
        following = self.turn_of[row] + 1
        if status in ("completed", "rejected") and following < len(turns):
            row = turns[following]
            self._push(row, self.now + self.delay[row])
        elif self.pending:
            self._push(self.turns[self.pending.pop(0)][0], self.now)


class Graph:
    """Requests follow the releases and ends of others, plays follow plays in their lane."""

    def __init__(self, payload: dict, workload: Workload) -> None:
        super().__init__(payload, workload)
        graph = self.graph = workload.dependencies
        n = len(workload)
        self.play = graph.play.tolist()
        self.not_before = graph.not_before_ms.tolist()
        self.followers: list[list[tuple[int, bool, float]]] = [[] for _ in range(n)]
        self.missing = [0] * n
        for row in range(n):
            for k in range(graph.offsets[row], graph.offsets[row + 1]):
                edge = (row, bool(graph.on_completion[k]), float(graph.delay_ms[k]))
                self.followers[graph.source[k]].append(edge)
                self.missing[row] += 1
        self.roots = [self.missing[row] == 0 for row in range(n)]
        self.rows_of = [[] for _ in range(len(graph.play_id))]
        for row in range(n):
            self.rows_of[self.play[row]].append(row)
        self.open = [len(rows) for rows in self.rows_of]
        self.failed = [False] * len(self.rows_of)
        self.due = list(self.not_before)
        plays = list(range(len(self.rows_of)))
        first = len(plays) if graph.lanes is None else graph.lanes
        self.pending = plays[first:]
        for play in plays[:first]:
            self._start_play(play)

    def _start_play(self, play: int) -> None:
        rows = self.rows_of[play]
        if self.graph.lanes is not None:
            first = min(self.not_before[row] for row in rows if self.roots[row])
            for row in rows:
                self.due[row] = self.now + max(0.0, self.not_before[row] - first)
        for row in rows:
            if self.roots[row]:
                self._push(row)

    def _push(self, row: int) -> None:
        heapq.heappush(self.ready, (self.due[row], int(self.graph.node[row]), 0, row))

    def _released(self, row: int) -> None:
        self._fire(row, False)

    def _fire(self, source: int, on_completion: bool) -> None:
        for row, completion, delay in self.followers[source]:
            if completion == on_completion:
                self.due[row] = max(self.due[row], self.now + delay)
                self.missing[row] -= 1
                if self.missing[row] == 0 and not self.failed[self.play[row]]:
                    self._push(row)

    def _heard(self, row: int, status: str) -> None:
        play = self.play[row]
        if status == "completed":
            self._fire(row, True)
        elif not self.failed[play]:
            self.failed[play] = True
            self.ready = [entry for entry in self.ready if self.play[entry[3]] != play]
            heapq.heapify(self.ready)
            for other in self.rows_of[play]:
                if self.requests[other].arrival_ms is None:
                    self._close(other)
        self._close(row)

    def _close(self, row: int) -> None:
        play = self.play[row]
        self.open[play] -= 1
        if self.open[play] == 0 and self.pending:
            self._start_play(self.pending.pop(0))


class SessionFleet(Sessions, WaitingFleet):
    pass


class SessionPools(Sessions, WaitingPools):
    pass


class GraphFleet(Graph, WaitingFleet):
    pass


class GraphPools(Graph, WaitingPools):
    pass


FLEETS = {
    (True, False): SessionFleet,
    (True, True): GraphFleet,
    (False, False): SessionPools,
    (False, True): GraphPools,
}
"""By (aggregated, graph)."""
