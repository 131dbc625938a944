"""Slow and plain: prefill and decode ranks of SGLang, on top of `slow_sglang`.

A prefill rank produces one hidden token and then holds the pages of the request, by then in the
tree, until they are released. A decode rank reserves pages for destinations, first come, first
served, and runs the activated ones before anything it would have to prefill itself; a prompt enters
its tree when the request is admitted.
"""

from __future__ import annotations

from tests.models.slow_rank import Pass
from tests.models.slow_sglang import Group, Rank, Request


class SglangSource(Rank):
    def __init__(self, config: dict, dp_size: int, group: Group) -> None:
        super().__init__(config, dp_size, group, None)
        self.held: list[Request] = []

    def is_drained(self) -> bool:
        return not (self.has_work() or self.held)

    def _finish(self, q: Request) -> None:
        if q.max_out == 0:
            self._cache(q)
        self.held.append(q)
        q.verdict = ("held", None)

    def release_source(self, q: Request) -> None:
        if q in self.held:
            self.held.remove(q)
            super()._finish(q)

    def release(self, q: Request) -> None:
        self._give_up(q)

    def may_still_start(self, q: Request) -> bool:
        return bool(self.held)


class SglangDestination(Rank):
    def __init__(self, config: dict, dp_size: int, group: Group) -> None:
        super().__init__(config, dp_size, group, None)
        self.pending: list[Request] = []
        self.reserved: list[Request] = []
        self.ready: list[Request] = []

    def has_work(self) -> bool:
        return bool(self.ready) or super().has_work()

    def is_drained(self) -> bool:
        return not (self.has_work() or self.pending or self.reserved)

    def _prefill_ms(self, tokens: float) -> float:
        return 0.0

    def refusal(self, q: Request) -> str | None:
        if self.max_model_len is not None and q.isl >= self.max_model_len:
            return "prompt_exceeds_max_model_len"
        if self._pages(q.isl) > self.capacity:
            return "prompt_exceeds_kv_capacity"
        return None

    def accept_destination(self, q: Request) -> None:
        if self.max_model_len is not None:
            q.max_out = min(q.osl, max(0, self.max_model_len - q.isl))
        q.node = self.tree.root
        self.pending.append(q)

    def retry(self) -> Request | None:
        """One attempt to reserve the first destination.

        The reference spares itself attempts after which nothing changed: nobody can tell.
        """
        if not self.pending or not self._reserve(self.pending[0]):
            return None
        q = self.pending.pop(0)
        self.reserved.append(q)
        return q

    def _reserve(self, q: Request) -> bool:
        hits = 0
        if self.caching:
            keys = q.page_keys(q.isl // self.page)
            hits = self.tree.probe(keys)
            q.node = self.tree.match(keys[:hits])
            self.tree.lock(q.node, 1)
        need = self._pages(q.isl) - hits
        if need > self._available():
            self.tree.lock(q.node, -1)
            q.node = self.tree.root
            return False
        self._evict(need - self.free)
        self.free -= need
        q.cached, q.pages, q.fresh_blocks = hits, self._pages(q.isl), need
        return True

    def activate(self, q: Request) -> None:
        self.reserved.remove(q)
        q.mat = q.isl
        self.ready.append(q)

    def cancel_destination(self, q: Request) -> None:
        if q in self.pending:
            self.pending.remove(q)
        elif q in self.reserved:
            self.reserved.remove(q)
            self._give_up(q)

    def release(self, q: Request) -> None:
        self._give_up(q)

    # the pass

    def start(self, now: float, step: int) -> Pass:
        self.now = now
        return super().start(now, step)

    def _reject(self, p: Pass) -> None:
        super()._reject(p)
        while self.ready and len(self.running) < self.max_seqs:
            q = self.ready.pop(0)
            q.admissions.append((self.now, 0))
            p.admitted.append(q)
            self._cache(q)
            self.running.append(q)

    def _form_batch(self, p: Pass, now: float) -> list[tuple[Request, int]]:
        return [] if self.ready or self.pending else super()._form_batch(p, now)

    def _decode(self, p: Pass, now: float) -> tuple[list[Request], list[Request], float | None]:
        self.empty = [q for q in self.running if q.remaining() == 0]
        self.running = [q for q in self.running if q.remaining() > 0]
        self.parked: list[Request] = []
        finished, retracted, estimate = super()._decode(p, now)
        self.running = self.parked or self.running
        return self.empty + finished, retracted, estimate

    def _settle_runner(self, p: Pass) -> None:
        """Waits while pages of other destinations, or of some that end here, stand in its way."""
        others = self.reserved or self.ready
        fits = self._pages(self.running[0].length() + 1) <= self.capacity
        if self.empty or (others and fits):
            self.parked, self.running = self.running, []
            p.waits = not self.empty
        else:
            super()._settle_runner(p)

    def may_still_start(self, q: Request) -> bool:
        return bool(self.reserved)
