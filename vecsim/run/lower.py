"""Lowering: role descriptors and a workload become arrays. The only place that knows both sides."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from vecsim.config.roles import Role
from vecsim.config.schema import FixedTiming, RankConfig, Tokenization
from vecsim.errors import InputError
from vecsim.kernels import aggregated
from vecsim.kernels.cache import sharing
from vecsim.kernels.fleet.placement import tokenize_all
from vecsim.kernels.state import layout
from vecsim.kernels.state.layout import ForecastForest, Forest, Pools, Ranks, Requests, Workers
from vecsim.timing.model import BoundTiming
from vecsim.workload.workload import PrefixTree, Workload

if TYPE_CHECKING:
    from vecsim.kernels.cache.session_content import Seats
    from vecsim.kernels.fleet.arrivals import Arrivals
    from vecsim.run.kv_events import Watched

LONGEST_SEQUENCE = 2**30
_MOST_BLOCKS = 2**61

# Copies beyond one per block instance: a block recomputed while an old copy lingers adds one.
SPARE_COPIES = 8

# Nodes that radix trees start with.
_FIRST_NODES = 4096


Forests = Forest | ForecastForest


@dataclass(frozen=True)
class State:
    """Everything the kernels read and write, for one aggregated pool.

    Attributes:
        order: int64 [n] row of the workload that request q of the kernels is, or None if the same.
            Coupled workers see requests by arrival; independent ones rank by rank, which keeps
            each worker's requests together in memory.
        pools: KV blocks of all ranks; for SGLang a forest without room for nodes, as each thread
            grows its own.
        entries: the module with the entry points of the backend.
        watched: where the role emits KV events, what they are made of; else None.
        waiting: what entries for requests that wait for others take besides.
    """

    ranks: Ranks
    workers: Workers
    requests: Requests
    pools: Pools | Forests
    order: np.ndarray | None
    entries: ModuleType
    watched: Watched | None = None
    waiting: tuple[Arrivals, Seats] | tuple[()] = ()


def lower(
    role: Role,
    workload: Workload,
    workers: int,
    *,
    eviction: str,
    tokenization: Tokenization | None,
    authored_order: bool,
    released_by_completions: bool,
    coupled: bool,
    timing: BoundTiming | None,
    counted: np.ndarray | None = None,
) -> State:
    """Arrays for a fresh run.

    Args:
        role: the pool's role.
        workload: n requests.
        workers: number of workers.
        eviction: "lru" or "belady".
        tokenization: the stage in front of every worker, or None.
        authored_order: take requests in workload order instead of arrival order.
        released_by_completions: closed loop; arrivals are decided by the run.
        coupled: the clock hands arrivals over one by one.
        timing: custom timing, or None for the role's own model.
        counted: bool [n], whose inter-token gaps are recorded; None = everybody's.

    Raises:
        InputError: a request too long for 32-bit token counters.
    """
    order = None
    released = workload.arrival_ms
    if not authored_order and np.any(released[1:] < released[:-1]):
        order = np.argsort(released, kind="stable")
    placed = _place(workload, order, workers, role.dp_size)
    arrivals = released = in_order(released, order)
    if not coupled and tokenization is not None:
        prompts = in_order(workload.input_length, order)
        arrivals = _tokenize(tokenization, workers, role.dp_size, placed, prompts, released)
    if not coupled and (workers * role.dp_size > 1 or tokenization is not None):
        by_rank = np.argsort(placed, kind="stable")
        if tokenization is not None:
            by_rank = np.lexsort((arrivals, placed))
        placed, released, arrivals = placed[by_rank], released[by_rank], arrivals[by_rank]
        order = by_rank if order is None else order[by_rank]
    limit, reason, longest = output_limits(workload, role.rank)
    params, factors = params_of(role, longest, eviction, timing)
    if np.any((workload.input_length == 0) & (limit > 0)):
        # Room for a preempted empty prompt is made by undoing scheduled work: duplicates arise.
        params[layout.SINGLE_COPIES] = role.rank.enable_prefix_caching
    if role.rank.emit_kv_events:
        # Every block that an event may name has an identity.
        params[layout.SINGLE_COPIES] = role.rank.enable_prefix_caching
    paths = paths_of(workload, role.rank, longest, order, placed, workers * role.dp_size)
    params[layout.BLOCKS_PER_NODE] = paths.blocks_per_node[0]
    ranks = ranks_of(workers * role.dp_size, params, factors)
    requests = requests_of(workload, limit, reason, paths, order, counted)
    requests.state[layout.RANK] = placed
    if role.rank.emit_kv_events:
        checked_rows(int(blocks_of_sequences(requests, params).sum()))
    if not released_by_completions:
        requests.time[layout.RELEASED] = released
    if not coupled:
        requests.time[layout.ARRIVAL] = arrivals
    if role.backend == "sglang":
        # Nobody else needs these kernels, and loading them takes a tenth of a second.
        from vecsim.kernels import aggregated_sglang

        requests.state[layout.SHARED] = paths.covered
        requests.state[layout.TREE_NODE] = requests.state[layout.RANK]
        requests = requests._replace(path_rows=paths.nodes)
        if not coupled:
            _queue_all(ranks, requests, paths.starts)
        ranks, forest = sglang_rooms(ranks, paths.starts)
        state = State(ranks, workers_of(workers), requests, forest, order, aggregated_sglang)
        if eviction == "belady":
            state = _with_forecast(state, paths)
        return _watched_sglang(state, paths, role) if role.rank.emit_kv_events else state
    if role.rank.enable_prefix_caching and workload.output_offsets is not None:
        planned = np.diff(workload.output_offsets) > 0
        requests.state[layout.LONER] = in_order(planned, order)

    belady = eviction == "belady"
    contents = np.zeros(0, np.int32)
    if belady:
        sequences = requests.state[layout.ISL].astype(np.int64) + requests.state[layout.LIMIT]
        rows = int(paths.covered.sum()) + int((sequences // params[layout.BLOCK_SIZE]).sum()) + 1
        contents = np.full(rows, layout.NONE, np.int32)
    instances = np.zeros(len(ranks.fields), np.int64)
    rows = aggregated.prepare(
        ranks,
        requests,
        paths,
        instances,
        contents,
    )
    if not coupled:
        _queue_all(ranks, requests, paths.starts)
    ranks = ranks._replace(lists=place_lists(ranks, paths.starts))
    copies = place_copies(ranks, instances)
    prompt_blocks = requests.state[layout.ISL] // params[layout.BLOCK_SIZE]
    pools = pools_of(copies, int(rows), contents, prompt_blocks, paths)
    state = State(ranks, workers_of(workers), requests, pools, order, aggregated)
    if not role.rank.emit_kv_events:
        return state
    from vecsim.kernels import aggregated_events
    from vecsim.run.kv_events import Watched, words_a_pass

    watched = Watched(requests, int(rows), words_a_pass(instances, ranks, role.dp_size))
    return dataclasses.replace(state, entries=aggregated_events, watched=watched)


def blocks_of_sequences(requests: Requests, params: np.ndarray) -> np.ndarray:
    """int64 [n], most full blocks that each request can have."""
    sequences = requests.state[layout.ISL].astype(np.int64) + requests.state[layout.LIMIT]
    return sequences // params[layout.BLOCK_SIZE]


def checked_rows(rows: int) -> int:
    """`rows`, unless they are more than 32 bits can name."""
    if rows > layout.NEVER:
        expected = f"at most {layout.NEVER} blocks of all requests, for KV events"
        raise InputError("observe", rows, expected)
    return rows


def _queue_all(ranks: Ranks, requests: Requests, starts: np.ndarray) -> None:
    """Queue all requests, which stand rank by rank in order of arrival, at their known arrivals."""
    some = starts[1:] > starts[:-1]
    first, last = starts[:-1][some], starts[1:][some] - 1
    following = np.arange(1, requests.state.shape[1] + 1)
    following[last] = layout.NONE
    requests.state[layout.NEXT] = following
    ranks.fields[some, layout.QUEUE_HEAD] = first
    ranks.fields[some, layout.QUEUE_TAIL] = last


def sglang_rooms(ranks: Ranks, starts: np.ndarray) -> tuple[Ranks, Forest]:
    """SGLang ranks, which get at most np.diff(starts) requests each, and their empty trees."""
    fields = ranks.fields
    fields[:, layout.ROOT] = np.arange(len(fields))
    capacity = np.minimum(np.diff(starts), fields[:, layout.MAX_NUM_SEQS])
    # A pass may split and add a node for the match, the chunk and the end of each request; a queue
    # of prompts that are refused for good splits one for each, but never more than there are pages.
    refused = np.minimum(np.diff(starts), fields[:, layout.NUM_BLOCKS])
    fields[:, layout.TREE_ROOM] = 6 * capacity + refused
    ranks = ranks._replace(lists=place_lists(ranks, starts))
    return ranks, Forest(
        nodes=np.full((layout.TREE_FIELDS, 0), layout.NONE, np.int32),
        table=np.zeros(0, np.int32),
        state=np.array([layout.NONE, 0, len(fields), 0], np.int64),
        order=np.zeros((4, int(layout.LPM_LIMIT)), np.int64),
    )


def _watched_sglang(state: State, paths: sharing.Paths, role: Role) -> State:
    """The state of SGLang ranks that emit KV events."""
    from vecsim.kernels import aggregated_sglang_belady_events, aggregated_sglang_events
    from vecsim.run.kv_events import Watched, words_a_pass

    entries = aggregated_sglang_events
    if isinstance(state.pools, ForecastForest):
        entries = aggregated_sglang_belady_events
    fields = state.ranks.fields
    named, rows = named_pages(state.requests, paths, fields[0])
    pages = blocks_of_sequences(named, fields[0])
    ranks = named.state[layout.RANK]
    instances = np.bincount(ranks, weights=pages, minlength=len(fields))
    words = words_a_pass(instances.astype(np.int64), state.ranks, role.dp_size)
    return dataclasses.replace(state, entries=entries, watched=Watched(named, rows, words))


def named_pages(
    requests: Requests, paths: sharing.Paths, params: np.ndarray
) -> tuple[Requests, int]:
    """SGLang requests whose pages have rows, by which KV events name them, and the number of rows:
    those of the prefix tree first, then of each request the pages behind its path."""
    columns = requests.state
    per_node = paths.blocks_per_node[0]
    own = np.maximum(blocks_of_sequences(requests, params) - paths.covered, 0)
    first = len(paths.marks) * per_node
    rows = checked_rows(int(first + own.sum())) if params[layout.PREFIX_CACHING] else 0
    columns[layout.OWN_FROM] = paths.covered
    columns[layout.OWN_ROWS] = first + np.cumsum(own) - own
    return requests._replace(path_rows=paths.nodes * np.int32(per_node)), rows


def grown_forest(forest: Forests, ranks: Ranks) -> Forests:
    """A copy of `forest` with room for twice as many nodes, and for the next pass of any rank."""
    used = forest.nodes.shape[1]
    room = int(ranks.fields[:, layout.TREE_ROOM].max(initial=0)) + len(ranks.fields)
    capacity = max(2 * used, _FIRST_NODES, used + 2 * room)
    nodes = np.full((layout.TREE_FIELDS, capacity), layout.NONE, np.int32)
    nodes[:, :used] = forest.nodes
    state = forest.state.copy()
    state[layout.TABLE_STALE] = 1
    table = np.full(1 << (2 * capacity - 1).bit_length(), layout.NONE, np.int32)
    return forest._replace(nodes=nodes, table=table, state=state, order=forest.order.copy())


def lacks_nodes(forest: Forests, ranks: Ranks, dp_size: int) -> bool:
    """Whether the next pass of a worker may need more nodes than there are."""
    state = forest.state
    left = forest.nodes.shape[1] - state[layout.NODE_BUMP] + state[layout.UNUSED_COUNT]
    return bool(left < dp_size * ranks.fields[:, layout.TREE_ROOM].max())


def _with_forecast(state: State, paths: sharing.Paths) -> State:
    """The state of SGLang ranks that evict by a forecast."""
    from vecsim.kernels import aggregated_sglang_belady

    fields = state.ranks.fields
    prompt_pages = state.requests.state[layout.ISL] // fields[0, layout.PAGE_SIZE]
    forest = ForecastForest(*state.pools, *_forecast(prompt_pages, paths))
    return dataclasses.replace(state, pools=forest, entries=aggregated_sglang_belady)


def _place(workload: Workload, order: np.ndarray | None, workers: int, dp_size: int) -> np.ndarray:
    """int32 [n], scheduler id of every request, in order of arrival."""
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


def in_order(column: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    return column if order is None else column[order]


def output_limits(workload: Workload, rank: RankConfig) -> tuple[np.ndarray, np.ndarray, int]:
    """(tokens that each request may produce: int64 [n], why fewer than asked for: uint8 [n] reason
    codes, tokens of the longest sequence)."""
    prompt = workload.input_length.astype(np.int64)
    limit = workload.output_length.astype(np.int64)
    reason = np.full(len(limit), layout.NO_REASON, np.uint8)
    if rank.max_model_len is not None:
        room = np.maximum(min(rank.max_model_len, int(layout.UNLIMITED)) - prompt, 0)
        reason[room < limit] = layout.LENGTH
        limit = np.minimum(limit, room)
    if rank.backend == "trtllm":
        # The output of a prompt that fits is clamped to the pool (reference: TensorRT-LLM, B1).
        room = min(rank.num_gpu_blocks * rank.block_tokens, int(layout.UNLIMITED)) - prompt
        clamped = (room > 0) & (room < limit)
        reason[clamped] = layout.KV_CAPACITY_EXHAUSTED
        limit = np.where(clamped, room, limit)
    longest = int((prompt + limit).max()) if len(prompt) else 0
    if longest > LONGEST_SEQUENCE:
        row = int((prompt + limit).argmax())
        raise InputError(
            f"requests[{row}]", longest, f"at most {LONGEST_SEQUENCE} tokens, prompt and output"
        )
    return limit, reason, longest


def params_of(
    role: Role, longest: int, eviction: str, timing: BoundTiming | None
) -> tuple[np.ndarray, np.ndarray]:
    """Parameters of one rank: int64 [PARAMS], float64 [FACTORS]."""
    rank = role.rank
    unlimited = int(layout.UNLIMITED)
    p = np.zeros(layout.PARAMS, np.int64)
    p[layout.NUM_BLOCKS] = min(rank.num_gpu_blocks, _MOST_BLOCKS)
    # A block longer than every sequence is never full, so its exact size does not matter.
    p[layout.BLOCK_SIZE] = min(rank.block_tokens, longest + 1)
    p[layout.CAPACITY_TOKENS] = min(rank.num_gpu_blocks * rank.block_tokens, unlimited)
    p[layout.MAX_NUM_SEQS] = _or_unlimited(rank.max_num_seqs)
    p[layout.TOKEN_BUDGET] = _or_unlimited(rank.max_num_batched_tokens)
    p[layout.MAX_MODEL_LEN] = _or_unlimited(rank.max_model_len)
    p[layout.PREFIX_CACHING] = rank.enable_prefix_caching
    p[layout.CHUNKED_PREFILL] = rank.enable_chunked_prefill
    p[layout.PREEMPT_FIRST] = rank.preemption_mode == "fifo"
    belady = eviction == "belady"
    p[layout.EVICTION_POLICY] = layout.EVICT_BELADY if belady else layout.EVICT_LRU
    # An undone fifo victim leaves a duplicate of its own last block, and Belady weighs each block.
    single = belady or rank.preemption_mode == "fifo"
    p[layout.SINGLE_COPIES] = single and rank.enable_prefix_caching
    trtllm = rank.backend == "trtllm"
    p[layout.RESERVES_OUTPUT] = p[layout.KEEPS_WHOLE_HIT] = trtllm
    p[layout.PREFILL_SCHEDULE_INTERVAL] = min(rank.prefill_schedule_interval, unlimited)

    f = np.zeros(layout.FACTORS)
    f[layout.PREFILL_RATIO] = rank.speedup_ratio
    f[layout.DECODE_RATIO] = rank.speedup_ratio * rank.decode_speedup_ratio
    model = layout.MODEL_POLYNOMIAL
    if timing is not None:
        model = layout.MODEL_CUSTOM
        p[layout.PREFILL_FUNCTION], p[layout.DECODE_FUNCTION] = timing.addresses
    elif isinstance(rank.timing_model, FixedTiming):
        model = layout.MODEL_FIXED
        f[layout.FIXED_PREFILL_MS] = rank.timing_model.prefill_ms
        f[layout.FIXED_DECODE_MS] = rank.timing_model.decode_ms
    p[layout.PREFILL_MODEL] = p[layout.DECODE_MODEL] = model
    if rank.backend == "sglang":
        _set_sglang(role, p, f)
    return p, f


def _set_sglang(role: Role, p: np.ndarray, f: np.ndarray) -> None:
    """What only SGLang ranks have. Ranks of a group share chunks and reserve less (reference:
    runtimes, section 4.4)."""
    rank, options = role.rank, role.rank.sglang
    unlimited = int(layout.UNLIMITED)
    p[layout.NUM_BLOCKS] = min(rank.num_gpu_blocks, _MOST_BLOCKS // rank.block_tokens)
    p[layout.PAGE_SIZE] = min(rank.block_tokens, int(layout.UNLIMITED))
    p[layout.TOKEN_BUDGET] = min(options.max_prefill_tokens, unlimited)
    p[layout.CHUNKED_PREFILL_SIZE] = min(options.chunked_prefill_size // role.dp_size, unlimited)
    p[layout.CLIP_MAX_NEW_TOKENS] = min(options.clip_max_new_tokens, _MOST_BLOCKS)
    lpm = options.schedule_policy == "lpm"
    p[layout.SCHEDULE_POLICY] = layout.POLICY_LPM if lpm else layout.POLICY_FIFO
    p[layout.PREFILL_DECODE_INTERVAL] = min(rank.prefill_decode_interval, unlimited)
    conservativeness = options.schedule_conservativeness
    if role.dp_size > 1:
        conservativeness *= 0.3
    f[layout.RATIO_INIT] = 0.7 * conservativeness
    f[layout.RATIO_MIN] = f[layout.RATIO_INIT] * 0.14
    f[layout.RATIO_STEP] = (f[layout.RATIO_INIT] - f[layout.RATIO_MIN]) / 600.0
    f[layout.NEW_TOKEN_RATIO] = f[layout.RATIO_INIT]


def _or_unlimited(value: int | None) -> int:
    return int(layout.UNLIMITED) if value is None else min(value, int(layout.UNLIMITED))


def ranks_of(count: int, params: np.ndarray, factors: np.ndarray) -> Ranks:
    fields = np.zeros((count, layout.RANK_FIELDS), np.int64)
    fields[:, : layout.PARAMS] = params
    fields[:, layout.SCHEDULER_ID] = np.arange(count)
    fields[:, layout.FREE] = params[layout.NUM_BLOCKS]
    fields[:, layout.NEXT_FINISH] = layout.NEVER
    for head in (
        layout.IDLE_HEAD,
        layout.IDLE_TAIL,
        layout.COPY_FREE,
        layout.QUEUE_HEAD,
        layout.QUEUE_TAIL,
        layout.REJECTED_HEAD,
        layout.READY_HEAD,
        layout.READY_TAIL,
        layout.DONE_HEAD,
        layout.ACTIVATED_HEAD,
        layout.REFUSED_VERSION,
    ):
        fields[:, head] = layout.NONE
    return Ranks(fields, np.tile(factors, (count, 1)), np.zeros(0, np.int32))


def workers_of(workers: int, ahead: int = 0) -> Workers:
    """Idle workers; `ahead`: passes of a stretch in flight whose ends each can keep."""
    state = np.zeros((workers, layout.WORKER_STATE), np.int64)
    state[:, layout.LAST_ENDED] = layout.NONE
    return Workers(state, np.zeros((workers, layout.WORKER_TIME + ahead)))


def paths_of(
    workload: Workload,
    rank: RankConfig,
    longest: int,
    order: np.ndarray | None,
    placed: np.ndarray,
    ranks: int,
) -> sharing.Paths:
    """Prompts as paths through the prefix tree; empty ones where nothing can be shared."""
    n = len(workload)
    block = min(rank.block_tokens, longest + 1)  # longer ones are never full either
    tree = PrefixTree(np.zeros(n + 1, np.int64), np.zeros(0, np.int32), 0, block)
    if rank.enable_prefix_caching and workload.block_offsets is not None and block <= longest:
        tree = workload.prefix_tree(block)
    spans = np.diff(tree.offsets)
    prompt_blocks = workload.input_length.astype(np.int64) // block
    if tree.tokens_per_node == block:
        covered = spans
        if workload.output_offsets is None:
            covered = np.minimum(spans, prompt_blocks)
    else:
        covered = np.where(spans > 0, prompt_blocks, 0)
    return sharing.Paths(
        spans=np.array([in_order(tree.offsets[:-1], order), in_order(tree.offsets[1:], order)]),
        nodes=tree.nodes,
        covered=in_order(covered, order).astype(np.int32),
        blocks_per_node=np.array([tree.tokens_per_node // block], np.int64),
        marks=np.zeros((tree.node_count, 4), np.int32),
        order=np.argsort(placed, kind="stable"),
        starts=np.concatenate([[0], np.cumsum(np.bincount(placed, minlength=ranks))]),
    )


def requests_of(
    workload: Workload,
    limit: np.ndarray,
    reason: np.ndarray,
    paths: sharing.Paths,
    order: np.ndarray | None,
    counted: np.ndarray | None,
) -> Requests:
    n = len(workload)
    state = np.zeros((layout.REQUEST_STATE, n), np.int32)
    state[layout.ISL] = in_order(workload.input_length, order)
    state[layout.LIMIT] = in_order(limit, order)
    state[layout.REASON] = in_order(reason, order)
    state[layout.COUNTED] = 1 if counted is None else in_order(counted, order)
    state[layout.FRESH] = 1
    state[layout.PATH] = paths.spans[0]
    state[layout.OWN_TAIL] = layout.NONE
    state[layout.STATUS] = layout.UNFINISHED
    state[layout.FAMILY] = np.arange(n)
    return Requests(
        state=state,
        time=np.full((layout.REQUEST_TIME, n), np.nan),
        path_rows=np.zeros(len(paths.nodes), np.int32),
    )


def place_lists(ranks: Ranks, starts: np.ndarray) -> np.ndarray:
    """Give every rank its growth counters and a running list, as long as it can get."""
    fields = ranks.fields
    capacity = np.minimum(np.diff(starts), fields[:, layout.MAX_NUM_SEQS])
    counters = fields[:, layout.BLOCK_SIZE]
    ends = np.cumsum(capacity + counters)
    fields[:, layout.RUN_OFFSET] = ends - capacity
    fields[:, layout.GROWTH_OFFSET] = ends - capacity - counters
    return np.zeros(int(ends[-1]), np.int32)


def place_copies(ranks: Ranks, instances: np.ndarray) -> int:
    """Give every rank its range of copies: no more than it has blocks, or blocks to copy."""
    fields = ranks.fields
    spare = np.where(fields[:, layout.SINGLE_COPIES] != 0, SPARE_COPIES, 1)
    capacity = np.minimum(instances * spare, fields[:, layout.NUM_BLOCKS])
    ends = np.cumsum(capacity)
    fields[:, layout.COPY_BUMP] = ends - capacity
    fields[:, layout.FIRST_RUN] = ends[-1]
    return int(ends[-1])


def pools_of(
    copies: int, rows: int, contents: np.ndarray, prompt_blocks: np.ndarray, paths: sharing.Paths
) -> Pools:
    """Empty pools; with a forecast of prompts if `contents` names the contents of the rows.

    `prompt_blocks` int [n]: full blocks of each prompt.
    """
    index = np.full((layout.INDEX_FIELDS, rows), layout.NONE, np.int32)
    forecast, users = (np.zeros((rows, 0), np.int32) for rows in (layout.FORECAST_FIELDS, 2))
    if len(contents):
        index[layout.CONTENT] = contents[:rows]
        forecast, users = _forecast(prompt_blocks, paths)
    nodes = np.zeros((layout.NODE_FIELDS, copies + len(prompt_blocks)), np.int32)
    return Pools(nodes, index, forecast, users)


def _forecast(prompt_blocks: np.ndarray, paths: sharing.Paths) -> tuple[np.ndarray, np.ndarray]:
    """(forecast, users) of `Pools`: the requests of every node of the prefix tree, ascending."""
    per_node = int(paths.blocks_per_node[0])
    blocks = np.minimum(paths.covered, prompt_blocks).astype(np.int64)
    spans = -(-blocks // per_node)
    user = np.repeat(np.arange(len(blocks)), spans)
    place = np.arange(len(user)) - (np.cumsum(spans) - spans)[user]
    covers = np.minimum(blocks[user] - place * per_node, per_node)
    node = paths.nodes[paths.spans[0, user] + place]
    by_node = np.argsort(node, kind="stable")
    counts = np.bincount(node, minlength=len(paths.marks))
    ends = np.cumsum(counts)
    users = np.array([user[by_node], covers[by_node]], np.int32)
    return np.array([ends - counts, ends], np.int32), users
