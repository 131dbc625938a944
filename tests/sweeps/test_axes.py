"""Axes, expressions and the points they span."""

import numpy as np
import polars as pl
import pytest

from vecsim.errors import InputError
from vecsim.sweeps.axes import points_of, read_axis
from vecsim.sweeps.expressions import parse_expression

WORKERS = "topology.workers.initial_workers"
BLOCKS = "engine.rank.num_gpu_blocks"


def values(axis):
    return [choice.label for choice in axis.choices]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1, 2, 4], [1, 2, 4]),
        ((1,), [1]),
        (7, [7]),
        (range(1, 6, 2), [1, 3, 5]),
        (np.array([1, 2]), [1, 2]),
        (pl.Series([3, 4]), [3, 4]),
        ({"range": [1, 4]}, [1, 2, 3, 4]),
        ({"range": [0, 1, 0.25]}, [0, 0.25, 0.5, 0.75, 1.0]),
        ({"range": [1, 8, 3]}, [1, 4, 7]),
        ({"log_range": [1, 64, 7]}, [1, 2, 4, 8, 16, 32, 64]),
        ({"log_range": [1, 3, 9]}, [1, 2, 3]),
        ({"log_range": [0.5, 2.0, 3]}, [0.5, 1.0, 2.0]),
    ],
)
def test_lists_ranges_and_log_ranges(given, expected):
    axis = read_axis("workers", given)
    assert values(axis) == expected
    assert axis.choices[0].fields == {WORKERS: expected[0]}


@pytest.mark.parametrize(
    "given",
    [
        [],
        "abc",
        {"range": [1]},
        {"range": [3, 1]},
        {"range": [1, 3, 0]},
        {"range": [1, float("inf")]},
        {"range": [True, 3]},
        {"log_range": [0, 3, 4]},
        {"log_range": [1, 3]},
        {"log_range": [1, 3, 1]},
        {"log_range": [1, 3, 2.5]},
        {"a": 3},
        {},
    ],
)
def test_malformed_values_name_the_axis(given):
    with pytest.raises(InputError) as error:
        read_axis("workers", given)
    assert error.value.where.startswith("axes.workers")


def test_an_unknown_path_names_a_near_match__dynamo_13517():
    with pytest.raises(InputError, match=r"axes\.engine\.rank\.num_gpu_block.*num_gpu_blocks"):
        read_axis("engine.rank.num_gpu_block", [1])
    with pytest.raises(InputError, match="initial_workers"):
        read_axis("topology.workers.initial_worker", [1])
    with pytest.raises(InputError, match=r"workload\.arrival_speedup"):
        read_axis("workload.speed", [1])


@pytest.mark.parametrize(
    "path",
    [
        "spec.engine.dp_size",
        "engine.rank.timing_model",
        "engine.rank.timing_model.prefill_ms",
        "engine.prefill.rank.block_size",
        "traffic.request_rate",
        "tokenization.workers",
        "topology.kind",
        "requests[0].input_tokens",
        "adapters.placement.config.anything",
        "engine.rank.kv_bytes_per_token",
        "sla.ttft_ms",
    ],
)
def test_known_paths_are_taken(path):
    assert values(read_axis(path, [1])) == [1]


def test_grid_varies_the_last_axis_fastest():
    points = points_of({"workers": [1, 2], "dp": [1, 4]})
    assert [tuple(point.labels.values()) for point in points] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert [point.index for point in points] == [0, 1, 2, 3]
    assert points[3].fields == {WORKERS: 2, "engine.dp_size": 4}


def test_zip_takes_axes_side_by_side():
    points = points_of({"workers": [1, 2], "dp": [1, 4]}, combine="zip")
    assert [tuple(point.labels.values()) for point in points] == [(1, 1), (2, 4)]
    with pytest.raises(InputError, match="equal length"):
        points_of({"workers": [1, 2], "dp": [1]}, combine="zip")


