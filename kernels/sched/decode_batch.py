"""The decode batch: running requests that advance in step, kept implicitly.

The *decode batch* is the leading part of the running list whose members all emitted a token at the
end of the rank's last decode pass (or of the pass that finished their prompt) and have more to
produce. They advance one token a decode pass, so inside the decode batch

- tokens produced are GENERATED + tick, where the tick counts the rank's decode passes;
- the request finishes at the tick FINISH;
- COMPUTED stays as it was when the request joined;
- the growth counter of `tick % block_size` is the number of members that need a block in a pass.

A pass over the decode batch costs O(1). All other running requests are *explicit*.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state.codes import NEVER


@inner
def known_tokens(requests, q):
    """Prompt and output so far of an explicit request."""
    return np.int64(requests.state[Q.ISL, q]) + requests.state[Q.GENERATED, q]


@inner
def growth_slot(s, computed):
    """Counter of the passes in which a member that has `computed` + tick tokens needs a block."""
    return s[R.GROWTH_OFFSET] + (-computed) % s[R.BLOCK_SIZE]


@inner
def join_decode_batch(requests, s, lists, q):
    """Append an explicit request, which just emitted a token, to the decode batch."""
    state = requests.state
    generated = np.int64(state[Q.GENERATED, q])
    state[Q.GENERATED, q] = generated - s[R.TICK]
    state[Q.FINISH, q] = s[R.TICK] + state[Q.LIMIT, q] - generated
    s[R.NEXT_FINISH] = min(s[R.NEXT_FINISH], np.int64(state[Q.FINISH, q]))
    lists[growth_slot(s, state[Q.COMPUTED, q] - s[R.TICK])] += 1
    s[R.DECODING] += 1
    s[R.DECODING_CONTEXT] += state[Q.ISL, q] + generated
    s[R.DECODING_COUNTED] += state[Q.COUNTED, q]


@inner
def leave_decode_batch(requests, s, lists, q, uncomputed):
    """Make a member of the decode batch explicit again, all but `uncomputed` of whose tokens are
    computed; the caller adjusts DECODING and the running list."""
    state = requests.state
    lists[growth_slot(s, known_tokens(requests, q) - uncomputed)] -= 1
    state[Q.GENERATED, q] += s[R.TICK]
    known = known_tokens(requests, q)
    state[Q.COMPUTED, q] = known - uncomputed
    s[R.DECODING_CONTEXT] -= known
    s[R.DECODING_COUNTED] -= state[Q.COUNTED, q]


@inner
def empty_decode_batch(s):
    """All members have left; the running list stays as it is."""
    s[R.DECODING] = 0
    s[R.DECODING_JOINED] = 0
    s[R.NEXT_FINISH] = NEVER


@inner
def close_gaps(requests, s, lists):
    """Members that ended left NONE in the running list: move up those behind them."""
    start = s[R.RUN_OFFSET]
    kept = np.int64(0)
    next_finish = NEVER
    for i in range(s[R.DECODING]):
        q = lists[start + i]
        if q >= 0:
            next_finish = min(next_finish, np.int64(requests.state[Q.FINISH, q]))
            lists[start + kept] = q
            kept += 1
    gone = s[R.DECODING] - kept
    s[R.DECODING] = kept
    s[R.NEXT_FINISH] = next_finish
    for i in range(kept + gone, s[R.RUNNING]):
        lists[start + i - gone] = lists[start + i]
    s[R.RUNNING] -= gone


@inner
def advance_decode_batch(s, passes):
    """`passes` decode passes went by for every member."""
    s[R.TICK] += passes
    s[R.DECODING_CONTEXT] += passes * s[R.DECODING]


@inner
def passes_within(s, lists, blocks, passes):
    """How many of `passes` pure decode passes the given number of blocks suffices for."""
    decodes = s[R.DECODING]
    block_size = s[R.BLOCK_SIZE]
    if decodes * (passes // block_size + 1) <= blocks:
        return passes
    covered = (blocks // decodes) * block_size
    left = blocks % decodes
    growth = lists[s[R.GROWTH_OFFSET] : s[R.GROWTH_OFFSET] + block_size]
    slot = s[R.TICK] % block_size
    while covered < passes and growth[slot] <= left:
        left -= growth[slot]
        covered += 1
        slot += 1
        if slot == block_size:
            slot = np.int64(0)
    return min(covered, passes)
