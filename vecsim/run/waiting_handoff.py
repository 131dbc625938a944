"""Lowering of prefill/decode fleets whose requests wait for others: sessions, graphs.

Both sides number requests as ties are broken (`vecsim.run.waiting`). Their ranks, grown prompts and
rows of the prefix index are decided in the kernels, when a request is released and placed.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from vecsim.config.roles import Role
from vecsim.config.schema import DisaggregatedTopology, Tokenization
from vecsim.kernels.cache import sharing
from vecsim.kernels.fleet import handoff as kernel
from vecsim.kernels.fleet.handoff import Side
from vecsim.kernels.fleet.handoff_waiting import WaitingHandoff
from vecsim.kernels.state import layout
from vecsim.run import lower, waiting
from vecsim.run.execute import new_scratch
from vecsim.run.lower_handoff import (
    HandoffState,
    handoff_of,
    prompts_only,
    set_role,
    set_tokenization,
    set_transfers,
    sglang_trees,
)
from vecsim.timing.model import BoundTiming
from vecsim.workload.workload import Workload


def lower_waiting_handoff(
    roles: tuple[Role, Role],
    topology: DisaggregatedTopology,
    workload: Workload,
    *,
    tokenization: Tokenization | None,
    session_cap: int | None,
    horizon_ms: float,
    timings: tuple[BoundTiming | None, BoundTiming | None],
    record_segments: bool,
    counted: np.ndarray | None = None,
) -> HandoffState:
    """Arrays for a fresh run of a workload with sessions or dependencies.

    Args:
        roles: prefill and decode.
        topology: workers of both pools, latency of the handoff.
        workload: n requests.
        tokenization: the stage in front of every prefill worker, or None.
        session_cap: sessions in flight at once; None = open loop.
        horizon_ms: virtual time after which nothing is processed.
        timings: custom timing of each role, or None for its own model.
        record_segments: keep the segment logs.
        counted: bool [n], whose inter-token gaps are recorded; None = everybody's.

    Raises:
        InputError: a request too long for 32-bit token counters, or more blocks of content than
            32 bits count.
    """
    rows = waiting.rows_in_order(workload)
    order = None if np.array_equal(rows, np.arange(len(rows))) else rows
    chains = waiting.Chains.of(workload, rows)
    pools = (topology.prefill, topology.decode)
    sides, paths = [], []
    for role, pool, timing in zip(roles, pools, timings, strict=True):
        workers = pool.initial_workers
        side, own_paths = _side(role, workload, order, chains, workers, timing, counted)
        sides.append(side._replace(scratch=new_scratch(side.ranks, record_segments)))
        paths.append(own_paths)
    prefill, decode = sides
    between = handoff_of(prefill, decode, workload, order)
    room = waiting.arrivals_of(workload, rows, session_cap)
    handoff = WaitingHandoff(*between, arrivals=room)
    set_transfers(handoff, roles, topology)
    handoff.time[kernel.HORIZON] = horizon_ms
    prefill = set_tokenization(prefill, handoff, tokenization)
    state = HandoffState(prefill, decode, handoff, order, _entries(roles))
    if not roles[0].rank.emit_kv_events:
        return state
    from vecsim.run.waiting_events import watched_sides

    return watched_sides(state, chains, paths)


def _entries(roles: tuple[Role, Role]) -> ModuleType:
    # Only the kernels that are needed: loading them takes a tenth of a second.
    if roles[0].backend == "sglang":
        from vecsim.kernels import disaggregated_sglang_waiting

        return disaggregated_sglang_waiting
    from vecsim.kernels import disaggregated_waiting

    return disaggregated_waiting


def _side(
    role: Role,
    workload: Workload,
    order: np.ndarray | None,
    chains: waiting.Chains | None,
    workers: int,
    timing: BoundTiming | None,
    counted: np.ndarray | None,
) -> tuple[Side, sharing.Paths]:
    """One pool, and the paths of what its prompts hold as far as it is known ahead: from the whole
    workload where they grow, whatever the role."""
    own = prompts_only(workload) if role.stage == "prefill" else workload
    limit, reason, longest = waiting.turn_limits(own, role.rank, chains)
    params, factors = lower.params_of(role, longest, "lru", timing)
    rank = set_role(role, params, factors)
    caching = bool(params[layout.PREFIX_CACHING])
    if rank.emit_kv_events or np.any((own.input_length == 0) & (limit > 0)):
        # As in `lower_handoff`.
        params[layout.SINGLE_COPIES] = caching
    known, known_order = own, order
    if chains is not None:
        known, known_order = waiting.known_ahead(workload, chains), None
    one_rank = np.zeros(len(known), np.int64)
    paths = lower.paths_of(known, rank, longest, known_order, one_rank, 1)
    params[layout.BLOCKS_PER_NODE] = paths.blocks_per_node[0]
    ranks = lower.ranks_of(workers * role.dp_size, params, factors)
    spans = paths.spans if chains is None else paths.spans[:, chains.session]
    followed = paths._replace(spans=np.ascontiguousarray(spans))
    requests = lower.requests_of(own, limit, reason, followed, order, counted)
    state = requests.state
    state[layout.RANK] = layout.NONE
    if chains is not None:
        state[layout.FAMILY] = chains.first
    starts = np.arange(len(ranks.fields) + 1) * len(workload)
    no_servers = np.zeros((workers, 0))
    if role.backend == "sglang":
        covered = paths.covered if chains is None else paths.covered[chains.session]
        state[layout.SHARED] = state[layout.OWN_FROM] = covered
        requests = requests._replace(path_rows=paths.nodes)
        ranks, forest = sglang_trees(ranks, starts)
        idle = lower.workers_of(workers, layout.CHUNK)
        table = np.zeros((1, 2), np.int64)
        return Side(ranks, idle, requests, forest, None, table, no_servers), paths
    if rank.enable_prefix_caching and own.output_offsets is not None:
        state[layout.LONER] = lower.in_order(np.diff(own.output_offsets) > 0, order)
    shared = waiting.shared_blocks(ranks, known, paths)
    state[layout.SHARED] = shared if chains is None else shared[chains.session]
    state[layout.OWN_FROM] = state[layout.SHARED]
    requests, pools, seats = waiting.vllm_rooms(ranks, requests, followed, chains, caching)
    ranks = ranks._replace(lists=lower.place_lists(ranks, starts))
    idle = lower.workers_of(workers, layout.CHUNK)
    return Side(ranks, idle, requests, pools, None, seats, no_servers), paths
