"""Code libraries that are linked once, at the entry point.

Left alone, Numba optimises every inner function to machine code that nobody calls, and once more in
each caller that it is linked into. Here inner functions stay as they were lowered; the entry point
links all that it reaches, once, and only the whole is optimised and emitted.
"""

from __future__ import annotations

from numba.core.codegen import JITCodeLibrary

LONG = 100
"""LLVM instructions, before optimising, above which a function is not inlined."""


def _length(function):
    """Instructions of a function that is still being built."""
    return sum(len(block.instructions) for block in function.blocks)


class LinkingLibrary(JITCodeLibrary):
    """Code of an entry point: links, besides its callees, whatever they reach.

    The linked functions become internal before the whole is optimised, so that unused words of
    array arguments disappear.
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


class InnerLibrary(LinkingLibrary):
    """Code of an inner function: lowered, neither optimised nor emitted.

    Long functions are not to be inlined later: it would double the time of optimising.
    """

    def add_ir_module(self, ir_module):
        for function in ir_module.functions:
            if _length(function) > LONG:
                function.attributes.add("noinline")
        super().add_ir_module(ir_module)

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
