"""The two decorators of all kernels, and their on-disk cache.

`entry` marks a function that Python calls; `inner` one that only kernels call. Inner functions
carry no wrappers (calling one from Python crashes the interpreter; tests wrap them in an `entry`),
which halves compile time. Reference counting is off: a kernel allocates nothing, its scratch comes
from outside.

Left alone, Numba optimises every inner function to machine code that nobody calls, and once more in
each caller that it is linked into. Here inner functions stay as they were lowered; the entry point
links all that it reaches, once, and only the whole is optimised and emitted.

Numba's own cache looks at the file of the cached function alone, so an edited callee would leave a
stale entry in use. Here every cache file lives in a folder named by a digest of all kernel sources,
the decorators' options and the versions of Numba, NumPy and Python.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import caching
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.registry import cpu_target
from numba.core.targetconfig import TargetConfig

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


_LONG = 600
"""LLVM instructions, before optimising, above which a function is not inlined."""


class _LinkingLibrary(JITCodeLibrary):
    """Code of an entry point: links, besides its callees, whatever they reach.

    The linked functions become internal before the whole is optimised, so that unused words of
    array arguments disappear. Long ones are not inlined: it would double the time of optimising.
    """

    def _optimize_functions(self, ll_module):
        ll_module.data_layout = self._codegen._data_layout

    def add_llvm_module(self, ll_module):
        super().add_llvm_module(ll_module)
        self._own = {f.name for f in self._final_module.functions if not f.is_declaration}

    def _optimize_final_module(self):
        for function in self._final_module.functions:
            if not function.is_declaration and function.name not in self._own:
                function.linkage = "internal"
                if sum(1 for block in function.blocks for _ in block.instructions) > _LONG:
                    function.add_function_attribute("noinline")
        super()._optimize_final_module()

    def add_linking_library(self, library):
        reached = [library, *getattr(library, "reached", ())]
        for one in reached:
            if one not in self._linking_libraries:
                super().add_linking_library(one)

    @property
    def reached(self):
        return self._linking_libraries


class _SilentCodegen:
    """The code generator, for a library that is never loaded into the process."""

    def __init__(self, codegen) -> None:
        self._codegen = codegen

    def set_env(self, env_name, env) -> None:
        """There is no loaded module whose environment could be set."""

    def __getattr__(self, name):
        return getattr(self._codegen, name)


class _InnerLibrary(_LinkingLibrary):
    """Code of an inner function: lowered, neither optimised nor emitted."""

    @property
    def codegen(self):
        return _SilentCodegen(self._codegen)

    def finalize(self):
        self._raise_if_finalized()
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name):
        self._ensure_finalized()
        return 0


class _EntryCompiler(CompilerBase):
    _library = _LinkingLibrary

    def define_pipelines(self):
        state = self.state
        state.library = self._library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return [DefaultPassBuilder.define_nopython_pipeline(state)]


class _InnerCompiler(_EntryCompiler):
    _library = _InnerLibrary


_BUILTIN = type(operator.add)
_OPERATORS = {value for value in vars(operator).values() if type(value) is _BUILTIN}
_compiling = threading.Lock()
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
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    parent = os.environ.get("VECSIM_CACHE_DIR") or _user_cache()
    folder = Path(parent) / f"kernels-{digest.hexdigest()[:20]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    return folder


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
        try:
            found = super().load_overload(sig, target_context)
        except Exception:
            # Numba unpickles whatever stands in the file; a damaged one is worth no more than none.
            found = None
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
    """Compile with a memory for operators: kernels use few operators on few types, and Numba tries
    dozens of templates each time it meets `a + b` or `a[i]`."""
    context = cpu_target.typing_context
    resolve = type(context).resolve_function_type
    known: dict = {}

    def remember(function, args, kws):
        if kws or type(function) is not _BUILTIN or function not in _OPERATORS:
            return resolve(context, function, args, kws)
        key = (function, args)
        if key not in known:
            known[key] = resolve(context, function, args, kws)
        return known[key]

    # Flags are keys of Numba's memories, and it would compare all their options each time.
    slow_hash, slow_eq = TargetConfig.__hash__, TargetConfig.__eq__

    def quick_eq(flags, other):
        same = isinstance(other, TargetConfig) and flags._values == other._values
        return same or slow_eq(flags, other)

    with _compiling:
        context.resolve_function_type = remember
        TargetConfig.__hash__ = lambda flags: len(flags.options)
        TargetConfig.__eq__ = quick_eq
        try:
            return compile_now(signature)
        finally:
            TargetConfig.__hash__, TargetConfig.__eq__ = slow_hash, slow_eq
            del context.resolve_function_type


def _announce(name: str) -> None:
    for callback in _on_compile:
        callback(name)


def entry(function: Callable) -> Callable:
    """Compile `function` on its first call from Python, through the cache of this module."""
    if DISABLED:
        return function
    dispatcher = numba.njit(**_COMMON, pipeline_class=_EntryCompiler)(function)
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
    return numba.njit(**_INNER, pipeline_class=_InnerCompiler)(function)
