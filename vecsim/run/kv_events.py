"""KV events: what every rank's prefix cache announced, as a frame of one row a block.

The kernels log blocks by number (`vecsim.kernels.cache.kv_events`); here the logs of all threads
become columns, hashes included, when a run that observed them is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.kernels.cache import event_columns, kv_events
from vecsim.kernels.cache.event_columns import Columns, Tokens
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state.codes import NONE
from vecsim.kernels.state.pools import EventLog
from vecsim.kernels.state.rank import Ranks
from vecsim.kernels.state.request import Requests

if TYPE_CHECKING:
    from vecsim.config.roles import Role
    from vecsim.run.lower.fleet import FleetState
    from vecsim.run.lower.independent import Independent
    from vecsim.workload.workload import Workload

KIND = pl.Enum(("stored", "removed"))
POOL = pl.Enum(("agg", "prefill", "decode"))
OCCASION = pl.Enum(("pass_end", "reserve", "activate", "release"))

KV_EVENTS_SCHEMA: dict[str, pl.DataType] = {
    "pool": POOL,
    "worker": pl.Int32(),
    "rank": pl.Int32(),
    "event_id": pl.Int32(),
    "observed_at_ms": pl.Float64(),
    "occasion": OCCASION,
    "kind": KIND,
    "parent_hash": pl.UInt64(),
    "block_hash": pl.UInt64(),
    "tokens_hash": pl.UInt64(),
}
"""Columns of `Result.kv_events`, one row a block, by pool, worker and rank, then in order.

