"""From the log of KV events to columns: hashes of blocks, event ids, times.

The log names blocks by their row of the prefix index. Hashes are computed once for each row, along
the sequences of the requests that computed them; where a prompt repeats one token, blocks in a row
have equal tokens, and are hashed once.

Token values are the reference's: those given, as ids or as content blocks of one repeated value;
for a prompt without any, index * 1000003 + k; for output tokens that are not planned, the low half
of XXH3-64 of the request's uuid and k, where the uuid of a request is its index plus one
(reference: traffic, sections 1.2 and 2.2; vLLM backend, section 5).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vecsim.kernels.cache.block_pool import row_run
from vecsim.kernels.cache.hashing import SEED, chained, output_token, xxh3_64
from vecsim.kernels.cache.kv_events import KIND_BITS, REMOVED_FIRST, ROW_BITS, STORED_FIRST, VISIBLE
from vecsim.kernels.compile.jit import entry, inner
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state import status as S
from vecsim.kernels.state.codes import NONE

TOKENS_HASH, BLOCK_HASH = (np.int64(k) for k in range(2))

_KIND_MASK = (np.int64(1) << KIND_BITS) - 1
_ROW_MASK = (np.int64(1) << ROW_BITS) - 1
_LOW_32 = np.int64(0xFFFFFFFF)
_DEFAULT_TOKEN_STRIDE = np.int64(1_000_003)


class Tokens(NamedTuple):
    """Token values of a workload; n requests in workload order."""

    prompt: np.ndarray  # int32 [n]: prompt tokens
    block_offsets: np.ndarray  # int64 [n + 1]: span of each request in `block_ids`
    block_ids: np.ndarray  # uint32: token value of each content block
    output_offsets: np.ndarray  # int64 [n + 1]: span in `output_ids`
    output_ids: np.ndarray  # uint32: planned output tokens
    block_tokens: np.ndarray  # int64 [1]: tokens per content block
    words: np.ndarray  # uint32 [block size]: scratch


class Columns(NamedTuple):
    """One entry a block of an event, by rank, then in the order of the log."""

    event_id: np.ndarray  # int32, from 0 for each rank
    at_ms: np.ndarray  # float64: when it became visible
    occasion: np.ndarray  # uint8: on which occasion (AT_... of `events`)
    removed: np.ndarray  # bool; else stored
    rootless: np.ndarray  # bool: no parent, because it is a first block, or removed
    hashes: np.ndarray  # uint64 [3, entries]: tokens_hash, block_hash, block_hash of the parent


PARENT_HASH = np.int64(2)


# --- tokens ---------------------------------------------------------------------------------------
@inner
def _own_token_run(tokens, index, position):
    """`_token_run` in what a turn adds to the conversation: its part of the prompt, its output."""
    prompt = np.int64(tokens.prompt[index])
    if position < prompt:
        first = tokens.block_offsets[index]
        if tokens.block_offsets[index + 1] == first:
            return (index * _DEFAULT_TOKEN_STRIDE + position) & _LOW_32, position + 1
        block = position // tokens.block_tokens[0]
        end = min((block + 1) * tokens.block_tokens[0], prompt)
        return np.int64(tokens.block_ids[first + block]), end
    k = position - prompt
    planned = tokens.output_offsets[index] + k
    if planned < tokens.output_offsets[index + 1]:
        return np.int64(tokens.output_ids[planned]), position + 1
    return output_token(index + 1, k), position + 1


@inner
def _begin_of_turn(requests, order, tokens, q):
    """Where the conversation of a family goes on with the turn `q`."""
    return np.int64(requests.state[Q.ISL, q]) - np.int64(tokens.prompt[order[q]])


@inner
def _token_run(requests, order, tokens, q, position):
    """Token value at a position of a request, and the end of the run of equal tokens it is in."""
    turn = np.int64(requests.state[Q.SESSION, q])
    last = q
    while turn < last:
        middle = (turn + last + 1) // 2
        if _begin_of_turn(requests, order, tokens, middle) <= position:
            turn = middle
        else:
            last = middle - 1
    begin = _begin_of_turn(requests, order, tokens, turn)
    value, end = _own_token_run(tokens, order[turn], position - begin)
    return value, begin + end


@inner
def _hash_tokens(requests, order, tokens, q, start, size):
    """tokens_hash of the block [start, start + size) of a request."""
    position = start
    stop = start + size
    while position < stop:
        value, end = _token_run(requests, order, tokens, q, position)
        for at in range(position - start, min(end, stop) - start):
            tokens.words[at] = np.uint32(value)
        position = end
    return xxh3_64(tokens.words, np.int64(0), size, SEED)


# --- hashes ---------------------------------------------------------------------------------------
@entry
def hash_rows(requests, s, order, tokens, hashes, before):
    """Hashes of all blocks that admitted or activated requests may have computed, one that a
    deadlock ended while it waited included.

    Args:
        requests: `layout.Requests` after the run, with the rows that the log names.
        s: int64 [RANK_FIELDS], any rank of the pool.
        order: int64 [n], index in the workload of request q.
        tokens: `Tokens`.
        hashes: uint64 [2, rows], zeros; written: tokens_hash and block_hash.
        before: int32 [rows], written: row of the block before, NONE for a first block.
    """
    state = requests.state
    block_size = s[R.BLOCK_SIZE]
    for q in range(len(order)):
        waited = state[Q.REASON, q] == S.DEADLOCK
        if state[Q.ADMISSIONS, q] == 0 and state[Q.COMPUTED, q] == 0 and not waited:
            continue
        q = np.int64(q)
        blocks = (np.int64(state[Q.ISL, q]) + state[Q.GENERATED, q]) // block_size
        block = np.int64(0)
        previous = NONE
        run_end = np.int64(0)
        own = np.uint64(0)
        while block < blocks:
            row, count = row_run(requests, s, q, block)
            for _ in range(min(count, blocks - block)):
                if hashes[BLOCK_HASH, row] == 0:
                    start = block * block_size
                    if start + block_size > run_end:
                        _, run_end = _token_run(requests, order, tokens, q, start)
                        own = _hash_tokens(requests, order, tokens, q, start, block_size)
                    hashes[TOKENS_HASH, row] = own
                    chain = own
                    if previous >= 0:
                        chain = chained(hashes[BLOCK_HASH, previous], own)
                    hashes[BLOCK_HASH, row] = chain
                    before[row] = previous
                previous = row
                block += 1
                row += 1


# --- columns --------------------------------------------------------------------------------------
@entry
def count_visible(words, counts):
    """Count the blocks of events that became visible.

    Args:
        words: int64 [k], the log, or a part of it.
        counts: int64 [2, ranks]: visible blocks, and blocks logged since the last mark; added to.
    """
    for at in range(0, len(words), 2):
        what = words[at] >> ROW_BITS
        rank = what >> KIND_BITS
        if what & _KIND_MASK == VISIBLE:
            counts[0, rank] += counts[1, rank]
            counts[1, rank] = 0
        else:
            counts[1, rank] += abs(words[at + 1])


@inner
def fill_stored(columns, hashes, before, to, event_id, row, count):
    """Enter `count` stored blocks of an event, the rows from `row` up, from the entry `to` on."""
    for k in range(count):
        columns.event_id[to + k] = event_id
        columns.removed[to + k] = False
        columns.hashes[TOKENS_HASH, to + k] = hashes[TOKENS_HASH, row + k]
        columns.hashes[BLOCK_HASH, to + k] = hashes[BLOCK_HASH, row + k]
        parent = before[row + k]
        columns.rootless[to + k] = parent < 0
        if parent >= 0:
            columns.hashes[PARENT_HASH, to + k] = hashes[BLOCK_HASH, parent]


@inner
def fill_removed(columns, hashes, to, event_id, row, count):
    """Enter removed blocks of an event, the rows from `row` up, or with a negative count, down."""
    step = np.int64(1 if count > 0 else -1)
    for k in range(abs(count)):
        columns.event_id[to + k] = event_id
        columns.removed[to + k] = True
        columns.rootless[to + k] = True
        columns.hashes[BLOCK_HASH, to + k] = hashes[BLOCK_HASH, row + step * k]


@entry
def fill_columns(words, times, hashes, before, places, columns):
    """Enter the events of the log, or of a part of it, into their columns.

    Args:
        words: int64 [k].
        times: float64 [k], the same memory.
        hashes, before: as written by `hash_rows`.
        places: int64 [4, ranks], updated: where a rank's next block goes, where its blocks since
            the last mark begin, where its part of the columns ends, events so far.
        columns: `Columns`.
    """
    for at in range(0, len(words), 2):
        what = words[at] >> ROW_BITS
        rank = what >> KIND_BITS
        kind = what & _KIND_MASK
        to = places[0, rank]
        if kind == VISIBLE:
            columns.at_ms[places[1, rank] : to] = times[at + 1]
            columns.occasion[places[1, rank] : to] = words[at] & _ROW_MASK
            places[1, rank] = to
            continue
        if to == places[2, rank]:
            # Logged, but never visible.
            continue
        count = words[at + 1]
        places[0, rank] = to + abs(count)
        places[3, rank] += np.int64(kind in (STORED_FIRST, REMOVED_FIRST))
        event_id = places[3, rank] - 1
        row = words[at] & _ROW_MASK
        if kind >= REMOVED_FIRST:
            fill_removed(columns, hashes, to, event_id, row, count)
        else:
            fill_stored(columns, hashes, before, to, event_id, row, count)


@entry
def gather_stored(removed, tokens_hash, stored):
    """Copy the tokens hashes of stored blocks, all workers and ranks at once. Returns their number.

    Args:
        removed: bool [k].
        tokens_hash: uint64 [k].
        stored: uint64 [k], written.
    """
    count = np.int64(0)
    for at in range(len(removed)):
        if not removed[at]:
            stored[count] = tokens_hash[at]
            count += 1
    return count
