"""Memory layout: status and reason codes with their sentences, and the rows of the state arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# --- terminal statuses of a request (uint8 codes) -------------------------------------------------
COMPLETED = np.int64(0)
REJECTED = np.int64(1)
SHED = np.int64(2)
FAILED = np.int64(3)
CANCELED = np.int64(4)
UNFINISHED = np.int64(5)
NOT_ARRIVED = np.int64(6)

STATUS_NAMES = (
    "completed",
    "rejected",
    "shed",
    "failed",
    "canceled",
    "unfinished",
    "not_arrived",
)

# --- reasons beside a status (uint8 codes) --------------------------------------------------------
NO_REASON = np.int64(0)
LENGTH = np.int64(1)
PROMPT_EXCEEDS_MAX_MODEL_LEN = np.int64(2)
PROMPT_EXCEEDS_KV_CAPACITY = np.int64(3)
PROMPT_EXCEEDS_TOKEN_BUDGET = np.int64(4)
NO_PROGRESS = np.int64(5)
KV_CAPACITY_EXHAUSTED = np.int64(6)
DEADLOCK = np.int64(7)

REASON_NAMES = (
    None,
    "length",
    "prompt_exceeds_max_model_len",
    "prompt_exceeds_kv_capacity",
    "prompt_exceeds_token_budget",
    "no_progress",
    "kv_capacity_exhausted",
    "deadlock",
)

REASON_SENTENCES = (
    "ended as asked",
    "the context reached max_model_len before the requested output was produced",
    "the prompt is as long as max_model_len or longer",
    "the prompt does not fit an empty KV pool",
    "the prompt, or the chunk that must run whole, exceeds the token budget of a pass",
    "the rank could make no progress with this request at the head of its queue",
    "the request needs more KV blocks than the pool has",
    "prefill and decode waited for each other with no event left",
)

# --- factors of a rank: float64 [ranks, FACTORS] --------------------------------------------------
PREFILL_RATIO, DECODE_RATIO, FIXED_PREFILL_MS, FIXED_DECODE_MS = (np.int64(k) for k in range(4))

# SGLang keeps its float state beside them.
(
    RATIO_INIT,  # share of its remaining output that admission reserves for a running request: ...
    RATIO_MIN,
    RATIO_STEP,  # ... taken off after every decode pass
    NEW_TOKEN_RATIO,  # ... as it stands
    LAST_EMIT,  # end (ms) of the last decode pass
    COUNTDOWN_END,  # when PREFILL_LEFT runs out without time passing, with nothing to decode
) = (np.int64(4 + k) for k in range(6))
FACTORS = 10

MODEL_POLYNOMIAL, MODEL_FIXED, MODEL_CUSTOM = (np.int64(k) for k in range(3))
POLICY_FIFO, POLICY_LPM = (np.int64(k) for k in range(2))
EVICT_LRU, EVICT_BELADY = (np.int64(k) for k in range(2))

UNLIMITED = np.int64(1 << 62)
NEVER = np.int64((1 << 31) - 1)
"""A tick, or a position in the workload, that is never reached."""
NONE = np.int64(-1)
"""No request, copy, node or row."""

# --- a rank: int64 [ranks, RANK_FIELDS] -----------------------------------------------------------
# Parameters first, ...
(
    NUM_BLOCKS,  # KV blocks of the pool
    BLOCK_SIZE,  # tokens a block, at most one more than the longest sequence
    BLOCKS_PER_NODE,  # blocks of one node of the prefix tree; they have consecutive index rows
    CAPACITY_TOKENS,  # num_gpu_blocks * block_size as authored: the decode price divides by it
    MAX_NUM_SEQS,
    TOKEN_BUDGET,  # max_num_batched_tokens
    MAX_MODEL_LEN,
    PREFIX_CACHING,
    CHUNKED_PREFILL,
    PREEMPT_FIRST,  # preemption_mode fifo: the victim is the first of the running list
    EVICTION_POLICY,
    SINGLE_COPIES,  # every full block has an identity and a copy of its own
    PREFILL_SCHEDULE_INTERVAL,
    RESERVES_OUTPUT,  # admission needs room for prompt and output (TensorRT-LLM)
    KEEPS_WHOLE_HIT,  # a fully cached prompt is not computed again, not even its last block
    PREFILL_MODEL,
    DECODE_MODEL,
    PREFILL_FUNCTION,  # address of a custom model
    DECODE_FUNCTION,
    SCHEDULER_ID,  # number of the rank in its pool
    FIRST_RUN,  # node of request 0 in the idle list: one past the last copy of all ranks
    RUN_OFFSET,  # the rank's running requests, in admission order: lists[RUN_OFFSET:]
    GROWTH_OFFSET,  # members that need a block at tick t: lists[GROWTH_OFFSET + t % BLOCK_SIZE]
    # SGLang only:
    PAGE_SIZE,  # as authored: budgets are rounded to it
    CHUNKED_PREFILL_SIZE,
    CLIP_MAX_NEW_TOKENS,
    SCHEDULE_POLICY,
    PREFILL_DECODE_INTERVAL,
    ROOT,  # root of the rank's radix tree
    TREE_ROOM,  # tree nodes that one pass may need
    ROLE,
) = (np.int64(k) for k in range(31))
PARAMS = 31
AGGREGATED, SOURCE, DESTINATION = (np.int64(k) for k in range(3))

# ... then state.
(
    FREE,  # blocks never used or given back
    IDLE,  # cached blocks without a reference
    RESERVED,  # blocks that running requests may still take, where admission reserves them
    IDLE_HEAD,  # next victim
    IDLE_TAIL,
    COPY_FREE,  # head of the list of given-back copies
    COPY_BUMP,  # next copy that was never used
    QUEUE_HEAD,  # waiting requests that were never preempted, in arrival order
    QUEUE_TAIL,
    READY_HEAD,  # waiting requests in front of the queue, in the order they are served (queues.py)
    PREEMPTED_COUNT,
    RUNNING,  # running requests
    FRONT,  # how many of them, from the first, decode in step (see front.py)
    FRONT_CONTEXT,  # sum of their sequence lengths (tokens)
    FRONT_COUNTED,  # how many of them have COUNTED set
    FRONT_JOINED,  # the front's members from this position on joined at the last pass end
    TICK,  # passes of this rank
    NEXT_FINISH,  # tick at which the next front member finishes
    CAPACITY_BOUND,
    PARTICIPATES,  # had work when the pass in flight began
    BUDGET,  # tokens left in the pass being scheduled
    PREEMPTED_ANY,
    REJECTED_HEAD,  # requests rejected in the pass in flight
    SETTLED,  # standstills settled when the pass in flight began
    STRAINED,  # passes that preempted somebody since one last let a request go on (vLLM)
    PREFILLS,  # requests with prompt tokens in the pass in flight
    PREFILL_ISL,  # sum of prompt positions they reach
    PREFILL_PREFIX,  # sum of prompt positions they start from
    PREFILL_TOKENS,  # tokens they compute
    COMMITTED_PREFILL,
    PREEMPTIONS,
    GROWN,  # blocks that the front took during the stretch being walked
    # SGLang only:
    READY_TAIL,
    READY_COUNT,
    BATCHED,  # requests that the pass in flight prefills; 0 in a decode pass
    NEW_FROM,  # position in the running list of the first of them that completes its prompt
    FITS,  # there is room for their first tokens
    LAGGING,  # some front member got its last token before the last pass end
    TREE_CLOCK,  # tree operations so far
    UNSORTED,  # tree or queue changed since the queue was last sorted
    # Prefill/decode handoff only:
    HELD,  # a source: requests whose prompt is done and whose blocks are kept for the transfer
    ENDING_HEAD,  # a destination (SGLang): requests without output that end with the pass in flight
    ENDING_TAIL,
    PROMISED,  # a destination: requests with reserved blocks that are not activated yet
    ACTIVATED,  # ... activated requests that wait and were never preempted
    ACTIVATED_HEAD,  # ... the same as a list, in order of activation (SGLang)
    ACTIVATED_TAIL,
    CAPACITY_VERSION,  # ... how often it may have become easier to reserve
    REFUSED_VERSION,  # ... the version at which the first pending request was refused; NONE: not
    BLOCKED,  # the head of its queue (SGLang: its last running request) has to wait in the pass
    EFFECT,  # the pass in flight schedules, admits, preempts, rejects or settles somebody
    # Of every rank:
    SIGNAL_HEAD,  # requests with SIGNALS that nobody has taken note of, in order
    SIGNAL_TAIL,
    GRANTED,  # copies that the rank was given (content.py)
    REJECTED_TAIL,
    WORKER,  # place of its worker among all
) = (np.int64(PARAMS + k) for k in range(56))
RANK_FIELDS = PARAMS + 56

# --- state of a worker: int64 [workers, WORKER_STATE], float64 [workers, WORKER_TIME] ------------
(
    WORKER_ID,  # ids are never used again; ties are broken by them
    POOL,  # 0: the only pool, or that of prefill workers; 1: that of decode workers
    FIRST_RANK,
    DP_SIZE,  # ranks of the worker, from FIRST_RANK on
    TURN,  # round robin over them (aggregated pools)
    PENDING,
    PENDING_PASSES,
    STEP,
    PASSES,
    TERMINALS,
    FRUITLESS,
    PREFILL_LEFT,  # passes for which prefills are put off (prefill_decode_interval)
    # Workers on the fleet's clock only:
    ASIDE,  # its last pass had no effect
    WALKED_PASSES,  # passes of the run in flight that are settled as far as observers go
    AHEAD,  # passes after those whose ends are known (decode_run.py)
) = (np.int64(k) for k in range(15))
WORKER_STATE = 15
NO_PASS, ONE_PASS, RUN = (np.int64(k) for k in range(3))

(
    CLOCK,  # start of the pass in flight, or end of the last one, or until when it was idle
    PASS_END,
    BUSY_MS,
    KV_BLOCK_MS,
    GAP_COUNT,
    GAP_ZEROS,
    GAP_SHIFT,  # the first gap; moments are sums of deviations from it
    GAP_SUM,
    GAP_SQUARES,
    GAP_MIN,
    GAP_MAX,
    GAP_POSITIVE_MIN,
    RATE_SHIFT,
    RATE_SUM,
    RATE_SQUARES,
    # Workers on the fleet's clock only:
    WALKED,  # the end of WALKED_PASSES
    WAKE_AT,  # when the worker has to look at its queue again: a run in flight ends there
) = (np.int64(k) for k in range(17))
WORKER_TIME = 17
"""On the fleet's clock CHUNK columns follow: the ends of the AHEAD passes."""

