"""Numba's compiler, arranged for kernels."""
