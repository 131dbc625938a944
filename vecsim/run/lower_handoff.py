"""Lowering of prefill/decode fleets: two roles and a workload become two sides and what links them.

Requests have a copy on each side, in order of arrival. Where prompts are submitted as requests
arrive, their prefill ranks are known beforehand, and so is what the requests of each rank share.
Other ranks are known only when the run places a request there: sharing is analysed over the whole
workload then (kernels/placing.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vecsim.config.roles import Role
from vecsim.config.schema import DisaggregatedTopology, Tokenization
from vecsim.kernels import aggregated, disaggregated
from vecsim.kernels.cache import content, sharing
from vecsim.kernels.fleet import handoff as kernel
from vecsim.kernels.fleet.handoff import Handoff, Side
from vecsim.kernels.state import layout
from vecsim.kernels.state.layout import Forest, Ranks, Requests
from vecsim.run import lower
from vecsim.run.execute import new_scratch
from vecsim.timing.model import BoundTiming
from vecsim.workload.workload import Workload

if TYPE_CHECKING:
    from vecsim.run.kv_events import Watched

_INSTANTS_A_CALL = 100_000

_NODES_A_COMMAND = 8


@dataclass(frozen=True)
class HandoffState:
    """Everything the kernels read and write, for a prefill and a decode pool.

    Attributes:
        order: int64 [n] row of the workload that request q of the kernels is, or None if the same.
        entries: the module with the entry point of the backend.
        watched: where the roles emit KV events, what those of each side are made of; else None.
    """

    prefill: Side
    decode: Side
    handoff: Handoff
    order: np.ndarray | None
    entries: ModuleType
    watched: tuple[Watched, Watched] | None = None


def lower_handoff(
    roles: tuple[Role, Role],
    topology: DisaggregatedTopology,
    workload: Workload,
    *,
    tokenization: Tokenization | None,
    authored_order: bool,
    max_in_flight: int | None,
    horizon_ms: float,
    timings: tuple[BoundTiming | None, BoundTiming | None],
    record_segments: bool,
    counted: np.ndarray | None = None,
) -> HandoffState:
    """Arrays for a fresh run.

    Args:
        roles: prefill and decode.
        topology: workers of both pools, latency of the handoff.
        workload: n requests.
        tokenization: the stage in front of every prefill worker, or None.
        authored_order: take requests in workload order instead of arrival order.
        max_in_flight: closed loop, or None; arrivals are then decided by the run.
        horizon_ms: virtual time after which nothing is processed.
        timings: custom timing of each role, or None for its own model.
        record_segments: keep the segment logs.
        counted: bool [n], whose inter-token gaps are recorded; None = everybody's.

    Raises:
        InputError: a request too long for 32-bit token counters, or blocks for 32-bit numbers.
    """
    order = None
    released = workload.arrival_ms
    if not authored_order and np.any(released[1:] < released[:-1]):
        order = np.argsort(released, kind="stable")
    pools = (topology.prefill, topology.decode)
    sides, paths = [], []
    for role, pool, timing in zip(roles, pools, timings, strict=True):
        own, placed = workload, None
        if role.stage == "prefill":
            own = prompts_only(workload)
            if role.backend != "sglang":
                placed = _prompt_ranks(own, order, pool.initial_workers, role.dp_size)
        workers = pool.initial_workers
        side, own_paths = _side(role, own, order, workers, placed, timing, counted)
        sides.append(side._replace(scratch=new_scratch(side.ranks, record_segments)))
        paths.append(own_paths)
    prefill, decode = sides
    if max_in_flight is None:
        prefill.requests.time[layout.RELEASED] = lower.in_order(released, order)
    handoff = handoff_of(prefill, decode, workload, order)
    set_transfers(handoff, roles, topology)
    handoff.state[kernel.MAX_IN_FLIGHT] = min(max_in_flight or 0, len(workload))
    handoff.time[kernel.HORIZON] = horizon_ms
    prefill = set_tokenization(prefill, handoff, tokenization)
    state = HandoffState(prefill, decode, handoff, order, _entries(roles))
    return _watched(state, paths) if roles[0].rank.emit_kv_events else state


def _entries(roles: tuple[Role, Role]) -> ModuleType:
    if roles[0].backend != "sglang":
        return disaggregated
    # Nobody else needs these kernels, and loading them takes a tenth of a second.
    from vecsim.kernels import disaggregated_sglang

    return disaggregated_sglang


def _watched(state: HandoffState, paths: list[sharing.Paths]) -> HandoffState:
    """The state of roles that emit KV events; `paths`: of the prompts of each side."""
    sides = zip((state.prefill, state.decode), paths, strict=True)
    watched = tuple(_watched_side(side, own) for side, own in sides)
    return observed_sides(state, watched, _watched_entries(state.prefill))


def observed_sides(
    state: HandoffState, watched: tuple[Watched, Watched], entries: ModuleType
) -> HandoffState:
    """The state with logs of KV events on both sides, and of the steps of the handoffs."""
    from vecsim.kernels.fleet.handoff_events import (
        STEP_FIELDS,
        STEP_KINDS,
        ObservedSide,
        ObservedTrees,
        Steps,
    )
    from vecsim.run.kv_events import new_log, observed

    n = state.handoff.requests.shape[1]
    lines = np.zeros((STEP_FIELDS, STEP_KINDS * n))
    steps = Steps(lines, np.zeros(1, np.int64), state.handoff.time)
    sides = []
    for side, own in zip((state.prefill, state.decode), watched, strict=True):
        log = new_log(own, len(side.ranks.fields), coupled=True)
        pools, scratch = observed(side.pools, side.scratch, own, log)
        kind = ObservedTrees if is_forest(side) else ObservedSide
        pools = kind(*pools, steps)
        sides.append(side._replace(pools=pools, scratch=scratch._replace(pools=pools)))
    return replace(state, prefill=sides[0], decode=sides[1], entries=entries, watched=watched)


def _watched_side(side: Side, paths: sharing.Paths) -> Watched:
    """What the KV events of a side are made of."""
    from vecsim.run.kv_events import Watched, words_an_instant

    if is_forest(side):
        params = side.ranks.fields[0]
        requests, rows = lower.named_pages(side.requests, paths, params)
        blocks = int(lower.blocks_of_sequences(requests, params).sum())
    else:
        requests, rows = side.requests, lower.checked_rows(side.pools.index.shape[1])
        blocks = int(requests.state[layout.SHARED].sum(dtype=np.int64))
    return Watched(requests, rows, words_an_instant(blocks, side.ranks))


def _watched_entries(side: Side) -> ModuleType:
    if is_forest(side):
        from vecsim.kernels import disaggregated_sglang_events

        return disaggregated_sglang_events
    from vecsim.kernels import disaggregated_events

    return disaggregated_events


def is_forest(side: Side) -> bool:
    """Whether the KV pages of a side are in radix trees (SGLang), not in pools of blocks."""
    return hasattr(side.pools, "table")


def prompts_only(workload: Workload) -> Workload:
    """The workload as prefill workers see it: one token at most comes out of a prompt."""
    planned = workload.output_offsets is not None
    return replace(
        workload,
        output_length=np.minimum(workload.output_length, 1),
        output_offsets=None,
        output_token_ids=None,
        _trees={} if planned else workload._trees,
    )


def _pins(workload: Workload, order: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(prefill, decode) rank within its worker that each request is pinned to, or -1."""
    pin = lower.in_order(workload.dp_rank, order)
    own_pin = lower.in_order(workload.prefill_dp_rank, order)
    return np.where(own_pin < 0, pin, own_pin), pin