# --- requests: int32 [REQUEST_STATE, n], float64 [REQUEST_TIME, n]; n in arrival order ------------
(
    ISL,  # prompt tokens
    LIMIT,  # tokens to produce: requested output, cut by max_model_len
    PATH,  # first entry of its path in `path_rows`
    SHARED,  # leading full blocks that have an identity of their own in the index
    OWN_FROM,  # block from which on the rows are OWN_ROWS, OWN_ROWS + 1, ... (single copies only)
    OWN_ROWS,
    COUNTED,  # its inter-token gaps enter the distribution
    LONER,  # planned output tokens: never decodes in step with others
    COMPUTED,  # tokens computed; inside the front: when it joined
    GENERATED,  # tokens produced; inside the front: minus the rank's tick
    FINISH,  # inside the front: tick at which it finishes
    NEXT,  # next in the waiting queue, the preempted, the rejected or the ended list
    FRESH,  # never preempted
    HITS,  # leading blocks that were found in the index at admission
    OWN_TAIL,  # last copy that it published
    RETIRED,  # admitted or rejected: no use for its blocks is forecast any more
    RUN_CACHED,  # idle cached blocks behind SHARED; only this request can find them again
    PASS_TOKENS,  # tokens scheduled in the pass in flight
    PASS_PROMPT,  # prompt tokens among them
    PASS_PREFIX,  # prompt tokens there before
    ADMISSIONS,
    REUSED,
    FIRST_REUSED,
    STATUS,
    REASON,
    RANK,
    # SGLang only:
    TREE_NODE,  # radix node that it locks, with the whole path above
    CACHED_PAGES,  # depth of that node: pages of its own path that are in the tree
    REQUEUED,  # gave its pages back once so that another request could go on
    FAMILY,  # itself; where prompts grow from turn to turn, the first turn of its session
    # A destination only:
    ORDER,  # when its blocks were asked for, among all requests
    # Requests on the fleet's clock only:
    SHAREABLE,  # what SHARED may grow to when others with its content come to its rank (content.py)
    SIGNALS,  # what became of it in the pass that ended: FIRST_OUTPUT, HELD_OUTPUT, ENDED
    NEXT_SIGNAL,  # next request of its rank with SIGNALS
) = (np.int64(k) for k in range(34))
REQUEST_STATE = 34

