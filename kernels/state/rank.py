"""A rank: parameters, then state. `s` is the row of one rank, `f` its factors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
    FIRST_RUN,  # node of request 0 in the evictable list: one past the last copy of all ranks
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
    EVICTABLE,  # cached blocks without a reference
    RESERVED,  # blocks that running requests may still take, where admission reserves them
    EVICTABLE_HEAD,  # next victim
    EVICTABLE_TAIL,
    COPY_FREE,  # head of the list of given-back copies
    COPY_BUMP,  # next copy that was never used
    QUEUE_HEAD,  # waiting requests that were never preempted, in arrival order
    QUEUE_TAIL,
    READY_HEAD,  # waiting requests in front of the queue, in the order they are served (queues.py)
    PREEMPTED_COUNT,
    RUNNING,  # running requests
    DECODING,  # how many of them, from the first, decode in lock step (see decode_batch.py)
    DECODING_CONTEXT,  # sum of their sequence lengths (tokens)
    DECODING_COUNTED,  # how many of them have COUNTED set
    DECODING_JOINED,  # the decode batch's members from this position on joined at the last pass end
    TICK,  # passes of this rank
    NEXT_FINISH,  # tick at which the next member of the decode batch finishes
    CAPACITY_BOUND,
    PARTICIPATES,  # had work when the pass in flight began
    BUDGET,  # tokens left in the pass being scheduled
    PREEMPTED_ANY,
    REJECTED_HEAD,  # requests rejected in the pass in flight
    STUCK_ENDED,  # standstills that ended somebody when the pass in flight began
    PREEMPTING_PASSES,  # passes that preempted somebody since one last let a request go on (vLLM)
    PREFILLS,  # requests with prompt tokens in the pass in flight
    PREFILL_ISL,  # sum of prompt positions they reach
    PREFILL_PREFIX,  # sum of prompt positions they start from
    PREFILL_TOKENS,  # tokens they compute
    COMMITTED_PREFILL,
    PREEMPTIONS,
    GROWN,  # blocks that the decode batch took during the decode run being walked
    # SGLang only:
    READY_TAIL,
    READY_COUNT,
    BATCHED,  # requests that the pass in flight prefills; 0 in a decode pass
    NEW_FROM,  # position in the running list of the first of them that completes its prompt
    FITS,  # there is room for their first tokens
    LAGGING,  # some member of the decode batch got its last token before the last pass end
    TREE_CLOCK,  # tree operations so far
    UNSORTED,  # tree or queue changed since the queue was last sorted
    # Prefill/decode handoff only:
    HELD,  # a source: requests whose prompt is done and whose blocks are kept for the transfer
    ENDING_HEAD,  # a destination (SGLang): requests without output that end with the pass in flight
    ENDING_TAIL,
    PREALLOCATED,  # a destination: requests with reserved blocks that are not activated yet
    ACTIVATED,  # ... activated requests that wait and were never preempted
    ACTIVATED_HEAD,  # ... the same as a list, in order of activation (SGLang)
    ACTIVATED_TAIL,
    CAPACITY_VERSION,  # ... how often it may have become easier to reserve
    REFUSED_VERSION,  # ... the version at which the first pending request was refused; NONE: not
    BLOCKED,  # the head of its queue (SGLang: its last running request) has to wait in the pass
    EFFECT,  # the pass in flight schedules, admits, preempts, rejects or ends somebody
    # Of every rank:
    SIGNAL_HEAD,  # requests with SIGNALS that nobody has taken note of, in order
    SIGNAL_TAIL,
    COPIES_GRANTED,  # copies that the rank was given (content.py)
    REJECTED_TAIL,
    WORKER,  # place of its worker among all
    DUPLICATES,  # cached copies beyond the first of their identity
) = (np.int64(PARAMS + k) for k in range(57))
RANK_FIELDS = PARAMS + 57


class Ranks(NamedTuple):
    """All ranks; row = scheduler id."""

    fields: np.ndarray  # int64 [ranks, RANK_FIELDS]
    factors: np.ndarray  # float64 [ranks, FACTORS]
    lists: np.ndarray  # int32: growth counters and running lists of all ranks
