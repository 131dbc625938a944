"""Interning of prompt content against a plain dictionary of token tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vecsim.kernels.cache import prefix_tree
from vecsim.kernels.compile.jit import DISABLED
from vecsim.workload.workload import PrefixTree, Workload


def tokens_of(workload: Workload, row: int) -> list[int] | None:
    """Prompt and planned output, token by token; None for private content."""
    length = int(workload.input_length[row])
    begin, end = workload.block_offsets[row : row + 2]
    if begin == end and length:
        return None
    ids = np.repeat(workload.block_ids[begin:end], workload.block_tokens)[:length].tolist()
    if workload.output_offsets is not None:
        begin, end = workload.output_offsets[row : row + 2]
        ids += workload.output_token_ids[begin:end].tolist()
    return ids


def naive_engine_tree(workload: Workload, block: int) -> list[list[int]]:
    """Nodes numbered by first appearance, keyed by the whole token prefix."""
    numbers: dict[tuple[int, ...], int] = {}
    paths = []
    for row in range(len(workload)):
        tokens = tokens_of(workload, row) or []
        ends = range(block, len(tokens) + 1, block)
        paths.append([numbers.setdefault(tuple(tokens[:end]), len(numbers)) for end in ends])
    return paths


def naive_content_tree(workload: Workload) -> list[list[int]]:
    numbers: dict[tuple[int, ...], int] = {}
    paths = []
    for row in range(len(workload)):
        begin, end = workload.block_offsets[row : row + 2]
        ids = workload.block_ids[begin:end].tolist()
        ends = range(1, len(ids) + 1)
        paths.append([numbers.setdefault(tuple(ids[:end]), len(numbers)) for end in ends])
    return paths


def check(tree: PrefixTree, paths: list[list[int]]) -> None:
    assert tree.offsets.dtype == np.int64
    assert tree.nodes.dtype == np.int32
    assert np.diff(tree.offsets).tolist() == [len(path) for path in paths]
    assert tree.nodes.tolist() == [node for path in paths for node in path]
    assert tree.node_count == len({node for path in paths for node in path})


def common(a: list[int] | None, b: list[int] | None) -> int:
    """Tokens of the longest common prefix."""
    count = 0
    for one, other in zip(a or [], b or [], strict=False):
        if one != other:
            break
        count += 1
    return count


def shared(tree: PrefixTree, workload: Workload, a: int, b: int) -> int:
    """Tokens that two rows share according to the tree."""
    paths = [tree.nodes[tree.offsets[row] : tree.offsets[row + 1]].tolist() for row in (a, b)]
    lengths = [len(tokens_of(workload, row) or []) for row in (a, b)]
    return min(common(*paths) * tree.tokens_per_node, *lengths)


@st.composite
def workloads(draw: st.DrawFn, block_tokens: st.SearchStrategy[int], planned: bool) -> Workload:
    """Few ids, so that prefixes meet, end inside blocks and repeat; private rows among them."""
    block = draw(block_tokens)
    rows = draw(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=12))
    inputs = [
        draw(st.integers(0, len(row) * block)) if row else draw(st.integers(0, 9)) for row in rows
    ]
    outputs, offsets, ids = [], [0], []
    for _ in rows:
        tokens = draw(st.lists(st.integers(0, 3), max_size=10)) if planned else []
        outputs.append(len(tokens))
        ids += tokens
        offsets.append(len(ids))
    return Workload.from_columns(
        np.zeros(len(rows)),
        inputs,
        outputs,
        block_offsets=np.cumsum([0] + [len(row) for row in rows]),
        block_ids=[token for row in rows for token in row],
        block_tokens=block,
        output_offsets=offsets if planned else None,
        output_token_ids=ids if planned else None,
    )


@settings(max_examples=150, deadline=None)
@given(workloads(st.sampled_from([1, 2, 3, 4, 6, 7]), planned=False), st.integers(1, 9))
def test_prompts_against_dictionary(workload: Workload, block: int) -> None:
    tree = workload.prefix_tree(block)
    if workload.block_tokens % block == 0:
        check(tree, naive_content_tree(workload))
        assert tree.tokens_per_node == workload.block_tokens
    else:
        check(tree, naive_engine_tree(workload, block))
        assert tree.tokens_per_node == block


@settings(max_examples=150, deadline=None)
@given(workloads(st.sampled_from([1, 2, 3, 4, 6, 7]), planned=True), st.integers(1, 9))
def test_planned_outputs_against_dictionary(workload: Workload, block: int) -> None:
    check(workload.prefix_tree(block), naive_engine_tree(workload, block))


@settings(max_examples=100, deadline=None)
@given(workloads(st.sampled_from([1, 3, 4, 6]), planned=False), st.integers(1, 7))
def test_full_engine_blocks_in_common_follow_from_paths(workload: Workload, block: int) -> None:
    tree = workload.prefix_tree(block)
    tokens = [tokens_of(workload, row) for row in range(len(workload))]
    for a in range(len(workload)):
        for b in range(a):
            expected = common(tokens[a], tokens[b]) // block
            assert shared(tree, workload, a, b) // block == expected


@pytest.mark.parametrize("block_tokens", [1, 5, 16])
@pytest.mark.parametrize("block", [1, 4, 5, 16])
def test_long_random_paths(block_tokens: int, block: int) -> None:
    """Thousands of rows over a deep tree: probing past collisions, both kinds of children."""
    random = np.random.default_rng(7)
    rows, history = [], [[]]
    for _ in range(1500):
        base = history[random.integers(len(history))]
        cut = int(random.integers(0, len(base) + 1))
        row = [*base[:cut], *random.integers(0, 50, random.integers(1, 8)).tolist()][:40]
        history.append(row)
        rows.append(row)
    inputs = [len(row) * block_tokens - int(random.integers(block_tokens)) for row in rows]
    workload = Workload.from_columns(
        np.zeros(len(rows)), inputs, inputs, hash_ids=rows, block_tokens=block_tokens
    )
    if block_tokens % block == 0:
        check(workload.prefix_tree(block), naive_content_tree(workload))
    else:
        check(workload.prefix_tree(block), naive_engine_tree(workload, block))


def test_a_block_is_one_node_however_its_runs_are_cut() -> None:
    """Four tokens 7 under one id, and as 3 + 1 of two equal ids, are the same engine block."""
    workload = Workload.from_columns(
        [0, 0], [6, 6], [0, 0], hash_ids=[[7, 7], [7, 7]], block_tokens=3
    )
    assert workload.prefix_tree(4).nodes.tolist() == [0, 0]
    planned = Workload.from_columns(
        [0, 0],
        [4, 2],
        [0, 2],
        block_offsets=[0, 1, 2],
        block_ids=[7, 7],
        block_tokens=4,
        output_offsets=[0, 0, 2],
        output_token_ids=[7, 7],
    )
    assert planned.prefix_tree(4).nodes.tolist() == [0, 0]


def test_token_values_use_all_32_bits() -> None:
    top = 2**32 - 1
    workload = Workload.from_columns(
        [0, 0, 0],
        [4, 4, 4],
        [0, 0, 0],
        block_offsets=[0, 4, 8, 12],
        block_ids=[top, top, 5, 5, top, top, 5, 6, top, top, 5, 5],
        block_tokens=1,
    )
    assert workload.prefix_tree(2).nodes.tolist() == [0, 1, 0, 2, 0, 1]
    assert workload.prefix_tree(1).nodes.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3]


@pytest.mark.skipif(DISABLED, reason="kernels run as plain Python")
def test_one_signature_per_kernel() -> None:
    for block_tokens, ids in ((4, [[1, 2], [1, 3]]), (1, [[1, 2], [1]])):
        workload = Workload.from_columns(
            [0, 0], [2, 1], [1, 1], hash_ids=ids, block_tokens=block_tokens
        )
        workload.prefix_tree(1)
        workload.prefix_tree(3)
    workload = Workload.from_columns([0], [0], [2], output_offsets=[0, 2], output_token_ids=[1, 2])
    workload.prefix_tree(2)
    assert len(prefix_tree.intern_content_blocks.signatures) == 1
    assert len(prefix_tree.intern_engine_blocks.signatures) == 1