FIRST_OUTPUT, HELD_OUTPUT, ENDED = (np.int64(1 << k) for k in range(3))
"""Bits of SIGNALS: its first token came out; its prompt is done and its blocks are kept for the
transfer; it is terminal."""

RELEASED, ARRIVAL, FIRST_ADMIT, FIRST_TOKEN, SECOND_TOKEN, LAST_TOKEN, TERMINAL = (
    np.int64(k) for k in range(7)
)
"""RELEASED is when a request comes to the pool, ARRIVAL when it joins its rank's waiting queue: the
same, or the end of its tokenization."""
REQUEST_TIME = 7

# --- nodes of the idle lists: int32 [NODE_FIELDS, copies + n] -------------------------------------
# Copies of blocks first, then one node per request for its idle run; only copies use ROW and on.
PREVIOUS, FOLLOWING, ROW, REFERENCES, NEWER, OLDER, OWN_BEFORE = (np.int64(k) for k in range(7))
NODE_FIELDS = 7

# --- prefix index: int32 [INDEX_FIELDS, rows] -----------------------------------------------------
PRIMARY, NEWEST, CONTENT = (np.int64(k) for k in range(3))
"""Oldest and newest copy of an identity; what it stands for in the forecast (NONE: nothing)."""
INDEX_FIELDS = 3

