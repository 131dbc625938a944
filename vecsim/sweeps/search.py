"""Searching candidates on a grid of axes for the best feasible one, whatever shape the feasible
region has.

Candidates are numbered in order of preference, 0 the best. Where all of them may be asked about,
they are asked in that order up to the first feasible one, which needs no assumption. Otherwise the
search takes samples, and says how much of the order its answer rests on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_AUDITS = 8
"""Preferred candidates beside a sampled answer, off its axes, that are asked about besides."""


class Search:
    """A search; answers are remembered, so no candidate is asked for twice.

    Args:
        places: int [n, k], position of each candidate on each axis, in order of preference.
        values: for each axis the value at each position; numbers are sampled at both ends and at
            powers of two, anything else everywhere.
        ask: whether a candidate is feasible.

    Attributes:
        known: answers so far, by candidate.
    """

    def __init__(
        self, places: np.ndarray, values: Sequence[Sequence[object]], ask: Callable[[int], bool]
    ) -> None:
        self.places = places
        self.count = len(places)
        self.known: dict[int, bool] = {}
        self._values = values
        self._ask = ask
        self._lines: dict[tuple, list[int]] = {}
        for candidate in range(self.count):
            for axis in range(places.shape[1]):
                self._lines.setdefault(self._line_key(candidate, axis), []).append(candidate)

    def feasible(self, candidate: int) -> bool:
        """Whether a candidate is feasible."""
        if candidate not in self.known:
            self.known[candidate] = self._ask(candidate)
        return self.known[candidate]

    # --- with all candidates ----------------------------------------------------------------------

    def in_order(self) -> int | None:
        """The most preferred feasible candidate: all before it are asked about."""
        best = next((i for i in range(self.count) if self.feasible(i)), None)
        if best is not None:
            for neighbour in self.neighbours(best):
                self.feasible(neighbour)
        return best

    # --- with samples -----------------------------------------------------------------------------

    def sampled(self, questions: int) -> int | None:
        """The most preferred feasible candidate that up to `questions` answers bring to light.

        Both ends and the powers of two of every axis come first; then, along each axis, the
        stretch between the best so far and the nearest infeasible candidate before it is halved
        until its neighbours are known; then some candidates just before it in the order. Where
        nothing is feasible, the longest stretches never asked about are halved.
        """
        for candidate in _spread(self._coarse(), max(questions // 2, min(questions, 2))):
            self.feasible(candidate)
        while self.best is None and len(self.known) < min(questions, self.count):
            self.feasible(self._middle_of_the_unknown())
        audits, kept_for_neighbours = 0, 2 * self.places.shape[1]
        while self.best is not None and len(self.known) < questions - kept_for_neighbours:
            step = self._between(self.best)
            if step is None and audits < _AUDITS:
                audits += 1
                step = next((i for i in range(self.best, -1, -1) if i not in self.known), None)
            if step is None:
                break
            self.feasible(step)
        for neighbour in () if self.best is None else self.neighbours(self.best):
            if len(self.known) < questions:
                self.feasible(neighbour)
        return self.best

    def _coarse(self) -> list[int]:
        """Candidates at both ends and powers of two of every axis, and of the order."""
        marked = np.ones(self.count, bool)
        for axis, values in enumerate(self._values):
            marked &= np.isin(self.places[:, axis], _marks(values))
        marked[_marks(range(1, self.count + 1))] = True
        return np.flatnonzero(marked).tolist()

    def _between(self, best: int) -> int | None:
        """The middle of what is unknown between `best` and the nearest infeasible candidate that
        would be preferred, along the first axis where there is something."""
        for line in self._lines_of(best):
            before = line[: line.index(best)]
            low = max((k for k, i in enumerate(before) if i in self.known), default=-1)
            if len(before) - low > 1:
                return before[(low + len(before)) // 2]
        return None

    def _middle_of_the_unknown(self) -> int:
        marks = [-1, *sorted(self.known), self.count]
        width, start = max((b - a, -a) for a, b in itertools.pairwise(marks))
        return -start + width // 2

    # --- what is known ----------------------------------------------------------------------------

    @property
    def best(self) -> int | None:
        """The most preferred candidate known to be feasible."""
        return min((i for i, good in self.known.items() if good), default=None)

    @property
    def rests_on_all(self) -> bool:
        """Whether no candidate that would be preferred is unknown."""
        end = self.count if self.best is None else self.best
        return all(i in self.known for i in range(end))

    def neighbours(self, candidate: int) -> list[int]:
        """The candidates next to one along each axis, those that would be preferred first."""
        found: set[int] = set()
        for line in self._lines_of(candidate):
            at = line.index(candidate)
            found.update(line[max(at - 1, 0) : at] + line[at + 1 : at + 2])
        return sorted(found)

    @property
    def breaches(self) -> list[tuple[int, int]]:
        """Pairs (feasible, infeasible) next to each other among the known candidates of a line,
        the preferred one first: where more is not better."""
        pairs: dict[tuple[int, int], None] = {}
        for line in self._lines.values():
            asked = [i for i in line if i in self.known]
            for low, high in itertools.pairwise(asked):
                if self.known[low] and not self.known[high]:
                    pairs[low, high] = None
        return list(pairs)

    def _lines_of(self, candidate: int) -> Iterator[list[int]]:
        for axis in range(self.places.shape[1]):
            yield self._lines[self._line_key(candidate, axis)]

    def _line_key(self, candidate: int, axis: int) -> tuple:
        """Candidates that differ in one axis only have a key in common."""
        place = self.places[candidate].tolist()
        place[axis] = -1
        return (axis, *place)


def _marks(values: Sequence[object]) -> list[int]:
    """Positions of both ends and, between them, of the first value from each power of two on;
    every position where a value is no number."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or min(numbers) <= 0:
        return list(range(len(values)))
    marks = {0, len(values) - 1}
    powers = np.floor(np.log2(np.asarray(numbers, float)))
    marks.update((np.flatnonzero(np.diff(powers)) + 1).tolist())
    return sorted(marks)


def _spread(candidates: list[int], most: int) -> list[int]:
    """At most `most` of the candidates, evenly spread, both ends included."""
    if len(candidates) <= most:
        return candidates
    at = np.unique(np.linspace(0, len(candidates) - 1, max(most, 1)).round().astype(int))
    return [candidates[i] for i in at]
