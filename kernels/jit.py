"""The two decorators of all kernels, and their on-disk cache.

`entry` marks a function that Python calls; `inner` one that only kernels call. Inner functions
carry no wrappers (calling one from Python crashes the interpreter; tests wrap them in an `entry`),
which halves compile time. Reference counting is off: a kernel allocates nothing, its scratch comes
from outside.

Numba's own cache looks at the file of the cached function alone, so an edited callee would leave a
stale entry in use. Here every cache file lives in a folder named by a digest of all kernel sources,
the decorators' options and the versions of Numba, NumPy and Python.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import caching

from vecsim.kernels.compiling import EntryCompiler, InnerCompiler, quick_compiler

DISABLED = bool(numba.config.DISABLE_JIT)
"""True when NUMBA_DISABLE_JIT is set: kernels run as plain Python."""

_COMMON = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": False,
    "no_rewrites": True,
    "_nrt": False,
}
_INNER = {**_COMMON, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


_on_compile: list[Callable[[str], None]] = []


def on_compile(callback: Callable[[str], None]) -> None:
    """Call `callback(name)` just before an entry point that the cache lacks is compiled."""
    _on_compile.append(callback)


@functools.cache
def cache_folder() -> Path | None:
    """Folder of the compiled kernels, or None when no writable place exists.

    `VECSIM_CACHE_DIR` names the parent folder; the default is the user's cache folder.
    """
    digest = hashlib.sha256()
    versions = (numba.__version__, llvmlite.__version__, np.__version__, sys.version)
    digest.update(repr((versions, platform.machine(), _COMMON, _INNER)).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    folder = cache_parent() / f"kernels-{digest.hexdigest()[:20]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    return folder


def cache_parent() -> Path:
    """The folder of all that vecsim keeps between runs: `VECSIM_CACHE_DIR`, or the user's."""
    return Path(os.environ.get("VECSIM_CACHE_DIR") or _user_cache())


def _user_cache() -> str:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", os.path.expanduser("~"))
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "vecsim")


class _Locator(caching._CacheLocator):
    """Places every cache file in `cache_folder()`; the folder's name already carries the key."""

    def __init__(self, py_func: Callable, py_file: str) -> None:
        self._name = py_func.__qualname__

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> tuple[str]:
        return (cache_folder().name,)

    def get_disambiguator(self) -> str:
        return self._name

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _KernelCache(caching.FunctionCache):
    _impl_class = _CacheImpl

    def load_overload(self, sig, target_context):
        found = None
        # Numba would first prepare for compiling, which takes longer than all the loading.
        try:
            with self._guard_against_spurious_io_errors():
                found = self._load_overload(sig, target_context)
        except Exception:
            # Numba unpickles whatever stands in the file; a damaged one is worth no more than none.
            self._discard()
        if found is None:
            _announce(self._name)
        return found

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except Exception:
            self._discard()

    def _discard(self) -> None:
        """Empty the index, so that what is damaged or half written is compiled anew next time."""
        with contextlib.suppress(OSError):
            self.flush()


class _NoCache(caching.NullCache):
    """Compiling in memory; still announces."""

    def __init__(self, name: str) -> None:
        self._name = name

    def load_overload(self, sig, target_context):
        _announce(self._name)


def _compile_quickly(compile_now: Callable, signature: Any) -> Any:
    with quick_compiler():
        return compile_now(signature)


def _announce(name: str) -> None:
    for callback in _on_compile:
        callback(name)


def entry(function: Callable) -> Callable:
    """Compile `function` on its first call from Python, through the cache of this module."""
    if DISABLED:
        return function
    dispatcher = numba.njit(**_COMMON, pipeline_class=EntryCompiler)(function)
    dispatcher.compile = functools.partial(_compile_quickly, dispatcher.compile)
    if cache_folder() is None:
        dispatcher._cache = _NoCache(function.__qualname__)
    else:
        dispatcher._cache = _KernelCache(function)
    return dispatcher


def inner(function: Callable) -> Callable:
    """Compile `function` into the entry points that reach it."""
    if DISABLED:
        return function
    return numba.njit(**_INNER, pipeline_class=InnerCompiler)(function)