# --- forecast of prompts (Belady): int32 [FORECAST_FIELDS, nodes of the prefix tree] --------------
NEXT_USER, END_OF_USERS = (np.int64(k) for k in range(2))
"""Span in `users` of the requests that have the node in their prompt and may still come."""
FORECAST_FIELDS = 2
USER, COVERS = (np.int64(k) for k in range(2))
"""The request, and how many of the node's blocks its prompt covers."""

# --- nodes of radix trees: int32 [TREE_FIELDS, nodes]; the roots of all ranks come first ----------
(
    OWNER,  # a request whose path goes through the node
    START,  # pages above it
    END,  # pages down to its end
    KEY,  # first page: what sets it apart from its siblings
    PARENT,  # NONE: a root, or not in use
    CHILDREN,  # number of children
    LOCKS,
    TIME,  # last access, in tree operations
    LESS_RECENT,  # neighbours in the list of unlocked nodes, by TIME
    MORE_RECENT,  # also the next of the nodes not in use
) = (np.int64(k) for k in range(10))
TREE_FIELDS = 10

UNUSED_HEAD, UNUSED_COUNT, NODE_BUMP, TABLE_STALE = (np.int64(k) for k in range(4))
"""Given-back nodes, next node never used, whether the table must be built anew."""
FOREST_STATE = 4
QUEUE_DUPLICATE, QUEUE_SCORE, QUEUE_REQUEST, QUEUE_PREFIX = (np.int64(k) for k in range(4))
LPM_LIMIT = np.int64(128)
"""A longer queue is not sorted by prefix."""

# --- chunk of a stretch: float64 [CHUNK_FIELDS, CHUNK] --------------------------------------------
DURATIONS, PRICES, ENDS, GAPS, COUNTING = (np.int64(k) for k in range(5))
"""COUNTING is 0, 1, 2, ...: a loop over floats alone is vectorised."""
RAW = GAPS
"""Prices before rounding share a row with the gaps, which are known only after pricing."""
CHUNK_FIELDS = 5
CHUNK = 64
"""Passes of a stretch that are priced at a time."""