def _prompt_ranks(
    workload: Workload, order: np.ndarray | None, workers: int, dp_size: int
) -> np.ndarray:
    """int64 [n], prefill rank of each request, where they are submitted in order of arrival
    (reference: runtimes, section 5.2)."""
    pins = _pins(workload, order)[0]
    placed = np.arange(len(pins)) % (workers * dp_size)
    if np.any(pins >= 0):
        turn = 0
        for q, pin in enumerate(pins.tolist()):
            turn %= workers * dp_size if pin < 0 else workers
            placed[q] = turn if pin < 0 else turn * dp_size + pin
            turn += 1
    return placed


def _side(
    role: Role,
    workload: Workload,
    order: np.ndarray | None,
    workers: int,
    placed: np.ndarray | None,
    timing: BoundTiming | None,
    counted: np.ndarray | None,
) -> tuple[Side, sharing.Paths]:
    """One pool before the start, and the paths of its prompts; `placed` is the rank of each
    request, None where the run decides."""
    count = workers * role.dp_size
    one_rank = np.zeros(len(workload), np.int32)
    if count == 1:
        placed = one_rank
    limit, reason, longest = lower.output_limits(workload, role.rank)
    params, factors = lower.params_of(role, longest, "lru", timing)
    rank = set_role(role, params, factors)
    if np.any((workload.input_length == 0) & (limit > 0)):
        # Room for a preempted empty prompt is made by undoing scheduled work: duplicates arise.
        params[layout.SINGLE_COPIES] = params[layout.PREFIX_CACHING]
    if rank.emit_kv_events:
        # Every block that an event may name has an identity.
        params[layout.SINGLE_COPIES] = params[layout.PREFIX_CACHING]
    known, known_ranks = (one_rank, 1) if placed is None else (placed, count)
    named = rank
    if not params[layout.PREFIX_CACHING]:
        named = msgspec.structs.replace(rank, enable_prefix_caching=False)
    paths = lower.paths_of(workload, named, longest, order, known, known_ranks)
    params[layout.BLOCKS_PER_NODE] = paths.blocks_per_node[0]
    ranks = lower.ranks_of(count, params, factors)
    requests = lower.requests_of(workload, limit, reason, paths, order, counted)
    if rank.emit_kv_events:
        lower.checked_rows(int(lower.blocks_of_sequences(requests, params).sum()))
    requests.state[layout.RANK] = layout.NONE
    starts = np.arange(count + 1) * len(workload) if placed is None else paths.starts
    no_servers = np.zeros((workers, 0))
    table = np.zeros((1, 2), np.int64)
    if role.backend == "sglang":
        requests.state[layout.SHARED] = paths.covered
        requests = requests._replace(path_rows=paths.nodes)
        ranks, forest = sglang_trees(ranks, starts)
        idle = lower.workers_of(workers, layout.CHUNK)
        return Side(ranks, idle, requests, forest, None, table, no_servers), paths
    if rank.enable_prefix_caching and workload.output_offsets is not None:
        planned = np.diff(workload.output_offsets) > 0
        requests.state[layout.LONER] = lower.in_order(planned, order)
    ranks = ranks._replace(lists=lower.place_lists(ranks, starts))
    instances = np.zeros(known_ranks, np.int64)
    analysed = ranks._replace(fields=ranks.fields[:known_ranks])
    contents = np.zeros(0, np.int32)
    rows = int(aggregated.prepare(analysed, requests, paths, instances, contents))
    if placed is None:
        table, copies, rows = _rows_by_rank(ranks, requests, rows)
    else:
        copies = lower.place_copies(ranks, instances)
    prompt_blocks = requests.state[layout.ISL] // params[layout.BLOCK_SIZE]
    pools = lower.pools_of(copies, rows, contents, prompt_blocks, paths)
    idle = lower.workers_of(workers, layout.CHUNK)
    return Side(ranks, idle, requests, pools, None, table, no_servers), paths


