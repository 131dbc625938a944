"""A slow, plain model of a prefill/decode replay: two pools of ranks on one event loop.

Beside `slow_model`, and with its kind of answer. It knows inline requests, round robin and pinned
ranks in both pools, attention-DP groups, open and closed loop, a time limit, transfers by latency
or bandwidth. Where nothing can move any more, the blocked head of the lowest rank is failed.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from tests.models import slow_sglang
from tests.models.slow_handoff import TrtllmDestination, TrtllmSource, VllmDestination, VllmSource
from tests.models.slow_handoff_sglang import SglangDestination, SglangSource
from tests.models.slow_model import Endless, SlowOutcome, Tokenizer, tokenizer_of
from tests.models.slow_rank import Pass, Request
from tests.models.slow_sglang import Group

IDLE_PASS_LIMIT = 400_000  # STRAINED_LIMIT preemptions, between which a prompt comes token by token
RETRY_LIMIT = 1024  # effect-free passes in a row at one instant after which the reference gives up
SGLANG = (SglangSource, SglangDestination)
RANKS = {
    "vllm": (VllmSource, VllmDestination),
    "trtllm": (TrtllmSource, TrtllmDestination),
}
PREFILL, DECODE = 0, 1


class Worker:
    def __init__(self, ranks: list) -> None:
        self.ranks = ranks
        self.tokenizer: Tokenizer | None = None
        self.group: Group | None = None  # SGLang's
        self.flight: list[tuple[int, Pass]] | None = None
        self.end_ms = 0.0
        self.step = 0
        self.passes = 0
        self.idle_passes = 0
        self.retries = 0  # effect-free passes in a row that only moved the ratio
        self.set_aside = False
        self.deferred: list[deque] = [deque() for _ in ranks]

    def has_work(self) -> bool:
        counting = self.group is not None and self.group.left > 0
        return counting or any(r.has_work() for r in self.ranks)

    def pulse(self) -> tuple:
        """What an SGLang worker goes on trying for, though its pass had no effect."""
        return () if self.group is None else (self.group.left, *(r.ratio for r in self.ranks))


class Pool:
    """One pool: its workers and the counter of its round robin."""

    def __init__(self, stage: int, role: dict, workers: int) -> None:
        config = role.get("rank", {})
        self.dp_size = role.get("dp_size", 1)
        self.workers = [self._worker(stage, config) for _ in range(workers)]
        self.turn = 0
        rank = self.workers[0].ranks[0]
        named = rank.caching or isinstance(rank, SGLANG)
        self.names: dict | None = {} if named else None  # hashes of the pool's blocks

    def _worker(self, stage: int, config: dict) -> Worker:
        backend = config.get("backend", "vllm")
        if backend != "sglang":
            rank = RANKS[backend][stage]
            return Worker([rank(config, self.dp_size) for _ in range(self.dp_size)])
        group = Group(config)
        group.ranks = [SGLANG[stage](config, self.dp_size, group) for _ in range(self.dp_size)]
        worker = Worker(group.ranks)
        worker.group = group
        return worker

    def place(self, pin: int | None) -> int:
        total = len(self.workers) * self.dp_size
        candidates = [s for s in range(total) if pin is None or s % self.dp_size == pin]
        at = self.turn % len(candidates)
        self.turn = at + 1
        return candidates[at]

    def rank(self, scheduler: int):
        return self.workers[scheduler // self.dp_size].ranks[scheduler % self.dp_size]

    def worker(self, scheduler: int) -> Worker:
        return self.workers[scheduler // self.dp_size]


@dataclass
class Handoff:
    """One request of the run: its copies in the two pools and what became of it."""

    index: int
    ordinal: int
    authored_ms: float
    source: Request
    target: Request
    pins: tuple[int | None, int | None]
    arrival_ms: float | None = None
    status: str = "not_arrived"
    reason: str | None = None
    terminal_ms: float | None = None
    prefill: int = -1
    decode: int = -1
    token_ms: list[float] = field(default_factory=list)
    held_ms: float | None = None
    reserved_ms: float | None = None
    activated_ms: float | None = None
    released_ms: float | None = None


class Fleet:
    def __init__(self, payload: dict) -> None:
        spec = payload.get("spec", payload)
        engine = spec.get("engine") or {}
        topology = spec["topology"]
        roles = [
            engine if engine.get(name) is None else engine[name] for name in ("prefill", "decode")
        ]
        self.roles = roles
        self.pools = [
            Pool(k, role, topology[name]["initial_workers"])
            for k, (name, role) in enumerate(zip(("prefill", "decode"), roles, strict=True))
        ]
        for w in self.pools[PREFILL].workers:
            w.tokenizer = tokenizer_of(payload)
        self.source_rank = roles[0].get("rank", {})
        self.source_first = self.source_rank.get("backend") != "sglang"
        self.latency_ms = float(topology.get("handoff_latency_ms", 0.0))
        self.handoffs = [self._handoff(k, r) for k, r in enumerate(spec["requests"])]
        self.queue = sorted(self.handoffs, key=lambda h: h.authored_ms)
        for ordinal, h in enumerate(self.queue):
            h.ordinal = ordinal
        self.max_in_flight = spec.get("max_in_flight")
        self.limit_ms = spec.get("max_sim_time_ms")
        self.now = 0.0
        self.taken = self.in_flight = 0
        self.committed_prefill_tokens = 0
        self.settled = 0
        self.worker_seconds = [0.0, 0.0]
        self.actions: deque = deque()
        self.transfers: list[tuple[float, int, Handoff]] = []

    def _handoff(self, index: int, authored: dict) -> Handoff:
        copies = []
        for k, pool in enumerate(self.pools):
            rank = pool.workers[0].ranks[0]
            row = dict(authored)
            if k == PREFILL:
                plan = row.pop("output_token_ids", None)
                row["output_tokens"] = min(row["output_tokens"] if plan is None else len(plan), 1)
            if isinstance(rank, SGLANG):
                copies.append(slow_sglang.Request(index, row, rank.page, pool.names))
            else:
                copies.append(Request(index, row, rank.block_size, pool.names))
        decode_pin = authored.get("dp_rank")
        prefill_pin = authored.get("prefill_dp_rank", decode_pin)
        return Handoff(
            index, 0, copies[1].authored_ms, copies[0], copies[1], (prefill_pin, decode_pin)
        )

    # One instant

    def run(self) -> None:
        self._drain()
        while True:
            times = [w.end_ms for p in self.pools for w in p.workers if w.flight is not None]
            times += [at for at, _, _ in self.transfers]
            times += [w.tokenizer.pending[0][0] for w in self._tokenizing()]
            times += self._next_arrivals()
            if not times:
                if not self._settle_deadlock():
                    return
                self._drain(settled=True)
                continue
            if self.limit_ms is not None and min(times) > self.limit_ms:
                return
            for k, pool in enumerate(self.pools):
                elapsed = min(times) - self.now
                self.worker_seconds[k] += len(pool.workers) * elapsed / 1000
            self.now = min(times)
            self._drain()

    def _next_arrivals(self) -> list[float]:
        if self.max_in_flight is None and self.taken < len(self.queue):
            return [self.queue[self.taken].authored_ms]
        return []

    def _drain(self, settled: bool = False) -> None:
        """All rounds of an instant; the end of a deadlock counts as a change in the first."""
        changed = True
        while changed:
            changed = self._deliver_tokenized() or settled
            settled = False
            for pool in self.pools:
                for w in pool.workers:
                    w.set_aside = False
                    if w.flight is not None and w.end_ms == self.now:
                        self._complete(pool, w)
                        changed = True
            due = sorted(t for t in self.transfers if t[0] == self.now)
            for transfer in due:
                self.transfers.remove(transfer)
                self.actions.append(("activate", transfer[2]))
                changed = True
            while self.actions:
                name, h = self.actions.popleft()
                getattr(self, f"_{name}")(h)
                changed = True
            changed |= self._take_arrivals()
            for pool in self.pools:
                changed |= self._drive(pool)

    def _take_arrivals(self) -> bool:
        before = self.taken
        while self.taken < len(self.queue):
            h = self.queue[self.taken]
            if self.max_in_flight is None:
                if h.authored_ms > self.now:
                    break
                h.arrival_ms = h.authored_ms
            elif self.in_flight < self.max_in_flight:
                h.arrival_ms = self.now
            else:
                break
            self._take(h)
        return self.taken > before

    def _take(self, h: Handoff) -> None:
        self.taken += 1
        self.in_flight += 1
        h.status = "unfinished"
        self.actions.append(("submit" if self.source_first else "reserve", h))

    def _leave(self, h: Handoff) -> None:
        """A request is no more in flight."""
        self.in_flight -= 1

    # Actions

    def _submit(self, h: Handoff) -> None:
        pool = self.pools[PREFILL]
        h.prefill = h.source.scheduler = pool.place(h.pins[PREFILL])
        tokenizer = pool.worker(h.prefill).tokenizer
        if tokenizer is None:
            pool.rank(h.prefill).accept(h.source)
        else:
            tokenizer.take(h.source, self.now)
            self._deliver_tokenized()

    def _tokenizing(self) -> list[Worker]:
        workers = self.pools[PREFILL].workers
        return [w for w in workers if w.tokenizer and w.tokenizer.pending]

    def _deliver_tokenized(self) -> bool:
        changed = False
        for w in self._tokenizing():
            while w.tokenizer.pending and w.tokenizer.pending[0][0] <= self.now:
                q = heapq.heappop(w.tokenizer.pending)[2]
                self.pools[PREFILL].rank(q.scheduler).accept(q)
                changed = True
        return changed

    def _reserve(self, h: Handoff) -> None:
        pool = self.pools[DECODE]
        h.decode = pool.place(h.pins[DECODE])
        rank = pool.rank(h.decode)
        reason = rank.refusal(h.target)
        if reason:
            h.decode = -1
            self._end(h, "failed", reason)
            self.actions.append(("cancel_source" if self.source_first else "drop", h))
            return
        rank.accept_destination(h.target)
        if pool.worker(h.decode).flight is None:
            self._lifecycle(rank.retry())

    def _transfer(self, h: Handoff) -> None:
        delay = self._delay_ms(h)
        if delay > 0:
            self.transfers.append((self.now + delay, h.ordinal, h))
        else:
            self.actions.append(("activate", h))

    def _delay_ms(self, h: Handoff) -> float:
        per_token = self.source_rank.get("kv_transfer_bytes_per_token")
        bandwidth = self.source_rank.get("kv_transfer_bandwidth")
        if per_token is None or not bandwidth:
            return self.latency_ms
        tokens = h.target.isl
        if self.source_rank.get("kv_transfer_timing_mode") == "destination_missing":
            rank = self.pools[DECODE].rank(h.decode)
            tokens = h.target.fresh_blocks * rank.block_size
        return float(tokens) * float(per_token) / (bandwidth * 1e9) * 1000

    def _activate(self, h: Handoff) -> None:
        pool = self.pools[DECODE]
        w = pool.worker(h.decode)
        if w.flight is not None:
            w.deferred[h.decode % pool.dp_size].append(("activate", h))
            return
        rank = pool.rank(h.decode)
        rank.activate(h.target)
        h.activated_ms = self.now
        self.actions.append(("release", h))
        self._lifecycle(rank.retry())

    def _release(self, h: Handoff) -> None:
        if self._free_source(h, "release"):
            h.released_ms = self.now

    def _free_source(self, h: Handoff, action: str) -> bool:
        pool = self.pools[PREFILL]
        w = pool.worker(h.prefill)
        if w.flight is not None:
            w.deferred[h.prefill % pool.dp_size].append((action, h))
            return False
        pool.rank(h.prefill).release_source(h.source)
        return True

    def _cancel_source(self, h: Handoff) -> None:
        if self._free_source(h, "cancel_source"):
            self.actions.append(("drop" if self.source_first else "cancel_destination", h))

    def _cancel_destination(self, h: Handoff) -> None:
        pool = self.pools[DECODE]
        w = pool.worker(h.decode)
        if w.flight is not None:
            w.deferred[h.decode % pool.dp_size].append(("cancel_destination", h))
            return
        pool.rank(h.decode).cancel_destination(h.target)
        self.actions.append(("drop", h))
        self._lifecycle(pool.rank(h.decode).retry())

    def _drop(self, h: Handoff) -> None:
        self._leave(h)

    def _lifecycle(self, reserved: Request | None) -> None:
        if reserved is not None:
            h = self.handoffs[reserved.index]
            h.reserved_ms = self.now
            self.actions.append(("transfer" if self.source_first else "submit", h))

    # Passes

    def _drive(self, pool: Pool) -> bool:
        changed = False
        for w in pool.workers:
            while w.flight is None and not w.set_aside and w.has_work():
                before = w.pulse()
                effect = self._start(pool, w)
                moved = w.pulse() != before
                if w.end_ms == self.now:
                    effect |= self._complete(pool, w)
                    w.set_aside = not (effect or moved)
                self._count_retries(w, effect or not moved)
                changed |= effect or moved or w.end_ms > self.now
        return changed

    def _count_retries(self, w: Worker, effect: bool) -> None:
        """Counts the passes in a row that took no time."""
        if effect:
            w.retries = 0
            w.idle_passes = w.idle_passes + 1 if w.end_ms == self.now else 0
        else:
            w.retries += 1
        self.settled += w.retries == RETRY_LIMIT
        if w.idle_passes > IDLE_PASS_LIMIT:
            raise Endless

    def _start(self, pool: Pool, w: Worker) -> bool:
        """Starts a pass; whether it has an effect."""
        w.flight = [(k, r.start(self.now, w.step)) for k, r in enumerate(w.ranks) if r.has_work()]
        w.end_ms = max((p.end_ms for _, p in w.flight), default=self.now)
        effect = any(
            p.work
            or p.emitted
            or p.completed
            or p.rejected
            or p.settled
            or p.preempted
            or p.admitted
            or p.ran_model
            or p.requeued
            for _, p in w.flight
        )
        if w.group is not None:
            w.group.close([p for _, p in w.flight])
        for _, p in w.flight:
            self.settled += p.requeued + (p.waits and w.end_ms == self.now and not effect)
            for q in p.settled:
                self._settle(self.handoffs[q.index], pool, *q.verdict)
        return effect

    def _settle(self, h: Handoff, pool: Pool, status: str, reason: str) -> None:
        self.settled += 1
        self._end(h, status, reason)
        if pool is self.pools[PREFILL] and not self.source_first:
            self.actions.append(("cancel_destination", h))
        else:
            self._leave(h)

    def _complete(self, pool: Pool, w: Worker) -> bool:
        """Applies the pass in flight; whether a destination got its blocks."""
        flight = dict(w.flight)
        w.flight = None
        w.step += 1
        w.passes += 1
        decode = pool is self.pools[DECODE]
        retried = [r.retry() if decode else None for r in w.ranks]
        for k in range(len(w.ranks)):
            self.actions.extend(w.deferred[k])
            w.deferred[k].clear()
            if k in flight:
                self._apply(flight[k], decode)
            self._lifecycle(retried[k])
        if all(r.is_drained() for r in w.ranks):
            w.step = 0
        return any(r is not None for r in retried)

    def _apply(self, p: Pass, decode: bool) -> None:
        self.committed_prefill_tokens += p.prefill_tokens
        if decode:
            for q in p.emitted:
                self.handoffs[q.index].token_ms.append(self.now)
            for q in p.completed:
                h = self.handoffs[q.index]
                self._end(h, *q.verdict)
                self._leave(h)
            return
        for q in p.rejected:
            h = self.handoffs[q.index]
            self._end(h, *q.verdict)
            # Nothing is held yet; a destination that waits is told at once.
            self.actions.append(("cancel_source" if self.source_first else "cancel_destination", h))
        for q in p.completed:
            h = self.handoffs[q.index]
            h.held_ms = self.now
            self.actions.append(("reserve" if self.source_first else "transfer", h))

    def _end(self, h: Handoff, status: str, reason: str | None) -> None:
        h.status, h.reason, h.terminal_ms = status, reason, self.now

    # Standstills

    def _settle_deadlock(self) -> bool:
        """Fails the blocked head of the lowest rank, if there is one."""
        for pool in self.pools:
            for w in pool.workers:
                for r in w.ranks:
                    lists = [r.waiting, getattr(r, "ready", []), getattr(r, "pending", [])]
                    blocked = next((queue for queue in lists if queue), None)
                    if blocked is None:
                        continue
                    head = blocked.pop(0)
                    decode = pool is self.pools[DECODE]
                    h = self.handoffs[head.index]
                    if decode:
                        r.cancel_destination(head)
                    if decode or not self.source_first:
                        r.release(head)
                    self.settled += 1
                    self._end(h, "failed", "deadlock")
                    if decode and h.held_ms is not None and h.released_ms is None:
                        self.actions.append(("cancel_source", h))
                    elif not decode and not self.source_first:
                        self.actions.append(("cancel_destination", h))
                    else:
                        self._leave(h)
                    if decode:
                        self._lifecycle(r.retry())
                    return True
        return False


# --- the answer -----------------------------------------------------------------------------------


def simulate(payload: dict) -> SlowOutcome:
    """Replays a payload with inline requests. Raises `Endless` where passes never end."""
    fleet = Fleet(payload)
    fleet.run()
    return _outcome(fleet)


def _outcome(fleet: Fleet) -> SlowOutcome:
    hs = fleet.handoffs
    times = [h.token_ms for h in hs]
    sources = [[cached for _, cached in h.source.admissions] or [0] for h in hs]
    return SlowOutcome(
        arrival_ms=[h.arrival_ms for h in hs],
        tokenized_ms=[h.source.tokenized_ms for h in hs],
        first_admit_ms=[_first(h.source.admissions) for h in hs],
        first_token_ms=[t[0] if t else None for t in times],
        second_token_ms=[t[1] if len(t) > 1 else None for t in times],
        last_token_ms=[t[-1] if t else None for t in times],
        terminal_ms=[h.terminal_ms for h in hs],
        input_length=[h.target.isl for h in hs],
        requested_output_length=[h.target.osl for h in hs],
        output_length=[len(t) for t in times],
        reused_input_tokens=[max(r) for r in sources],
        first_reused_input_tokens=[r[0] for r in sources],
        status=[h.status for h in hs],
        reason=[h.reason for h in hs],
        rank=[h.decode for h in hs],
        admissions=[h.source.admissions + h.target.admissions for h in hs],
        token_ms=times,
        gaps=[
            b - a
            for h in hs
            if h.status == "completed"
            for a, b in zip(h.token_ms, h.token_ms[1:], strict=False)
        ],
        end_ms=fleet.now,
        committed_prefill_tokens=fleet.committed_prefill_tokens,
        preemptions=[r.preemptions for p in fleet.pools for w in p.workers for r in w.ranks],
        passes=[w.passes for p in fleet.pools for w in p.workers],
        settled=fleet.settled,
        evictions=0,
        handoffs=[_columns(h) for h in hs],
        worker_seconds=tuple(fleet.worker_seconds),
        gpus_per_worker=tuple(
            role.get("dp_size", 1) * role.get("tensor_parallel_size", 1) for role in fleet.roles
        ),
    )


def _first(admissions: list[tuple[float, int]]) -> float | None:
    return admissions[0][0] if admissions else None


def _columns(h: Handoff) -> dict:
    """What a record has beyond that of an aggregated run."""
    source, target = h.source.admissions, h.target.admissions
    return {
        "prefill_worker_idx": h.prefill if h.prefill >= 0 else None,
        "prefill_admit_ms": _first(source),
        "source_held_ms": h.held_ms,
        "destination_reserved_ms": h.reserved_ms,
        "destination_activated_ms": h.activated_ms,
        "decode_admit_ms": _first(target),
        "source_released_ms": h.released_ms,
        "decode_reused_input_tokens": max((cached for _, cached in target), default=None),
        "admission_count": len(source) + len(target),
        "readmission_count": max(len(source) - 1, 0) + max(len(target) - 1, 0),
        "admission_history": [
            *(("prefill", at, reused) for at, reused in source),
            *(("decode", at, reused) for at, reused in target),
        ],
    }
