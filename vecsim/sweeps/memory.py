"""Keeping freed memory at hand between replays."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT = 1 << 30


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let the C library keep freed memory while many replays run, and give it back afterwards.

    After each replay glibc would return a thread's arrays to the system, and the next replay would
    fault the same pages in again: a tenth of a sweep's time on two threads. Elsewhere this does
    nothing.
    """
    library = None
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    library.mallopt(_TRIM_THRESHOLD, _KEPT)
    library.mallopt(_MMAP_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        library.malloc_trim(0)
