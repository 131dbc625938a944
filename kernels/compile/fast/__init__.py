"""Numba's compiler, arranged for kernels: all that reaches inside Numba, and nothing else does.

Left alone, Numba takes about four times as long for the same kernels, most of it in its own Python.
What it is spared here, each trick with the reason why kernels may have it:

`library`: link once.
    Numba optimises every function to machine code, and again in each caller that it is linked into.
    Inner kernels are called by kernels alone, so they stay as they were lowered; the entry point
    links all that it reaches, and only the whole is optimised. Off: let the library of
    `InnerCompiler` be a LinkingLibrary.

`library`: long functions are not inlined.
    LLVM inlines what has one caller, and its time grows faster than the length of a function. Off:
    raise `LONG`.

`lowering`: arrays in pieces.
    Numba passes an array as seven words or more and packs them into structures in memory, for every
    function and subscript; LLVM has to remove all of it. Kernels take C-contiguous arrays, so a
    data pointer and a shape do. Nine of ten LLVM instructions go. It is a calling convention: a
    kernel cannot hand an array to a function of plain Numba (it is refused). Off: leave
    NativeLowering, and the context, as they are in `pipeline`.

`lowering`: no checks after calls.
    Kernels raise nothing (their answers are codes). For the same reason bounds checks and debug
    information mean plain Numba.

`pipeline`: passes for what kernels do not use are left out.
    No `with`, closures, exceptions or literal loops. Off: empty `_UNUSED_PASSES`.

`pipeline`: branches for parts that are None are pruned.
    Not for speed: without it the dead branch is typed, and fails. It costs one part in twenty of
    the time. Plain Numba does so by itself, among rewrites that kernels otherwise do without.

`quicker`: quicker equals of some of Numba's functions.
    While an entry point is compiled, under the lock that all compiling takes: the templates found
    for operators are remembered, flags are compared without a look-up for each, variables are
    gathered without recursion over classes, messages stay uncoloured, events untold, and the
    garbage collector rests. The answers are the same. Off: take its line out of `quick_compiler`.

All of it is off with VECSIM_NUMBA=plain, and for a Numba outside `mode.TESTED`. To extend that
range, run the tests with VECSIM_NUMBA=fast under the new release, then change the range. The stored
answers hold for both ways; `.ci/run` looks at some of them.
"""
