"""The passes of Numba's compiler that kernels need, with their own lowering and linking."""

from __future__ import annotations

from numba.core import typed_passes, untyped_passes
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager

from vecsim.kernels.compile.fast.library import InnerLibrary, LinkingLibrary
from vecsim.kernels.compile.fast.lowering import KernelLowering, kernel_context

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


_PRUNING = (untyped_passes.RewriteSemanticConstants, untyped_passes.DeadBranchPrune)
"""Kernels turn Numba's rewrites off and these with them, but need them: `if part is not None:` on
an argument that is None is not even typed."""


class EntryCompiler(CompilerBase):
    """Compiles an entry point and links all that it reaches."""

    _library = LinkingLibrary

    def define_pipelines(self):
        state = self.state
        state.targetctx = kernel_context(state.targetctx)
        state.library = self._library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        passes = PassManager("kernel")
        for one, description in DefaultPassBuilder.define_nopython_pipeline(state).passes:
            if one is untyped_passes.ReconstructSSA:
                for pruning in _PRUNING:
                    passes.add_pass(pruning, "what a part that is None leaves out")
            if one is typed_passes.NativeLowering:
                passes.add_pass(KernelLowering, "lowering of kernels")
            elif one not in _UNUSED_PASSES:
                passes.add_pass(one, description)
        passes.finalize()
        return [passes]


class InnerCompiler(EntryCompiler):
    """Lowers an inner function, ready to be linked."""

    _library = InnerLibrary
