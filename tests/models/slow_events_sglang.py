"""Slow and plain: KV events of SGLang's prefill/decode pools, as `slow_disaggregated` brings them
about.

Copies of a page are counted: one in the tree, and one in each prompt that was activated and waits
for a slot. The first one stores the page, the last one removes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.models.slow_disaggregated import DECODE, Fleet, Pool, Worker
from tests.models.slow_handoff_sglang import SglangDestination
from tests.models.slow_rank import Pass
from tests.models.slow_sglang import Node, Rank, Request, Tree

DECODES_A_REPORT = 40


class WatchedTree(Tree):
    """A rank's radix tree, which notes the first and the last copy of every page."""

    def __init__(self, tree: Tree, names: dict[tuple, int]) -> None:
        vars(self).update(vars(tree))
        self.names = names  # number of each (page before, tokens)
        self.copies: Counter[int] = Counter()
        self.open: list[tuple[str, int | None, list[int]]] = []
        self.events: list[tuple[int, float, str, int | None, list[int]]] = []

    def insert(self, start: Node, pages: list) -> tuple[Node, int]:
        end, duplicates = super().insert(start, pages)
        self.add(pages[duplicates:])
        return end, duplicates

    def _cut(self, leaf: Node, count: int) -> None:
        gone = leaf.key[-count:]
        super()._cut(leaf, count)
        self.drop(gone)

    def add(self, pages: list[int]) -> None:
        for page in pages:
            self.copies[page] += 1
            if self.copies[page] == 1:
                parent = list(self.names)[page][0]
                goes_on = self.open and self.open[-1][0] == "stored"
                if not goes_on or self.open[-1][2][-1] != parent:
                    self.open.append(("stored", parent, []))
                self.open[-1][2].append(page)

    def drop(self, pages: list[int]) -> None:
        for page in pages:
            self.copies[page] -= 1
            if self.copies[page] == 0:
                if not self.open or self.open[-1][0] != "removed":
                    self.open.append(("removed", None, []))
                self.open[-1][2].append(page)

    def show(self, now: float) -> None:
        """What was noted can be seen from now on."""
        for kind, parent, pages in self.open:
            self.events.append((len(self.events), now, kind, parent, pages))
        self.open = []


class WatchedSglangFleet(Fleet):
    """A fleet of SGLang ranks all of which are watched."""

    def __init__(self, payload: dict) -> None:
        super().__init__(payload)
        for pool in self.pools:
            for w in pool.workers:
                for rank in w.ranks:
                    rank.tree = WatchedTree(rank.tree, pool.names)
                    self._watch_pass(rank)
                    if pool is self.pools[DECODE]:
                        self._watch_commands(rank)

    def _watch_pass(self, rank: Rank) -> None:
        rank.decodes = 0  # since the last that called for a report
        decode = rank._decode

        def counted(p: Pass, now: float) -> Any:
            answer = decode(p, now)
            p.decoded = bool(p.emitted)
            return answer

        rank._decode = counted

    def _complete(self, pool: Pool, w: Worker) -> bool:
        for k, p in w.flight:
            rank = w.ranks[k]
            due = p.prefill_tokens > 0
            if getattr(p, "decoded", False):
                rank.decodes = (rank.decodes + 1) % DECODES_A_REPORT
                due = rank.decodes == 0
            if due or not rank.running:
                rank.tree.show(self.now)
        return super()._complete(pool, w)

    def _watch_commands(self, rank: SglangDestination) -> None:
        tree: WatchedTree = rank.tree
        prompts: dict[int, list[int]] = {}  # pages of the activated requests that wait

        def alone(change: Callable, *arguments: Any) -> Any:
            """What comes about is seen at once, behind what was not reported yet."""
            tree.show(self.now)
            answer = change(*arguments)
            tree.show(self.now)
            return answer

        def watched(method: Callable) -> Callable:
            def wrap(wrapper: Callable) -> None:
                setattr(rank, method.__name__, lambda *a: wrapper(method, *a))

            return wrap

        @watched(rank.activate)
        def activated(activate: Callable, q: Request) -> None:
            activate(q)
            if rank.caching:
                pages = q.page_keys(q.isl // rank.page)
                prompts[q.index] = list(pages)
                new = any(tree.copies[page] == 0 for page in pages)
                alone(tree.add, pages) if new else tree.add(pages)

        @watched(rank._cache)
        def cached(cache: Callable, q: Request) -> None:
            cache(q)
            tree.drop(prompts.pop(q.index, []))

        @watched(rank.release)
        def released(release: Callable, q: Request) -> None:
            release(q)
            pages = prompts.pop(q.index, [])
            last = any(tree.copies[page] == 1 for page in pages)
            alone(tree.drop, pages) if last else tree.drop(pages)

        @watched(rank._reserve)
        def reserved(reserve: Callable, q: Request) -> bool:
            evict = rank._evict
            rank._evict = lambda count: alone(evict, count) if count > 0 else None
            answer = reserve(q)
            rank._evict = evict
            return answer
