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
    cache_full_blocks,
    find_prefix,
    reference_prefix,
    release,
    take_blocks,
)
from vecsim.kernels.cache.content import place_blocks
from vecsim.kernels.cache.kv_events import AT_ACTIVATE, AT_RELEASE, AT_RESERVE, mark_visible
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.sched.vllm_queue import footprint, gate_is_shut, leave_queue, queue_activated
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NONE


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
    if requests.state[Q.ISL, q] >= s[R.MAX_MODEL_LEN]:
        return S.PROMPT_EXCEEDS_MAX_MODEL_LEN
    if footprint(requests, s, q) > s[R.NUM_BLOCKS]:
        return S.PROMPT_EXCEEDS_KV_CAPACITY
    return np.int64(0)


@inner
def reserve(requests, pools, s, q, now):
    """Reserve blocks for the prompt of `q`. Returns how many of them are new, or NONE: no room.

    Blocks of prompts that are there are shared; TensorRT-LLM shares none, and counts on the output.
    """
    state = requests.state
    if s[R.RUNNING] >= s[R.MAX_NUM_SEQS]:
        return NONE
    prompt = np.int64(state[Q.ISL, q])
    need = blocks_of(prompt, s[R.BLOCK_SIZE])
    hits = np.int64(0)
    if s[R.RESERVES_OUTPUT] != 0:
        if gate_is_shut(requests, s, q, np.int64(0)):
            return NONE
        s[R.RESERVED] += footprint(requests, s, q) - need
        state[Q.HITS, q] = 0
        state[Q.OWN_TAIL, q] = NONE
    else:
        hits, active = find_prefix(requests, pools, s, q, prompt // s[R.BLOCK_SIZE])
        need -= hits
        if need > s[R.FREE] + s[R.EVICTABLE] - (hits - active):
            return NONE
        reference_prefix(requests, pools, s, q, hits)
    take_blocks(requests, pools, s, need)
    mark_command(pools.events, s, now, AT_RESERVE)
    return need


@inner
def activate(requests, pools, s, q, now):
    """The prompt has arrived: its blocks can be found, and it waits to be decoded."""
    state = requests.state
    prompt = np.int64(state[Q.ISL, q])
    cache_full_blocks(requests, pools, s, q, np.int64(state[Q.HITS, q]), prompt // s[R.BLOCK_SIZE])
    state[Q.COMPUTED, q] = prompt
    queue_activated(requests, s, q)
    mark_command(pools.events, s, now, AT_ACTIVATE)


@inner
def release_held(requests, pools, s, q, now):
    """Give the blocks of a held request back, because it was activated or canceled."""
    s[R.HELD] -= 1
    release(requests, pools, s, q, np.int64(requests.state[Q.COMPUTED, q]))
    requests.state[Q.COMPUTED, q] = 0
    mark_command(pools.events, s, now, AT_RELEASE)


@inner
def fail_waiting(requests, pools, s, q, now):
    """Take a blocked request, the first of the waiting list of its rank, off it, with its
    blocks."""
    leave_queue(requests, s, q)
    computed = np.int64(requests.state[Q.COMPUTED, q])
    if s[R.RESERVES_OUTPUT] != 0 and computed > 0:
        s[R.RESERVED] -= footprint(requests, s, q) - blocks_of(computed, s[R.BLOCK_SIZE])
    release(requests, pools, s, q, computed)


@inner
def cancel(requests, pools, s, q):
    """Never asked for: the prompt of a reserved request is done."""


@inner
def try_in_vain(f):
    """An attempt leaves no trace."""
