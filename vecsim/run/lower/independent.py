"""Lowering of aggregated pools whose workers do not see each other: placed and queued
beforehand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vecsim.config.roles import Role
from vecsim.config.schema import Tokenization
from vecsim.kernels.cache import sharing
from vecsim.kernels.fleet.placement import tokenize_all
from vecsim.kernels.state import pools as P
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state.codes import NONE
from vecsim.kernels.state.pools import Forest, Pools
from vecsim.kernels.state.rank import Ranks
from vecsim.kernels.state.request import Requests
from vecsim.kernels.state.worker import Workers
from vecsim.run.lower.content import empty_pools, next_use_table, place_copies
from vecsim.run.lower.ranks import one_pool, params_of, place_lists, sglang_trees
from vecsim.run.lower.requests import (
    blocks_of_sequences,
    checked_rows,
    in_order,
    needs_identities,
    output_limits,
    paths_of,
    private_requests,
    requests_of,
)
from vecsim.timing.model import BoundTiming
from vecsim.workload.workload import Workload

if TYPE_CHECKING:
    from vecsim.run.kv_events import Watched


@dataclass(frozen=True)
class Independent:
    """Everything the kernels read and write.

    Attributes:
        order: int64 [n] row of the workload that request q of the kernels is, or None if the same:
            rank by rank, which keeps each worker's requests together in memory.
        pools: KV blocks of all ranks; for SGLang a forest without room for nodes, as each thread
            grows its own.
        watched: where the role emits KV events, what they are made of; else None.
    """

    ranks: Ranks
    workers: Workers
    requests: Requests
    pools: Pools | Forest
    order: np.ndarray | None
    watched: Watched | None = None


def lower_independent(
    role: Role,
    workload: Workload,
    workers: int,
    *,
    eviction: str,
    tokenization: Tokenization | None,
    timing: BoundTiming | None,
    counted: np.ndarray | None = None,
) -> Independent:
    """Arrays for a fresh run of open-loop arrivals.

    Args:
        role: the pool's role.
        workload: n requests.
        workers: number of workers.
        eviction: "lru" or "belady".
        tokenization: the stage in front of every worker, or None.
        timing: custom timing, or None for the role's own model.
        counted: bool [n], whose inter-token gaps are recorded; None = everybody's.

    Raises:
        InputError: a request too long for 32-bit token counters.
    """
    order = None
    released = workload.arrival_ms
    if np.any(released[1:] < released[:-1]):
        order = np.argsort(released, kind="stable")
    placed = _place(workload, order, workers, role.dp_size)
    arrivals = released = in_order(released, order)
    if tokenization is not None:
        prompts = in_order(workload.input_length, order)
        arrivals = _tokenize(tokenization, workers, role.dp_size, placed, prompts, released)
    if workers * role.dp_size > 1 or tokenization is not None:
        by_rank = np.argsort(placed, kind="stable")
        if tokenization is not None:
            by_rank = np.lexsort((arrivals, placed))
        placed, released, arrivals = placed[by_rank], released[by_rank], arrivals[by_rank]
        order = by_rank if order is None else order[by_rank]
    limit, reason, longest = output_limits(workload, role.rank)
    params, factors = params_of(role, longest, eviction, timing)
    if needs_identities(role, workload, limit):
        params[R.SINGLE_COPIES] = params[R.PREFIX_CACHING]
    caching = bool(params[R.PREFIX_CACHING])
    paths = paths_of(workload, role.rank, longest, order, placed, workers * role.dp_size, caching)
    params[R.BLOCKS_PER_NODE] = paths.blocks_per_node[0]
    ranks, fresh = one_pool(workers, role.dp_size, params, factors)
    requests = requests_of(workload, limit, reason, paths, order, counted)
    requests.state[Q.RANK] = placed
    requests.time[Q.RELEASED] = released
    requests.time[Q.ARRIVAL] = arrivals
    if role.rank.emit_kv_events:
        checked_rows(int(blocks_of_sequences(requests, params).sum()))
    _queue_all(ranks, requests, paths.starts)
    most = np.diff(paths.starts)
    ranks = ranks._replace(lists=place_lists(ranks, most))
    next_uses = None
    if eviction == "belady":
        next_uses = next_use_table(requests.state[Q.ISL] // params[R.BLOCK_SIZE], paths)
    if role.backend == "sglang":
        requests.state[Q.SHARED] = paths.covered
        requests.state[Q.TREE_NODE] = requests.state[Q.RANK]
        requests = requests._replace(path_rows=paths.nodes)
        forest = sglang_trees(ranks, most, False)._replace(next_uses=next_uses)
        state = Independent(ranks, fresh, requests, forest, order)
        return _watched_pages(state, paths, role) if role.rank.emit_kv_events else state
    if caching:
        requests.state[Q.PRIVATE] = private_requests(workload, order)
    contents = np.zeros(0, np.int32)
    if next_uses is not None:
        sequences = requests.state[Q.ISL].astype(np.int64) + requests.state[Q.LIMIT]
        rows = int(paths.covered.sum()) + int((sequences // params[R.BLOCK_SIZE]).sum()) + 1
        contents = np.full(rows, NONE, np.int32)
    instances = np.zeros(len(ranks.fields), np.int64)
    rows = int(sharing.analyse(requests, paths, contents, ranks.fields, instances))
    copies = place_copies(ranks, instances)
    pools = empty_pools(copies, len(workload), rows, next_uses)
    if next_uses is not None:
        pools.index[P.CONTENT] = contents[:rows]
    state = Independent(ranks, fresh, requests, pools, order)
    if not role.rank.emit_kv_events:
        return state
    from vecsim.run.kv_events import Watched, words_a_pass

    watched = Watched(requests, rows, words_a_pass(instances, ranks, role.dp_size))
    return dataclasses.replace(state, watched=watched)


def _queue_all(ranks: Ranks, requests: Requests, starts: np.ndarray) -> None:
    """Queue all requests, which stand rank by rank in order of arrival, at their known arrivals."""
    some = starts[1:] > starts[:-1]
    first, last = starts[:-1][some], starts[1:][some] - 1
    following = np.arange(1, requests.state.shape[1] + 1)
    following[last] = NONE
    requests.state[Q.NEXT] = following
    ranks.fields[some, R.QUEUE_HEAD] = first
    ranks.fields[some, R.QUEUE_TAIL] = last


def _watched_pages(state: Independent, paths: sharing.Paths, role: Role) -> Independent:
    """The state of SGLang ranks that emit KV events: pages have rows, those of the prefix tree
    first, then of each request the pages behind its path."""
    from vecsim.run.kv_events import Watched, words_a_pass

    fields, columns = state.ranks.fields, state.requests.state
    per_node = paths.blocks_per_node[0]
    pages = blocks_of_sequences(state.requests, fields[0])
    own = np.maximum(pages - paths.covered, 0)
    first = len(paths.marks) * per_node
    rows = 0
    if fields[0, R.PREFIX_CACHING]:
        rows = checked_rows(int(first + own.sum()))
    columns[Q.OWN_FROM] = paths.covered
    columns[Q.OWN_ROWS] = first + np.cumsum(own) - own
    named = state.requests._replace(path_rows=paths.nodes * np.int32(per_node))
    instances = np.bincount(columns[Q.RANK], weights=pages, minlength=len(fields))
    words = words_a_pass(instances.astype(np.int64), state.ranks, role.dp_size)
    return dataclasses.replace(state, watched=Watched(named, rows, words))


def _place(workload: Workload, order: np.ndarray | None, workers: int, dp_size: int) -> np.ndarray:
    """int32 [n], scheduler id of every request, in order of arrival (reference: runtimes, section
    5.1)."""
    n = len(workload)
    turns = -(-n // workers)
    pins = np.full(turns * workers, -1, np.int64)
    pins[:n] = in_order(workload.dp_rank, order)
    # One row a turn of all workers; a pinned request takes a turn of the worker, not of its ranks.
    pins = pins.reshape(turns, workers)
    free = pins < 0
    ranks = np.where(free, (np.cumsum(free, axis=0) - 1) % dp_size, pins)
    return (np.arange(workers) * dp_size + ranks).ravel()[:n].astype(np.int32)


def _tokenize(
    tokenization: Tokenization,
    workers: int,
    dp_size: int,
    placed: np.ndarray,
    prompts: np.ndarray,
    released: np.ndarray,
) -> np.ndarray:
    """float64 [n], when each placed request leaves its worker's tokenizers (ms)."""
    arrivals = np.empty(len(released))
    tokenize_all(
        np.zeros((workers, min(tokenization.workers, len(released)))),
        tokenization.base_ms,
        tokenization.per_input_token_ms,
        np.int64(dp_size),
        placed,
        np.ascontiguousarray(prompts),
        np.ascontiguousarray(released),
        arrivals,
    )
    return arrivals