def sglang_trees(ranks: Ranks, starts: np.ndarray) -> tuple[Ranks, Forest]:
    """`lower.sglang_rooms`, where commands come between two passes and take some nodes as well."""
    ranks, forest = lower.sglang_rooms(ranks, starts)
    ranks.fields[:, layout.TREE_ROOM] += _NODES_A_COMMAND
    return ranks, lower.grown_forest(forest, ranks)


def set_role(role: Role, params: np.ndarray, factors: np.ndarray):
    """Enter what the role adds to the parameters. Returns the settings of its ranks.

    Prefill workers are never charged for decoding, and the other way round (reference:
    configuration and timing, section 4.5). A TensorRT-LLM destination never looks a block up, so
    that it need not name any, unless somebody wants to know.
    """
    rank = role.rank
    if role.stage == "prefill":
        params[layout.ROLE] = layout.SOURCE
        params[layout.DECODE_MODEL] = layout.MODEL_FIXED
        factors[layout.FIXED_DECODE_MS] = 0.0
        return rank
    params[layout.ROLE] = layout.DESTINATION
    params[layout.PREFILL_MODEL] = layout.MODEL_FIXED
    factors[layout.FIXED_PREFILL_MS] = 0.0
    if role.backend == "trtllm" and not rank.emit_kv_events:
        params[layout.PREFIX_CACHING] = params[layout.SINGLE_COPIES] = 0
    return rank


