"""Aggregated pools of vLLM-style ranks (vLLM, TensorRT-LLM): the entry points that Python calls.

They are functions of this module over bound kernels: an entry that carried them in a closure would
not be found in the cache again.
"""

from __future__ import annotations

from vecsim.kernels.cache.sharing import analyse
from vecsim.kernels.compile.jit import entry
from vecsim.kernels.fleet import clock as pool_clock
from vecsim.kernels.fleet import worker
from vecsim.kernels.sched import vllm_rank

advance_all, run_clock = pool_clock.bind(worker.bind(vllm_rank.SCHEDULER))[:2]


@entry
def prepare(ranks, requests, paths, instances, contents):
    """Analyse sharing among the placed requests. Returns the number of rows of the prefix index."""
    return analyse(requests, paths, contents, ranks.fields, instances)


@entry
def run_independent(ranks, workers, requests, pools, scratch, clock):
    """Advance the workers NEXT_WORKER..END_WORKER-1 to the horizon (see `clock.advance_all`)."""
    return advance_all(ranks, workers, requests, pools, scratch, clock)


@entry
def run_coupled(ranks, workers, requests, pools, scratch, clock):
    """Run all workers on one clock to the horizon (see `clock.run_clock`)."""
    return run_clock(ranks, workers, requests, pools, scratch, clock)