`event_id` counts the events of a rank from 0; the blocks of one event are rows with one id. The
occasion is the end of a pass, or the command of a handoff that brought the event about. Hashes
are XXH3-64, seed 1337: `tokens_hash` of the block's tokens, `block_hash` of the block with all
before it; `parent_hash` is the block_hash of the block before, null for a first block. Removed
blocks have a `block_hash` only. (Reference: vLLM backend, sections 5 and 12.)
"""

_SLACK_WORDS = 1 << 16


@dataclass(frozen=True)
class Watched:
    """What lowering leaves for observation.

    Attributes:
        requests: the requests, with the rows of the prefix index that the log names.
        rows: number of these rows.
        words: int64 [workers], most words that a worker logs in a pass or decode run.
    """

    requests: Requests
    rows: int
    words: np.ndarray


@dataclass(frozen=True)
class KvEvents:
    """The events of one pool.

    Attributes:
        pool: its name.
        dp_size: attention-DP ranks per worker.
        counts: int64 [ranks], blocks of each rank.
        columns: `vecsim.kernels.cache.event_columns.Columns`, by rank.
    """

    pool: str
    dp_size: int
    counts: np.ndarray
    columns: Columns


def words_a_pass(instances: np.ndarray, ranks: Ranks, dp_size: int) -> np.ndarray:
    """int64 [workers], most words that a worker logs in a pass or decode run.

    Each request stores each of its blocks once at most, and what goes was there before or came in
    between; a block takes two words at most, and two more mark the end of its pass. `instances`
    int64 [ranks]: blocks of all requests of a rank.
    """
    held = np.minimum(instances, ranks.fields[:, R.NUM_BLOCKS])
    return (4 * (2 * instances + held)).reshape(-1, dp_size).sum(axis=1)


def words_an_instant(blocks: int, ranks: Ranks, at_once: int | None = None) -> np.ndarray:
    """int64 [1], most words that a pool whose requests are placed as the run goes on logs before
    its next pass starts: the end of a pass or decode run of each worker, and the commands of an
    instant. As in `words_a_pass`; `blocks`: of all requests; `at_once`: of the most that can be in
    flight together, if that is known."""
    held = min(blocks, int(ranks.fields[:, R.NUM_BLOCKS].sum(dtype=np.float64)))
    stored = blocks if at_once is None else at_once
    return np.array([4 * (2 * stored + held)])


def new_log(watched: Watched, ranks: int, *, coupled: bool, named: Requests | None) -> EventLog:
    """An empty log of one thread. Workers on one clock may all log before anybody looks.

    Raises:
        InputError: there is not so much memory.
    """
    room = int(watched.words.sum() if coupled else watched.words.max(initial=0))
    length = 2 * room + _SLACK_WORDS
    try:
        words = np.empty(length, np.int64)
    except (MemoryError, ValueError):
        expected = f"larger blocks or fewer requests: the log may need {length / 2**27:.3g} GiB"
        raise InputError("observe", "kv_events", expected) from None
    log = EventLog(
        words=words,
        state=np.array([0, room], np.int64),
        ranks=np.zeros((kv_events.LOG_RANK, ranks), np.int64),
        named=named,
    )
    log.ranks[kv_events.NEXT_REMOVED] = kv_events.REMOVED_FIRST
    log.ranks[kv_events.LAST_STORED] = NONE
    return log


def taken_out(log: EventLog) -> np.ndarray:
    """The words in the log, which is empty afterwards."""
    words = log.words[: int(log.state[kv_events.LOG_LENGTH])].copy()
    log.state[kv_events.LOG_LENGTH] = 0
    return words


def collect_pool(
    logs: list[list[np.ndarray]], state: Independent, role: Role, workload: Workload
) -> tuple[KvEvents, ...]:
    """The events of independent workers that became visible; `logs` are the parts of each thread's
    log: each rank is in one of them."""
    watched = state.watched
    hashes, before = _no_hashes(watched)
    _hash(watched.requests, state.ranks.fields[0], workload, state.order, hashes, before)
    counts, columns = _columns(logs, len(state.ranks.fields), hashes, before)
    return (KvEvents("agg", role.dp_size, counts, columns),)


def collect(
    logs: list[list[np.ndarray]], state: FleetState, ranks: Ranks, workload: Workload
) -> tuple[KvEvents, ...]:
    """The events of each pool of a fleet that became visible; `logs` as of `collect_pool`."""
    watched, n = state.watched, len(workload)
    hashes, before = _no_hashes(watched)
    first = 0
    for pool, plan in enumerate(state.plans):
        requests = watched.requests
        if len(state.plans) > 1:
            columns = np.ascontiguousarray(requests.state[:, pool * n : (pool + 1) * n])
            columns[Q.SESSION] -= pool * n
            requests = requests._replace(state=columns)
        _hash(requests, ranks.fields[first], workload, state.order, hashes, before)
        first += plan.ranks
    counts, columns = _columns(logs, len(ranks.fields), hashes, before)
    ends = np.cumsum(counts)
    pools, first = [], 0
    for plan in state.plans:
        own = slice(first, first + plan.ranks)
        start = int(ends[own.start] - counts[own.start])
        part = slice(start, int(ends[own.stop - 1]))
        name = "agg" if plan.role.stage == "aggregated" else plan.role.stage
        taken = Columns(*(column[..., part] for column in columns))
        pools.append(KvEvents(name, plan.role.dp_size, counts[own], taken))
        first = own.stop
    return tuple(pools)


def _no_hashes(watched: Watched) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((2, watched.rows), np.uint64), np.empty(watched.rows, np.int32)


def _hash(
    requests: Requests,
    fields: np.ndarray,
    workload: Workload,
    order: np.ndarray | None,
    hashes: np.ndarray,
    before: np.ndarray,
) -> None:
    """Fill the hashes of the rows of one pool, whose ranks are like `fields`."""
    if hashes.shape[1] == 0:
        return
    if order is None:
        order = np.arange(len(workload))
    tokens = _tokens(workload, int(fields[R.BLOCK_SIZE]))
    with np.errstate(over="ignore"):  # where kernels run as plain Python
        event_columns.hash_rows(requests, fields, order, tokens, hashes, before)


def _columns(
    logs: list[list[np.ndarray]], ranks: int, hashes: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, Columns]:
    """(int64 [ranks] blocks of each rank, their columns by rank)."""
    counts = np.zeros((2, ranks), np.int64)
    for parts in logs:
        counts[1] = 0
        for words in parts:
            event_columns.count_visible(words, counts)
    ends = np.cumsum(counts[0])
    starts = ends - counts[0]
    total = int(ends[-1])
    columns = Columns(
        event_id=np.empty(total, np.int32),
        at_ms=np.empty(total),
        occasion=np.empty(total, np.uint8),
        removed=np.empty(total, np.bool_),
        rootless=np.empty(total, np.bool_),
        hashes=np.zeros((3, total), np.uint64),
    )
    places = np.array([starts, starts, ends, np.zeros_like(ends)])
    for parts in logs:
        for words in parts:
            times = words.view(np.float64)
            event_columns.fill_columns(words, times, hashes, before, places, columns)
    return counts[0], columns


def _tokens(workload: Workload, block_size: int) -> Tokens:
    """Where the token values of the workload come from."""
    n = len(workload)
    nothing = np.zeros(n + 1, np.int64), np.zeros(0, np.uint32)
    prompts = (workload.block_offsets, workload.block_ids)
    outputs = (workload.output_offsets, workload.output_token_ids)
    return Tokens(
        workload.input_length,
        *(nothing if prompts[0] is None else prompts),
        *(nothing if outputs[0] is None else outputs),
        np.array([workload.block_tokens], np.int64),
        np.zeros(block_size, np.uint32),
    )


def frame_of(pools: list[KvEvents]) -> pl.DataFrame:
    """The frame of `KV_EVENTS_SCHEMA`."""
    return pl.concat([_pool_frame(pool) for pool in pools])


def _pool_frame(kv: KvEvents) -> pl.DataFrame:
    columns = kv.columns
    removed = pl.Series("removed", columns.removed)
    rootless = pl.Series("rootless", columns.rootless)
    tokens_hash, block_hash, parent_hash = (pl.Series(values) for values in columns.hashes)
    kinds = pl.Series(list(KIND.categories), dtype=KIND)
    occasions = pl.Series(list(OCCASION.categories), dtype=OCCASION)
    ranks = np.arange(len(kv.counts), dtype=np.int32)
    return pl.DataFrame(
        [
            pl.Series("pool", [kv.pool], POOL).new_from_index(0, len(removed)),
            pl.Series("worker", np.repeat(ranks // np.int32(kv.dp_size), kv.counts)),
            pl.Series("rank", np.repeat(ranks % np.int32(kv.dp_size), kv.counts)),
            pl.Series("event_id", columns.event_id),
            pl.Series("observed_at_ms", columns.at_ms),
            occasions.gather(pl.Series(columns.occasion)).alias("occasion"),
            kinds.gather(removed.cast(pl.UInt32)).alias("kind"),
            parent_hash.zip_with(~rootless, pl.Series([None], dtype=pl.UInt64)).alias(
                "parent_hash"
            ),
            block_hash.alias("block_hash"),
            tokens_hash.zip_with(~removed, pl.Series([None], dtype=pl.UInt64)).alias("tokens_hash"),
        ]
    )


def stored_hashes(kv_events: pl.DataFrame) -> np.ndarray:
    """The tokens hashes of the blocks that were stored, in the order of the events.

    Args:
        kv_events: `Result.kv_events`, or rows of it.

    Returns:
        uint64 [k]: the `tokens_hash` of every block of every Stored event, duplicates included, of
        all workers and ranks; Removed events contribute nothing (reference: runtimes, section 10).

    Raises:
        InputError: not a frame of KV events.
    """
    names = ("kind", "tokens_hash")
    if not isinstance(kv_events, pl.DataFrame) or any(n not in kv_events.columns for n in names):
        raise InputError("kv_events", kv_events, "a frame with the columns kind and tokens_hash")
    removed = (kv_events["kind"].cast(pl.String) == "removed").to_numpy(writable=True)
    hashes = kv_events["tokens_hash"].fill_null(0).to_numpy(writable=True)
    stored = np.empty(len(hashes), np.uint64)
    return stored[: event_columns.gather_stored(removed, hashes, stored)]
