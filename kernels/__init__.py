"""Numba kernels: the simulator core. Smallest room first; each imports only those before it.

`jit`, `layout`, `timing`, `prefix`, `sharing`, `placement`, `observe`; `blockpool`, `vllm`,
`vllm_rank` for block pools (vLLM, TensorRT-LLM); `radix`, `sglang_queue`, `sglang`, `sglang_rank`
for radix trees; `records`, `decode run`, `worker`, `clock` for whatever ranks they are bound to;
the entry points of a pool in `aggregated` and `aggregated_sglang`.
"""
