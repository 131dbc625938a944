"""The on-disk cache of compiled kernels.

Numba's own cache looks at the file of the cached function alone, so an edited callee would leave a
stale entry in use. Here every cache file lives in a folder named by a digest of all kernel sources,
the way they are compiled and the versions of Numba, NumPy and Python.

What is found there is unpickled, which may run anything: a folder that other users may write to is
not used. Whenever there is no usable folder, kernels are compiled in memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import caching

from vecsim.kernels.compile.mode import CHECKED, FAST

KERNELS = Path(__file__).parents[1]
"""The folder of all kernel sources."""

_COMPILED_BY_ENVIRONMENT = ("BOUNDSCHECK", "DEBUGINFO_DEFAULT", "OPT", "LOOP_VECTORIZE")
"""Settings of Numba that change the code it makes."""


class UnusableFolder(Exception):
    """The cache folder cannot, or must not, be used; the text says why."""


# --- the folder -----------------------------------------------------------------------------------
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


def sources_digest(root: Path = KERNELS) -> str:
    """Hexadecimal digest of the names and texts of all sources below `root`."""
    digest = hashlib.sha256()
    for source in sorted(root.rglob("*.py")):
        digest.update(source.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def _folder_name() -> str:
    settings = [getattr(numba.config, name, None) for name in _COMPILED_BY_ENVIRONMENT]
    versions = (numba.__version__, llvmlite.__version__, np.__version__, sys.version)
    way = ("fast" if FAST else "plain", CHECKED, settings)
    key = repr((versions, platform.machine(), way, sources_digest()))
    return f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:20]}"


@functools.cache
def _folder() -> tuple[Path | None, str]:
    """The cache folder, or None and why there is none."""
    folder = cache_parent() / _folder_name()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return None, f"{cache_parent()}: {error.strerror or error}"
    except UnusableFolder as error:
        warnings.warn(f"no cache of kernels: {error}", RuntimeWarning, stacklevel=2)
        return None, str(error)
    return folder, ""


def _check_owner(folder: Path) -> None:
    """Raise UnusableFolder where others could put files into `folder`, or another in its place.

    The folder itself must be the user's own, so a parent that a group may write to does no harm.
    """
    if not hasattr(os, "getuid"):
        return
    status, parent = folder.stat(), folder.parent.stat()
    if status.st_uid != os.getuid():
        raise UnusableFolder(f"{folder} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnusableFolder(f"other users may write to {folder}")
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        raise UnusableFolder(f"other users may write to {folder.parent}")


def cache_folder() -> Path | None:
    """Folder of the compiled kernels, or None when there is no usable one.

    `VECSIM_CACHE_DIR` names the parent folder; the default is the user's cache folder.
    """
    return _folder()[0]


def where_kept() -> str:
    """What becomes of compiled kernels, as a clause for the user."""
    folder, reason = _folder()
    return "later runs find them in the cache" if folder else f"no cache: {reason}"


# --- telling --------------------------------------------------------------------------------------
_on_compile: list[Callable[[str], None]] = []


def on_compile(callback: Callable[[str], None]) -> None:
    """Call `callback(name)` just before an entry point that the cache lacks is compiled.

    The name is the function's, with its module.
    """
    _on_compile.append(callback)


def full_name(function: Callable) -> str:
    """Dotted name of a function: its module's and its own."""
    return f"{function.__module__}.{function.__qualname__}"


def _announce(name: str) -> None:
    for callback in _on_compile:
        callback(name)


# --- what Numba is given --------------------------------------------------------------------------
class _Locator(caching._CacheLocator):
    """Places every cache file in `cache_folder()`; the folder's name already carries the key."""

    def __init__(self, function: Callable) -> None:
        self._py_file = function.__code__.co_filename
        self._line = function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> tuple[str]:
        return (cache_folder().name,)

    def get_disambiguator(self) -> str:
        return str(self._line)


class _CacheImpl(caching.CompileResultCacheImpl):
    """Names cache files by the dotted module: two modules of one stem are not one.

    Numba's own would also take another locator from NUMBA_CACHE_LOCATOR_CLASSES, and find stale
    kernels with it.
    """

    def __init__(self, function: Callable) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(function)
        abi = getattr(sys, "abiflags", "")
        self._filename_base = self.get_filename_base(full_name(function), abi)

    @property
    def locator(self) -> _Locator:
        return self._locator

    def check_cachable(self, data: Any) -> bool:
        """Whether compiled code is good in another process.

        Numba refuses code with addresses of this one. But where a kernel hands another on, that is
        known when it is compiled, and the address that is passed besides is never read.
        """
        # LLVM numbers the later ones of a name: numba.dynamic.globals.ADDRESS.NUMBER.
        addresses = {int(name.split(".")[3], 16) for name in data.library._dynamic_globals}
        return addresses <= _kernels.keys() or super().check_cachable(data)


_kernels: dict[int, Any] = {}


def may_be_handed_on(kernel: Any) -> Any:
    """The compiled function; kernels that pass it to others are kept in the cache all the same."""
    _kernels[id(kernel)] = kernel
    return kernel


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
            _announce(full_name(self._py_func))
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

    def __init__(self, function: Callable) -> None:
        self._name = full_name(function)

    def load_overload(self, sig, target_context):
        _announce(self._name)


def kernel_cache(function: Callable) -> Any:
    """The cache of one compiled function."""
    return _NoCache(function) if cache_folder() is None else _KernelCache(function)
