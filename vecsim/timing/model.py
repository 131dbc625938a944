"""Timing models given as functions, and what the kernels see of any custom model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from vecsim.errors import InputError
from vecsim.kernels.compile.callback import GuardedFunction
from vecsim.kernels.timing.durations import DECODE, PREFILL


class BoundTiming:
    """A custom timing model as one run uses it: a record for each phase, and its counters.

    The addresses are valid as long as this object lives. A record is laid out as
    `vecsim.kernels.timing.durations` says.
    """

    def __init__(self, prefill: np.ndarray, decode: np.ndarray, keep: Any) -> None:
        self._prefill = prefill
        self._decode = decode
        self._keep = keep

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the prefill and the decode record."""
        return self._prefill.ctypes.data, self._decode.ctypes.data

    @property
    def outside(self) -> tuple[int, int] | None:
        """Prefill and decode look-ups so far outside a table's range; None without a table."""
        return None

    @property
    def farthest(self) -> list[str]:
        """How far outside a table's range its look-ups went, in words; empty without a table."""
        return []

    @property
    def refusal(self) -> str | None:
        """Why the model gave no price, if it knows."""
        return None


class PassTiming(Protocol):
    """A model of what passes cost, whatever it is made of."""

    def bind(self) -> BoundTiming:
        """The model for one run. Raises InputError where it cannot be used."""


@dataclass(frozen=True, eq=False)
class CompiledTiming:
    """Prices of a pass as two functions that Numba can compile; both return raw ms (float).

    The raw price is rounded to whole nanoseconds and divided by the role's speedups, as for the
    built-in models. NaN, a negative price, or one above 2**64 s ends the run with an error.

    Attributes:
        prefill: `(batch_size, mean_isl, mean_prefix)` of the requests with prompt tokens in the
            pass, means floored (tokens). Not asked when mean_isl <= mean_prefix: that is free.
        decode: `(batch_size, context_sum, mean_context, capacity_tokens)`: decoding requests, the
            sum and floored mean of their lengths (tokens), and the tokens that a pool holds.
    """

    prefill: Callable[[int, int, int], float]
    decode: Callable[[int, int, int, int], float]

    @cached_property
    def _compiled(self) -> tuple[GuardedFunction, GuardedFunction]:
        return _compile("timing.prefill", self.prefill, PREFILL), _compile(
            "timing.decode", self.decode, DECODE
        )

    def bind(self) -> BoundTiming:
        """The model for one run. Raises InputError: a function cannot be compiled."""
        records = [np.array([code.address, 0]) for code in self._compiled]
        return BoundTiming(*records, self._compiled)


def _compile(where: str, function: Callable, signature: Any) -> GuardedFunction:
    try:
        return GuardedFunction(function, signature)
    except ValueError as error:
        raise InputError(
            where, function, f"a function that Numba compiles as {signature} ({error})"
        ) from error


def check_timing(where: str, timing: object) -> None:
    """Raise InputError unless `timing` is None or a timing model."""
    if timing is not None and not hasattr(timing, "bind"):
        raise InputError(where, timing, "a vecsim.CompiledTiming, a vecsim.TimingTable, or None")
