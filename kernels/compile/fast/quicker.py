"""Quicker equals of some of Numba's functions, in place while an entry point is compiled."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from numba.core import errors, event, ir
from numba.core.compiler import Flags
from numba.core.compiler_lock import global_compiler_lock
from numba.core.targetconfig import TargetConfig
from numba.core.types.functions import BaseFunction


def _remembering(get_call_type):
    """`get_call_type` with a memory: kernels use few operators on few types, and Numba tries dozens
    of templates whenever it types or lowers an `a + b` or `a[i]`."""
    known: dict = {}

    def remember(function, context, args, kws):
        if kws:
            return get_call_type(function, context, args, kws)
        key = (function, type(context), args)
        if key not in known:
            known[key] = get_call_type(function, context, args, kws)
        return known[key]

    return remember


def _same_flags(slow_eq):
    """Equality of flags, the keys of Numba's memories, without a look-up for each of them."""
    defaults = {name: option.default for name, option in Flags.options.items()}

    def same(flags, other):
        if type(flags) is not Flags or type(other) is not Flags:
            return slow_eq(flags, other)
        mine, others = flags._values, other._values
        return mine == others or {**defaults, **mine} == {**defaults, **others}

    return same


def _variables_in(_, value):
    """All variables within a piece of Numba's intermediate code."""
    found: list = []
    _gather(value, found)
    return found


def _gather(value, found):
    kind = type(value)
    if kind is ir.Var:
        found.append(value)
    elif kind is dict:
        for part in value.values():
            _gather(part, found)
    elif kind is list or kind is tuple:
        for part in value:
            _gather(part, found)
    elif kind not in _PLAIN and isinstance(value, ir.Inst):
        found.extend(value.list_vars())


_PLAIN = {str, int, float, bool, type(None), ir.Loc, ir.Const, ir.Global, ir.FreeVar, ir.Arg}
"""Types that hold no variable; most of what is met."""


def _colourless():
    """The replacement that leaves messages uncoloured, where Numba colours them: most are of
    attempts that fail in silence."""
    scheme = type(errors.termcolor())
    if not hasattr(scheme, "_markup"):
        return []
    return [(scheme, "_markup", lambda scheme, message, *_: message)]


def _count_as_old():
    """Leave what was made meanwhile to the next full collection; else the first to come, perhaps
    the last of a short run, would go through all of it."""
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()


def _silent(tell):
    """`tell`, an event's start or end, that other threads alone call. Events let others take the
    time, of every call of LLVM too. What a thread has begun to tell it tells to the end."""
    compiling = threading.get_ident()

    def tell_others(*args, **kwargs):
        if threading.get_ident() != compiling:
            tell(*args, **kwargs)

    return tell_others


@contextlib.contextmanager
def quick_compiler() -> Iterator[None]:
    """Within it, some of Numba's functions are replaced by quicker ones of the same answers.

    Whoever else compiles in this process waits for the lock that all of Numba's compiling takes.
    The garbage collector rests meanwhile: it would spend a seventh of the time in vain.
    """
    with global_compiler_lock:
        quicker = (
            (BaseFunction, "get_call_type", _remembering(BaseFunction.get_call_type)),
            (TargetConfig, "__eq__", _same_flags(TargetConfig.__eq__)),
            (TargetConfig, "__hash__", lambda flags: len(flags.options)),
            (ir.Inst, "_rec_list_vars", _variables_in),
            *_colourless(),
            (event, "start_event", _silent(event.start_event)),
            (event, "end_event", _silent(event.end_event)),
        )
        collecting = gc.isenabled()
        usual = [(owner, name, getattr(owner, name)) for owner, name, _ in quicker]
        try:
            gc.disable()
            for owner, name, function in quicker:
                setattr(owner, name, function)
            yield
        finally:
            for owner, name, function in usual:
                setattr(owner, name, function)
            if collecting:
                _count_as_old()
                gc.enable()
