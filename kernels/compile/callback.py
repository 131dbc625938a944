"""Functions with a C address: a kernel calls them without having compiled them in."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numba
from numba.core.ccallback import CFunc

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
        if DISABLED:
            return ctypes.cast(self._c_function, ctypes.c_void_p).value
        return self._c_function.address


def c_caller(signature: Any) -> Any:
    """The ctypes type of C functions with a signature of float64 and int64."""
    kinds = {numba.types.float64: ctypes.c_double, numba.types.int64: ctypes.c_int64}
    return ctypes.CFUNCTYPE(kinds[signature.return_type], *(kinds[a] for a in signature.args))


def callback(signature: Any) -> Callable[[Callable], Callback]:
    """Decorator of a function that kernels call at its address."""
    return functools.partial(Callback, signature=signature)
