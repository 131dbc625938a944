"""What the kernels leave behind: plain columns, in workload order, before any frame is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vecsim.run.kv_events import KvEvents


@dataclass(frozen=True)
class GapDistribution:
    """Inter-token gaps (ms), pooled over all tokens of the completed requests.

    Attributes:
        count: number of gaps, zeros included.
        zeros: number of gaps that are exactly zero.
        minimum, maximum: exact extremes of all gaps (ms); NaN without gaps.
        mean, m2: mean (ms) and sum of squared deviations from it (ms^2) of all gaps.
        rate_mean, rate_m2: the same of 1000 / gap (tokens/s) over the positive gaps.
        positive_minimum: smallest positive gap (ms); NaN without one.
        bins: int64 [m], number of positive gaps in each non-empty bin, ascending by gap.
        midpoints: float64 [m], representative gap (ms) of each of these bins, within 0.01 %
            of every gap counted there.
    """

    count: int
    zeros: int
    minimum: float
    maximum: float
    mean: float
    m2: float
    rate_mean: float
    rate_m2: float
    positive_minimum: float
    bins: np.ndarray
    midpoints: np.ndarray


@dataclass(frozen=True)
class PoolOutcome:
    """One worker pool after a run.

    Attributes:
        name: "agg", "prefill" or "decode" (the reference's pool names).
        workers: number of workers.
        dp_size: attention-DP ranks per worker.
        gpus_per_worker: modelled GPUs of one worker.
        busy_ms: float64 [workers], time with a pass in flight.
        kv_block_ms: float64 [workers], integral of referenced KV blocks over time (blocks x ms),
            all ranks of the worker together; between passes, blocks kept for handoffs.
        total_blocks: KV blocks of one rank.
        passes: int64 [workers], passes completed.
        preemptions: int64 [workers * dp_size], preemptions per rank.
        segments: float64 [SEGMENT_FIELDS, lines] (`vecsim.kernels.state.worker`), what each rank
        did in
            each pass or decode run, by rank, then time; None unless asked for.
    """

    name: str
    workers: int
    dp_size: int
    gpus_per_worker: int
    busy_ms: np.ndarray
    kv_block_ms: np.ndarray
    total_blocks: int
    passes: np.ndarray
    preemptions: np.ndarray
    segments: np.ndarray | None = None


@dataclass(frozen=True)
class HandoffSteps:
    """What a prefill/decode run whose KV events are observed tells besides.

    Attributes:
        kind: uint8 [m], steps of all handoffs in the order in which they happened, as numbered in
            `vecsim.kernels.fleet.handoff_events`.
        request: int32 [m], row of the workload.
        at_ms: float64 [m].
        source_output: int32 [n], tokens that came out of the prefill pool.
        drained: whether the prefill pool, the decode pool, and what links them have nothing left.
    """

    kind: np.ndarray
    request: np.ndarray
    at_ms: np.ndarray
    source_output: np.ndarray
    drained: tuple[bool, bool, bool]


@dataclass(frozen=True)
class HandoffOutcome:
    """What a prefill/decode run adds; row order and undefined times as in `Outcome`.

    Attributes:
        source_first: a destination is asked for when the prompt is done, not before.
        prefill_rank: int32 [n], scheduler id in the prefill pool; -1 if never placed there.
        source_held_ms, destination_reserved_ms, destination_activated_ms, decode_admit_ms,
            source_released_ms: float64 [n], first occurrence.
        decode_admissions: int32 [n], admissions in the decode pool.
        decode_reused: int32 [n], largest prefix reuse over them (tokens).
        decode_first_reused: int32 [n], prefix reuse of the first (tokens).
        readmission_in_decode: bool [k], pool of each readmission.
        steps: of a run whose KV events are observed, else None.
    """

    source_first: bool
    prefill_rank: np.ndarray
    source_held_ms: np.ndarray
    destination_reserved_ms: np.ndarray
    destination_activated_ms: np.ndarray
    decode_admit_ms: np.ndarray
    source_released_ms: np.ndarray
    decode_admissions: np.ndarray
    decode_reused: np.ndarray
    decode_first_reused: np.ndarray
    readmission_in_decode: np.ndarray
    steps: HandoffSteps | None = None


@dataclass(frozen=True)
class Outcome:
    """Columns of one finished run; n = number of requests, row order = workload order.

    Times are float64 ms, NaN where undefined. Tokens of unfinished requests that became visible
    before a time limit are included.

    Attributes:
        arrival_ms: recorded arrival (release time in a closed loop); NaN if it never arrived.
        tokenized_ms: end of tokenization; None without a tokenization stage.
        first_admit_ms, first_token_ms, second_token_ms, last_token_ms, terminal_ms: float64 [n].
        input_length: int32 [n], prompt tokens; where prompts grow, with the conversation before.
        output_length: int32 [n], tokens produced.
        reused_input_tokens: int32 [n], largest prefix reuse over the admissions (tokens).
        first_reused_input_tokens: int32 [n], prefix reuse of the first admission (tokens).
        admissions: int32 [n], number of admissions.
        status, reason: uint8 [n], codes of `vecsim.kernels.state.worker`.
        rank: int32 [n], scheduler id (worker * dp_size + dp rank); -1 if never placed.
        readmission_request: int32 [k], readmission_at_ms: float64 [k], readmission_reused:
            int32 [k], admissions after a preemption, by time within each request.
        end_ms: virtual time of the last processed event.
        committed_prefill_tokens: prompt tokens computed by finished prefill passes (spec: report,
            section 6).
        gaps: inter-token gaps.
        pools: one entry per pool, prefill before decode; the aggregated pool is called "agg".
        handoff: of a prefill/decode run; `first_admit_ms`, `reused_input_tokens` and
            `first_reused_input_tokens` are then the prefill pool's, `rank` the decode pool's.
        kv_events: KV events of each pool; None unless asked for.
    """

    arrival_ms: np.ndarray
    tokenized_ms: np.ndarray | None
    first_admit_ms: np.ndarray
    first_token_ms: np.ndarray
    second_token_ms: np.ndarray
    last_token_ms: np.ndarray
    terminal_ms: np.ndarray
    input_length: np.ndarray
    output_length: np.ndarray
    reused_input_tokens: np.ndarray
    first_reused_input_tokens: np.ndarray
    admissions: np.ndarray
    status: np.ndarray
    reason: np.ndarray
    rank: np.ndarray
    readmission_request: np.ndarray
    readmission_at_ms: np.ndarray
    readmission_reused: np.ndarray
    end_ms: float
    committed_prefill_tokens: int
    gaps: GapDistribution
    pools: tuple[PoolOutcome, ...]
    handoff: HandoffOutcome | None = None
    kv_events: tuple[KvEvents, ...] | None = None

    @property
    def has_segments(self) -> bool:
        """Whether the run kept the segment logs, from which time series are made."""
        return all(pool.segments is not None for pool in self.pools)


PER_REQUEST = tuple(
    column.name
    for column in fields(Outcome)
    if column.type == "np.ndarray" and not column.name.startswith("readmission_")
)
"""Columns of `Outcome` with one entry a request: what windows, frames and records go by."""
