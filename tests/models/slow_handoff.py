"""Slow and plain: prefill and decode ranks of vLLM and TensorRT-LLM, on top of `slow_rank`.

A prefill rank produces one hidden token and then holds the blocks of the request until they are
released. A decode rank reserves blocks for destinations, first come, first served, and admits
the activated ones without looking at memory.
"""

from __future__ import annotations

from tests.models.slow_rank import STRAINED_LIMIT, Pass, Rank, Request
from tests.models.slow_trtllm import TrtllmRank


class Source:
    """What a prefill rank does differently; mixed into a rank."""

    def __init__(self, config: dict, dp_size: int) -> None:
        super().__init__(config, dp_size, None)
        self.held: list[Request] = []

    def is_drained(self) -> bool:
        return not (self.has_work() or self.held)

    def _decode_ms(self, context: int) -> float:
        return 0.0

    def _finish(self, q: Request) -> None:
        self.running.remove(q)
        self.held.append(q)
        q.verdict = ("held", None)

    def release_source(self, q: Request) -> None:
        if q in self.held:
            self.held.remove(q)
            self._release_blocks(q)

    def may_still_start(self, q: Request) -> bool:
        """A release may bring the memory that the head lacks."""
        return bool(self.held) and not self._fits(q)

    def _fits(self, q: Request) -> bool:
        active = self._lookup(q)[1]
        return self.footprint(q) - active // self.block_size <= self.room()


class VllmSource(Source, Rank):
    def footprint(self, q: Request) -> int:
        return self.blocks_of(q.length())

    def room(self) -> int:
        return self.pool.capacity - self.pool.active()


class TrtllmSource(Source, TrtllmRank):
    def footprint(self, q: Request) -> int:
        return self._full(q)

    def room(self) -> int:
        promised = sum(self._full(r) - self.blocks_of(r.allocated) for r in self.running)
        return self.pool.capacity - self.pool.active() - promised


class Destination:
    """What a decode rank does differently; mixed into a rank."""

    def __init__(self, config: dict, dp_size: int) -> None:
        super().__init__(config, dp_size, None)
        self.pending: list[Request] = []
        self.reserved: list[Request] = []
        self.orders = 0
        self.generation = 0  # counts what may have made room; a refused head waits for the next one

    def is_drained(self) -> bool:
        return not (self.has_work() or self.pending or self.reserved)

    def _prefill_ms(self, batch: int, mean_isl: int, mean_prefix: int) -> float:
        return 0.0

    def _decodes(self, q: Request, p: Pass) -> bool:
        return True

    def refusal(self, q: Request) -> str | None:
        """Why a destination can never be reserved."""
        if self.max_model_len is not None and q.isl >= self.max_model_len:
            return "prompt_exceeds_max_model_len"
        if self.least_blocks(q) > self.pool.capacity:
            return "prompt_exceeds_kv_capacity"
        return None

    def accept_destination(self, q: Request) -> None:
        q.order = self.orders
        self.orders += 1
        q.materialised = False
        q.refused_at = None
        self.pending.append(q)

    def retry(self) -> Request | None:
        """One attempt to reserve the first destination."""
        if not self.pending:
            return None
        q = self.pending[0]
        if len(self.running) >= self.max_seqs:
            q.refused_at = self.generation
            return None
        if q.refused_at == self.generation or not self.reserve(q):
            q.refused_at = self.generation
            return None
        self.pending.pop(0)
        self.reserved.append(q)
        return q

    def activate(self, q: Request) -> None:
        self.reserved.remove(q)
        q.materialised = True
        q.computed = q.isl
        for entry in q.blocks[: q.isl // self.block_size]:
            if entry[2]:
                entry[2] = False
                self.pool.publish(entry[1], entry[0])
        at = 0
        while at < len(self.waiting) and self.waiting[at].order < q.order:
            at += 1
        self.waiting.insert(at, q)

    def cancel_destination(self, q: Request) -> None:
        self.generation += 1
        if q in self.pending:
            self.pending.remove(q)
        elif q in self.reserved:
            self.reserved.remove(q)
            self._release_blocks(q)

    def release(self, q: Request) -> None:
        self._release_blocks(q)

    def start(self, now: float, step: int) -> Pass:
        self.holding_back = bool(self.pending)
        p = super().start(now, step)
        self.generation += len(p.settled)
        return p

    def head(self) -> Request | None:
        """While destinations wait for memory, preempted requests are passed over."""
        if not self.holding_back:
            return self.waiting[0]
        return next((q for q in self.waiting if q.materialised), None)

    def _settle_overcommitment(self, p: Pass, defer: bool) -> None:
        """Reserved blocks in its way, an empty prompt may preempt all others and still not run."""
        super()._settle_overcommitment(p, defer)
        if self.strained > STRAINED_LIMIT:
            q = next(q for q in self.waiting if q.isl == 0)
            self.waiting.remove(q)
            q.verdict = ("failed", "kv_capacity_exhausted")
            p.settled.append(q)
            self.strained = 0

    def _rejection(self, q: Request) -> str | None:
        return None if q.materialised else super()._rejection(q)

    def _admit(self, q: Request, p: Pass, defer: bool, now: float) -> bool:
        if not q.materialised:
            return super()._admit(q, p, defer, now)
        if self.blocks_of(q.length()) > self.pool.capacity:
            return False  # an empty prompt that outgrew the pool, as in `Rank._admit`
        if self._schedule(q, p, 0) != "ok":
            return False
        self.waiting.remove(q)
        self.running.append(q)
        q.admissions.append((now, 0))
        p.admitted.append(q)
        return True

    def _preempt(self) -> Request | None:
        victim = super()._preempt()
        if victim is not None:
            victim.materialised = victim.isl == 0
            self.generation += 1
        return victim

    def _finish(self, q: Request) -> None:
        super()._finish(q)
        self.generation += 1

    def may_still_start(self, q: Request) -> bool:
        """Reserved destinations come and go; only a request that outgrew the pool never starts."""
        if self.blocks_of(q.length()) > self.pool.capacity:
            return False
        return bool(self.pending or self.reserved or self.waiting[1:])


class VllmDestination(Destination, Rank):
    def least_blocks(self, q: Request) -> int:
        return self.blocks_of(q.isl)

    def reserve(self, q: Request) -> bool:
        hits = 0
        if self.caching:
            for block_hash, _, _ in q.blocks[: q.isl // self.block_size]:
                if block_hash is None or self.pool.probe(block_hash) is None:
                    break
                hits += 1
        if not self._grow(q, q.isl, hits):
            return False
        q.fresh_blocks = self.blocks_of(q.isl) - hits
        return True


class TrtllmDestination(Destination, TrtllmRank):
    def least_blocks(self, q: Request) -> int:
        return self._full(q)

    def reserve(self, q: Request) -> bool:
        owners = self.running + self.reserved + [w for w in self.waiting if w.materialised]
        promised = sum(self._full(r) - self.blocks_of(r.allocated) for r in owners)
        if self._full(q) > self.pool.capacity - self.pool.active() - promised:
            return False
        if not self._grow(q, q.isl, 0):
            return False
        q.fresh_blocks = self.blocks_of(q.isl)
        return True
