"""Numba's compiler, arranged for kernels: less work for the same code.

Left alone, Numba optimises every inner function to machine code that nobody calls, and once more in
each caller that it is linked into. Here inner functions stay as they were lowered; the entry point
links all that it reaches, once, and only the whole is optimised and emitted.

The rest of the time goes into Numba's own Python. Passes for what kernels never use are left out,
code is kept short (see lowering.py), and while an entry point is compiled some of Numba's functions
give way to quicker equals.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from numba.core import errors, event, ir, typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags
from numba.core.compiler_machinery import PassManager
from numba.core.targetconfig import TargetConfig
from numba.core.types.functions import BaseFunction

_LONG = 100
"""LLVM instructions, before optimising, above which a function is not inlined."""


def _length(function):
    """Instructions of a function that is still being built."""
    return sum(len(block.instructions) for block in function.blocks)


class _LinkingLibrary(JITCodeLibrary):
    """Code of an entry point: links, besides its callees, whatever they reach.

    The linked functions become internal before the whole is optimised, so that unused words of
    array arguments disappear. Long ones are not inlined: it would double the time of optimising.
    """

    long: frozenset[str] = frozenset()

    def add_ir_module(self, ir_module):
        super().add_ir_module(ir_module)
        self.long |= {f.name for f in ir_module.functions if _length(f) > _LONG}

    def _optimize_functions(self, ll_module):
        ll_module.data_layout = self._codegen._data_layout

    def add_llvm_module(self, ll_module):
        super().add_llvm_module(ll_module)
        self._own = {f.name for f in self._final_module.functions if not f.is_declaration}

    def _optimize_final_module(self):
        long = frozenset().union(*(getattr(one, "long", ()) for one in self._linking_libraries))
        for function in self._final_module.functions:
            if not function.is_declaration and function.name not in self._own:
                function.linkage = "internal"
                if function.name in long:
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


_UNUSED_PASSES = (
    untyped_passes.WithLifting,
    untyped_passes.InlineClosureLikes,
    untyped_passes.RewriteDynamicRaises,
    untyped_passes.MakeFunctionToJitFunction,
    untyped_passes.InlineInlinables,
    untyped_passes.FindLiterallyCalls,
    untyped_passes.LiteralUnroll,
    untyped_passes.LiteralPropagationSubPipelinePass,
    typed_passes.InlineOverloads,
)
"""Kernels have no `with`, no closures of their own, no exceptions, and inline nothing so early."""


class EntryCompiler(CompilerBase):
    """Compiles an entry point and links all that it reaches."""

    _library = _LinkingLibrary

    def define_pipelines(self):
        # Not before something is compiled: it takes Numba's array functions.
        from vecsim.kernels.lowering import KernelLowering, kernel_context

        state = self.state
        state.targetctx = kernel_context(state.targetctx)
        state.library = self._library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        passes = PassManager("kernel")
        whole = DefaultPassBuilder.define_nopython_pipeline(state)
        passes.passes = [
            (KernelLowering if one is typed_passes.NativeLowering else one, description)
            for one, description in whole.passes
            if one not in _UNUSED_PASSES
        ]
        passes.finalize()
        return [passes]


class InnerCompiler(EntryCompiler):
    """Lowers an inner function, ready to be linked."""

    _library = _InnerLibrary


def _remembering(get_call_type):
    """`get_call_type` with a memory: kernels use few operators on few types, and Numba tries dozens
    of templates whenever it types or lowers an `a + b` or `a[i]`."""
    known: dict = {}

    def remember(function, context, args, kws):
        if kws:
            return get_call_type(function, context, args, kws)
        key = (function, args)
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


_changing = threading.Lock()


@contextlib.contextmanager
def quick_compiler() -> Iterator[None]:
    """Within it, some of Numba's functions are replaced by quicker ones of the same answers.

    The garbage collector rests meanwhile: it would spend a seventh of the time in vain.
    """
    with _changing:
        quicker = (
            (BaseFunction, "get_call_type", _remembering(BaseFunction.get_call_type)),
            (TargetConfig, "__eq__", _same_flags(TargetConfig.__eq__)),
            (TargetConfig, "__hash__", lambda flags: len(flags.options)),
            (ir.Inst, "_rec_list_vars", _variables_in),
            *_colourless(),
            # Events let others take the time, of every call of LLVM too.
            (event, "start_event", lambda *_, **__: None),
            (event, "end_event", lambda *_, **__: None),
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
