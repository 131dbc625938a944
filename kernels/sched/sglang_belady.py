"""SGLang ranks that evict by a forecast (Belady).

The forecast is shared by all workers and forgets a request at its first prefill, before room is
made for the first tokens of that pass, or once it is rejected, after the pass has made its room
(found by comparison with the reference). `pools` is a `ForecastForest`.
"""

from __future__ import annotations

from vecsim.kernels.cache.radix_tree import evict_by_forecast
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.decode_run import passes_within
from vecsim.kernels.sched import sglang_rank
from vecsim.kernels.state.layout import FREE, NEXT, REJECTED_HEAD, RETIRED

_PLAIN = sglang_rank.bind(evict_by_forecast)
_schedule = _PLAIN.schedule
_steady_passes = _PLAIN.steady_passes


@inner
def schedule(requests, pools, scratch, w, s, f, lists, now, defer):
    """Step 1 of a pass."""
    _schedule(requests, pools, scratch, w, s, f, lists, now, defer)
    q = s[REJECTED_HEAD]
    while q >= 0:
        requests.state[RETIRED, q] = 1
        q = requests.state[NEXT, q]


@inner
def steady_passes(requests, pools, w, s, f, lists, now):
    """Passes that the rank can make as pure decodes of its front; 0 when it is not steady. What is
    evicted depends on what other workers admit meanwhile: only free pages are taken."""
    passes = _steady_passes(requests, pools, w, s, f, lists, now)
    return passes_within(s, lists, s[FREE], passes)


SCHEDULER = _PLAIN._replace(schedule=schedule, steady_passes=steady_passes)
