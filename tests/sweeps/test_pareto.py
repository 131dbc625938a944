"""The Pareto front: strict dominance, ties kept, rows without values left out."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecsim.errors import InputError
from vecsim.sweeps.pareto import pareto_front, undominated


def brute(values):
    return [not any((o <= v).all() and (o < v).any() for o in values) for v in values]


@given(st.integers(1, 3), st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=30))
def test_equals_brute_force(objectives, rows):
    values = np.array(rows, float).reshape(-1, 3)[:, :objectives]
    assert undominated(values).tolist() == brute(values)


def test_directions_ties_nulls_and_failed_rows():
    frame = pl.DataFrame(
        {
            "name": list("abcdefg"),
            "status": ["ok"] * 6 + ["failed"],
            "latency": [1.0, 2.0, 2.0, 3.0, None, 1.0, 0.0],
            "rate": [5, 9, 9, 8, 99, 5, 99],
        }
    )
    front = pareto_front(frame, {"latency": "min", "rate": "max"})
    assert front["name"].to_list() == ["a", "b", "c", "f"]
    assert pareto_front(frame, {"rate": "min"})["name"].to_list() == ["a", "f"]


@pytest.mark.parametrize("objectives", [{}, {"nothing": "min"}, {"name": "min"}, {"rate": "up"}])
def test_malformed_objectives(objectives):
    frame = pl.DataFrame({"name": ["a"], "rate": [1]})
    with pytest.raises(InputError, match="objectives"):
        pareto_front(frame, objectives)


def test_rows_with_nan_take_no_part_and_whole_numbers_are_compared_exactly():
    frame = pl.DataFrame({"x": [1.0, 2.0, float("nan")], "n": [2**53 + 1, 2**53, 2**53 + 1]})
    assert pareto_front(frame, {"x": "min"})["x"].to_list() == [1.0]
    assert pareto_front(frame, {"n": "min"})["n"].to_list() == [2**53]
    assert pareto_front(frame, {"n": "max", "x": "min"})["x"].to_list() == [1.0]
