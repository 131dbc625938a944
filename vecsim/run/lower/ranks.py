"""Ranks and workers before the start: parameters from role descriptors, empty queues and pools."""

from __future__ import annotations

import numpy as np

from vecsim.config.roles import Role
from vecsim.config.schema import FixedTiming
from vecsim.kernels.state import pools as P
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import worker as W
from vecsim.kernels.state.codes import NEVER, NONE, UNLIMITED
from vecsim.kernels.state.pools import Forest
from vecsim.kernels.state.rank import Ranks
from vecsim.kernels.state.worker import Workers
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
    unlimited = int(UNLIMITED)
    p = np.zeros(R.PARAMS, np.int64)
    p[R.NUM_BLOCKS] = min(rank.num_gpu_blocks, _MOST_BLOCKS)
    # A block longer than every sequence is never full, so its exact size does not matter.
    p[R.BLOCK_SIZE] = min(rank.block_tokens, longest + 1)
    p[R.CAPACITY_TOKENS] = min(rank.num_gpu_blocks * rank.block_tokens, unlimited)
    p[R.MAX_NUM_SEQS] = _or_unlimited(rank.max_num_seqs)
    p[R.TOKEN_BUDGET] = _or_unlimited(rank.max_num_batched_tokens)
    p[R.MAX_MODEL_LEN] = _or_unlimited(rank.max_model_len)
    p[R.PREFIX_CACHING] = rank.enable_prefix_caching
    p[R.CHUNKED_PREFILL] = rank.enable_chunked_prefill
    p[R.PREEMPT_FIRST] = rank.preemption_mode == "fifo"
    belady = eviction == "belady"
    p[R.EVICTION_POLICY] = R.EVICT_BELADY if belady else R.EVICT_LRU
    # An undone fifo victim leaves a duplicate of its own last block, and Belady weighs each block.
    single = belady or rank.preemption_mode == "fifo"
    p[R.SINGLE_COPIES] = single and rank.enable_prefix_caching
    trtllm = rank.backend == "trtllm"
    p[R.RESERVES_OUTPUT] = p[R.KEEPS_WHOLE_HIT] = trtllm
    p[R.PREFILL_SCHEDULE_INTERVAL] = min(rank.prefill_schedule_interval, unlimited)

    f = np.zeros(R.FACTORS)
    f[R.PREFILL_RATIO] = rank.speedup_ratio
    f[R.DECODE_RATIO] = rank.speedup_ratio * rank.decode_speedup_ratio
    model = R.MODEL_POLYNOMIAL
    if timing is not None:
        model = R.MODEL_CUSTOM
        p[R.PREFILL_FUNCTION], p[R.DECODE_FUNCTION] = timing.addresses
    elif isinstance(rank.timing_model, FixedTiming):
        model = R.MODEL_FIXED
        f[R.FIXED_PREFILL_MS] = rank.timing_model.prefill_ms
        f[R.FIXED_DECODE_MS] = rank.timing_model.decode_ms
    p[R.PREFILL_MODEL] = p[R.DECODE_MODEL] = model
    if rank.backend == "sglang":
        _set_sglang(role, p, f)
    return p, f


