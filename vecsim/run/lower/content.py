"""KV pools before the start: copies, the prefix index, the next_uses, what placement hands out."""

from __future__ import annotations

import numpy as np

from vecsim.errors import InputError
from vecsim.kernels.cache import sharing
from vecsim.kernels.cache.content import SPARE_COPIES
from vecsim.kernels.state import fleet as F
from vecsim.kernels.state import pools as P
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state.codes import NONE
from vecsim.kernels.state.fleet import Content
from vecsim.kernels.state.pools import NextUseTable, Pools
from vecsim.kernels.state.rank import Ranks
from vecsim.kernels.state.request import Requests

_MOST_ROWS = 2**31 - 1


def next_use_table(prompt_blocks: np.ndarray, paths: sharing.Paths) -> NextUseTable:
    """What prompts are to come: the requests of every node of the prefix tree, ascending.

    `prompt_blocks` int [n]: full blocks of each prompt.
    """
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
    return NextUseTable(np.array([ends - counts, ends], np.int32), users)


def place_copies(ranks: Ranks, instances: np.ndarray) -> int:
    """Give every rank its range of copies: no more than it has blocks, or blocks to copy
    (`instances`, int64 [ranks]). Returns the number of copies."""
    fields = ranks.fields
    spare = np.where(fields[:, R.SINGLE_COPIES] != 0, int(SPARE_COPIES), 1)
    capacity = np.minimum(instances * spare, fields[:, R.NUM_BLOCKS])
    ends = np.cumsum(capacity)
    fields[:, R.COPY_BUMP] = ends - capacity
    fields[:, R.FIRST_RUN] = ends[-1]
    return int(ends[-1])


def empty_pools(copies: int, requests: int, rows: int, next_uses: NextUseTable | None) -> Pools:
    """Pools in which nothing is cached."""
    return Pools(
        nodes=np.zeros((P.NODE_FIELDS, copies + requests), np.int32),
        index=np.full((P.INDEX_FIELDS, rows), NONE, np.int32),
        next_uses=next_uses,
        events=None,
    )


def own_blocks(
    requests: Requests, params: np.ndarray, reach: np.ndarray, whole: bool
) -> np.ndarray:
    """int32 [n], blocks of each family with rows of its own, by its first request.

    Args:
        requests: of one pool; SHARED: blocks that others have too.
        params: int64 [PARAMS] of its ranks.
        reach: int64 [n], most tokens that a request can have.
        whole: prompts grow, so that a family has rows for all its blocks.
    """
    state = requests.state
    own = np.zeros(state.shape[1], np.int32)
    if not params[R.PREFIX_CACHING]:
        return own
    blocks = reach // params[R.BLOCK_SIZE]
    if whole:
        np.maximum.at(own, state[Q.SESSION], blocks.astype(np.int32))
    elif params[R.SINGLE_COPIES]:
        own = np.maximum(blocks - state[Q.SHARED], 0).astype(np.int32)
    return own


def content_of(
    ranks: Ranks,
    requests: Requests,
    pool: np.ndarray,
    own: np.ndarray,
    reach: np.ndarray,
    nodes: int,
    whole: bool,
) -> tuple[Content, int, int]:
    """(what placement hands out, copies of all ranks, rows of the index).

    Args:
        ranks: all ranks; COPY_BUMP and FIRST_RUN are filled.
        requests: the copies of all pools.
        pool: int64 [requests], first rank of the pool of each.
        own: int32 [requests], as of `own_blocks`.
        reach: int64 [requests], most tokens of each.
        nodes: contents that paths name.
        whole: as of `own_blocks`.

    Raises:
        InputError: more blocks than 32 bits count.
    """
    fields, state = ranks.fields, requests.state
    shared = state[Q.SHARED].astype(np.int64)
    per_node = fields[pool, R.BLOCKS_PER_NODE]
    single = fields[pool, R.SINGLE_COPIES] != 0
    entries = -(-shared // np.maximum(per_node, 1))
    family_own = own[state[Q.SESSION]].astype(np.int64)
    at_once = single | (family_own > 0)
    # A row that is not handed out at once has two requests at least.
    rows = int((entries * per_node)[at_once].sum())
    rows += int(min(family_own.sum(), len(fields) * own.sum(dtype=np.int64)))
    rows += int((entries * per_node)[~at_once].sum()) // 2
    identified = np.minimum(
        reach // fields[pool, R.BLOCK_SIZE],
        np.maximum(shared, family_own) if whole else shared + family_own,
    )
    spare = np.where(single, int(SPARE_COPIES), 1)
    blocks = fields[:, R.NUM_BLOCKS].sum(dtype=np.float64)
    copies = int(min((identified * spare).sum(), blocks))
    if max(rows, copies + state.shape[1]) > _MOST_ROWS:
        expected = f"at most {_MOST_ROWS} blocks of prompt content that can be found again"
        raise InputError("prefix tree", max(rows, copies), expected)
    fields[:, R.COPY_BUMP] = fields[:, R.FIRST_RUN] = copies
    keys = int(entries.sum()) + int(np.count_nonzero(family_own))
    table = np.full((1 << (keys + keys // 2).bit_length(), 2), -1, np.int64)
    counters = np.zeros(F.CONTENT_STATE, np.int64)
    counters[F.OWN_KEYS] = nodes
    counters[F.OWN_WHOLE] = whole
    return Content(counters, own, table), copies, rows
