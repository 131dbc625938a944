"""Which way kernels run: compiled by the arranged Numba of `fast`, by plain Numba, or not at all.

`fast` knows Numba from within, so it is used for the releases that it was tried with and for no
others. Plain Numba compiles the same kernels to the same answers; only the first start takes longer
and runs are somewhat slower. Bounds checks and debug information mean plain Numba too: `fast`
writes subscripts of its own, without them.
"""

from __future__ import annotations

import os
import warnings

import numba

TESTED = ((0, 61), (0, 68))
"""The first and the last Numba series (major, minor) that `fast` was tried with."""

DISABLED = bool(numba.config.DISABLE_JIT)
"""True when NUMBA_DISABLE_JIT is set: kernels run as plain Python."""


def choose(wanted: str | None, version: tuple[int, ...], checked: bool) -> tuple[bool, str | None]:
    """Whether `fast` compiles, and what the user should know of it.

    Args:
        wanted: VECSIM_NUMBA: "plain"; "fast", also for a Numba that it was not tried with; or none.
        version: of Numba, (major, minor, ...).
        checked: whether Numba is to write bounds checks or debug information.
    """
    if wanted not in (None, "", "fast", "plain"):
        return False, f"VECSIM_NUMBA={wanted}: expected plain or fast; taken as plain"
    if wanted == "plain" or checked:
        return False, None
    if wanted == "fast" or TESTED[0] <= version[:2] <= TESTED[1]:
        return True, None
    first, last = (".".join(map(str, one)) for one in TESTED)
    return False, (
        f"Numba {'.'.join(map(str, version))} is outside {first} to {last}, where kernels are "
        "compiled in the fast way; the plain way gives the same answers, later"
    )


CHECKED = bool(numba.config.BOUNDSCHECK or numba.config.DEBUGINFO_DEFAULT)
"""True when NUMBA_BOUNDSCHECK or NUMBA_DEBUGINFO is set."""

FAST, _notice = choose(os.environ.get("VECSIM_NUMBA"), numba.version_info[:3], CHECKED)
"""FAST: whether `fast` compiles."""

if DISABLED:
    FAST = False
elif _notice:
    warnings.warn(_notice, RuntimeWarning, stacklevel=2)
