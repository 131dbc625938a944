"""Numba kernels: the simulator core. README.md beside this file says which folder is for what."""
