"""The one error hierarchy. Every message names the place, the value, and what was expected."""

from __future__ import annotations


class VecsimError(Exception):
    """Base of every error that vecsim raises on purpose. Its text is one line."""


_LONGEST_VALUE = 200
"""Characters of a value that a message repeats; whole paths among them."""


class InputError(VecsimError):
    """A malformed or impossible input.

    Attributes:
        where: field path (`engine.rank.block_size`) or place in a file (`trace.jsonl:3, hash_ids`).
        value: the offending value, already shortened for print; None when a field is missing.
        expected: what would have been accepted.
    """

    def __init__(self, where: str, value: object, expected: str) -> None:
        self.where = where
        self.value = value
        self.expected = expected
        super().__init__(f"{where}: {self._describe(value)}expected {expected}")

    @staticmethod
    def _describe(value: object) -> str:
        if value is MISSING:
            return "missing, "
        try:
            text = " ".join(repr(value).splitlines())
        except (ValueError, RecursionError):  # too many digits, or too deep
            text = f"a value of type {type(value).__name__}"
        if len(text) > _LONGEST_VALUE:
            text = text[: _LONGEST_VALUE - 3] + "..."
        return f"got {text}, "


class NotSupportedYetError(InputError):
    """A valid descriptor field or combination whose feature is not built yet."""

    def __init__(self, where: str, detail: str = "") -> None:
        self.where = where
        self.value = None
        self.expected = detail
        suffix = f" ({detail})" if detail else ""
        VecsimError.__init__(self, f"not supported yet: {where}{suffix}")


class SimulationError(VecsimError):
    """A run that cannot go on: a timing model answered with an unusable duration, or the progress
    guard found a standstill that no rule settles. The message shows the queues."""


class ConformanceError(VecsimError):
    """A handoff that does not keep to the rules.

    Attributes:
        group: which rules: order, lifecycle, counts, KV visibility or drain.
        where: field of the record.
        value: what the run gave.
        expected: what the rules ask for.
    """

    def __init__(self, group: str, where: str, value: object, expected: object) -> None:
        self.group = group
        self.where = where
        self.value = value
        self.expected = expected
        super().__init__(f"handoff conformance, {group}: {where}: got {value}, expected {expected}")


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
"""Passed as `value` of an `InputError` when the field is absent."""