def _set_sglang(role: Role, p: np.ndarray, f: np.ndarray) -> None:
    """What only SGLang ranks have. Ranks of a group share chunks and reserve less (reference:
    runtimes, section 4.4)."""
    rank, options = role.rank, role.rank.sglang
    unlimited = int(UNLIMITED)
    p[R.NUM_BLOCKS] = min(rank.num_gpu_blocks, _MOST_BLOCKS // rank.block_tokens)
    p[R.PAGE_SIZE] = min(rank.block_tokens, unlimited)
    p[R.TOKEN_BUDGET] = min(options.max_prefill_tokens, unlimited)
    p[R.CHUNKED_PREFILL_SIZE] = min(options.chunked_prefill_size // role.dp_size, unlimited)
    p[R.CLIP_MAX_NEW_TOKENS] = min(options.clip_max_new_tokens, _MOST_BLOCKS)
    lpm = options.schedule_policy == "lpm"
    p[R.SCHEDULE_POLICY] = R.POLICY_LPM if lpm else R.POLICY_FIFO
    p[R.PREFILL_DECODE_INTERVAL] = min(rank.prefill_decode_interval, unlimited)
    conservativeness = options.schedule_conservativeness
    if role.dp_size > 1:
        conservativeness *= 0.3
    f[R.RATIO_INIT] = 0.7 * conservativeness
    f[R.RATIO_MIN] = f[R.RATIO_INIT] * 0.14
    f[R.RATIO_STEP] = (f[R.RATIO_INIT] - f[R.RATIO_MIN]) / 600.0
    f[R.NEW_TOKEN_RATIO] = f[R.RATIO_INIT]


def _or_unlimited(value: int | None) -> int:
    return int(UNLIMITED) if value is None else min(value, int(UNLIMITED))


def set_role(role: Role, params: np.ndarray, factors: np.ndarray) -> None:
    """Enter what the role of a prefill or decode worker adds to the parameters.

    Prefill workers are never charged for decoding, and the other way round (reference:
    configuration and timing, section 4.5). A TensorRT-LLM destination never looks a block up, so
    that it need not name any, unless somebody wants to know.
    """
    if role.stage == "prefill":
        params[R.ROLE] = R.SOURCE
        params[R.DECODE_MODEL] = R.MODEL_FIXED
        factors[R.FIXED_DECODE_MS] = 0.0
        return
    params[R.ROLE] = R.DESTINATION
    params[R.PREFILL_MODEL] = R.MODEL_FIXED
    factors[R.FIXED_PREFILL_MS] = 0.0
    if role.backend == "trtllm" and not role.rank.emit_kv_events:
        params[R.PREFIX_CACHING] = params[R.SINGLE_COPIES] = 0


_EMPTY_LISTS = (
    R.EVICTABLE_HEAD,
    R.EVICTABLE_TAIL,
    R.COPY_FREE,
    R.QUEUE_HEAD,
    R.QUEUE_TAIL,
    R.REJECTED_HEAD,
    R.REJECTED_TAIL,
    R.READY_HEAD,
    R.READY_TAIL,
    R.ENDING_HEAD,
    R.ACTIVATED_HEAD,
    R.SIGNAL_HEAD,
    R.REFUSED_VERSION,
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
    fields = np.zeros((count, R.RANK_FIELDS), np.int64)
    fields[:, : R.PARAMS] = params
    fields[:, R.SCHEDULER_ID] = first + np.arange(count)
    fields[:, R.WORKER] = first_worker + np.arange(count) // dp_size
    fields[:, R.FREE] = params[R.NUM_BLOCKS]
    fields[:, R.NEXT_FINISH] = NEVER
    fields[:, R.EFFECT] = 1
    fields[:, _EMPTY_LISTS] = NONE
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
    state = np.zeros((count, W.WORKER_STATE), np.int64)
    state[:, W.WORKER_ID] = first_id + np.arange(count)
    state[:, W.POOL] = pool
    state[:, W.FIRST_RANK] = first_rank + np.arange(count) * dp_size
    state[:, W.DP_SIZE] = dp_size
    return state


def one_pool(
    workers: int, dp_size: int, params: np.ndarray, factors: np.ndarray
) -> tuple[Ranks, Workers]:
    """The ranks and workers of an aggregated pool that advance on their own."""
    fields, factors = new_ranks(workers * dp_size, 0, dp_size, 0, params, factors)
    state = new_workers(workers, 0, dp_size, 0, 0)
    times = np.zeros((workers, W.WORKER_TIME))
    return Ranks(fields, factors, np.zeros(0, np.int32)), Workers(state, times)


def place_lists(ranks: Ranks, most: np.ndarray) -> np.ndarray:
    """Give every rank its growth counters and a running list, as long as it can get with at most
    `most` (int64 [ranks]) requests."""
    fields = ranks.fields
    capacity = np.minimum(most, fields[:, R.MAX_NUM_SEQS])
    counters = fields[:, R.BLOCK_SIZE]
    ends = np.cumsum(capacity + counters)
    fields[:, R.RUN_OFFSET] = ends - capacity
    fields[:, R.GROWTH_OFFSET] = ends - capacity - counters
    return np.zeros(int(ends[-1]), np.int32)


def sglang_trees(ranks: Ranks, most: np.ndarray, commands: bool) -> Forest:
    """Trees without room for nodes, of SGLang ranks that get at most `most` (int64 [ranks])
    requests each; `commands` of handoffs may come between two passes."""
    fields = ranks.fields
    fields[:, R.ROOT] = np.arange(len(fields))
    capacity = np.minimum(most, fields[:, R.MAX_NUM_SEQS])
    # A pass may split and add a node for the match, the chunk and the end of each request; a queue
    # of prompts that are refused for good splits one for each, but never more than there are pages.
    refused = np.minimum(most, fields[:, R.NUM_BLOCKS])
    fields[:, R.TREE_ROOM] = 6 * capacity + refused + _NODES_A_COMMAND * commands
    return Forest(
        nodes=np.full((P.TREE_FIELDS, 0), NONE, np.int32),
        table=np.zeros(0, np.int32),
        state=np.array([NONE, 0, len(fields), 0], np.int64),
        order=np.zeros((4, int(P.LPM_LIMIT)), np.int64),
        next_uses=None,
        events=None,
    )


def grown_forest(forest: Forest, ranks: Ranks) -> Forest:
    """A copy of `forest` with room for twice as many nodes, and for the next pass of any rank."""
    used = forest.nodes.shape[1]
    room = int(ranks.fields[:, R.TREE_ROOM].max(initial=0)) + len(ranks.fields)
    capacity = max(2 * used, _FIRST_NODES, used + 2 * room)
    nodes = np.full((P.TREE_FIELDS, capacity), NONE, np.int32)
    nodes[:, :used] = forest.nodes
    state = forest.state.copy()
    state[P.TABLE_STALE] = 1
    table = np.full(1 << (2 * capacity - 1).bit_length(), NONE, np.int32)
    return forest._replace(nodes=nodes, table=table, state=state, order=forest.order.copy())


def lacks_nodes(forest: Forest, ranks: Ranks) -> bool:
    """Whether the next pass of a worker may need more nodes than there are."""
    state = forest.state
    left = forest.nodes.shape[1] - state[P.NODE_BUMP] + state[P.UNUSED_COUNT]
    rooms = np.bincount(ranks.fields[:, R.WORKER], weights=ranks.fields[:, R.TREE_ROOM])
    return bool(left < rooms.max())
