"""Ranks and workers before the start: parameters from role descriptors, empty queues and pools."""

from __future__ import annotations

import numpy as np

from vecsim.config.roles import Role
from vecsim.config.schema import FixedTiming
from vecsim.kernels.state import layout
from vecsim.kernels.state.layout import Forest, Ranks, Workers
from vecsim.timing.model import BoundTiming

_MOST_BLOCKS = 2**61

# Nodes that radix trees start with.
_FIRST_NODES = 4096
_NODES_A_COMMAND = 8


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
    p[layout.PAGE_SIZE] = rank.block_tokens
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


def set_role(role: Role, params: np.ndarray, factors: np.ndarray) -> None:
    """Enter what the role of a prefill or decode worker adds to the parameters.

    Prefill workers are never charged for decoding, and the other way round (reference:
    configuration and timing, section 4.5). A TensorRT-LLM destination never looks a block up, so
    that it need not name any, unless somebody wants to know.
    """
    if role.stage == "prefill":
        params[layout.ROLE] = layout.SOURCE
        params[layout.DECODE_MODEL] = layout.MODEL_FIXED
        factors[layout.FIXED_DECODE_MS] = 0.0
        return
    params[layout.ROLE] = layout.DESTINATION
    params[layout.PREFILL_MODEL] = layout.MODEL_FIXED
    factors[layout.FIXED_PREFILL_MS] = 0.0
    if role.backend == "trtllm" and not role.rank.emit_kv_events:
        params[layout.PREFIX_CACHING] = params[layout.SINGLE_COPIES] = 0


_EMPTY_LISTS = (
    layout.IDLE_HEAD,
    layout.IDLE_TAIL,
    layout.COPY_FREE,
    layout.QUEUE_HEAD,
    layout.QUEUE_TAIL,
    layout.REJECTED_HEAD,
    layout.REJECTED_TAIL,
    layout.READY_HEAD,
    layout.READY_TAIL,
    layout.ENDING_HEAD,
    layout.ACTIVATED_HEAD,
    layout.SIGNAL_HEAD,
    layout.REFUSED_VERSION,
)


def new_ranks(
    count: int, first: int, dp_size: int, first_worker: int, params: np.ndarray, factors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Idle ranks of one role: int64 [count, RANK_FIELDS] and float64 [count, FACTORS].

    Args:
        count: how many, a multiple of `dp_size`.
        first: place of the first among all ranks; it is its scheduler id as well.
        dp_size: ranks of each worker.
        first_worker: place of the first worker among all.
        params, factors: as of `params_of`.
    """
    fields = np.zeros((count, layout.RANK_FIELDS), np.int64)
    fields[:, : layout.PARAMS] = params
    fields[:, layout.SCHEDULER_ID] = first + np.arange(count)
    fields[:, layout.WORKER] = first_worker + np.arange(count) // dp_size
    fields[:, layout.FREE] = params[layout.NUM_BLOCKS]
    fields[:, layout.NEXT_FINISH] = layout.NEVER
    fields[:, layout.EFFECT] = 1
    fields[:, _EMPTY_LISTS] = layout.NONE
    return fields, np.tile(factors, (count, 1))


def new_workers(count: int, first_rank: int, dp_size: int, pool: int, first_id: int) -> np.ndarray:
    """Idle workers of one pool: int64 [count, WORKER_STATE].

    Args:
        count: how many.
        first_rank: place of the first one's first rank among all.
        dp_size: ranks of each.
        pool: 0, or 1 for decode workers beside prefill workers.
        first_id: their ids go up from here; ids of workers that are gone are not used again.
    """
    state = np.zeros((count, layout.WORKER_STATE), np.int64)
    state[:, layout.WORKER_ID] = first_id + np.arange(count)
    state[:, layout.POOL] = pool
    state[:, layout.FIRST_RANK] = first_rank + np.arange(count) * dp_size
    state[:, layout.DP_SIZE] = dp_size
    return state


def one_pool(
    workers: int, dp_size: int, params: np.ndarray, factors: np.ndarray
) -> tuple[Ranks, Workers]:
    """The ranks and workers of an aggregated pool that advance on their own."""
    fields, factors = new_ranks(workers * dp_size, 0, dp_size, 0, params, factors)
    state = new_workers(workers, 0, dp_size, 0, 0)
    times = np.zeros((workers, layout.WORKER_TIME))
    return Ranks(fields, factors, np.zeros(0, np.int32)), Workers(state, times)


def place_lists(ranks: Ranks, most: np.ndarray) -> np.ndarray:
    """Give every rank its growth counters and a running list, as long as it can get with at most
    `most` (int64 [ranks]) requests."""
    fields = ranks.fields
    capacity = np.minimum(most, fields[:, layout.MAX_NUM_SEQS])
    counters = fields[:, layout.BLOCK_SIZE]
    ends = np.cumsum(capacity + counters)
    fields[:, layout.RUN_OFFSET] = ends - capacity
    fields[:, layout.GROWTH_OFFSET] = ends - capacity - counters
    return np.zeros(int(ends[-1]), np.int32)


def sglang_trees(ranks: Ranks, most: np.ndarray, commands: bool) -> Forest:
    """Trees without room for nodes, of SGLang ranks that get at most `most` (int64 [ranks])
    requests each; `commands` of handoffs may come between two passes."""
    fields = ranks.fields
    fields[:, layout.ROOT] = np.arange(len(fields))
    capacity = np.minimum(most, fields[:, layout.MAX_NUM_SEQS])
    # A pass may split and add a node for the match, the chunk and the end of each request; a queue
    # of prompts that are refused for good splits one for each, but never more than there are pages.
    refused = np.minimum(most, fields[:, layout.NUM_BLOCKS])
    fields[:, layout.TREE_ROOM] = 6 * capacity + refused + _NODES_A_COMMAND * commands
    return Forest(
        nodes=np.full((layout.TREE_FIELDS, 0), layout.NONE, np.int32),
        table=np.zeros(0, np.int32),
        state=np.array([layout.NONE, 0, len(fields), 0], np.int64),
        order=np.zeros((4, int(layout.LPM_LIMIT)), np.int64),
        forecast=None,
        events=None,
    )


def grown_forest(forest: Forest, ranks: Ranks) -> Forest:
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


def lacks_nodes(forest: Forest, ranks: Ranks) -> bool:
    """Whether the next pass of a worker may need more nodes than there are."""
    state = forest.state
    left = forest.nodes.shape[1] - state[layout.NODE_BUMP] + state[layout.UNUSED_COUNT]
    rooms = np.bincount(ranks.fields[:, layout.WORKER], weights=ranks.fields[:, layout.TREE_ROOM])
    return bool(left < rooms.max())