def test_explicit_points_may_differ_in_what_they_set():
    points = points_of([{"workers": 3}, {BLOCKS: 8, "concurrency": 2}])
    assert points[0].fields == {WORKERS: 3}
    assert points[1].fields == {BLOCKS: 8, "workload.concurrency": 2}


def test_bundles_set_several_fields_together_and_show_them():
    shapes = {"tp1": {"tp": 1, BLOCKS: 100}, "tp2": {"tp": 2, BLOCKS: 300}}
    points = points_of({"shape": shapes, "workers": [1, 2]})
    assert len(points) == 4
    assert points[2].fields == {"engine.tensor_parallel_size": 2, BLOCKS: 300, WORKERS: 1}
    assert points[2].labels == {
        "shape": "tp2",
        "engine.tensor_parallel_size": 2,
        BLOCKS: 300,
        "workers": 1,
    }


def test_a_bundle_may_hold_objects():
    timing = {"type": "fixed", "prefill_ms": 1.0, "decode_ms": 2.0}
    (point,) = points_of({"gpu": {"a": {"engine.rank.timing_model": timing}}})
    assert point.fields["engine.rank.timing_model"] == timing
    assert '"decode_ms": 2.0' in point.labels["engine.rank.timing_model"]


def test_two_axes_must_not_set_one_field():
    with pytest.raises(InputError, match="no other axis"):
        points_of({"workers": [1], WORKERS: [2]})


def test_constraints_leave_points_out():
    axes = {"workers": [1, 2, 4], "tp": [1, 2, 4]}
    points = points_of(axes, constraints=["workers * tp <= 4", "not (workers == 1 and tp == 1)"])
    assert [tuple(p.labels.values()) for p in points] == [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    assert len(points_of({WORKERS: [1, 2]}, constraints=["initial_workers > 1"])) == 1
    assert len(points_of({WORKERS: [1, 2]}, constraints=[f"{WORKERS} > 1"])) == 1
    assert points_of({"shape": {"a": {"tp": 1}, "b": {"tp": 2}}}, constraints=["tp > 2"]) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3", 7),
        ("-x + y / 2 - 7 // 2 % 2", 0.5),
        ("1 < x <= 2 < y", True),
        ("x == 2 or missing", True),
        ("max(x, y, 3) - min(x, y) + abs(-1)", 6),
        ("name == 'a'", True),
    ],
)
def test_expressions(text, expected):
    assert parse_expression("e", text).evaluate({"x": 2, "y": 7, "name": "a"}) == expected


@pytest.mark.parametrize(
    "text",
    ["", "x +", "open('f')", "x ** 9", "[1]", "x.y()", "lambda: 1", "(1).real", "max()", "x[0]", 3],
)
def test_expressions_are_arithmetic_and_logic_only(text):
    with pytest.raises(InputError) as error:
        parse_expression("constraints[0]", text)
    assert error.value.where == "constraints[0]"


def test_expression_errors_name_what_is_known():
    with pytest.raises(InputError, match=r"one of .*workers"):
        points_of({"workers": [1]}, constraints=["worker < 2"])
    with pytest.raises(InputError, match="division"):
        parse_expression("e", "1 / x").evaluate({"x": 0})
    with pytest.raises(InputError, match=r"a\.x or b\.x"):
        parse_expression("e", "x").evaluate({"a.x": 1, "b.x": 2})


@pytest.mark.parametrize(
    "text",
    [
        "workers + " + "9" * 5000 + " > 1",
        "workers < " + " * ".join(["9999999999"] * 150),
        " + ".join(["workers"] * 990) + " > 3",
        "'%999999999d' % 1 == ''",
        "'a' * 9999999999 == ''",
        "(" * 500 + "workers" + ")" * 500 + " > 1",
        "-" * 1500 + "workers > 1",
        "workers",
        "workers * 2",
        "'yes'",
    ],
)
def test_a_constraint_that_is_too_much_or_no_condition_is_one_line(text):
    with pytest.raises(InputError) as refused:
        points_of({"workers": [1, 2]}, constraints=[text])
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 500
