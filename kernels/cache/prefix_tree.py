"""Interning of prompt content into the nodes of a prefix tree.

A request is a path of nodes; two requests share a prefix exactly as far as their paths are equal.
Nodes are numbered in order of first appearance, so a chain that is new gets consecutive numbers
and the first child of node v is node v + 1. Most steps along a path therefore look at the next node
only; a hash table is asked where a path leaves a known chain, and a request adds at most one entry
to it.

Both kernels expect `table` filled with -1, its size a power of two and at least twice the number of
requests, and scratch with room for one node per path entry.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import entry, inner

_STATE_FACTOR = np.int64(0x2545F491)
_CONTENT_FACTOR = np.int64(0x1B873593)
_LENGTH_FACTOR = np.int64(0x165667B1)
_LOW_30 = np.int64(0x3FFFFFFF)


@inner
def _mix(state, content, length):
    """Fold (content, length) into a hash state. No overflow for content < 2**32, length < 2**31."""
    mixed = (state & _LOW_30) * _STATE_FACTOR + content * _CONTENT_FACTOR + length * _LENGTH_FACTOR
    return mixed ^ (mixed >> np.int64(29))


@entry
def intern_content_blocks(offsets, block_ids, nodes, parent, content, table):
    """One node per content block, keyed by (parent node, content id).

    Args:
        offsets: int64 [n + 1], span of each request in `block_ids`.
        block_ids: uint32 [m], content id of every prompt block.
        nodes: int32 [m], written: node of every prompt block.
        parent: int32 [m], scratch: parent of a node, -1 at the root.
        content: uint32 [m], scratch: content id of a node.
        table: int32 [power of two], filled with -1.

    Returns:
        Number of nodes.
    """
    mask = np.int64(len(table) - 1)
    count = np.int64(0)
    for request in range(len(offsets) - 1):
        node = np.int64(-1)
        fresh = False
        for k in range(offsets[request], offsets[request + 1]):
            block = block_ids[k]
            child = node + np.int64(1)
            if not fresh and not (
                child < count and parent[child] == node and content[child] == block
            ):
                child = count
                slot = _mix(node + np.int64(1), np.int64(block), np.int64(0)) & mask
                while table[slot] >= 0:
                    known = np.int64(table[slot])
                    if parent[known] == node and content[known] == block:
                        child = known
                        break
                    slot = (slot + np.int64(1)) & mask
                if child == count:
                    table[slot] = np.int32(count)
                    fresh = True
            if child == count:
                parent[count] = np.int32(node)
                content[count] = block
                count += np.int64(1)
            nodes[k] = np.int32(child)
            node = child
    return count


@inner
def _run_at(request, position, content, block_tokens):
    """Token value at a position of a request, and the end of its content block or token."""
    input_length, offsets, ids, output_offsets, output_ids = content
    length = np.int64(input_length[request])
    if position < length:
        block = position // block_tokens
        value = np.int64(ids[offsets[request] + block])
        return value, min((block + np.int64(1)) * block_tokens, length)
    value = np.int64(output_ids[output_offsets[request] + position - length])
    return value, position + np.int64(1)


@inner
def _same_tokens(one, other, start, size, content, block_tokens):
    """Whether two requests hold equal tokens at [start, start + size)."""
    position = start
    stop = start + size
    while position < stop:
        value, end = _run_at(one, position, content, block_tokens)
        other_value, other_end = _run_at(other, position, content, block_tokens)
        if value != other_value:
            return False
        position = min(end, other_end)
    return True


@inner
def _hash_tokens(seed, request, start, size, content, block_tokens):
    """Hash of the tokens at [start, start + size), equal for equal tokens however they are cut."""
    state = seed + np.int64(1)
    stop = start + size
    run_start = start
    run_value, position = _run_at(request, start, content, block_tokens)
    while position < stop:
        value, end = _run_at(request, position, content, block_tokens)
        if value != run_value:
            state = _mix(state, run_value, position - run_start)
            run_value = value
            run_start = position
        position = end
    return _mix(state, run_value, stop - run_start)


@entry
def intern_engine_blocks(offsets, content, block_tokens, engine_block, nodes, tree, table):
    """One node per full engine block, keyed by (parent node, tokens of the block).

    The tokens of a request are its prompt followed by its planned output. They are compared as runs
    of equal tokens, never laid out one by one.

    Args:
        offsets: int64 [n + 1], span of each request in `nodes`.
        content: (int32 [n] prompt tokens, int64 [n + 1] span in and uint32 [m] token value of each
            content block, int64 [n + 1] span in and uint32 [k] planned output tokens).
        block_tokens: tokens per content block.
        engine_block: tokens per engine block.
        nodes: int32 [offsets[n]], written: node of every full engine block.
        tree: int32 [2, offsets[n]], scratch: parent and first request of a node.
        table: int32 [power of two], filled with -1.

    Returns:
        Number of nodes.
    """
    mask = np.int64(len(table) - 1)
    parent, first = tree[0], tree[1]
    count = np.int64(0)
    for request in range(len(offsets) - 1):
        node = np.int64(-1)
        fresh = False
        start = np.int64(0)
        for k in range(offsets[request], offsets[request + 1]):
            child = node + np.int64(1)
            if not fresh and not (
                child < count
                and parent[child] == node
                and _same_tokens(
                    np.int64(first[child]), request, start, engine_block, content, block_tokens
                )
            ):
                child = count
                slot = mask & _hash_tokens(
                    node, request, start, engine_block, content, block_tokens
                )
                while table[slot] >= 0:
                    known = np.int64(table[slot])
                    if parent[known] == node and _same_tokens(
                        np.int64(first[known]), request, start, engine_block, content, block_tokens
                    ):
                        child = known
                        break
                    slot = (slot + np.int64(1)) & mask
                if child == count:
                    table[slot] = np.int32(count)
                    fresh = True
            if child == count:
                parent[count] = np.int32(node)
                first[count] = np.int32(request)
                count += np.int64(1)
            nodes[k] = np.int32(child)
            node = child
            start += engine_block
    return count
