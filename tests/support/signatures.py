"""What entry points were compiled for."""

from __future__ import annotations

from typing import Any

from numba import types


def parts_of(signature: Any) -> Any:
    """Which optional parts a signature has: its nested tuples, None where a part is absent."""
    if isinstance(signature, tuple):
        return tuple(parts_of(one) for one in signature)
    if isinstance(signature, types.BaseTuple):
        return tuple(parts_of(one) for one in signature.types)
    return None if isinstance(signature, types.NoneType) else "present"


def assert_one_a_combination(*kernels: Any) -> None:
    """Each kernel was compiled once for every combination of optional parts that was met."""
    for kernel in kernels:
        met = [parts_of(signature) for signature in kernel.signatures]
        assert met, kernel
        assert len(set(met)) == len(met), (kernel, kernel.signatures)
