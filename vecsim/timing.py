"""Timing models given as functions: compiled once, called by the kernels at their address."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numba
from numba.core.errors import NumbaError

from vecsim.errors import InputError

_PREFILL = numba.types.float64(*[numba.types.int64] * 3)
_DECODE = numba.types.float64(*[numba.types.int64] * 4)


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
    def _compiled(self) -> tuple[Any, Any]:
        return _compile("timing.prefill", self.prefill, _PREFILL), _compile(
            "timing.decode", self.decode, _DECODE
        )

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the compiled prefill and decode functions; valid while this object lives.

        Raises:
            InputError: a function cannot be compiled.
        """
        prefill, decode = self._compiled
        return prefill.address, decode.address


def _compile(where: str, function: Callable, signature: Any) -> Any:
    try:
        return _guarded(function, len(signature.args), signature)
    except (NumbaError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            where, function, f"a function that Numba compiles as {signature} ({reason})"
        ) from error


def _guarded(function: Callable, arguments: int, signature: Any) -> Any:
    """The function as C code that answers NaN where it raises: a C caller sees no exception."""
    inner = numba.njit(error_model="numpy")(getattr(function, "py_func", function))
    if arguments == 3:

        def price(batch, mean_isl, mean_prefix):
            try:
                return float(inner(batch, mean_isl, mean_prefix))
            except Exception:
                return math.nan

    else:

        def price(batch, context_sum, mean_context, capacity):
            try:
                return float(inner(batch, context_sum, mean_context, capacity))
            except Exception:
                return math.nan

    return numba.cfunc(signature)(price)


def check_timing(where: str, timing: object) -> None:
    """Raise InputError unless `timing` is None or a CompiledTiming."""
    if timing is not None and not isinstance(timing, CompiledTiming):
        raise InputError(where, timing, "a vecsim.CompiledTiming or None")
