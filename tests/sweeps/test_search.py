"""Searching candidates on a grid: exact with all of them, honest with samples."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vecsim.sweeps.search import Search


def line(answers):
    asked = []

    def ask(i):
        asked.append(i)
        return answers[i]

    values = list(range(1, len(answers) + 1))
    return Search(np.arange(len(answers))[:, None], [values], ask), asked


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_in_order_the_first_feasible_one_is_found_and_nothing_asked_twice(answers):
    search, asked = line(answers)
    found = search.in_order()
    assert found == next((i for i, good in enumerate(answers) if good), None)
    assert search.rests_on_all
    assert len(set(asked)) == len(asked) <= (len(answers) if found is None else found + 2)


@given(st.integers(1, 300), st.data())
def test_samples_solve_monotone_orders(count, data):
    first = data.draw(st.integers(0, count))
    search, asked = line([i >= first for i in range(count)])
    found = search.sampled(48)
    if first < count:
        assert found == first
    else:
        assert found is None
    assert len(set(asked)) == len(asked) <= 48


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(2, 40))
def test_samples_keep_to_their_number_and_give_feasible_answers(answers, questions):
    search, asked = line(answers)
    found = search.sampled(questions)
    assert len(set(asked)) == len(asked) <= questions
    assert found is None or answers[found]
    assert found == min((i for i in asked if answers[i]), default=None)
    if found is None and len(asked) == len(answers):
        assert search.rests_on_all


def test_breaches_and_neighbours_on_two_axes():
    places = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])
    good = [False, True, False, False, True, True]
    search = Search(places, [[1, 2, 3], ["a", "b"]], lambda i: good[i])
    assert search.in_order() == 1
    assert search.neighbours(1) == [0, 3]
    assert search.breaches == [(1, 3)]
