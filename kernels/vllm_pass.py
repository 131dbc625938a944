"""The pass of a vLLM-style rank put together: admissions, and what becomes of its requests.

The parts that do not depend on a rank's role are in vllm.py. `bind` completes them by the rules of
a role: an aggregated rank has `AGGREGATED`, the two sides of a prefill/decode handoff share a
set of their own (vllm_roles.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vecsim.kernels.blockpool import blocks_of, reference_prefix, take_blocks
from vecsim.kernels.jit import inner
from vecsim.kernels.layout import (
    BLOCK_SIZE,
    BUDGET,
    CAPACITY_BOUND,
    CHUNKED_PREFILL,
    COMMITTED_PREFILL,
    COMPUTED,
    EVICT_BELADY,
    EVICTION_POLICY,
    FAILED,
    FINISH,
    FREE,
    FRONT,
    FRONT_COUNTED,
    FRONT_JOINED,
    GENERATED,
    IDLE,
    ISL,
    KV_CAPACITY_EXHAUSTED,
    LAST_TOKEN,
    LIMIT,
    LONER,
    MAX_NUM_SEQS,
    NEVER,
    NEXT,
    NEXT_FINISH,
    NO_PROGRESS,
    NONE,
    NUM_BLOCKS,
    PASS_PROMPT,
    PASS_TOKENS,
    PREEMPTED_ANY,
    PREFILL_ISL,
    PREFILL_PREFIX,
    PREFILL_TOKENS,
    PREFILLS,
    PROMPT_EXCEEDS_KV_CAPACITY,
    PROMPT_EXCEEDS_TOKEN_BUDGET,
    REASON,
    REJECTED,
    REJECTED_HEAD,
    RESERVED,
    RESERVES_OUTPUT,
    RETIRED,
    RUN_OFFSET,
    RUNNING,
    SETTLED,
    STATUS,
    TERMINAL,
    TERMINALS,
    TICK,
    TOKEN_BUDGET,
)
from vecsim.kernels.observe import count_gap
from vecsim.kernels.records import emit_token, end_rejected, log_admission, mark_second_tokens
from vecsim.kernels.vllm import (
    advance_front,
    compute,
    drop_head,
    finish,
    footprint,
    is_ready,
    join_front,
    leave_front,
    make_room,
    passes_the_gate,
    queue_head,
    rejection,
    retire_running,
    reusable_blocks,
    schedule_running,
    tokens_to_admit,
)


class Rules(NamedTuple):
    """What depends on the role of a rank.

    Attributes:
        head: (requests, s, now): the waiting request that is looked at next, or NONE.
        drop: (requests, s, q): take that request off the queue.
        make_room: (requests, pools, s, lists, q, need, now): preempt until the empty prompt `q`,
            off the queue already, can take `need` blocks; False: it went back to the queue.
        finish: (requests, pools, w, s, q, end): it has produced what it is asked for.
        admit_prebuilt: (requests, scratch, s, lists, q, now): admit it if its prompt is there
            already; whether it was.
        may_start_later: (requests, s, q, active): whether something else than a running request may
            let the refused head in.
        is_prebuilt: (requests, s, q): whether its prompt is there already; None: it never is.
    """

    head: Callable
    drop: Callable
    make_room: Callable
    finish: Callable
    admit_prebuilt: Callable
    may_start_later: Callable
    is_prebuilt: Callable | None


class Pass(NamedTuple):
    """The kernels of a pass that depend on the role."""

    schedule: Callable
    apply: Callable
    finish_front: Callable


def bind(rules: Rules) -> Pass:
    """The pass of a rank under the rules of its role."""
    head, drop, make_room, finish, admit_prebuilt, may_start_later = rules[:6]

    @inner
    def settle_standstill(requests, pools, w, s, q, now):
        """End a queue head that can never be admitted although nothing runs on its rank."""
        state = requests.state
        produced = np.int64(state[GENERATED, q])
        status = FAILED if produced > 0 else REJECTED
        reason = NO_PROGRESS
        if blocks_of(np.int64(state[ISL, q]) + produced, s[BLOCK_SIZE]) > s[NUM_BLOCKS]:
            reason = KV_CAPACITY_EXHAUSTED if produced > 0 else PROMPT_EXCEEDS_KV_CAPACITY
        elif s[CHUNKED_PREFILL] == 0 and state[ISL, q] > s[TOKEN_BUDGET]:
            reason = PROMPT_EXCEEDS_TOKEN_BUDGET
        state[STATUS, q] = status
        state[REASON, q] = reason
        requests.time[TERMINAL, q] = now
        if s[EVICTION_POLICY] == EVICT_BELADY:
            state[RETIRED, q] = 1
        drop(requests, s, q)
        s[SETTLED] += 1
        w[TERMINALS] += 1

    @inner
    def admit_waiting(requests, pools, scratch, w, s, lists, now, defer):
        """Phase 2 of a pass: admit from the head of the queue, strictly in order."""
        state = requests.state
        while s[PREEMPTED_ANY] == 0 and s[RUNNING] < s[MAX_NUM_SEQS]:
            q = head(requests, s, now)
            if q < 0:
                return
            if admit_prebuilt(requests, scratch, s, lists, q, now):
                if s[BUDGET] == 0:
                    return
                continue
            reason = rejection(requests, s, q)
            if reason > 0:
                drop(requests, s, q)
                state[REASON, q] = reason
                state[NEXT, q] = s[REJECTED_HEAD]
                s[REJECTED_HEAD] = q
                if s[EVICTION_POLICY] == EVICT_BELADY:
                    state[RETIRED, q] = 1
                continue
            known = np.int64(state[ISL, q]) + state[GENERATED, q]
            hits, active = reusable_blocks(requests, pools, s, q, known)
            cached = hits * s[BLOCK_SIZE]
            tokens = NONE
            if passes_the_gate(requests, s, q, hits, active, defer):
                tokens = tokens_to_admit(requests, s, q, known, cached)
            if tokens < 0:
                runs = s[RUNNING] > 0 or s[REJECTED_HEAD] >= 0
                if runs or may_start_later(requests, s, q, active):
                    return
                settle_standstill(requests, pools, w, s, q, now)
                continue
            drop(requests, s, q)
            reference_prefix(requests, pools, s, q, hits)
            need = blocks_of(cached + tokens, s[BLOCK_SIZE]) - hits
            if state[ISL, q] == 0 and not make_room(requests, pools, s, lists, q, need, now):
                return
            take_blocks(requests, pools, s, need)
            lists[s[RUN_OFFSET] + s[RUNNING]] = q
            s[RUNNING] += 1
            log_admission(requests, scratch, q, now, cached)
            state[COMPUTED, q] = cached
            if s[RESERVES_OUTPUT] != 0:
                s[RESERVED] += footprint(requests, s, q) - blocks_of(cached + tokens, s[BLOCK_SIZE])
            no_budget = s[BUDGET] == 0
            compute(requests, pools, s, q, tokens)
            if no_budget:
                return

    @inner
    def schedule(requests, pools, scratch, w, s, lists, now, defer):
        """Step 1 of a pass: decide what every running and waiting request computes."""
        if s[RUNNING] == 0:
            # Ticks are kept in 32 bits; without a front nothing counts from them.
            s[TICK] = 0
        s[BUDGET] = s[TOKEN_BUDGET]
        s[PREEMPTED_ANY] = 0
        s[SETTLED] = 0
        s[REJECTED_HEAD] = NONE
        s[PREFILLS] = 0
        s[PREFILL_ISL] = 0
        s[PREFILL_PREFIX] = 0
        s[PREFILL_TOKENS] = 0
        schedule_running(requests, pools, s, lists, now, defer)
        admit_waiting(requests, pools, scratch, w, s, lists, now, defer)
        if s[EVICTION_POLICY] == EVICT_BELADY:
            retire_running(requests, s, lists)
        if not defer and s[PREEMPTED_ANY] == 0:
            s[CAPACITY_BOUND] = np.int64(queue_head(requests, s, now) >= 0)

    @inner
    def finish_without_output(requests, pools, w, s, lists, end):
        """Complete ready requests that have nothing to produce; they leave before all others."""
        start = s[RUN_OFFSET]
        kept = s[FRONT]
        for i in range(s[FRONT], s[RUNNING]):
            q = np.int64(lists[start + i])
            if requests.state[LIMIT, q] == 0 and is_ready(requests, q):
                requests.state[PASS_TOKENS, q] = 0
                requests.state[PASS_PROMPT, q] = 0
                finish(requests, pools, w, s, q, end)
            else:
                lists[start + kept] = q
                kept += 1
        s[RUNNING] = kept

    @inner
    def finish_front(requests, pools, w, s, lists, end):
        """Complete the front members whose last token came at `end`."""
        start = s[RUN_OFFSET]
        kept = np.int64(0)
        next_finish = NEVER
        for i in range(s[FRONT]):
            q = np.int64(lists[start + i])
            if requests.state[FINISH, q] <= s[TICK]:
                leave_front(requests, pools, s, lists, q)
                requests.time[LAST_TOKEN, q] = end
                finish(requests, pools, w, s, q, end)
            else:
                next_finish = min(next_finish, np.int64(requests.state[FINISH, q]))
                lists[start + kept] = q
                kept += 1
        gone = s[FRONT] - kept
        s[FRONT] = kept
        s[NEXT_FINISH] = next_finish
        if gone > 0:
            for i in range(kept + gone, s[RUNNING]):
                lists[start + i - gone] = lists[start + i]
            s[RUNNING] -= gone

    @inner
    def emit_explicit(requests, pools, times, scratch, w, s, lists, end):
        """Tokens of the explicit requests, in order; who has more to produce joins the front."""
        state = requests.state
        start = s[RUN_OFFSET]
        kept = s[FRONT]
        for i in range(s[FRONT], s[RUNNING]):
            q = np.int64(lists[start + i])
            state[PASS_TOKENS, q] = 0
            state[PASS_PROMPT, q] = 0
            emitted = is_ready(requests, q)
            if emitted:
                emit_token(requests, times, scratch, q, end)
                if state[GENERATED, q] == state[LIMIT, q]:
                    finish(requests, pools, w, s, q, end)
                    continue
            lists[start + kept] = q
            kept += 1
            if emitted and kept == s[FRONT] + 1 and state[LONER, q] == 0:
                join_front(requests, s, lists, q)
        s[RUNNING] = kept

    @inner
    def apply(requests, pools, times, scratch, w, s, lists, start, end):
        """Step 4 of a pass: tokens, completions, rejections. Returns held blocks x ms."""
        if s[FRONT] > 0:
            count_gap(times, scratch, end - start, s[FRONT_COUNTED])
            mark_second_tokens(requests, s, lists, end)
        held = np.float64(s[NUM_BLOCKS] - s[FREE] - s[IDLE]) * (end - start)
        advance_front(s, np.int64(1))
        if s[RUNNING] > s[FRONT]:
            finish_without_output(requests, pools, w, s, lists, end)
        if s[TICK] >= s[NEXT_FINISH]:
            finish_front(requests, pools, w, s, lists, end)
        s[FRONT_JOINED] = s[FRONT]
        emit_explicit(requests, pools, times, scratch, w, s, lists, end)
        end_rejected(requests, w, s, end)
        s[COMMITTED_PREFILL] += s[PREFILL_TOKENS]
        return held

    return Pass(schedule, apply, finish_front)


@inner
def none_is_prebuilt(requests, scratch, s, lists, q, now):
    """An aggregated rank computes all prompts itself."""
    return False


@inner
def never_later(requests, s, q, active):
    """Only its running requests hold memory of an aggregated rank."""
    return False


AGGREGATED = Rules(queue_head, drop_head, make_room, finish, none_is_prebuilt, never_later, None)
