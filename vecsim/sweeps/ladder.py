"""Searching ordered candidates for the lowest feasible one, with few questions."""

from __future__ import annotations

import itertools
from collections.abc import Callable


class Ladder:
    """Candidates 0 .. count - 1, expected to be infeasible up to some point and feasible above it.

    Answers are remembered, so none is asked for twice.

    Attributes:
        count: number of candidates.
        known: answers so far, by candidate.
    """

    def __init__(self, count: int, ask: Callable[[int], bool]) -> None:
        self.count = count
        self.known: dict[int, bool] = {}
        self._ask = ask

    def feasible(self, i: int) -> bool:
        """Whether candidate `i` is feasible."""
        if i not in self.known:
            self.known[i] = self._ask(i)
        return self.known[i]

    def lowest(self, below: int | None = None) -> int | None:
        """A feasible candidate whose lower neighbour is infeasible (or missing); None when the
        highest is infeasible. Where feasibility is monotone, it is the lowest feasible one.

        Args:
            below: look at candidates below this one only; None = all.
        """
        end = self.count if below is None else below
        high = min((i for i in range(end) if self.known.get(i)), default=end - 1)
        if high < 0 or not self.feasible(high):
            return None
        low = max((i for i in range(high) if self.known.get(i) is False), default=-1)
        while high - low > 1:
            middle = (low + high) // 2
            if self.feasible(middle):
                high = middle
            else:
                low = middle
        return high

    def audit(self, answer: int | None, questions: int) -> int | None:
        """Spend up to `questions` more on looking for candidates that break the order, in turn in
        the middle of the longest decode run never asked about and beside the answer.

        Returns:
            The answer, lowered when a lower feasible candidate came to light.
        """
        spent = 0
        while spent < questions:
            candidate = self._beside(answer) if spent % 2 and answer is not None else None
            if candidate is None:
                candidate = self._middle_of_the_unknown()
            if candidate is None:
                break
            spent += 1
            if self.feasible(candidate) and (answer is None or candidate < answer):
                before = len(self.known)
                answer = self.lowest(below=candidate + 1)
                spent += len(self.known) - before
        return answer

    def _beside(self, answer: int) -> int | None:
        near = (answer + 1, answer - 2, answer + 2, answer - 3)
        return next((i for i in near if 0 <= i < self.count and i not in self.known), None)

    def _middle_of_the_unknown(self) -> int | None:
        marks = [-1, *sorted(self.known), self.count]
        width, start = max((b - a, -a) for a, b in itertools.pairwise(marks))
        return None if width < 2 else -start + width // 2

    @property
    def breaches(self) -> list[tuple[int, int]]:
        """Pairs (feasible, infeasible) of neighbours among the candidates asked about, lower first:
        decode runs where more is not better."""
        asked = sorted(self.known)
        return [
            (low, high)
            for low, high in itertools.pairwise(asked)
            if self.known[low] and not self.known[high]
        ]
