"""A slow, plain model of an aggregated vLLM replay: objects, lists and one event loop.

It is the oracle of the property tests and of `tests.fuzz`. It shares no code with the kernels, and
it was compared with the reference on random specs before anything else trusted it (`python -m
tests.fuzz --against slow`). It knows inline requests only: many workers, round robin and pinned
ranks, attention-DP groups, open and closed loop, a time limit, LRU and Belady, tokenization, both
preemption modes. Where the reference stands still, a rank settles the head of its queue
(`Rank.settle_head`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tests.models import slow_sglang
from tests.models.slow_rank import Forecast, Pass, Rank, Request
from tests.models.slow_trtllm import TrtllmRank

IDLE_PASS_LIMIT = 20_000

AnyRank = Rank | slow_sglang.Rank


class Endless(Exception):
    """Passes of no length follow each other without an output: the run would never end."""


class Tokenizer:
    """Servers in front of the ranks of one worker: first come, first served."""

    def __init__(self, servers: int, base_ms: float, per_token_ms: float) -> None:
        self.free_at = [0.0] * servers
        self.base_ms = base_ms
        self.per_token_ms = per_token_ms
        self.pending: list[tuple[float, int, Request]] = []
        self.taken = 0

    def take(self, q: Request, now: float) -> None:
        start = max(now, heapq.heappop(self.free_at))
        q.tokenized_ms = start + (self.base_ms + self.per_token_ms * q.isl)
        heapq.heappush(self.free_at, q.tokenized_ms)
        heapq.heappush(self.pending, (q.tokenized_ms, self.taken, q))
        self.taken += 1


class Worker:
    def __init__(
        self, ranks: list[AnyRank], tokenizer: Tokenizer | None, group: slow_sglang.Group | None
    ) -> None:
        self.ranks = ranks
        self.group = group  # SGLang's, or None
        self.tokenizer = tokenizer
        self.flight: list[Pass] | None = None
        self.end_ms = 0.0
        self.step = 0
        self.turn = 0
        self.passes = 0
        self.idle_passes = 0

    def has_work(self) -> bool:
        counting = self.group is not None and self.group.left > 0
        return counting or any(r.has_work() for r in self.ranks)


class Fleet:
    def __init__(self, payload: dict) -> None:
        spec = payload.get("spec", payload)
        engine = spec.get("engine") or {}
        config = engine.get("rank", {})
        self.dp_size = engine.get("dp_size", 1)
        if config.get("backend") == "sglang":
            page = config.get("block_size") or 1
            names: dict = {}
            self.requests = [
                slow_sglang.Request(k, r, page, names) for k, r in enumerate(spec["requests"])
            ]
        else:
            probe = _rank_class(config)(config, 1, None)
            names = {} if probe.caching else None
            self.requests = [
                Request(k, r, probe.block_size, names) for k, r in enumerate(spec["requests"])
            ]
        self.queue = sorted(self.requests, key=lambda q: q.authored_ms)
        belady = engine.get("kv_eviction_policy", "lru") == "belady"
        forecast = Forecast(self.queue) if belady else None
        self.workers = [
            self._worker(payload, config, forecast)
            for _ in range(spec["topology"]["workers"]["initial_workers"])
        ]
        self.max_in_flight = spec.get("max_in_flight")
        self.limit_ms = spec.get("max_sim_time_ms")
        self.now = 0.0
        self.taken = self.in_flight = self.turn = 0
        self.committed_prefill_tokens = 0
        self.settled = 0

    def _worker(self, payload: dict, config: dict, forecast: Forecast | None) -> Worker:
        if config.get("backend") != "sglang":
            rank = _rank_class(config)
            ranks = [rank(config, self.dp_size, forecast) for _ in range(self.dp_size)]
            return Worker(ranks, tokenizer_of(payload), None)
        group = slow_sglang.Group(config)
        group.ranks = [
            slow_sglang.Rank(config, self.dp_size, group, forecast) for _ in range(self.dp_size)
        ]
        return Worker(group.ranks, tokenizer_of(payload), group)

    # One instant

    def run(self) -> None:
        self._drain()
        while True:
            times = [w.end_ms for w in self.workers if w.flight is not None]
            times += [
                w.tokenizer.pending[0][0]
                for w in self.workers
                if w.tokenizer and w.tokenizer.pending
            ]
            if self.max_in_flight is None and self.taken < len(self.queue):
                times.append(self.queue[self.taken].authored_ms)
            if not times or (self.limit_ms is not None and min(times) > self.limit_ms):
                return
            self.now = min(times)
            self._drain()

    def _drain(self) -> None:
        changed = True
        while changed:
            changed = self._deliver_tokenized()
            for w in self.workers:
                if w.flight is not None and w.end_ms == self.now:
                    self._complete(w)
                    changed = True
            changed |= self._take_arrivals()
            changed |= self._drive()

    def _deliver_tokenized(self) -> bool:
        changed = False
        for w in self.workers:
            while w.tokenizer and w.tokenizer.pending and w.tokenizer.pending[0][0] <= self.now:
                q = heapq.heappop(w.tokenizer.pending)[2]
                w.ranks[q.scheduler % self.dp_size].accept(q)
                changed = True
        return changed

    def _take_arrivals(self) -> bool:
        before = self.taken
        while self.taken < len(self.queue):
            q = self.queue[self.taken]
            if self.max_in_flight is None:
                if q.authored_ms > self.now:
                    break
                q.arrival_ms = q.authored_ms
            elif self.in_flight < self.max_in_flight:
                q.arrival_ms = self.now
            else:
                break
            self.taken += 1
            self.in_flight += 1
            self._place(q)
        return self.taken > before

    def _place(self, q: Request) -> None:
        q.status = "unfinished"
        chosen = self.turn % len(self.workers)
        self.turn = chosen + 1
        w = self.workers[chosen]
        rank = q.pin
        if rank is None:
            rank = w.turn % self.dp_size
            w.turn = rank + 1
        q.scheduler = chosen * self.dp_size + rank
        if w.tokenizer:
            w.tokenizer.take(q, self.now)
            self._deliver_tokenized()
        else:
            w.ranks[rank].accept(q)

    def _drive(self) -> bool:
        changed = False
        for w in self.workers:
            while w.flight is None and w.has_work():
                self._start(w)
                changed = True
                if w.end_ms == self.now:
                    self._complete(w)
        return changed

    def _start(self, w: Worker) -> None:
        w.flight = [r.start(self.now, w.step) for r in w.ranks if r.has_work()]
        w.end_ms = max((p.end_ms for p in w.flight), default=self.now)
        outputs = any(
            p.emitted or p.completed or p.rejected or p.settled or p.requeued for p in w.flight
        )
        w.idle_passes = 0 if outputs or w.end_ms > self.now else w.idle_passes + 1
        if w.idle_passes > IDLE_PASS_LIMIT:
            raise Endless
        for p in w.flight:
            for q in p.settled:
                self._end(q)
                self.settled += 1
            self.settled += p.requeued
        if w.group is not None:
            w.group.close(w.flight)

    def _complete(self, w: Worker) -> None:
        for p in w.flight:
            self.committed_prefill_tokens += p.prefill_tokens
            for q in p.emitted:
                q.token_ms.append(self.now)
            for q in p.completed + p.rejected:
                self._end(q)
        w.flight = None
        w.step += 1
        w.passes += 1
        if not w.has_work():
            w.step = 0

    def _end(self, q: Request) -> None:
        q.status, q.reason = q.verdict
        q.terminal_ms = self.now
        self.in_flight -= 1


def _rank_class(config: dict) -> type[Rank]:
    return TrtllmRank if config.get("backend") == "trtllm" else Rank


def tokenizer_of(payload: dict) -> Tokenizer | None:
    stage = payload.get("tokenization") or {}
    base_ms, per_token_ms = stage.get("base_ms", 0.0), stage.get("per_input_token_ms", 0.0)
    if base_ms == 0 and per_token_ms == 0:
        return None
    return Tokenizer(stage.get("workers", 1), float(base_ms), float(per_token_ms))


# --- the answer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowOutcome:
    """The columns of `vecsim.run.outcome.Outcome` as plain lists in workload order.

    Undefined is None. `admissions` and `token_ms` hold everything of each request, `gaps` all
    inter-token gaps (ms) of the completed ones, `preemptions` one count per rank, `passes` one per
    worker. `settled` counts the requests that the reference would have stood still on, `evictions`
    the blocks (SGLang: pages) that were evicted. Of a prefill/decode run, `handoffs` has one dict
    of further fields per request, and the last two are (prefill, decode).
    """

    arrival_ms: list[float | None]
    tokenized_ms: list[float | None]
    first_admit_ms: list[float | None]
    first_token_ms: list[float | None]
    second_token_ms: list[float | None]
    last_token_ms: list[float | None]
    terminal_ms: list[float | None]
    input_length: list[int]
    requested_output_length: list[int]
    output_length: list[int]
    reused_input_tokens: list[int]
    first_reused_input_tokens: list[int]
    status: list[str]
    reason: list[str | None]
    rank: list[int]
    admissions: list[list[tuple[float, int]]]
    token_ms: list[list[float]]
    gaps: list[float]
    end_ms: float
    committed_prefill_tokens: int
    preemptions: list[int]
    passes: list[int]
    settled: int
    evictions: int
    handoffs: list[dict] | None = None
    worker_seconds: tuple[float, float] | None = None
    gpus_per_worker: tuple[int, int] | None = None


def simulate(payload: dict) -> SlowOutcome:
    """Replays a payload (bare spec or `{"spec", "tokenization"}`) with inline requests.

    Raises `Endless` where no rule settles a standstill.
    """
    fleet = Fleet(payload)
    fleet.run()
    return _outcome(fleet)


def _outcome(fleet: Fleet) -> SlowOutcome:
    rs = fleet.requests
    times = [q.token_ms for q in rs]
    reused = [[cached for _, cached in q.admissions] or [0] for q in rs]
    return SlowOutcome(
        arrival_ms=[q.arrival_ms for q in rs],
        tokenized_ms=[q.tokenized_ms for q in rs],
        first_admit_ms=[q.admissions[0][0] if q.admissions else None for q in rs],
        first_token_ms=[t[0] if t else None for t in times],
        second_token_ms=[t[1] if len(t) > 1 else None for t in times],
        last_token_ms=[t[-1] if t else None for t in times],
        terminal_ms=[q.terminal_ms for q in rs],
        input_length=[q.isl for q in rs],
        requested_output_length=[q.osl for q in rs],
        output_length=[len(t) for t in times],
        reused_input_tokens=[max(r) for r in reused],
        first_reused_input_tokens=[r[0] for r in reused],
        status=[q.status for q in rs],
        reason=[q.reason for q in rs],
        rank=[q.scheduler for q in rs],
        admissions=[q.admissions for q in rs],
        token_ms=times,
        gaps=[
            b - a
            for q in rs
            if q.status == "completed"
            for a, b in zip(q.token_ms, q.token_ms[1:], strict=False)
        ],
        end_ms=fleet.now,
        committed_prefill_tokens=fleet.committed_prefill_tokens,
        preemptions=[r.preemptions for w in fleet.workers for r in w.ranks],
        passes=[w.passes for w in fleet.workers],
        settled=fleet.settled,
        evictions=sum(r.evictions for w in fleet.workers for r in w.ranks),
    )
