"""Lowering of fleets on one clock: whatever couples workers, requests and pools.

Requests are numbered as ties are broken: by arrival, by session and turn, or by node. In a
prefill/decode fleet each has two copies, q for the prefill pool and n + q for the decode pool.
What is known ahead becomes arrays here; ranks, grown prompts, rows of the prefix index and copies
are decided in the kernels, when a request is released.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vecsim.config.roles import Role
from vecsim.config.schema import DisaggregatedTopology, Tokenization
from vecsim.kernels.cache import sharing
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import NONE, UNLIMITED
from vecsim.kernels.state.fleet import Clock, Fleet, Steps, Transfers
from vecsim.kernels.state.pools import Forest, NextUseTable, Pools
from vecsim.kernels.state.rank import Ranks
from vecsim.kernels.state.request import Requests
from vecsim.kernels.state.worker import Scratch, Workers
from vecsim.kernels.timing.itl_histogram import GAP_BINS
from vecsim.run.lower.arrivals import arrivals_of
from vecsim.run.lower.content import content_of, empty_pools, next_use_table, own_blocks
from vecsim.run.lower.ranks import (
    grown_forest,
    new_ranks,
    new_workers,
    params_of,
    place_lists,
    set_role,
    sglang_trees,
)
from vecsim.run.lower.requests import (
    Conversations,
    blocks_of_sequences,
    checked_rows,
    in_order,
    known_ahead,
    needs_identities,
    paths_of,
    private_requests,
    prompts_only,
    requests_of,
    rows_in_order,
    shared_blocks,
    turn_limits,
)
from vecsim.timing.model import BoundTiming
from vecsim.workload.workload import Workload

if TYPE_CHECKING:
    from vecsim.run.kv_events import Watched

_INSTANTS_A_CALL = 100_000
_LOG_LINES = 4096


@dataclass(frozen=True)
class PoolPlan:
    """One pool of workers as it is asked for.

    Attributes:
        role: what its workers are.
        workers: how many.
        timing: custom timing, or None for the role's own model.
    """

    role: Role
    workers: int
    timing: BoundTiming | None

    @property
    def ranks(self) -> int:
        return self.workers * self.role.dp_size


@dataclass(frozen=True)
class FleetState:
    """A fleet before the start.

    Attributes:
        fleet: everything the kernels read and write.
        plans: the pools.
        order: int64 [n], row of the workload that request q of the kernels is, or None if the same.
        watched: where KV events are observed, what they are made of; else None.
    """

    fleet: Fleet
    plans: tuple[PoolPlan, ...]
    order: np.ndarray | None
    watched: Watched | None = None


@dataclass(frozen=True)
class _Side:
    """What lowering knows of one pool: parameters of its ranks, its copies of the requests, their
    paths, and int64 [n] how many tokens each can have at most."""

    plan: PoolPlan
    params: np.ndarray
    factors: np.ndarray
    requests: Requests
    paths: sharing.Paths
    reach: np.ndarray


def lower_fleet(
    plans: tuple[PoolPlan, ...],
    workload: Workload,
    *,
    topology: DisaggregatedTopology | None,
    eviction: str,
    tokenization: Tokenization | None,
    authored_order: bool,
    cap: int | None,
    horizon_ms: float,
    record_segments: bool,
    counted: np.ndarray | None = None,
) -> FleetState:
    """Arrays for a fresh run.

    Args:
        plans: one aggregated pool, or a prefill and a decode pool.
        workload: n requests.
        topology: of a prefill/decode fleet: what a handoff costs.
        eviction: "lru" or "belady".
        tokenization: the stage in front of every worker of the first pool, or None.
        authored_order: take requests in workload order instead of arrival order.
        cap: requests, or sessions, in flight at once; None = open loop.
        horizon_ms: virtual time after which nothing is processed.
        record_segments: keep the segment log.
        counted: bool [n], whose inter-token gaps are recorded; None = everybody's.

    Raises:
        InputError: a request too long for 32-bit token counters, or more blocks of content than
            32 bits count.
    """
    rows = _numbered(workload, authored_order)
    order = None if np.array_equal(rows, np.arange(len(rows))) else rows
    talks = Conversations.of(workload, rows)
    sides = [_side(plan, workload, order, talks, eviction, counted) for plan in plans]
    ranks, workers = _members(sides)
    requests = _copies(sides)
    most = np.concatenate([_most_requests(side, len(workload)) for side in sides])
    ranks = ranks._replace(lists=place_lists(ranks, most))
    next_uses = None
    if eviction == "belady":
        prompt_blocks = requests.state[Q.ISL] // sides[0].params[R.BLOCK_SIZE]
        next_uses = next_use_table(prompt_blocks, sides[0].paths)
    sglang = plans[0].role.backend == "sglang"
    pools, content, requests = _pools(sides, ranks, requests, most, next_uses, talks is not None)
    scratch = new_scratch(ranks, record_segments)
    fleet = Fleet(
        ranks=ranks,
        workers=workers,
        requests=requests,
        pools=pools,
        scratch=scratch,
        clock=_clock(plans, len(workload), tokenization, horizon_ms),
        arrivals=arrivals_of(workload, rows, cap),
        content=content,
        pins=_pins(plans, workload, order),
        transfers=None if topology is None else _transfers(plans, topology, len(workload), ranks),
    )
    state = FleetState(fleet, plans, order)
    if not plans[0].role.rank.emit_kv_events:
        return state
    return _observed(state, sides, talks, sglang)


def _numbered(workload: Workload, authored_order: bool) -> np.ndarray:
    """int64 [n], the row of the workload of each request of the kernels."""
    if workload.sessions is not None or workload.dependencies is not None:
        return rows_in_order(workload)
    if authored_order:
        return np.arange(len(workload))
    return np.argsort(workload.arrival_ms, kind="stable")


# --- one side -------------------------------------------------------------------------------------
def _side(
    plan: PoolPlan,
    workload: Workload,
    order: np.ndarray | None,
    talks: Conversations | None,
    eviction: str,
    counted: np.ndarray | None,
) -> _Side:
    role = plan.role
    own = prompts_only(workload) if role.stage == "prefill" else workload
    limit, reason, longest = turn_limits(own, role.rank, talks)
    params, factors = params_of(role, longest, eviction, plan.timing)
    if role.stage != "aggregated":
        set_role(role, params, factors)
    caching = bool(params[R.PREFIX_CACHING])
    if needs_identities(role, own, limit):
        params[R.SINGLE_COPIES] = caching
    known, known_order = own, order
    if talks is not None:
        # What prompts hold as far as it is known ahead, from the whole workload.
        known, known_order = known_ahead(workload, talks), None
    one_rank = np.zeros(len(known), np.int64)
    whole = paths_of(known, role.rank, longest, known_order, one_rank, 1, caching)
    params[R.BLOCKS_PER_NODE] = whole.blocks_per_node[0]
    paths = whole
    if talks is not None:
        spans = np.ascontiguousarray(whole.spans[:, talks.session])
        paths = whole._replace(spans=spans, covered=whole.covered[talks.session])
    requests = requests_of(own, limit, reason, paths, order, counted)
    state = requests.state
    state[Q.RANK] = NONE
    if talks is not None:
        state[Q.SESSION] = talks.first
    if role.backend == "sglang":
        state[Q.SHARED] = paths.covered
        requests = requests._replace(path_rows=paths.nodes)
    elif role.rank.enable_prefix_caching:
        # Also where no block has a name (`set_role`): whether events are observed must not change
        # in which order gaps are summed.
        state[Q.PRIVATE] = private_requests(own, order)
    if caching and role.backend != "sglang":
        if params[R.SINGLE_COPIES] and talks is None:
            state[Q.SHARED] = paths.covered
        else:
            shared = shared_blocks(params, known, whole)
            state[Q.SHARED] = shared if talks is None else shared[talks.session]
        requests = _own_paths(requests, params, paths)
    state[Q.OWN_FROM] = state[Q.SHARED]
    reach = state[Q.ISL].astype(np.int64) + state[Q.LIMIT]
    if talks is not None:
        reach = talks.reach
    return _Side(plan, params, factors, requests, paths, reach)


def _own_paths(requests: Requests, params: np.ndarray, paths: sharing.Paths) -> Requests:
    """Requests with a decode run of `path_rows` each for the contents that they share, which become
    rows when they are placed."""
    state = requests.state
    per_node = int(params[R.BLOCKS_PER_NODE])
    entries = -(-state[Q.SHARED].astype(np.int64) // per_node)
    ends = np.cumsum(entries)
    starts = ends - entries
    state[Q.PATH] = starts
    places = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(
        paths.spans[0] - starts, entries
    )
    return requests._replace(path_rows=paths.nodes[places])


def _most_requests(side: _Side, n: int) -> np.ndarray:
    """int64 [ranks], most requests that each rank of a pool can get."""
    plan = side.plan
    share = n if plan.role.stage != "aggregated" else -(-n // plan.workers)
    return np.full(plan.ranks, share, np.int64)


# --- all sides ------------------------------------------------------------------------------------
def _members(sides: list[_Side]) -> tuple[Ranks, Workers]:
    """The ranks and workers of all pools, side by side."""
    fields, factors, states = [], [], []
    first_rank = first_worker = 0
    for pool, side in enumerate(sides):
        plan, dp_size = side.plan, side.plan.role.dp_size
        own = new_ranks(plan.ranks, first_rank, dp_size, first_worker, side.params, side.factors)
        fields.append(own[0])
        factors.append(own[1])
        states.append(new_workers(plan.workers, first_rank, dp_size, pool, first_worker))
        first_rank += plan.ranks
        first_worker += plan.workers
    times = np.zeros((first_worker, W.WORKER_TIME + W.CHUNK))
    times[:, W.WAKE_AT] = np.inf
    ranks = Ranks(np.concatenate(fields), np.concatenate(factors), np.zeros(0, np.int32))
    return ranks, Workers(np.concatenate(states), times)


def _copies(sides: list[_Side]) -> Requests:
    """The requests with a copy for each pool, side by side."""
    if len(sides) == 1:
        return sides[0].requests
    n = sides[0].requests.state.shape[1]
    for pool, side in enumerate(sides[1:], 1):
        side.requests.state[Q.PATH] += sum(
            len(before.requests.path_rows) for before in sides[:pool]
        )
        side.requests.state[Q.SESSION] += pool * n
    own = [side.requests for side in sides]
    return Requests(
        state=np.concatenate([one.state for one in own], axis=1),
        time=np.concatenate([one.time for one in own], axis=1),
        path_rows=np.concatenate([one.path_rows for one in own]),
    )


def _pools(
    sides: list[_Side],
    ranks: Ranks,
    requests: Requests,
    most: np.ndarray,
    next_uses: NextUseTable | None,
    whole: bool,
) -> tuple[Pools | Forest, F.Content, Requests]:
    """Empty pools, and what placement hands out."""
    copies_n = requests.state.shape[1]
    if sides[0].plan.role.backend == "sglang":
        forest = sglang_trees(ranks, most, len(sides) > 1)._replace(next_uses=next_uses)
        nothing = F.Content(
            np.zeros(F.CONTENT_STATE, np.int64),
            np.zeros(copies_n, np.int32),
            np.full((1, 2), -1, np.int64),
        )
        return grown_forest(forest, ranks), nothing, requests
    n = copies_n // len(sides)
    own = [
        own_blocks(_of_pool(requests, pool, n), side.params, side.reach, whole)
        for pool, side in enumerate(sides)
    ]
    first_ranks = np.cumsum([0] + [side.plan.ranks for side in sides[:-1]])
    content, copies, rows = content_of(
        ranks,
        requests,
        np.repeat(first_ranks, n),
        np.concatenate(own),
        np.concatenate([side.reach for side in sides]),
        max(len(side.paths.marks) for side in sides),
        whole,
    )
    return empty_pools(copies, copies_n, rows, next_uses), content, requests


def _of_pool(requests: Requests, pool: int, n: int) -> Requests:
    """The copies of one pool, with families numbered among themselves."""
    state = np.ascontiguousarray(requests.state[:, pool * n : (pool + 1) * n])
    if pool > 0:
        state[Q.SESSION] -= pool * n
    time = requests.time[:, pool * n : (pool + 1) * n]
    return Requests(state, np.ascontiguousarray(time), requests.path_rows)


def new_scratch(ranks: Ranks, record_segments: bool) -> Scratch:
    """Working memory of one thread."""
    lines = _LOG_LINES + len(ranks.fields) if record_segments else 0
    chunk = np.zeros((W.CHUNK_FIELDS, W.CHUNK))
    chunk[W.COUNTING] = np.arange(W.CHUNK)
    return Scratch(
        chunk=chunk,
        bins=np.zeros(GAP_BINS, np.int64),
        log=np.zeros((3, _LOG_LINES)),
        log_length=np.zeros(2, np.int64),
        segments=np.zeros((W.SEGMENT_FIELDS, lines)),
    )


# --- the clock ------------------------------------------------------------------------------------
def _event_queue(leaves: int) -> np.ndarray:
    return np.full(2 << max(leaves - 1, 0).bit_length(), np.inf)


def _clock(
    plans: tuple[PoolPlan, ...], n: int, tokenization: Tokenization | None, horizon_ms: float
) -> Clock:
    counts = [plan.workers for plan in plans]
    workers = sum(counts)
    servers = 0 if tokenization is None else min(tokenization.workers, n)
    pools = np.zeros((len(plans), F.POOL_FIELDS), np.int64)
    pools[:, F.FIRST_WORKER] = np.cumsum(counts) - counts
    pools[:, F.WORKER_COUNT] = counts
    state = np.zeros(F.CLOCK_STATE, np.int64)
    state[F.SEGMENTS] = _INSTANTS_A_CALL
    time = np.zeros(F.CLOCK_TIME)
    time[F.HORIZON] = horizon_ms
    time[F.NEXT_TICK] = np.inf
    if tokenization is not None:
        time[F.TOKENIZE_MS] = tokenization.base_ms
        time[F.TOKENIZE_TOKEN_MS] = tokenization.per_input_token_ms
    return Clock(
        state=state,
        time=time,
        ends=_event_queue(workers),
        ready=np.zeros(workers, np.int64),
        servers=np.zeros((workers, servers)),
        pools=pools,
    )


def _pins(plans: tuple[PoolPlan, ...], workload: Workload, order: np.ndarray | None) -> np.ndarray:
    """int32 [pools, n], rank within its worker that each request is pinned to, or -1."""
    pin = in_order(workload.dp_rank, order)
    pins = [pin]
    if len(plans) > 1:
        own_pin = in_order(workload.prefill_dp_rank, order)
        pins = [np.where(own_pin < 0, pin, own_pin), pin]
    return np.array(pins, np.int32)


def _transfers(
    plans: tuple[PoolPlan, ...], topology: DisaggregatedTopology, n: int, ranks: Ranks
) -> Transfers:
    """What passes between two pools; only the prefill role's fields say what a transfer costs
    (reference: runtimes, section 6.2)."""
    rank = plans[0].role.rank
    time = np.zeros(F.TRANSFERS_TIME)
    time[F.LATENCY_MS] = topology.handoff_latency_ms
    if rank.kv_transfer_bytes_per_token is not None:
        time[F.BANDWIDTH] = rank.kv_transfer_bandwidth or 0.0
        time[F.BYTES_PER_TOKEN] = rank.kv_transfer_bytes_per_token
    state = np.zeros(F.TRANSFERS_STATE, np.int64)
    state[F.DESTINATION_MISSING] = rank.kv_transfer_timing_mode == "destination_missing"
    state[F.TRANSFER_BLOCK] = min(plans[1].role.rank.block_tokens, int(UNLIMITED))
    return Transfers(
        state=state,
        time=time,
        requests=np.zeros((F.TRANSFER_REQUEST, n), np.int32),
        instants=np.full((F.TRANSFER_INSTANTS, n), np.nan),
        actions=np.zeros((2, 2 * n + 1), np.int32),
        ends=_event_queue(n),
        deferred=np.full((2, len(ranks.fields)), NONE, np.int64),
        steps=None,
    )


# --- KV events ------------------------------------------------------------------------------------
def _observed(
    state: FleetState, sides: list[_Side], talks: Conversations | None, sglang: bool
) -> FleetState:
    """The state with a log of KV events, and of the steps of handoffs."""
    from vecsim.run.kv_events import Watched, new_log, words_an_instant

    fleet = state.fleet
    n = fleet.arrivals.requests.shape[1]
    pages = np.concatenate(
        [
            side.reach // side.params[R.BLOCK_SIZE]
            if talks is not None
            else blocks_of_sequences(side.requests, side.params)
            for side in sides
        ]
    )
    checked_rows(int(pages.sum()))
    at_once = None
    named = None
    rows = 0 if sglang else fleet.pools.index.shape[1]
    if sglang:
        named, rows, at_once = _named_pages(fleet, sides, pages, talks)
    words = words_an_instant(int(pages.sum()), fleet.ranks, at_once)
    requests = fleet.requests if named is None else named
    watched = Watched(requests, rows, words)
    log = new_log(watched, len(fleet.ranks.fields), coupled=True, named=named)
    fleet = fleet._replace(pools=fleet.pools._replace(events=log))
    if fleet.transfers is not None:
        lines = np.zeros((F.STEP_FIELDS, F.STEP_KINDS * n))
        steps = Steps(lines, np.zeros(1, np.int64))
        fleet = fleet._replace(transfers=fleet.transfers._replace(steps=steps))
    return replace(state, fleet=fleet, watched=watched)


def _named_pages(
    fleet: Fleet, sides: list[_Side], pages: np.ndarray, talks: Conversations | None
) -> tuple[Requests, int, int | None]:
    """(the requests with rows for their pages, the number of rows, most pages that requests in
    flight together can have): rows of the prefix tree of each pool first, then for each family one
    for every page behind its path."""
    columns = fleet.requests.state
    family = columns[Q.SESSION]
    own = np.zeros(len(pages), np.int64)
    behind = pages if talks is not None else np.maximum(pages - columns[Q.SHARED], 0)
    np.maximum.at(own, family, behind)
    first, starts, path_rows = 0, [], []
    for side in sides:
        per_node = int(side.params[R.BLOCKS_PER_NODE])
        path_rows.append(first + side.requests.path_rows * np.int32(per_node))
        first += len(side.paths.marks) * per_node
    starts = first + np.cumsum(own) - own
    rows = checked_rows(int(first + own.sum()))
    columns[Q.OWN_ROWS] = starts[family]
    if talks is not None:
        columns[Q.OWN_ROWS] += columns[Q.OWN_FROM]
    named = fleet.requests._replace(path_rows=np.concatenate(path_rows).astype(np.int32))
    # A turn is released when the one before has ended, and the log is looked at in between.
    return named, rows, None if talks is None else int(own.sum())
