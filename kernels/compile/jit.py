"""The two decorators of all kernels.

`entry` marks a function that Python calls; `inner` one that only kernels call. Inner functions
carry no wrappers (calling one from Python crashes the interpreter; tests wrap them in an `entry`),
which halves compile time. Reference counting is off: a kernel allocates nothing, its scratch comes
from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from vecsim.kernels.compile.cache import kernel_cache, may_be_handed_on
from vecsim.kernels.compile.mode import DISABLED, FAST

OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": False, "_nrt": False}
"""Of all kernels."""

_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def entry(function: Callable) -> Callable:
    """Compile `function` on its first call from Python, through the cache of this package."""
    if DISABLED:
        return function
    dispatcher = numba.njit(**OPTIONS, **entry_pipeline())(function)
    keep_and_quicken(dispatcher, function)
    return dispatcher


def inner(function: Callable) -> Callable:
    """Compile `function` into the entry points that reach it."""
    if DISABLED:
        return function
    return may_be_handed_on(numba.njit(**OPTIONS, **_INNER, **_inner_pipeline())(function))


def keep_and_quicken(compiled: Any, function: Callable) -> None:
    """Give a function that Numba is to compile its cache, and where it lacks there, quick
    compilation."""
    compiled._cache = kernel_cache(function)
    if FAST:
        compiled._compiler.compile = _quick(compiled._compiler.compile)


# `fast` is imported when something is compiled: a start that finds its kernels in the cache does
# without it, and without the parts of Numba that it takes.
def _quick(compile_now: Callable) -> Callable:
    def compile_quickly(args: Any, return_type: Any) -> Any:
        from vecsim.kernels.compile.fast.quicker import quick_compiler

        with quick_compiler():
            return compile_now(args, return_type)

    return compile_quickly


def entry_pipeline() -> dict[str, Any]:
    """Numba's options that arrange the compiler for an entry point."""
    return {"no_rewrites": True, "pipeline_class": _entry_compiler} if FAST else {}


def _inner_pipeline() -> dict[str, Any]:
    return {"no_rewrites": True, "pipeline_class": _inner_compiler} if FAST else {}


def _entry_compiler(*state: Any) -> Any:
    from vecsim.kernels.compile.fast.pipeline import EntryCompiler

    return EntryCompiler(*state)


def _inner_compiler(*state: Any) -> Any:
    from vecsim.kernels.compile.fast.pipeline import InnerCompiler

    return InnerCompiler(*state)
