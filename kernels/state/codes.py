"""Values that mean something everywhere: nothing, never, and answers of an entry point."""

from __future__ import annotations

import numpy as np

UNLIMITED = np.int64(1 << 62)
NEVER = np.int64((1 << 31) - 1)
"""A tick, or a position in the workload, that is never reached."""
NONE = np.int64(-1)
"""No request, copy, node or row."""

# --- answers of an entry point --------------------------------------------------------------------
DONE, PAUSED, LOG_FULL, BAD_PRICE, NO_MOVE, TICKS_EXHAUSTED, FOREST_FULL, TICKED = (
    np.int64(k) for k in range(8)
)
