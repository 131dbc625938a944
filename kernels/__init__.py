"""Numba kernels: the simulator core. Smallest room first: `jit`, `layout`, `timing`, `hashing`,
`prefix`, `blockpool`, `vllm`, `worker`, `placement`, `aggregated`, `observe`; each imports only
those before it.
"""
