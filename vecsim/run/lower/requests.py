"""Requests as columns of the kernels: limits, paths through the prefix tree, sessions whose prompts
grow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vecsim.config.roles import Role
from vecsim.config.schema import RankConfig
from vecsim.errors import InputError
from vecsim.kernels.cache import sharing
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NEVER, NONE, UNLIMITED
from vecsim.kernels.state.request import Requests
from vecsim.workload.columns import offsets_of
from vecsim.workload.select import take
from vecsim.workload.workload import PrefixTree, Workload

LONGEST_SEQUENCE = 2**30


def in_order(column: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    return column if order is None else column[order]


def output_limits(workload: Workload, rank: RankConfig) -> tuple[np.ndarray, np.ndarray, int]:
    """(tokens that each request may produce: int64 [n], why fewer than asked for: uint8 [n] reason
    codes, tokens of the longest sequence)."""
    prompt = workload.input_length.astype(np.int64)
    limit = workload.output_length.astype(np.int64)
    reason = np.full(len(limit), S.NO_REASON, np.uint8)
    if rank.max_model_len is not None:
        room = np.maximum(min(rank.max_model_len, int(UNLIMITED)) - prompt, 0)
        reason[room < limit] = S.LENGTH
        limit = np.minimum(limit, room)
    if rank.backend == "trtllm":
        # The output of a prompt that fits is clamped to the pool (reference: TensorRT-LLM, B1).
        room = min(rank.num_gpu_blocks * rank.block_tokens, int(UNLIMITED)) - prompt
        clamped = (room > 0) & (room < limit)
        reason[clamped] = S.KV_CAPACITY_EXHAUSTED
        limit = np.where(clamped, room, limit)
    longest = int((prompt + limit).max()) if len(prompt) else 0
    if longest > LONGEST_SEQUENCE:
        row = int((prompt + limit).argmax())
        raise InputError(
            f"requests[{row}]", longest, f"at most {LONGEST_SEQUENCE} tokens, prompt and output"
        )
    return limit, reason, longest


def paths_of(
    workload: Workload,
    rank: RankConfig,
    longest: int,
    order: np.ndarray | None,
    placed: np.ndarray,
    ranks: int,
    caching: bool,
) -> sharing.Paths:
    """Prompts as paths through the prefix tree; empty ones where nothing can be shared."""
    n = len(workload)
    block = min(rank.block_tokens, longest + 1)  # longer ones are never full either
    tree = PrefixTree(np.zeros(n + 1, np.int64), np.zeros(0, np.int32), 0, block)
    if caching and workload.block_offsets is not None and block <= longest:
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
    state = np.zeros((Q.REQUEST_STATE, n), np.int32)
    state[Q.ISL] = in_order(workload.input_length, order)
    state[Q.LIMIT] = in_order(limit, order)
    state[Q.REASON] = in_order(reason, order)
    state[Q.COUNTED] = 1 if counted is None else in_order(counted, order)
    state[Q.FRESH] = 1
    state[Q.PATH] = paths.spans[0]
    state[Q.OWN_TAIL] = NONE
    state[Q.STATUS] = S.UNFINISHED
    state[Q.SESSION] = np.arange(n)
    return Requests(
        state=state,
        time=np.full((Q.REQUEST_TIME, n), np.nan),
        path_rows=np.zeros(len(paths.nodes), np.int32),
    )


def needs_identities(role: Role, workload: Workload, limit: np.ndarray) -> bool:
    """Whether every full block of a vLLM-style rank needs an identity and a copy of its own: where
    events name them, and where room for a preempted empty prompt is made by undoing scheduled work,
    so that duplicates arise."""
    return role.rank.emit_kv_events or bool(np.any((workload.input_length == 0) & (limit > 0)))


def private_requests(workload: Workload, order: np.ndarray | None) -> np.ndarray:
    """bool [n], requests with planned output tokens: they never decode in lock step."""
    if workload.output_offsets is None:
        return np.zeros(len(workload), bool)
    return in_order(np.diff(workload.output_offsets) > 0, order)


def blocks_of_sequences(requests: Requests, params: np.ndarray) -> np.ndarray:
    """int64 [n], most full blocks that each request can have."""
    sequences = requests.state[Q.ISL].astype(np.int64) + requests.state[Q.LIMIT]
    return sequences // params[R.BLOCK_SIZE]


def checked_rows(rows: int) -> int:
    """`rows`, unless they are more than 32 bits can name."""
    if rows > NEVER:
        expected = f"at most {NEVER} blocks of all requests, for KV events"
        raise InputError("observe", rows, expected)
    return rows


def prompts_only(workload: Workload) -> Workload:
    """The workload as prefill workers see it: one token at most comes out of a prompt."""
    planned = workload.output_offsets is not None
    return replace(
        workload,
        output_length=np.minimum(workload.output_length, 1),
        output_offsets=None,
        output_token_ids=None,
        _trees={} if planned else workload._trees,
    )


def rows_in_order(workload: Workload) -> np.ndarray:
    """int64 [n], the row of each request of the kernels."""
    if workload.dependencies is not None:
        return np.argsort(workload.dependencies.node, kind="stable")
    return workload.sessions.rows()[1]


# --- prompts that grow ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversations:
    """Sessions whose prompts grow; requests in the order of the kernels, by session and turn.

    Attributes:
        session: int64 [n], session of each request.
        first: int64 [n], first request of its session.
        starts: int64 [sessions], first request of each session.
        rows: int64 [n], row of the workload of each request.
        reach: int64 [n], most tokens of prompt and output that a request can have.
    """

    session: np.ndarray
    first: np.ndarray
    starts: np.ndarray
    rows: np.ndarray
    reach: np.ndarray

    @classmethod
    def of(cls, workload: Workload, rows: np.ndarray) -> Conversations | None:
        """None where every prompt is authored whole."""
        sessions = workload.sessions
        if sessions is None or not sessions.accumulate:
            return None
        session = sessions.session[rows].astype(np.int64)
        starts = np.flatnonzero(sessions.turn[rows] == 0)
        tokens = workload.input_length.astype(np.int64) + workload.output_length
        total = np.cumsum(tokens[rows])
        before = np.concatenate([[0], total])[starts]
        return cls(session, starts[session], starts, rows, total - before[session])


def turn_limits(
    workload: Workload, rank: RankConfig, talks: Conversations | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """`output_limits`; later turns of growing prompts get theirs when they are released."""
    limit, reason, longest = output_limits(workload, rank)
    if talks is None:
        return limit, reason, longest
    later = np.ones(len(limit), bool)
    later[talks.rows[talks.starts]] = False
    limit = np.where(later, workload.output_length, limit)
    reason[later] = S.NO_REASON
    longest = int(talks.reach.max(initial=0))
    if longest > LONGEST_SEQUENCE:
        row = int(talks.rows[talks.reach.argmax()])
        expected = f"at most {LONGEST_SEQUENCE} tokens, the turns before included"
        raise InputError(f"requests[{row}]", longest, expected)
    return limit, reason, longest


def known_ahead(workload: Workload, talks: Conversations) -> Workload:
    """One row a session: the tokens at the start of its conversation that are known ahead, up to
    the first generated token that is not planned."""
    first_rows = talks.rows[talks.starts]
    opening = replace(
        take(replace(workload, sessions=None), first_rows),
        output_offsets=None,
        output_token_ids=None,
    )
    if workload.block_offsets is None:
        return opening
    counts = np.diff(np.append(talks.starts, len(talks.rows)))
    planned = np.zeros(len(workload), np.int64)
    if workload.output_offsets is not None:
        planned = np.diff(workload.output_offsets)
    silent = (counts > 1) & (workload.output_length[first_rows] == 0)
    if not np.any(silent | (planned[first_rows] > 0)):
        return opening
    tokens = [
        _known_tokens(workload, planned, talks.rows[start : start + count])
        for start, count in zip(talks.starts, counts, strict=True)
    ]
    lengths = np.array([len(known) for known in tokens], np.int64)
    return replace(
        opening,
        input_length=lengths.astype(np.int32),
        block_offsets=offsets_of(lengths),
        block_ids=np.concatenate(tokens),
        block_tokens=1,
        _trees={},
    )


def _known_tokens(workload: Workload, planned: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """uint32, the tokens of a session that are known ahead."""
    parts = [np.zeros(0, np.uint32)]
    for row in turns:
        first, last = workload.block_offsets[row : row + 2]
        length = int(workload.input_length[row])
        if first == last and length > 0:
            break
        parts.append(np.repeat(workload.block_ids[first:last], workload.block_tokens)[:length])
        if planned[row] > 0:
            first, last = workload.output_offsets[row : row + 2]
            parts.append(workload.output_token_ids[first:last])
        elif workload.output_length[row] > 0:
            break
    return np.concatenate(parts)


def shared_blocks(params: np.ndarray, known: Workload, paths: sharing.Paths) -> np.ndarray:
    """int32 [rows of `known`], leading blocks that another row has too."""
    fields = np.zeros((1, R.RANK_FIELDS), np.int64)
    fields[:, : R.PARAMS] = params
    fields[:, R.SINGLE_COPIES] = 0
    everyone = Requests(
        state=np.zeros((Q.REQUEST_STATE, len(known)), np.int32),
        time=np.zeros((Q.REQUEST_TIME, 0)),
        path_rows=np.zeros(len(paths.nodes), np.int32),
    )
    everyone.state[Q.PATH] = paths.spans[0]
    instances = np.zeros(1, np.int64)
    sharing.analyse(everyone, paths, np.zeros(0, np.int32), fields, instances)
    return everyone.state[Q.SHARED]
