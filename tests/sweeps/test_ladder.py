"""Searching ordered candidates: few questions, and an eye for broken order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecsim.sweeps.ladder import Ladder


class Counted:
    """Answers from a list; counts what it is asked."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def __call__(self, i):
        self.asked.append(i)
        return self.answers[i]


@given(st.integers(1, 200), st.data())
def test_monotone_ladders_are_solved_with_few_questions(count, data):
    first = data.draw(st.integers(0, count))
    ask = Counted([i >= first for i in range(count)])
    ladder = Ladder(count, ask)
    assert ladder.lowest() == (first if first < count else None)
    assert len(ask.asked) <= 1 + np.ceil(np.log2(count + 1))
    assert len(set(ask.asked)) == len(ask.asked)
    assert ladder.breaches == []


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(0, 8))
def test_any_answer_is_feasible_and_its_neighbour_is_not(answers, questions):
    ask = Counted(answers)
    ladder = Ladder(len(answers), ask)
    found = ladder.audit(ladder.lowest(), questions)
    if found is None:
        assert not answers[-1]
    else:
        assert answers[found]
        assert found == 0 or ladder.known[found - 1] is False
    assert len(set(ask.asked)) == len(ask.asked)


def test_below_bounds_the_search_and_uses_earlier_answers():
    ask = Counted([i >= 10 for i in range(32)])
    ladder = Ladder(32, ask)
    assert ladder.lowest(below=8) is None
    assert ladder.lowest() == 10
    assert all(i > 7 for i in ask.asked[1:])
    assert ladder.lowest(below=0) is None


@pytest.mark.parametrize(
    "answers",
    [
        [3 <= i < 12 or i >= 20 for i in range(36)],
        [i >= 14 and not 22 <= i < 30 for i in range(36)],
        [i >= 20 and i != 21 for i in range(36)],
        [5 <= i < 30 for i in range(36)],
    ],
)
def test_broken_order_is_found_within_a_third_of_the_questions(answers):
    ask = Counted(answers)
    ladder = Ladder(36, ask)
    found = ladder.lowest()
    found = ladder.audit(found, 12 - len(ask.asked))
    assert len(ask.asked) <= 12
    assert ladder.breaches
    assert answers[found]
    assert found == 0 or not answers[found - 1]
