"""The same kernels around other callees.

An inner kernel finds its callees in its module when it is compiled. `rebound` makes a second
instance of a module, its functions the same code, in which some names mean something else: so a run
that observes KV events has entry points of its own over the same scheduler, and a run that does not
compiles nothing and pays nothing for it.
"""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

from vecsim.kernels.jit import inner


def rebound(module: ModuleType, *bases: ModuleType, **names: Any) -> ModuleType:
    """A copy of a module of inner kernels in which `names` stand for other things.

    The functions of the module see the copy. What it imported from modules that have copies among
    `bases`, and such a module itself, is taken from the copy; everything else is shared. Constants
    that were made of functions when the module was loaded keep the old ones.
    """
    copy = ModuleType(module.__name__, module.__doc__)
    space = copy.__dict__
    taken = {id(old): new for base in bases for old, new in base._replaced}
    for name, value in vars(module).items():
        space[name] = names.get(name, taken.get(id(value), value))
    replaced = [(module, copy)]
    for name, value in vars(module).items():
        function = getattr(value, "py_func", value)
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            if name not in names:
                again = _again(function, space)
                # A plain function is one that binds kernels, or kernels are not compiled at all.
                space[name] = again if function is value else inner(again)
            replaced.append((value, space[name]))
    copy._replaced = replaced
    return copy


def _again(function: FunctionType, space: dict[str, Any]) -> FunctionType:
    """The same function with `space` for its globals."""
    again = FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, function.__closure__
    )
    again.__doc__, again.__qualname__ = function.__doc__, function.__qualname__
    return again
