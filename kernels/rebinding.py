"""The same kernels around other callees.

An inner kernel finds its callees in its module when it is compiled. `rebound` makes a second
instance of a module in which some names mean something else: what calls them, directly or not, is
the same code, compiled anew; the rest is shared. So a run that observes KV events has entry points
of its own over the same scheduler, and a run that does not compiles and pays nothing for it.
"""

from __future__ import annotations

from types import CodeType, FunctionType, ModuleType
from typing import Any

from vecsim.kernels.compile.jit import inner


def rebound(module: ModuleType, *bases: ModuleType, **names: Any) -> ModuleType:
    """A copy of a module of inner kernels in which `names` stand for other things.

    What the module imported from modules that have copies among `bases`, and such a module itself,
    is taken from the copy. Constants that were made of functions when the module was loaded keep
    the old ones.
    """
    copy = ModuleType(module.__name__, module.__doc__)
    space = copy.__dict__
    taken = {id(old): new for base in bases for old, new in base._replaced}
    changed = set(names)
    for name, value in vars(module).items():
        space[name] = names.get(name, taken.get(id(value), value))
        if id(value) in taken:
            changed.add(name)
    functions = {
        name: function
        for name, value in vars(module).items()
        if isinstance(function := getattr(value, "py_func", value), FunctionType)
        and function.__module__ == module.__name__
        and name not in changed
    }
    for name in _callers(functions, changed):
        function, value = functions[name], vars(module)[name]
        again = _again(function, space)
        # A plain function is one that binds kernels, or kernels are not compiled at all.
        space[name] = again if function is value else inner(again)
    copy._replaced = [(module, copy)]
    for name, value in vars(module).items():
        if space[name] is not value and (name in functions or name in names):
            copy._replaced.append((value, space[name]))
    return copy


def _callers(functions: dict[str, FunctionType], changed: set[str]) -> set[str]:
    """Names of the functions that use a changed name, or call one that does."""
    reached = set(changed)
    while True:
        found = {n for n, f in functions.items() if n not in reached and _uses(f.__code__, reached)}
        if not found:
            return reached - changed
        reached |= found


def _uses(code: CodeType, names: set[str]) -> bool:
    """Whether code, or code inside it, names one of `names`."""
    inside = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return not names.isdisjoint(code.co_names) or any(_uses(one, names) for one in inside)


def _again(function: FunctionType, space: dict[str, Any]) -> FunctionType:
    """The same function with `space` for its globals."""
    again = FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, function.__closure__
    )
    again.__doc__, again.__qualname__ = function.__doc__, function.__qualname__
    return again
