"""Small questions that validation asks of one value; each raises InputError naming the field."""

from __future__ import annotations

import json
import math
from typing import NoReturn

from vecsim.errors import MISSING, InputError


def refuse(where: str, value: object, expected: str) -> NoReturn:
    """Raise InputError."""
    raise InputError(where, value, expected)


def positive(where: str, value: int) -> None:
    """An integer above zero."""
    if value <= 0:
        refuse(where, value, "a positive integer")


def optional_positive(where: str, value: int | None) -> None:
    """None, or an integer above zero."""
    if value is not None:
        positive(where, value)


def non_negative(where: str, value: float) -> None:
    """A finite number, zero or above."""
    if not 0.0 <= value < math.inf:
        refuse(where, value, "a finite number >= 0")


def finite_positive(where: str, value: float) -> None:
    """A finite number above zero."""
    if not 0.0 < value < math.inf:
        refuse(where, value, "a finite number > 0")


def optional_finite_positive(where: str, value: float | None) -> None:
    """None, or a finite number above zero."""
    if value is not None:
        finite_positive(where, value)


def known(where: str, value: str, names: tuple[str, ...]) -> None:
    """One of some names."""
    if value not in names:
        refuse(where, value, "one of " + ", ".join(repr(name) for name in names))


def present(where: str, value: object, expected: str) -> None:
    """Not None."""
    if value is None:
        refuse(where, MISSING, expected)


def json_value(where: str, value: object) -> None:
    """What JSON can hold: no NaN, no infinity, no objects, nothing inside itself."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        refuse(where, value, "what JSON can hold: finite numbers, string keys, no objects")


def unicode_text(where: str, value: str | None) -> None:
    """None, or a string without lone surrogates, which no encoding can write."""
    if value is not None and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            refuse(where, value, "Unicode text")