def _rows_by_rank(ranks: Ranks, requests: Requests, rows: int) -> tuple[np.ndarray, int, int]:
    """(table of `placing.place_blocks`, copies of all ranks together, rows of the index)."""
    fields, state = ranks.fields, requests.state
    per_node = int(fields[0, layout.BLOCKS_PER_NODE])
    state[layout.SHAREABLE] = state[layout.SHARED]
    shared = state[layout.SHARED].astype(np.int64)
    entries = int((-(-np.minimum(shared, state[layout.OWN_FROM]) // per_node)).sum())
    if fields[0, layout.SINGLE_COPIES]:
        spare = content.SPARE_COPIES
        first, rows = rows, rows + entries * per_node
    else:
        # A row has two requests at least.
        spare = 1
        first, rows = 0, entries // 2 * per_node
        state[layout.SHARED] = 0
    copies = int(min(shared.sum() * spare, fields[:, layout.NUM_BLOCKS].sum(dtype=np.float64)))
    fields[:, layout.FIRST_RUN] = copies
    slots = 1 << (entries + entries // 2).bit_length()
    table = np.full((slots + 1, 2), -1, np.int64)
    table[slots] = 0, first
    return table, copies, rows


def handoff_of(
    prefill: Side, decode: Side, workload: Workload, order: np.ndarray | None
) -> Handoff:
    """What two sides of the requests of a workload have between them before the start."""
    n = len(workload)
    workers = len(prefill.workers.state) + len(decode.workers.state)
    ranks = len(prefill.ranks.fields) + len(decode.ranks.fields)
    requests = np.zeros((kernel.HANDOFF_REQUEST, n), np.int32)
    requests[kernel.ORDINAL] = requests[kernel.BY_ORDINAL] = np.arange(n)
    requests[kernel.SOURCE_PIN], requests[kernel.DESTINATION_PIN] = _pins(workload, order)
    lists = np.zeros((kernel.LISTS, max(ranks, workers)), np.int64)
    lists[kernel.FIRST_DEFERRED] = layout.NONE
    time = np.zeros(kernel.HANDOFF_TIME)
    state = np.zeros(kernel.HANDOFF_STATE, np.int64)
    state[kernel.INSTANTS] = _INSTANTS_A_CALL
    return Handoff(
        state=state,
        time=time,
        requests=requests,
        instants=np.full((kernel.HANDOFF_INSTANTS, n), np.nan),
        actions=np.zeros((2, 2 * n + 1), np.int32),
        passes=_tournament(workers),
        transfers=_tournament(n),
        lists=lists,
    )


def _tournament(leaves: int) -> np.ndarray:
    return np.full(2 << max(leaves - 1, 0).bit_length(), np.inf)


def set_tokenization(prefill: Side, handoff: Handoff, tokenization: Tokenization | None) -> Side:
    """The prefill side with the stage in front of its workers."""
    if tokenization is None:
        return prefill
    handoff.time[kernel.TOKENIZE_MS] = tokenization.base_ms
    handoff.time[kernel.TOKENIZE_TOKEN_MS] = tokenization.per_input_token_ms
    servers = min(tokenization.workers, prefill.requests.state.shape[1])
    return prefill._replace(servers=np.zeros((len(prefill.workers.state), servers)))


def set_transfers(
    handoff: Handoff, roles: tuple[Role, Role], topology: DisaggregatedTopology
) -> None:
    """What a transfer costs; only the prefill role's fields count (reference: runtimes, 6.2)."""
    rank = roles[0].rank
    handoff.time[kernel.LATENCY_MS] = topology.handoff_latency_ms
    if rank.kv_transfer_bytes_per_token is not None:
        handoff.time[kernel.BANDWIDTH] = rank.kv_transfer_bandwidth or 0.0
        handoff.time[kernel.BYTES_PER_TOKEN] = rank.kv_transfer_bytes_per_token
    missing = rank.kv_transfer_timing_mode == "destination_missing"
    handoff.state[kernel.DESTINATION_MISSING] = missing
    block = min(roles[1].rank.block_tokens, int(layout.UNLIMITED))
    handoff.state[kernel.TRANSFER_BLOCK] = block