# --- segment log: a line for each rank that takes part in a pass or stretch, and of no passes for
# what an idle worker of a prefill/decode fleet keeps ----------------------------------------------
(
    SEGMENT_RANK,  # scheduler id
    SEGMENT_FIRST,  # number of its first pass, counted by worker
    SEGMENT_START,  # ms
    SEGMENT_END,
    SEGMENT_PASSES,
    SEGMENT_RUNNING,  # running requests
    SEGMENT_OUTPUT,  # tokens emitted
    SEGMENT_PREFILL,  # prompt tokens computed
    SEGMENT_BLOCKS,  # referenced KV blocks at its start
    SEGMENT_HELD,  # KV_BLOCK_MS of the worker up to and including this line
    SEGMENT_PREEMPTIONS,  # of the rank so far
) = (np.int64(k) for k in range(11))
SEGMENT_FIELDS = 11
LINES_A_RANK = np.int64(2)
"""Lines that a rank may need before there is more room: of its pass in flight, and of idle time."""

# --- answers of an entry point --------------------------------------------------------------------
DONE, PAUSED, LOG_FULL, BAD_PRICE, NO_MOVE, TICKS_EXHAUSTED, FOREST_FULL, TICKED = (
    np.int64(k) for k in range(8)
)


class Ranks(NamedTuple):
    """All ranks; row = scheduler id."""

    fields: np.ndarray  # int64 [ranks, RANK_FIELDS]
    factors: np.ndarray  # float64 [ranks, FACTORS]
    lists: np.ndarray  # int32: growth counters and running lists of all ranks


class Workers(NamedTuple):
    """State of all workers, and the segment each has in flight."""

    state: np.ndarray  # int64 [workers, WORKER_STATE]
    time: np.ndarray  # float64 [workers, WORKER_TIME]


class Requests(NamedTuple):
    """Request columns, in arrival order, and the paths of their prompts through the prefix tree."""

    state: np.ndarray  # int32 [REQUEST_STATE, n]
    time: np.ndarray  # float64 [REQUEST_TIME, n]
    path_rows: np.ndarray  # int32: first index row of each node of a path


class Forecast(NamedTuple):
    """What prompts are to come (Belady)."""

    nodes: np.ndarray  # int32 [FORECAST_FIELDS, nodes of the prefix tree]
    users: np.ndarray  # int32 [2, users]: by node, ascending


class EventLog(NamedTuple):
    """KV events as all ranks logged them (kv_events.py)."""

    words: np.ndarray  # int64 [capacity]
    state: np.ndarray  # int64 [LOG_STATE]
    ranks: np.ndarray  # int64 [LOG_RANK, ranks]
    named: Requests | None  # SGLang: the requests with rows for their pages


class Pools(NamedTuple):
    """KV blocks that can be found again: copies, idle lists, prefix index."""

    nodes: np.ndarray  # int32 [NODE_FIELDS, copies + n]
    index: np.ndarray  # int32 [INDEX_FIELDS, rows]
    forecast: Forecast | None
    events: EventLog | None


class Forest(NamedTuple):
    """Radix trees of SGLang ranks; what `Pools` is to the other backends."""

    nodes: np.ndarray  # int32 [TREE_FIELDS, capacity]
    table: np.ndarray  # int32 [power of two, twice the capacity at least]: children by first page
    state: np.ndarray  # int64 [FOREST_STATE]
    order: np.ndarray  # int64 [4, LPM_LIMIT]: the queue being sorted
    forecast: Forecast | None
    events: EventLog | None


class Scratch(NamedTuple):
    """Working memory of one thread."""

    chunk: np.ndarray  # float64 [CHUNK_FIELDS, CHUNK]
    bins: np.ndarray  # int64 [GAP_BINS]
    log: np.ndarray  # float64 [3, capacity]: readmissions (request, at_ms, reused tokens)
    log_length: np.ndarray  # int64 [2]: lines of `log` and of `segments` in use
    segments: np.ndarray  # float64 [SEGMENT_FIELDS, capacity]; no capacity: nothing is logged
