"""Lowering of workloads whose requests wait for others: sessions, and graphs of dependencies.

Requests are numbered as ties are broken: by session and turn, or by node. What is known ahead
becomes arrays here; ranks, grown prompts and rows of the prefix index are decided in the kernels,
when a request is released (`vecsim.kernels.cache.session_content`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vecsim.config.roles import Role
from vecsim.config.schema import RankConfig
from vecsim.errors import InputError
from vecsim.kernels import aggregated
from vecsim.kernels.cache import session_content, sharing
from vecsim.kernels.cache.session_content import Seats
from vecsim.kernels.fleet import arrivals as waiting_room
from vecsim.kernels.fleet.arrivals import Arrivals
from vecsim.kernels.state import layout
from vecsim.kernels.state.layout import Pools, Ranks, Requests
from vecsim.run.lower import (
    LONGEST_SEQUENCE,
    SPARE_COPIES,
    State,
    in_order,
    output_limits,
    params_of,
    paths_of,
    place_lists,
    ranks_of,
    requests_of,
    sglang_rooms,
    workers_of,
)
from vecsim.timing.model import BoundTiming
from vecsim.workload.columns import offsets_of
from vecsim.workload.dependencies import Dependencies, Sessions
from vecsim.workload.select import take
from vecsim.workload.workload import Workload

_MOST_ROWS = 2**31 - 1


def lower_waiting(
    role: Role,
    workload: Workload,
    workers: int,
    *,
    session_cap: int | None,
    timing: BoundTiming | None,
    counted: np.ndarray | None = None,
) -> State:
    """Arrays for a fresh run of a workload with sessions or dependencies.

    Args:
        role: the pool's role.
        workload: n requests.
        workers: number of workers.
        session_cap: sessions in flight at once; None = open loop.
        timing: custom timing, or None for the role's own model.
        counted: bool [n], whose inter-token gaps are recorded; None = everybody's.

    Raises:
        InputError: a request too long for 32-bit token counters, or more blocks of content than
            32 bits count.
    """
    rows = rows_in_order(workload)
    order = None if np.array_equal(rows, np.arange(len(rows))) else rows
    chains = Chains.of(workload, rows)
    limit, reason, longest = turn_limits(workload, role.rank, chains)
    params, factors = params_of(role, longest, "lru", timing)
    caching = role.rank.enable_prefix_caching
    if role.rank.emit_kv_events or np.any((workload.input_length == 0) & (limit > 0)):
        # As in `lower`.
        params[layout.SINGLE_COPIES] = caching
    known = workload if chains is None else known_ahead(workload, chains)
    known_order = order if chains is None else None
    one_rank = np.zeros(len(known), np.int64)
    paths = paths_of(known, role.rank, longest, known_order, one_rank, 1)
    params[layout.BLOCKS_PER_NODE] = paths.blocks_per_node[0]
    ranks = ranks_of(workers * role.dp_size, params, factors)
    spans = paths.spans if chains is None else paths.spans[:, chains.session]
    followed = paths._replace(spans=np.ascontiguousarray(spans))
    requests = requests_of(workload, limit, reason, followed, order, counted)
    state = requests.state
    state[layout.RANK] = in_order(workload.dp_rank, order)
    if chains is not None:
        state[layout.FAMILY] = chains.first
    arrivals = arrivals_of(workload, rows, session_cap)
    starts = np.arange(len(ranks.fields) + 1) * -(-len(workload) // workers)
    fresh = workers_of(workers)
    if role.backend == "sglang":
        from vecsim.kernels import aggregated_sglang_waiting

        covered = paths.covered if chains is None else paths.covered[chains.session]
        state[layout.SHARED] = state[layout.OWN_FROM] = covered
        requests = requests._replace(path_rows=paths.nodes)
        waiting = arrivals, _seats(ranks, requests, followed)
        ranks, forest = sglang_rooms(ranks, starts)
        lowered = State(
            ranks, fresh, requests, forest, order, aggregated_sglang_waiting, waiting=waiting
        )
        if not role.rank.emit_kv_events:
            return lowered
        from vecsim.run.waiting_events import watched_pages

        return watched_pages(lowered, chains, paths)
    from vecsim.kernels import aggregated_waiting

    if caching and workload.output_offsets is not None:
        state[layout.LONER] = in_order(np.diff(workload.output_offsets) > 0, order)
    shared = shared_blocks(ranks, known, paths)
    state[layout.SHARED] = shared if chains is None else shared[chains.session]
    state[layout.OWN_FROM] = state[layout.SHARED]
    requests, pools, seats = vllm_rooms(ranks, requests, followed, chains, caching)
    ranks = ranks._replace(lists=place_lists(ranks, starts))
    waiting = arrivals, seats
    lowered = State(ranks, fresh, requests, pools, order, aggregated_waiting, waiting=waiting)
    if not role.rank.emit_kv_events:
        return lowered
    from vecsim.run.waiting_events import watched_blocks

    return watched_blocks(lowered, chains)


def rows_in_order(workload: Workload) -> np.ndarray:
    """int64 [n], the row of each request of the kernels."""
    if workload.dependencies is not None:
        return np.argsort(workload.dependencies.node, kind="stable")
    return workload.sessions.rows()[1]


# --- prompts that grow ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Chains:
    """Sessions whose prompts grow; requests in the order of the kernels, by session and turn.

    Attributes:
        session: int64 [n], session of each request.
        first: int64 [n], first request of its session.
        starts: int64 [sessions], first request of each session.
        rows: int64 [n], row of the workload of each request.
        reach: int64 [n], most tokens of prompt and output that a request can have.
    """

    session: np.ndarray
    first: np.ndarray
    starts: np.ndarray
    rows: np.ndarray
    reach: np.ndarray

    @classmethod
    def of(cls, workload: Workload, rows: np.ndarray) -> Chains | None:
        """None where every prompt is authored whole."""
        sessions = workload.sessions
        if sessions is None or not sessions.accumulate:
            return None
        session = sessions.session[rows].astype(np.int64)
        starts = np.flatnonzero(sessions.turn[rows] == 0)
        tokens = workload.input_length.astype(np.int64) + workload.output_length
        total = np.cumsum(tokens[rows])
        before = np.concatenate([[0], total])[starts]
        return cls(session, starts[session], starts, rows, total - before[session])


def turn_limits(
    workload: Workload, rank: RankConfig, chains: Chains | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """`output_limits`; later turns of growing prompts get theirs when they are released."""
    limit, reason, longest = output_limits(workload, rank)
    if chains is None:
        return limit, reason, longest
    later = np.ones(len(limit), bool)
    later[chains.rows[chains.starts]] = False
    limit = np.where(later, workload.output_length, limit)
    reason[later] = layout.NO_REASON
    longest = int(chains.reach.max(initial=0))
    if longest > LONGEST_SEQUENCE:
        row = int(chains.rows[chains.reach.argmax()])
        expected = f"at most {LONGEST_SEQUENCE} tokens, the turns before included"
        raise InputError(f"requests[{row}]", longest, expected)
    return limit, reason, longest


def known_ahead(workload: Workload, chains: Chains) -> Workload:
    """One row a session: the tokens at the start of its conversation that are known ahead, up to
    the first generated token that is not planned."""
    first_rows = chains.rows[chains.starts]
    opening = replace(
        take(replace(workload, sessions=None), first_rows),
        output_offsets=None,
        output_token_ids=None,
    )
    if workload.block_offsets is None:
        return opening
    counts = np.diff(np.append(chains.starts, len(chains.rows)))
    planned = np.zeros(len(workload), np.int64)
    if workload.output_offsets is not None:
        planned = np.diff(workload.output_offsets)
    silent = (counts > 1) & (workload.output_length[first_rows] == 0)
    if not np.any(silent | (planned[first_rows] > 0)):
        return opening
    tokens = [
        _known_tokens(workload, planned, chains.rows[start : start + count])
        for start, count in zip(chains.starts, counts, strict=True)
    ]
    lengths = np.array([len(known) for known in tokens], np.int64)
    return replace(
        opening,
        input_length=lengths.astype(np.int32),
        block_offsets=offsets_of(lengths),
        block_ids=np.concatenate(tokens),
        block_tokens=1,
        _trees={},
    )


def _known_tokens(workload: Workload, planned: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """uint32, the tokens of a session that are known ahead."""
    parts = [np.zeros(0, np.uint32)]
    for row in turns:
        first, last = workload.block_offsets[row : row + 2]
        length = int(workload.input_length[row])
        if first == last and length > 0:
            break
        parts.append(np.repeat(workload.block_ids[first:last], workload.block_tokens)[:length])
        if planned[row] > 0:
            first, last = workload.output_offsets[row : row + 2]
            parts.append(workload.output_token_ids[first:last])
        elif workload.output_length[row] > 0:
            break
    return np.concatenate(parts)


# --- index rows and copies ------------------------------------------------------------------------


def shared_blocks(ranks: Ranks, known: Workload, paths: sharing.Paths) -> np.ndarray:
    """int32 [rows of `known`], leading blocks that another row has too; fills `paths.marks`."""
    fields = ranks.fields[:1].copy()
    fields[:, layout.SINGLE_COPIES] = 0
    everyone = Requests(
        state=np.zeros((layout.REQUEST_STATE, len(known)), np.int32),
        time=np.zeros((layout.REQUEST_TIME, 0)),
        path_rows=np.zeros(len(paths.nodes), np.int32),
    )
    everyone.state[layout.PATH] = paths.spans[0]
    instances = np.zeros(1, np.int64)
    one_rank = ranks._replace(fields=fields)
    aggregated.prepare(one_rank, everyone, paths, instances, np.zeros(0, np.int32))
    return everyone.state[layout.SHARED]


def vllm_rooms(
    ranks: Ranks,
    requests: Requests,
    paths: sharing.Paths,
    chains: Chains | None,
    caching: bool,
) -> tuple[Requests, Pools, Seats]:
    """Empty pools, and the rooms from which released requests get index rows and copies."""
    state, fields = requests.state, ranks.fields
    block_size, per_node = int(fields[0, layout.BLOCK_SIZE]), int(paths.blocks_per_node[0])
    n = state.shape[1]
    shared = state[layout.SHARED].astype(np.int64)
    entries = -(-shared // per_node)
    reach = state[layout.ISL].astype(np.int64) + state[layout.LIMIT]
    own = np.zeros(n, np.int32)
    spare = 1
    if chains is not None:
        reach = chains.reach
        starts = np.append(chains.starts, n)
        state[layout.PATH] = np.cumsum(entries) - entries
        requests = requests._replace(path_rows=np.zeros(int(entries.sum()), np.int32))
        if caching:
            own[chains.starts] = reach[starts[1:] - 1] // block_size
    elif fields[0, layout.SINGLE_COPIES] != 0:
        own = (reach // block_size).astype(np.int32)
    if fields[0, layout.SINGLE_COPIES] != 0:
        spare = SPARE_COPIES
    family_own = own[state[layout.FAMILY]].astype(np.int64)
    identified = np.minimum(reach // block_size, np.maximum(shared, family_own))
    copies = min(int(identified.sum()) * spare, len(fields) * int(fields[0, layout.NUM_BLOCKS]))
    extents = paths.marks[:, sharing.SECOND]
    rows = min(
        int((entries * per_node + family_own).sum()),
        len(fields) * (int(extents.sum(dtype=np.int64)) + int(own.sum(dtype=np.int64))),
    )
    if max(rows, copies + n) > _MOST_ROWS:
        expected = f"at most {_MOST_ROWS} blocks of prompt content that can be found again"
        raise InputError("prefix tree", max(rows, copies), expected)
    fields[:, layout.COPY_BUMP] = fields[:, layout.FIRST_RUN] = copies
    seats = _seats(ranks, requests, paths, own, spare)
    pools = Pools(
        nodes=np.zeros((layout.NODE_FIELDS, copies + n), np.int32),
        index=np.empty((layout.INDEX_FIELDS, rows), np.int32),
        forecast=np.zeros((layout.FORECAST_FIELDS, 0), np.int32),
        users=np.zeros((2, 0), np.int32),
    )
    return requests, pools, seats


def _seats(
    ranks: Ranks,
    requests: Requests,
    paths: sharing.Paths,
    own: np.ndarray | None = None,
    spare: int = 1,
) -> Seats:
    """Nobody placed, nothing handed out; no rows to hand out without `own`."""
    n = requests.state.shape[1]
    capacity = 0
    extents = paths.marks[:, sharing.SECOND].copy()
    if own is None:
        own = np.zeros(n, np.int32)
    else:
        shared = requests.state[layout.SHARED].astype(np.int64)
        entries = -(-shared // int(paths.blocks_per_node[0]))
        families = np.count_nonzero(own[requests.state[layout.FAMILY]])
        capacity = min(
            int(entries.sum()) + families,
            len(ranks.fields) * (np.count_nonzero(extents) + np.count_nonzero(own)),
        )
    state = np.zeros(session_content.SEATS_STATE, np.int64)
    state[session_content.SPARE_COPIES] = spare
    return Seats(
        state=state,
        ranks=np.zeros((2, len(ranks.fields)), np.int64),
        paths=paths.spans[0],
        nodes=paths.nodes,
        extents=extents,
        own=own,
        ranges=np.empty((2, capacity), np.int64),
        table=np.zeros(1 << int(2 * capacity).bit_length(), np.int32),
    )


# --- arrivals -------------------------------------------------------------------------------------


def arrivals_of(workload: Workload, rows: np.ndarray, session_cap: int | None) -> Arrivals:
    if workload.dependencies is not None:
        return graph_arrivals(workload.dependencies, rows)
    return session_arrivals(workload.sessions, workload.arrival_ms, rows, session_cap)


def session_arrivals(
    sessions: Sessions, arrival_ms: np.ndarray, rows: np.ndarray, session_cap: int | None
) -> Arrivals:
    """Sessions as plays of one chain each; a cap on them is a number of lanes.

    `rows` int64 [n]: row of the workload of each request of the kernels.
    """
    n = len(rows)
    session = sessions.session[rows]
    later = sessions.turn[rows] > 0
    firsts = np.flatnonzero(~later)
    target = np.flatnonzero(later)
    due = np.zeros(n)
    if session_cap is None:
        due[firsts] = arrival_ms[rows[firsts]]
    has_next = np.zeros(n, np.int64)
    has_next[target - 1] = 1
    return _room(
        due,
        later.astype(np.int32),
        session,
        np.bincount(session, minlength=sessions.count),
        offsets_of(has_next),
        np.array([target, np.ones(len(target))], np.int32),
        sessions.delay_ms[rows[target]],
        lanes=session_cap,
        rejection_fails=False,
    )


def graph_arrivals(graph: Dependencies, rows: np.ndarray) -> Arrivals:
    """A graph, renumbered by node, with its edges grouped by their source.

    `rows` int64 [n]: row of the workload of each request of the kernels.
    """
    n = len(rows)
    number = np.empty(n, np.int64)
    number[rows] = np.arange(n)
    waits_for = np.diff(graph.offsets)
    play = graph.play[rows]
    plays = len(graph.play_id)
    missing = waits_for[rows].astype(np.int32)
    due = graph.not_before_ms[rows]
    if graph.lanes is not None:
        earliest = np.full(plays, np.inf)
        roots = missing == 0
        np.minimum.at(earliest, play[roots], due[roots])
        due = np.maximum(due - earliest[play], 0.0)
    target = number[np.repeat(np.arange(n), waits_for)]
    source = number[graph.source]
    by_source = np.argsort(source, kind="stable")
    edges = np.array([target, graph.on_completion], np.int32)[:, by_source]
    return _room(
        due,
        missing,
        play,
        np.bincount(play, minlength=plays),
        offsets_of(np.bincount(source, minlength=n)),
        np.ascontiguousarray(edges),
        graph.delay_ms[by_source],
        lanes=graph.lanes,
        rejection_fails=True,
    )


def _room(
    due: np.ndarray,
    missing: np.ndarray,
    play: np.ndarray,
    sizes: np.ndarray,
    followers: np.ndarray,
    edges: np.ndarray,
    delays: np.ndarray,
    *,
    lanes: int | None,
    rejection_fails: bool,
) -> Arrivals:
    """The room before the start: the first plays are in their lanes, their roots stand by time."""
    n, plays = len(due), len(sizes)
    started = plays if lanes is None else min(lanes, plays)
    first = np.flatnonzero((missing == 0) & (play < started))
    first = first[np.argsort(due[first], kind="stable")]
    requests = np.zeros((waiting_room.REQUEST_ROWS, n), np.int32)
    requests[waiting_room.MISSING] = missing
    requests[waiting_room.PLAY] = play
    requests[waiting_room.FIRST, : len(first)] = first
    requests[waiting_room.MEMBER] = np.argsort(play, kind="stable")
    state = np.zeros(waiting_room.ARRIVALS_STATE, np.int64)
    state[waiting_room.OWN_TIME] = len(first)
    state[waiting_room.NEXT_PLAY] = started
    state[waiting_room.REJECTION_FAILS] = rejection_fails
    by_play = np.zeros((waiting_room.PLAY_ROWS, plays), np.int32)
    by_play[waiting_room.LEFT] = sizes
    return Arrivals(
        state=state,
        due=due,
        requests=requests,
        followers=followers,
        edges=edges,
        delays=np.ascontiguousarray(delays, np.float64),
        plays=by_play,
        members=offsets_of(sizes),
    )
