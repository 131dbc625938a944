"""Who comes to a prefill/decode run when: by known arrivals, or as a closed loop allows.

The clock asks `admit_next` whom to take in, and says who is no more in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vecsim.kernels.compile.jit import inner
from vecsim.kernels.fleet.handoff import ENDED, MAX_IN_FLIGHT, NOW, TAKEN
from vecsim.kernels.state.layout import NONE, RELEASED, TERMINALS


class HandoffArrivals(NamedTuple):
    """What the clock asks; bound into it.

    Attributes:
        admit_next: (prefill, decode, handoff): the next request that is admissible now, with its
            release noted, or NONE.
        next_release: (prefill, handoff): when the next one is, as far as known, or infinity.
        note_end: (handoff, requests, q): a request is no more in flight; `requests` is a side whose
            copy has ended, or where it was cancelled.
        note_ends: (handoff, requests, w, terminals, last): nor are those that ended on a worker
            since it had so many `TERMINALS`, and `last` for its `LAST_ENDED`.
    """

    admit_next: Callable
    next_release: Callable
    note_end: Callable
    note_ends: Callable


@inner
def admit_next(prefill, decode, handoff):
    """In order of arrival; in a closed loop while few enough are in flight."""
    h = handoff.state
    q = h[TAKEN]
    released = prefill.requests.time[RELEASED]
    if q == len(released):
        return NONE
    if h[MAX_IN_FLIGHT] > 0:
        if q - h[ENDED] >= h[MAX_IN_FLIGHT]:
            return NONE
        released[q] = handoff.time[NOW]
    elif released[q] > handoff.time[NOW]:
        return NONE
    return q


@inner
def next_release(prefill, handoff):
    """A closed loop has no times of its own."""
    h = handoff.state
    released = prefill.requests.time[RELEASED]
    if h[MAX_IN_FLIGHT] > 0 or h[TAKEN] == len(released):
        return np.inf
    return released[h[TAKEN]]


@inner
def note_end(handoff, requests, q):
    """Count it."""
    handoff.state[ENDED] += 1


@inner
def note_ends(handoff, requests, w, terminals, last):
    """Count them."""
    handoff.state[ENDED] += w[TERMINALS] - terminals


KNOWN_ARRIVALS = HandoffArrivals(admit_next, next_release, note_end, note_ends)
