"""Functions with a C address: a kernel calls them without having compiled them in."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import numba
from numba.core.ccallback import CFunc
from numba.core.errors import NumbaError

from vecsim.kernels.compile.jit import OPTIONS, entry_pipeline, keep_and_quicken
from vecsim.kernels.compile.mode import DISABLED


class Callback:
    """A function that is compiled when its address is first asked for, through the kernel cache."""

    def __init__(self, function: Callable, signature: Any) -> None:
        self._function = function
        self._signature = signature

    @functools.cached_property
    def _c_function(self) -> Any:
        if DISABLED:
            return c_caller(self._signature)(self._function)
        options = dict(entry_pipeline())
        pipeline = {name: options.pop(name) for name in ("pipeline_class",) if name in options}
        compiled = CFunc(
            self._function,
            (self._signature.args, self._signature.return_type),
            locals={},
            options={**OPTIONS, **options},
            **pipeline,
        )
        keep_and_quicken(compiled, self._function)
        compiled.compile()
        return compiled

    @property
    def address(self) -> int:
        """Address of the compiled function; it lives as long as this object."""
        return address_of(self._c_function)


class GuardedFunction:
    """A user's function as C code that answers NaN where it raises: a C caller sees no exception.

    The C function takes one more argument in front, which the user's function does not get. Raises
    ValueError, with the first line of Numba's reason, for what Numba cannot compile.
    """

    def __init__(self, function: Callable, signature: Any) -> None:
        try:
            inner = numba.njit(error_model="numpy")(getattr(function, "py_func", function))
            guarded = _GUARDS[len(signature.args)](inner)
            compiled = c_caller(signature) if DISABLED else numba.cfunc(signature)
            self._c_function = compiled(guarded)
        except (NumbaError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(str(error).strip().splitlines()[0]) from error

    @property
    def address(self) -> int:
        """Address of the compiled function; it lives as long as this object."""
        return address_of(self._c_function)


def _guard_of_three(inner: Callable) -> Callable:
    def price(record, a, b, c):
        try:
            return float(inner(a, b, c))
        except Exception:
            return math.nan

    return price


def _guard_of_four(inner: Callable) -> Callable:
    def price(record, a, b, c, d):
        try:
            return float(inner(a, b, c, d))
        except Exception:
            return math.nan

    return price


_GUARDS = {4: _guard_of_three, 5: _guard_of_four}
"""By how many arguments the C function takes: Numba compiles no `*arguments` for C callers."""


def address_of(c_function: Any) -> int:
    """Address of a compiled C function, or of a ctypes one in plain mode."""
    if DISABLED:
        return ctypes.cast(c_function, ctypes.c_void_p).value
    return c_function.address


def c_caller(signature: Any) -> Any:
    """The ctypes type of C functions with a signature of float64 and int64."""
    kinds = {numba.types.float64: ctypes.c_double, numba.types.int64: ctypes.c_int64}
    return ctypes.CFUNCTYPE(kinds[signature.return_type], *(kinds[a] for a in signature.args))


def callback(signature: Any) -> Callable[[Callable], Callback]:
    """Decorator of a function that kernels call at its address."""
    return functools.partial(Callback, signature=signature)
