"""Prices of many passes at once, for checks and plots."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import entry
from vecsim.kernels.timing.durations import call_decode, call_prefill


@entry
def prices(record, phase, first, second, third, out):
    """Raw prices (ms) by a model's record: of prefills (batch, isl, prefix) in phase 0, of decodes
    (batch, past KV tokens a sequence) in phase 1."""
    for k in range(len(out)):
        if phase == 0:
            out[k] = call_prefill(record, first[k], second[k], third[k])
        else:
            mean = second[k] + np.int64(1)
            out[k] = call_decode(record, first[k], mean * first[k], mean, np.int64(0))
