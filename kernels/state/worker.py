"""A worker: what it has in flight and its sums. `w` is the row of one worker.

Beside it the working memory of a thread, and the log of what ranks do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# --- state of a worker: int64 [workers, WORKER_STATE], float64 [workers, WORKER_TIME] ------------
(
    WORKER_ID,  # ids are never used again; ties are broken by them
    POOL,  # 0: the only pool, or that of prefill workers; 1: that of decode workers
    FIRST_RANK,
    DP_SIZE,  # ranks of the worker, from FIRST_RANK on
    TURN,  # round robin over them (aggregated pools)
    PENDING,
    PENDING_PASSES,
    STEP,
    PASSES,
    TERMINALS,
    PASSES_WITHOUT_PROGRESS,
    PREFILL_LEFT,  # passes for which prefills are put off (prefill_decode_interval)
    # Workers on the fleet's clock only:
    STANDS_BLOCKED,  # its last pass had no effect
    WALKED_PASSES,  # passes of the run in flight that are recorded
    AHEAD,  # passes after those whose ends are known (decode_run.py)
) = (np.int64(k) for k in range(15))
WORKER_STATE = 15
NO_PASS, ONE_PASS, RUN = (np.int64(k) for k in range(3))

(
    CLOCK,  # start of the pass in flight, or end of the last one, or until when it was idle
    PASS_END,
    BUSY_MS,
    KV_BLOCK_MS,
    GAP_COUNT,
    GAP_ZEROS,
    GAP_SHIFT,  # the first gap; moments are sums of deviations from it
    GAP_SUM,
    GAP_SQUARES,
    GAP_MIN,
    GAP_MAX,
    GAP_POSITIVE_MIN,
    RATE_SHIFT,
    RATE_SUM,
    RATE_SQUARES,
    # Workers on the fleet's clock only:
    WALKED,  # the end of WALKED_PASSES
    WAKE_AT,  # when the worker has to look at its queue again: a run in flight ends there
) = (np.int64(k) for k in range(17))
WORKER_TIME = 17
"""On the fleet's clock CHUNK columns follow: the ends of the AHEAD passes."""


# --- chunk of a decode run: float64 [CHUNK_FIELDS, CHUNK]
# --------------------------------------------
DURATIONS, PRICES, ENDS, GAPS, COUNTING = (np.int64(k) for k in range(5))
"""COUNTING is 0, 1, 2, ...: a loop over floats alone is vectorised."""
RAW = GAPS
"""Prices before rounding share a row with the gaps, which are known only after pricing."""
CHUNK_FIELDS = 5
CHUNK = 64
"""Passes of a decode run that are priced at a time."""

# --- segment log: a line for each rank that takes part in a pass or decode run, and of no passes
# for what an idle worker of a prefill/decode fleet keeps
# ----------------------------------------------
(
    SEGMENT_RANK,  # scheduler id
    SEGMENT_FIRST,  # number of its first pass, counted by worker
    SEGMENT_START,  # ms
    SEGMENT_END,
    SEGMENT_PASSES,
    SEGMENT_RUNNING,  # running requests
    SEGMENT_OUTPUT,  # tokens emitted
    SEGMENT_PREFILL,  # prompt tokens computed
    SEGMENT_BLOCKS,  # referenced KV blocks at its start
    SEGMENT_HELD,  # KV_BLOCK_MS of the worker up to and including this line
    SEGMENT_PREEMPTIONS,  # of the rank so far
) = (np.int64(k) for k in range(11))
SEGMENT_FIELDS = 11
LINES_A_RANK = np.int64(2)
"""Lines that a rank may need before there is more room: of its pass in flight, and of idle time."""


class Workers(NamedTuple):
    """State of all workers, and the segment each has in flight."""

    state: np.ndarray  # int64 [workers, WORKER_STATE]
    time: np.ndarray  # float64 [workers, WORKER_TIME]


class Scratch(NamedTuple):
    """Working memory of one thread."""

    chunk: np.ndarray  # float64 [CHUNK_FIELDS, CHUNK]
    bins: np.ndarray  # int64 [GAP_BINS]
    log: np.ndarray  # float64 [3, capacity]: readmissions (request, at_ms, reused tokens)
    log_length: np.ndarray  # int64 [2]: lines of `log` and of `segments` in use
    segments: np.ndarray  # float64 [SEGMENT_FIELDS, capacity]; no capacity: nothing is logged
