"""What a handoff asks of vLLM and TensorRT-LLM ranks beside their passes.

A decode rank reserves blocks for the first of the requests that wait for them, one at a time, and
queues it for decoding once it is activated; a prefill rank gives the blocks of a held request back.
KV events of a command are seen when it is done; the full blocks of a prompt are stored on the
decode rank at its activation, not before. (Reference: runtimes, section 7; vLLM backend, section
10.)
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.cache.block_pool import (
    blocks_of,
    find_prefix,
    publish,
    reference_prefix,
    release,
    take_blocks,
)
from vecsim.kernels.cache.content import place_blocks
from vecsim.kernels.cache.kv_events import AT_ACTIVATE, AT_RELEASE, AT_RESERVE, mark_visible
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.vllm_queue import footprint, gate_is_shut, leave_queue, queue_activated
from vecsim.kernels.state.layout import (
    BLOCK_SIZE,
    COMPUTED,
    FREE,
    HELD,
    HITS,
    IDLE,
    ISL,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NONE,
    NUM_BLOCKS,
    OWN_TAIL,
    PROMPT_EXCEEDS_KV_CAPACITY,
    PROMPT_EXCEEDS_MAX_MODEL_LEN,
    RESERVED,
    RESERVES_OUTPUT,
    RUNNING,
)


@inner
def mark_command(events, s, now, occasion):
    """What a command brought about can be seen `now`, if events are observed."""
    if events is not None:
        mark_visible(events, s, now, occasion)


@inner
def place(requests, pools, content, s, q, rank):
    """Place `q` on a rank (see `content.place_blocks`)."""
    place_blocks(requests, pools, content, s, q, rank)


@inner
def refusal(requests, s, q):
    """Reason why the destination can never hold the prompt, or 0."""
    if requests.state[ISL, q] >= s[MAX_MODEL_LEN]:
        return PROMPT_EXCEEDS_MAX_MODEL_LEN
    if footprint(requests, s, q) > s[NUM_BLOCKS]:
        return PROMPT_EXCEEDS_KV_CAPACITY
    return np.int64(0)


@inner
def reserve(requests, pools, s, q, now):
    """Reserve blocks for the prompt of `q`. Returns how many of them are new, or NONE: no room.

    Blocks of prompts that are there are shared; TensorRT-LLM shares none, and counts on the output.
    """
    state = requests.state
    if s[RUNNING] >= s[MAX_NUM_SEQS]:
        return NONE
    prompt = np.int64(state[ISL, q])
    need = blocks_of(prompt, s[BLOCK_SIZE])
    hits = np.int64(0)
    if s[RESERVES_OUTPUT] != 0:
        if gate_is_shut(requests, s, q, np.int64(0)):
            return NONE
        s[RESERVED] += footprint(requests, s, q) - need
        state[HITS, q] = 0
        state[OWN_TAIL, q] = NONE
    else:
        hits, active = find_prefix(requests, pools, s, q, prompt // s[BLOCK_SIZE])
        need -= hits
        if need > s[FREE] + s[IDLE] - (hits - active):
            return NONE
        reference_prefix(requests, pools, s, q, hits)
    take_blocks(requests, pools, s, need)
    mark_command(pools.events, s, now, AT_RESERVE)
    return need


@inner
def activate(requests, pools, s, q, now):
    """The prompt has arrived: its blocks can be found, and it waits to be decoded."""
    state = requests.state
    prompt = np.int64(state[ISL, q])
    publish(requests, pools, s, q, np.int64(state[HITS, q]), prompt // s[BLOCK_SIZE])
    state[COMPUTED, q] = prompt
    queue_activated(requests, s, q)
    mark_command(pools.events, s, now, AT_ACTIVATE)


@inner
def release_held(requests, pools, s, q, now):
    """Give the blocks of a held request back, because it was activated or canceled."""
    s[HELD] -= 1
    release(requests, pools, s, q, np.int64(requests.state[COMPUTED, q]))
    requests.state[COMPUTED, q] = 0
    mark_command(pools.events, s, now, AT_RELEASE)


@inner
def fail_waiting(requests, pools, s, q, now):
    """Take a blocked request, the first of the waiting list of its rank, off it, with its
    blocks."""
    leave_queue(requests, s, q)
    computed = np.int64(requests.state[COMPUTED, q])
    if s[RESERVES_OUTPUT] != 0 and computed > 0:
        s[RESERVED] -= footprint(requests, s, q) - blocks_of(computed, s[BLOCK_SIZE])
    release(requests, pools, s, q, computed)


@inner
def cancel(requests, pools, s, q):
    """Never asked for: the prompt of a reserved request is done."""


@inner
def try_in_vain(f):
    """An attempt leaves no trace."""
