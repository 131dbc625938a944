"""Slow and plain: one TensorRT-LLM rank, where it differs from a vLLM rank.

Admission reserves blocks for the whole output, so nobody is preempted; the output of a prompt that
fits is clamped to the pool; a fully cached prompt keeps its whole hit.
"""

from __future__ import annotations

from tests.models.slow_rank import Forecast, Pass, Rank, Request


class TrtllmRank(Rank):
    reserves = True

    def __init__(self, config: dict, dp_size: int, forecast: Forecast | None) -> None:
        super().__init__(
            {**config, "block_size": config.get("block_size") or 32}, dp_size, forecast
        )

    def _limit(self, q: Request) -> int:
        limit = q.osl
        room = self.pool.capacity * self.block_size - q.isl
        if room > 0:
            limit = min(limit, room)
        if self.max_model_len is not None:
            limit = min(limit, max(0, self.max_model_len - q.isl))
        return limit

    def _full(self, q: Request) -> int:
        return self.blocks_of(q.isl + self._limit(q))

    def _left(self, q: Request) -> int:
        return self._limit(q) - q.generated

    def _lookup(self, q: Request) -> tuple[int, int]:
        hits = active = 0
        if self.caching:
            for block_hash, _, _ in q.blocks:
                referenced = None if block_hash is None else self.pool.probe(block_hash)
                if referenced is None:
                    break
                hits += 1
                active += referenced
        return hits * self.block_size, active * self.block_size

    def _rejection(self, q: Request) -> str | None:
        if self.max_model_len is not None and q.isl >= self.max_model_len:
            return "prompt_exceeds_max_model_len"
        if self._full(q) > self.pool.capacity:
            return "prompt_exceeds_kv_capacity"
        return None

    def _admit(self, q: Request, p: Pass, defer: bool, now: float) -> bool:
        cached, active = self._lookup(q)
        promised = sum(self._full(r) - self.blocks_of(r.allocated) for r in self.running)
        room = max(0, self.pool.capacity - self.pool.active() - promised)
        if q.isl and self._full(q) - active // self.block_size > room:
            return False  # an empty prompt is let in whatever is promised
        if self._schedule(q, p, cached) != "ok":
            return False
        self.waiting.remove(q)
        self.running.append(q)
        q.admissions.append((now, cached))
        p.admitted.append(q)
        return True

    def _preempt(self) -> Request | None:
        return None

    def _finish(self, q: Request) -> None:
        super()._finish(q)
        if q.generated < q.osl:
            by_length = self.max_model_len is not None and q.length() == self.max_model_len
            reason = "length" if by_length else "kv_capacity_exhausted"
            q.verdict = ("completed", reason)
