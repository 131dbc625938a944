"""Which blocks another request of the same rank can match: only those need identities in the index.

A prompt is a path through the workload's prefix tree. A node that two paths of one rank pass
through is shareable as far as the second longest of them covers it; behind the first block that is
not, nothing is. Shareable nodes get consecutive index rows, one range per (rank, node).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vecsim.kernels.compile.jit import entry, inner
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import request as Q
from vecsim.kernels.state.codes import NEVER, NONE

SEEN_BY, LONGEST, SECOND, FIRST_ROW = (np.int64(k) for k in range(4))


class Paths(NamedTuple):
    """Prompts as paths through the prefix tree."""

    spans: np.ndarray  # int64 [2, n]: begin and end of each path in `nodes`
    nodes: np.ndarray  # int32
    covered: np.ndarray  # int32 [n]: full blocks of each path
    blocks_per_node: np.ndarray  # int64 [1]
    marks: np.ndarray  # int32 [nodes, 4], zeros: SEEN_BY, LONGEST, SECOND, FIRST_ROW
    order: np.ndarray  # int64 [n]: requests grouped by rank
    starts: np.ndarray  # int64 [ranks + 1]: first entry of each rank


@inner
def cover_nodes(paths, r, q):
    """Enter how far the path of `q` covers each of its nodes."""
    per_node = paths.blocks_per_node[0]
    marks = paths.marks
    left = np.int64(paths.covered[q])
    for step in range(paths.spans[0, q], paths.spans[1, q]):
        node = paths.nodes[step]
        covers = min(left, per_node)
        left -= covers
        if marks[node, SEEN_BY] != r + 1:
            marks[node, SEEN_BY] = r + 1
            marks[node, LONGEST] = covers
            marks[node, SECOND] = 0
            marks[node, FIRST_ROW] = NONE
        elif covers > marks[node, LONGEST]:
            marks[node, SECOND] = marks[node, LONGEST]
            marks[node, LONGEST] = covers
        elif covers > marks[node, SECOND]:
            marks[node, SECOND] = covers


@inner
def assign_rows(requests, contents, paths, q, rows, single_copies):
    """Give the shareable nodes (all nodes if `single_copies`) of `q` their rows, and note the
    content of each row if `contents` has room. Returns the next free row."""
    per_node = paths.blocks_per_node[0]
    marks = paths.marks
    left = np.int64(paths.covered[q])
    shared = np.int64(0)
    for step in range(paths.spans[0, q], paths.spans[1, q]):
        node = np.int64(paths.nodes[step])
        extent = np.int64(marks[node, LONGEST if single_copies else SECOND])
        covers = min(left, extent)
        if covers == 0:
            break
        if marks[node, FIRST_ROW] < 0:
            marks[node, FIRST_ROW] = rows
            if len(contents) > 0:
                for block in range(extent):
                    contents[rows + block] = node * per_node + block
            rows += extent
        requests.path_rows[step] = marks[node, FIRST_ROW]
        shared += covers
        left -= covers
        if covers < per_node:
            break
    requests.state[Q.SHARED, q] = shared
    return rows


@inner
def assign_own_rows(requests, q, block_size, rows):
    """Rows for the blocks behind the path: the whole sequence may be cached block by block."""
    state = requests.state
    longest = (np.int64(state[Q.ISL, q]) + state[Q.LIMIT, q]) // block_size
    own = max(longest - state[Q.SHARED, q], np.int64(0))
    state[Q.OWN_FROM, q] = state[Q.SHARED, q]
    state[Q.OWN_ROWS, q] = rows
    state[Q.SHARED, q] += own
    return rows + own


@entry
def analyse(requests, paths, contents, fields, instances):
    """Find the shareable blocks of every rank. Fills SHARED, OWN_FROM, OWN_ROWS, `path_rows`,
    `contents` (int32 [rows], or empty when not wanted) and `instances` (int64 [ranks], blocks that
    may get a copy). Returns the number of index rows."""
    rows = np.int64(0)
    for r in range(len(instances)):
        single_copies = fields[r, R.SINGLE_COPIES] != 0
        for i in range(paths.starts[r], paths.starts[r + 1]):
            cover_nodes(paths, np.int64(r), paths.order[i])
        for i in range(paths.starts[r], paths.starts[r + 1]):
            q = paths.order[i]
            rows = assign_rows(requests, contents, paths, q, rows, single_copies)
            requests.state[Q.OWN_FROM, q] = NEVER
            if single_copies:
                rows = assign_own_rows(requests, q, fields[r, R.BLOCK_SIZE], rows)
            instances[r] += requests.state[Q.SHARED, q]
    return rows
