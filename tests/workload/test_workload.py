"""Requests as columns: constructors, views, and which prompts share which prefixes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from vecsim.config.schema import ReplayRequest, Traffic
from vecsim.errors import InputError
from vecsim.workload.workload import Workload


def request(id: str = "r", at: float = 0.0, isl: int = 4, osl: int = 2, **rest) -> ReplayRequest:
    return ReplayRequest(id=id, arrival_time_ms=at, input_tokens=isl, output_tokens=osl, **rest)


def columns(**changes) -> Workload:
    given = {"arrival_ms": [0, 1], "input_length": [3, 4], "output_length": [1, 2]} | changes
    return Workload.from_columns(**given)


def reusable(workload: Workload, earlier: int, later: int, engine_block: int) -> int:
    """Prompt tokens in full engine blocks that two rows share."""
    tree = workload.prefix_tree(engine_block)
    a, b = (tree.nodes[tree.offsets[r] : tree.offsets[r + 1]] for r in (earlier, later))
    n = min(len(a), len(b))
    same = int(np.cumprod(a[:n] == b[:n]).sum())
    tokens = min(same * tree.tokens_per_node, *workload.input_length[[earlier, later]].tolist())
    return tokens // engine_block * engine_block


def best(workload: Workload, row: int, engine_block: int) -> int:
    return max((reusable(workload, e, row, engine_block) for e in range(row)), default=0)


# --- prefixes (reference: hash ids to tokens to engine blocks) ------------------------------------


@pytest.mark.parametrize(
    ("rows", "trace_block", "engine_block", "reused"),
    [
        ([(700, [5, 9]), (1024, [5, 9])], 512, 64, [0, 640]),
        ([(100, [5, 9, 11]), (1000, [5, 9, 11])], 512, 64, [0, 64]),
        ([(1000, [1, 2]), (1536, [1, 2, 3]), (700, [1, 2])], 512, 64, [0, 960, 640]),
        (
            [(1024, [1, 2]), (1024, [2, 1]), (1536, [1, 2, 1]), (1024, [1, 1])],
            512,
            64,
            [0, 0, 1024, 512],
        ),
        ([(48, [1, 2]), (48, [1, 3]), (72, [1, 2, 3])], 24, 16, [0, 16, 48]),
        ([(30, [1, 2]), (32, [1, 2])], 16, 16, [0, 16]),
        ([(300, [7]), (300, [7])], 512, 64, [0, 256]),
        ([(10, [7]), (10, [7])], 16, 16, [0, 0]),
        ([(600, [2**64 - 1, 2**63 + 5]), (600, [2**64 - 1, 3])], 512, 64, [0, 512]),
    ],
)
def test_reused_tokens_follow_from_common_paths(rows, trace_block, engine_block, reused) -> None:
    lengths = [length for length, _ in rows]
    workload = Workload.from_columns(
        np.zeros(len(rows)),
        lengths,
        lengths,
        hash_ids=[ids for _, ids in rows],
        block_tokens=trace_block,
    )
    assert [best(workload, row, engine_block) for row in range(len(rows))] == reused


def test_content_nodes_do_not_depend_on_the_engine_block() -> None:
    workload = columns(input_length=[32, 20], hash_ids=[[4, 5], [4, 6]], block_tokens=16)
    tree = workload.prefix_tree(8)
    assert tree is workload.prefix_tree(16)
    assert tree is workload.prefix_tree(1)
    assert (tree.nodes.tolist(), tree.node_count, tree.tokens_per_node) == ([0, 1, 0, 2], 3, 16)
    assert workload.prefix_tree(5).tokens_per_node == 5
    assert workload.prefix_tree(5) is workload.prefix_tree(5)


def test_rows_without_content_have_empty_paths() -> None:
    tree = columns().prefix_tree(16)
    assert (tree.offsets.tolist(), tree.nodes.size, tree.node_count) == ([0, 0, 0], 0, 0)
    mixed = columns(hash_ids=[[], [3]], block_tokens=4).prefix_tree(2)
    assert mixed.offsets.tolist() == [0, 0, 1]
    assert columns(hash_ids=[[], [3]], block_tokens=4).prefix_tree(3).offsets.tolist() == [0, 0, 1]


@pytest.mark.parametrize("block", [0, -1, 1.5, "64", True, None])
def test_engine_block_must_be_positive(block) -> None:
    with pytest.raises(InputError, match=r"engine_block: got .* a whole number, 1 or more"):
        columns().prefix_tree(block)


# --- inline requests ------------------------------------------------------------------------------


def test_inline_columns() -> None:
    workload = Workload.from_requests(
        [
            request("a", 5.5, 10, 3, dp_rank=1, session_id="s", turn_index=4),
            request("b", 2.0, 0, 0, prefill_dp_rank=2, metadata={"priority": 1}),
        ]
    )
    assert len(workload) == 2
    assert workload.arrival_ms.tolist() == [5.5, 2.0]
    assert workload.input_length.tolist() == [10, 0]
    assert workload.output_length.tolist() == [3, 0]
    assert workload.dp_rank.tolist() == [1, -1]
    assert workload.prefill_dp_rank.tolist() == [-1, 2]
    assert workload.request_id.to_list() == ["a", "b"]
    assert workload.session_id.to_list() == ["s", None]
    assert workload.turn_index.tolist() == [4, -1]
    assert workload.metadata == [None, {"priority": 1}]
    assert workload.block_ids is None
    assert workload.output_token_ids is None
    dtypes = [c.dtype for c in (workload.arrival_ms, workload.input_length, workload.dp_rank)]
    assert dtypes == [np.float64, np.int32, np.int32]


def test_inline_labels_are_absent_when_nobody_has_one() -> None:
    workload = Workload.from_requests([request("a"), request("b")])
    assert (workload.session_id, workload.turn_index, workload.metadata) == (None, None, None)


def test_no_requests() -> None:
    workload = Workload.from_requests([])
    assert len(workload) == 0
    assert workload.prefix_tree(16).node_count == 0
    assert len(workload.speedup(2.0)) == 0


def test_planned_outputs_replace_the_output_length() -> None:
    workload = Workload.from_requests(
        [
            request("a", osl=5, output_token_ids=[8, 9]),
            request("b", osl=5, output_token_ids=[]),
            request("c", osl=5),
        ]
    )
    assert workload.output_length.tolist() == [2, 0, 5]
    assert workload.output_offsets.tolist() == [0, 2, 2, 2]
    assert workload.output_token_ids.tolist() == [8, 9]
    assert workload.block_offsets.tolist() == [0, 0, 0, 0]
    assert workload.prefix_tree(2).node_count == 0


def test_token_ids_share_prefixes() -> None:
    workload = Workload.from_requests(
        [
            request("a", isl=5, input_token_ids=[1, 2, 3, 4, 5]),
            request("b", isl=4, input_token_ids=[1, 2, 3, 9]),
            request("c", isl=2, input_token_ids=[1, 2], osl=3, output_token_ids=[3, 4, 5]),
        ]
    )
    assert workload.prefix_tree(2).nodes.tolist() == [0, 1, 0, 2, 0, 1]


def test_default_tokens_are_exact_beside_authored_ones() -> None:
    """Token k of request i without ids is i * 1000003 + k mod 2**32."""
    wrapped = [(5000 * 1_000_003 + k) % 2**32 for k in range(4)]
    authored = [
        request("a", isl=4, input_token_ids=[1_000_003, 1_000_004, 1_000_005, 7]),
        request("b", isl=4),
        *(request(f"filler{i}", isl=1) for i in range(4998)),
        request("c", isl=4),
        request("d", isl=4, input_token_ids=wrapped),
    ]
    workload = Workload.from_requests(authored)
    assert reusable(workload, 0, 1, 1) == 3
    assert reusable(workload, 5000, 5001, 1) == 4


def test_planned_output_without_a_prompt_can_equal_default_tokens() -> None:
    workload = Workload.from_requests(
        [request("a", isl=4), request("b", isl=0, output_token_ids=[0, 1, 2, 5])]
    )
    tree = workload.prefix_tree(2)
    assert tree.nodes.tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"isl": 2**31}, r"requests\[1\]\.input_tokens: got 2147483648, expected .* 2147483647"),
        ({"osl": 2**31}, r"requests\[1\]\.output_tokens: got 2147483648"),
        ({"dp_rank": 2**31}, r"requests\[1\]\.dp_rank: got 2147483648"),
        ({"input_token_ids": [1, 2]}, r"requests\[1\]\.input_token_ids: .* expected 4 whole"),
        ({"input_token_ids": [1, 2, 3, 2**32]}, r"requests\[1\]\.input_token_ids"),
        ({"output_token_ids": [-1]}, r"requests\[1\]\.output_token_ids: got \[-1\]"),
    ],
)
def test_inline_errors_name_the_field(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        Workload.from_requests([request("a"), request("b", **changes)])


# --- columns --------------------------------------------------------------------------------------


def test_columns_of_any_kind() -> None:
    for convert in (list, np.array, pl.Series, lambda v: pl.Series(v, dtype=pl.Float64)):
        workload = Workload.from_columns(convert([0, 5]), convert([3, 4]), convert([1, 0]))
        assert workload.input_length.tolist() == [3, 4]
        assert workload.input_length.dtype == np.int32
        assert workload.arrival_ms.flags.writeable
        assert workload.dp_rank.tolist() == [-1, -1]
        assert workload.block_offsets is None


def test_hash_ids_are_numbered_by_first_appearance_and_surplus_is_dropped() -> None:
    for ids in ([[50, 7, 99], [50, 2**64 - 1]], [[9, 3, 4], [9, 0]]):
        workload = columns(input_length=[9, 8], hash_ids=ids, block_tokens=8)
        assert workload.block_offsets.tolist() == [0, 2, 3]
        assert workload.block_ids.tolist() == [0, 1, 0]
        assert workload.block_ids.dtype == np.uint32
    series = pl.Series([[5, 6], [5]])
    workload = columns(input_length=[9, 8], hash_ids=series, block_tokens=8)
    assert workload.block_ids.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrival_ms": [0, np.nan]}, r"arrival_ms\[1\]: got nan, expected a finite number"),
        ({"arrival_ms": [np.inf, 0]}, r"arrival_ms\[0\]: got inf"),
        ({"arrival_ms": [0, -1]}, r"arrival_ms\[1\]: got -1.0, expected .* 0 or more"),
        ({"arrival_ms": ["0", "1"]}, r"arrival_ms: got '0', expected numbers"),
        ({"arrival_ms": [[0, 1]]}, r"arrival_ms: got 'shape \(1, 2\)'"),
        ({"input_length": [3]}, r"input_length: got '1 values', expected one value per request, 2"),
        ({"input_length": [3, -4]}, r"input_length\[1\]: got -4"),
        ({"input_length": [3, 2**31]}, r"input_length\[1\]: got 2147483648, .* 2147483647"),
        ({"input_length": [3, 1.5]}, r"input_length\[1\]: got 1.5"),
        ({"input_length": pl.Series([3, None])}, r"input_length\[1\]: got nan"),
        ({"input_length": [3, "4"]}, r"input_length: got '3'"),
        ({"input_length": [True, False]}, r"input_length: got True"),
        ({"output_length": [3, -4]}, r"output_length\[1\]: got -4"),
        ({"dp_rank": [0, -2]}, r"dp_rank\[1\]: got -2"),
        ({"request_id": ["a"]}, r"request_id: got '1 values'"),
        ({"request_id": [{}, 3]}, r"request_id: got 'list', expected a sequence of strings"),
        ({"metadata": [None]}, r"metadata: got '1 values'"),
        ({"block_tokens": 0}, r"block_tokens: got 0, expected a whole number, 1 or more"),
        ({"hash_ids": [[1]]}, r"hash_ids: got '1 values', expected one list per request, 2"),
        ({"hash_ids": [[1], [-1]]}, r"hash_ids\[1\]: got \[-1\]"),
        ({"hash_ids": [[1], [2**64]]}, r"hash_ids\[1\]"),
        ({"hash_ids": [[1], [1.5]]}, r"hash_ids\[1\]: got \[1.5\]"),
        ({"hash_ids": [[1], [1]], "block_tokens": 2}, r"input_length\[0\]: got 3, .* at most 2"),
        ({"hash_ids": [[1], [1]], "block_ids": [1]}, r"hash_ids: .* expected one of the two"),
        ({"block_ids": [1]}, r"block_offsets: missing, expected a column beside block_ids"),
        ({"block_offsets": [0, 1, 2]}, r"block_ids: missing"),
        ({"block_offsets": [0, 2], "block_ids": [1, 2]}, r"block_offsets: got '2 values'"),
        ({"block_offsets": [0, 2, 1], "block_ids": [1, 2]}, r"block_offsets: .* rising"),
        ({"block_offsets": [0, 3, 2], "block_ids": [1, 2]}, r"block_offsets\[1\]: got 3"),
        ({"block_offsets": [0, 1, 2], "block_ids": [1, 2**32]}, r"block_ids\[1\]: got 4294967296"),
        (
            {"output_offsets": [0, 2, 2], "output_token_ids": [1, 2]},
            r"output_length\[0\]: got 1, expected 2, the number of its planned output tokens",
        ),
    ],
)
def test_column_errors_name_column_and_row(changes, message) -> None:
    with pytest.raises(InputError, match=message) as caught:
        columns(**changes)
    assert "\n" not in str(caught.value)


# --- views ----------------------------------------------------------------------------------------


def full() -> Workload:
    return columns(
        request_id=["a", "b"],
        session_id=["s", None],
        turn_index=[0, 1],
        metadata=[None, 1],
        block_offsets=[0, 1, 2],
        block_ids=[7, 7],
        block_tokens=4,
        output_offsets=[0, 1, 3],
        output_token_ids=[5, 6, 7],
    )


def test_lengths_only_drops_content() -> None:
    workload = full()
    workload.prefix_tree(1)
    bare = workload.lengths_only()
    assert bare.block_ids is None
    assert bare.output_token_ids is None
    assert bare.output_length.tolist() == [1, 2]
    assert bare.prefix_tree(1).node_count == 0
    assert workload.prefix_tree(1).node_count > 0


def test_limit_takes_the_first_rows() -> None:
    one = full().limit(1)
    assert len(one) == 1
    assert one.request_id.to_list() == ["a"]
    assert one.session_id.to_list() == ["s"]
    assert (one.turn_index.tolist(), one.metadata) == ([0], [None])
    assert (one.block_offsets.tolist(), one.block_ids.tolist()) == ([0, 1], [7])
    assert (one.output_offsets.tolist(), one.output_token_ids.tolist()) == ([0, 1], [5])
    assert one.prefix_tree(1).nodes.tolist() == [0, 1, 2, 3]
    assert len(full().limit(9)) == 2
    assert len(full().limit(0)) == 0
    assert full().limit(0).prefix_tree(4).node_count == 0
    with pytest.raises(InputError, match="limit: got -1"):
        full().limit(-1)


def test_speedup_divides_gaps_and_keeps_the_first_arrival() -> None:
    workload = columns(arrival_ms=[10, 5])
    assert workload.speedup(2).arrival_ms.tolist() == [7.5, 5.0]
    assert workload.arrival_ms.tolist() == [10, 5]
    assert columns(arrival_ms=[0, 1]).speedup(3).arrival_ms.tolist() == [0, 1 / 3]
    assert full().prefix_tree(2) is not None
    shared = full()
    assert shared.speedup(2).prefix_tree(2) is shared.prefix_tree(2)


@pytest.mark.parametrize("ratio", [0, -1, float("nan"), float("inf"), "2", None, True])
def test_speedup_must_be_positive(ratio) -> None:
    with pytest.raises(InputError, match=r"arrival_speedup_ratio: got .* a finite number above 0"):
        columns().speedup(ratio)


def test_speedup_that_overflows() -> None:
    with pytest.raises(InputError, match="arrival_speedup_ratio"):
        columns(arrival_ms=[0, 1e300]).speedup(1e-300)


def test_repr_is_short() -> None:
    assert repr(columns()) == "<Workload: 2 requests, lengths only>"
    assert repr(full()) == "<Workload: 2 requests, 4-token blocks>"


# --- traffic --------------------------------------------------------------------------------------


def test_traffic_of_a_trace(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [(1000, [1, 2]), (1500, [1, 2]), (1300, [3, 4])]
    text = "".join(
        f'{{"timestamp": {t}, "output_length": 2, "hash_ids": {ids}}}\n' for t, ids in rows
    )
    (tmp_path / "t.jsonl").write_text(text)
    traffic = Traffic(
        source_type="trace", trace_path="t.jsonl", trace_block_size=8, arrival_speedup_ratio=2.0
    )
    workload = Workload.from_traffic(traffic, spec=None)
    assert workload.arrival_ms.tolist() == [0, 250, 150]
    assert workload.input_length.tolist() == [16, 16, 16]
    assert workload.block_tokens == 8
    plain = Workload.from_traffic(Traffic(source_type="trace", trace_path="t.jsonl"), spec=None)
    assert plain.arrival_ms.tolist() == [0, 500, 300]
    assert plain.input_length.tolist() == [1024, 1024, 1024]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trace_block_size": 0}, "traffic.trace_block_size: got 0"),
        ({"arrival_speedup_ratio": 0.0}, "traffic.arrival_speedup_ratio: got 0.0"),
        ({"trace_format": "mooncak"}, r"traffic.trace_format: .* \(did you mean mooncake\?\)"),
        (
            {"trace_path": "absent.jsonl"},
            "trace file: got 'absent.jsonl', expected a readable file",
        ),
    ],
)
def test_traffic_errors_name_the_field(changes, message) -> None:
    given = {"source_type": "trace", "trace_path": "t.jsonl"} | changes
    with pytest.raises(InputError, match=message):
        Workload.from_traffic(Traffic(**given), spec=SimpleNamespace())
