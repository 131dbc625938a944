"""How kernels are compiled and kept: the one folder of tricks.

`jit` has the two decorators of all kernels, `callback` the functions with a C address; `mode` says
which of three ways is taken, `cache` where compiled kernels are kept. `fast` is all that reaches
inside Numba's compiler; nothing outside this folder does.
"""
