"""Slow and plain: KV events of prefill/decode pools, as `slow_disaggregated` brings them about.

Hashes are the slow model's own numbers of blocks.
"""

from __future__ import annotations

from tests.models import slow_disaggregated, slow_sessions
from tests.models.slow_disaggregated import Fleet, Pool
from tests.models.slow_events_sglang import WatchedSglangFleet
from tests.models.slow_rank import Pool as Blocks
from vecsim.workload.workload import Workload

Event = tuple[int, float, str, int | None, list[int]]
"""(event_id, observed_at_ms, kind, parent, blocks)."""


class Watched(Blocks):
    """A rank's KV blocks, which note what becomes findable and what is gone."""

    names: dict[tuple, int]  # number of each (block before, tokens)
    run = False  # the block published next may go on with the last event

    def __init__(self, blocks: Blocks, names: dict[tuple, int]) -> None:
        vars(self).update(vars(blocks))
        self.names = names
        self.open: list[list] = []
        self.events: list[Event] = []

    def reserve(self, hashes: list, fresh: int) -> list[int] | None:
        self.gone: list[int] = []
        ids = super().reserve(hashes, fresh)
        if self.gone:
            self.open.append(["removed", None, self.gone])
        return ids

    def _evict(self) -> None:
        there = set(self.by_hash)
        super()._evict()
        self.gone += there - set(self.by_hash)

    def publish(self, copy: int, block_hash: int) -> None:
        known = block_hash in self.by_hash
        super().publish(copy, block_hash)
        if known:
            self.run = False
            return
        if not self.run:
            parent = next(name[0] for name, k in self.names.items() if k == block_hash)
            self.open.append(["stored", parent, []])
        self.open[-1][2].append(block_hash)
        self.run = True

    def show(self, now: float) -> None:
        """What was noted can be seen from now on."""
        for kind, parent, blocks in self.open:
            self.events.append((len(self.events), now, kind, parent, blocks))
        self.open = []


class WatchedFleet(Fleet):
    """A fleet all of whose ranks are watched."""

    def __init__(self, payload: dict) -> None:
        super().__init__(payload)
        for pool in self.pools:
            for rank in self._ranks(pool):
                self._watch(rank, {} if pool.names is None else pool.names)

    @staticmethod
    def _ranks(pool: Pool) -> list:
        return [rank for w in pool.workers for rank in w.ranks]

    @staticmethod
    def _watch(rank, names: dict) -> None:
        rank.pool = blocks = Watched(rank.pool, names)

        def breaking(method):
            def call(*arguments):
                blocks.run = False
                return method(*arguments)

            return call

        rank._schedule = breaking(rank._schedule)
        if hasattr(rank, "activate"):
            rank.activate = breaking(rank.activate)

    def _complete(self, pool: Pool, w: slow_disaggregated.Worker) -> bool:
        # What a boundary retry evicts is handed over with the pass.
        reserved = super()._complete(pool, w)
        self._show(w)
        return reserved

    def _show(self, w: slow_disaggregated.Worker) -> None:
        for rank in w.ranks:
            rank.pool.show(self.now)

    def _reserve(self, h: slow_disaggregated.Handoff) -> None:
        super()._reserve(h)
        if h.decode >= 0:
            self._show_idle(self.pools[slow_disaggregated.DECODE].worker(h.decode))

    def _activate(self, h: slow_disaggregated.Handoff) -> None:
        super()._activate(h)
        self._show_idle(self.pools[slow_disaggregated.DECODE].worker(h.decode))

    def _show_idle(self, w: slow_disaggregated.Worker) -> None:
        if w.flight is None:
            self._show(w)

    def _settle_deadlock(self) -> bool:
        settled = super()._settle_deadlock()
        for w in self.pools[slow_disaggregated.DECODE].workers:
            self._show(w)
        return settled


class WatchedSessions(slow_sessions.SessionPools, WatchedFleet):
    pass


class WatchedGraph(slow_sessions.GraphPools, WatchedFleet):
    pass


class WatchedSglangSessions(slow_sessions.SessionPools, WatchedSglangFleet):
    pass


class WatchedSglangGraph(slow_sessions.GraphPools, WatchedSglangFleet):
    pass


WAITING = {
    (False, False): WatchedSessions,
    (False, True): WatchedGraph,
    (True, False): WatchedSglangSessions,
    (True, True): WatchedSglangGraph,
}
"""By (SGLang, graph)."""


def _is_sglang(payload: dict) -> bool:
    engine = payload.get("spec", payload)["engine"]
    return (engine.get("decode") or engine)["rank"].get("backend") == "sglang"


def events(payload: dict) -> list[tuple[str, int, int, list[Event]]]:
    """(pool, worker, rank, events) of all ranks. Raises `slow_model.Endless`."""
    fleet = (WatchedSglangFleet if _is_sglang(payload) else WatchedFleet)(payload)
    fleet.run()
    return _events(fleet)


def waiting_events(payload: dict, workload: Workload) -> list[tuple[str, int, int, list[Event]]]:
    """The same of a workload whose requests wait for others."""
    kind = WAITING[_is_sglang(payload), workload.dependencies is not None]
    return _events(slow_sessions.run(kind, payload, workload))


def _events(fleet: WatchedFleet | WatchedSglangFleet) -> list[tuple[str, int, int, list[Event]]]:
    return [
        (name, k, r, (rank.tree if hasattr(rank, "tree") else rank.pool).events)
        for name, pool in zip(("prefill", "decode"), fleet.pools, strict=True)
        for k, w in enumerate(pool.workers)
        for r, rank in enumerate(w.ranks)
    ]
