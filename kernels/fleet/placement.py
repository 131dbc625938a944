"""How a placed request reaches its rank: through its worker's tokenizers, into the waiting queue.

Round robin needs nothing but the order of arrival, so it is decided at lowering, before the clock
starts (reference: runtimes, section 5.1).
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import entry, inner
from vecsim.kernels.state.layout import ARRIVAL, NEXT, NONE, QUEUE_HEAD, QUEUE_TAIL


@inner
def tokenized_at(servers, base_ms, per_token_ms, prompt, now):
    """When a prompt that comes `now` leaves the tokenizers of its worker: first come, first served.

    `servers` float64 [servers]: when each becomes free; none = no such stage.
    """
    if len(servers) == 0:
        return now
    first = 0
    for k in range(len(servers)):
        if servers[k] < servers[first]:
            first = k
    servers[first] = max(now, servers[first]) + (base_ms + per_token_ms * np.float64(prompt))
    return servers[first]


@entry
def tokenize_all(servers, base_ms, per_token_ms, dp_size, ranks, prompts, released, arrivals):
    """Send all requests, in order of release, through the tokenizers of their workers.

    Args:
        servers: float64 [workers, servers], zeros.
        base_ms, per_token_ms: service time of a request and of each of its prompt tokens.
        dp_size: ranks per worker.
        ranks, prompts: int32 [n], scheduler id and prompt tokens.
        released: float64 [n], ascending (ms).
        arrivals: float64 [n], filled: when each joins its rank's waiting queue (ms).
    """
    for q in range(len(ranks)):
        own = servers[np.int64(ranks[q]) // dp_size]
        arrivals[q] = tokenized_at(own, base_ms, per_token_ms, prompts[q], released[q])


@inner
def enqueue(requests, s, q, arrival):
    """Enter a request into its rank's waiting queue, by arrival; it is visible from then on."""
    state = requests.state
    time = requests.time
    time[ARRIVAL, q] = arrival
    before = s[QUEUE_TAIL] if s[QUEUE_HEAD] >= 0 else NONE
    if before >= 0 and time[ARRIVAL, before] > arrival:
        before = NONE
        following = s[QUEUE_HEAD]
        while time[ARRIVAL, following] <= arrival:
            before = following
            following = np.int64(state[NEXT, following])
    if before < 0:
        state[NEXT, q] = s[QUEUE_HEAD]
        s[QUEUE_HEAD] = q
    else:
        state[NEXT, q] = state[NEXT, before]
        state[NEXT, before] = q
    if state[NEXT, q] < 0:
        s[QUEUE_TAIL] = q
