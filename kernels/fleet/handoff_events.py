"""What a prefill/decode run records where its KV events are observed: the commands of its handoffs.

A rank hands over what a command brought about when the command is done. Beside the events stand the
steps of all handoffs in the order in which they happened, which instants alone do not tell: several
fall on one (reference: runtimes, sections 10 and 11).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vecsim.kernels.cache.kv_events import EventLog
from vecsim.kernels.compile.jit import inner
from vecsim.kernels.state.layout import Requests

SOURCE_HELD, ACCEPTED, RESERVED, ACTIVATED, SOURCE_RELEASED, COMPLETED = (
    np.int64(k) for k in range(6)
)
"""Kinds of steps; every request makes each of them once at most."""
STEP_KINDS = 6

STEP_KIND, STEP_REQUEST, STEP_MS = (np.int64(k) for k in range(3))
STEP_FIELDS = 3


class Steps(NamedTuple):
    """Steps of all handoffs; both sides of a run share it."""

    lines: np.ndarray  # float64 [STEP_FIELDS, STEP_KINDS * n], in the order of happening
    length: np.ndarray  # int64 [1]: lines in use
    time: np.ndarray  # `Handoff.time`


class ObservedSide(NamedTuple):
    """`events.ObservedPools` with the steps of the handoffs."""

    nodes: np.ndarray
    index: np.ndarray
    forecast: np.ndarray
    users: np.ndarray
    events: EventLog
    steps: Steps


class ObservedTrees(NamedTuple):
    """`events.ObservedForest` with the steps of the handoffs."""

    nodes: np.ndarray
    table: np.ndarray
    state: np.ndarray
    order: np.ndarray
    forecast: np.ndarray
    users: np.ndarray
    events: EventLog
    named: Requests
    steps: Steps


@inner
def log_step(steps, kind, q, now):
    """Enter a step of the handoff of `q`."""
    line = steps.length[0]
    steps.lines[STEP_KIND, line] = kind
    steps.lines[STEP_REQUEST, line] = q
    steps.lines[STEP_MS, line] = now
    steps.length[0] = line + 1
