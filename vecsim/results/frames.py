"""The frames of a run: one row per request, one row per admission."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vecsim.kernels.state import status as S
from vecsim.results import metrics as metrics

if TYPE_CHECKING:
    from vecsim.run.outcome import Outcome
    from vecsim.workload.workload import Workload

STATUS = pl.Enum(S.STATUS_NAMES)
REASON = pl.Enum([name for name in S.REASON_NAMES if name is not None])
POOL = pl.Enum(("agg", "prefill", "decode"))

REQUESTS_SCHEMA: dict[str, pl.DataType] = {
    "request_id": pl.String(),
    "session_id": pl.String(),
    "turn_index": pl.Int32(),
    "play_id": pl.String(),
    "metadata": pl.String(),
    "arrival_time_ms": pl.Float64(),
    "dispatched_at_ms": pl.Float64(),
    "tokenized_ms": pl.Float64(),
    "first_admit_ms": pl.Float64(),
    "first_token_ms": pl.Float64(),
    "last_token_ms": pl.Float64(),
    "terminal_time_ms": pl.Float64(),
    "ttft_ms": pl.Float64(),
    "ttst_ms": pl.Float64(),
    "tpot_ms": pl.Float64(),
    "e2e_latency_ms": pl.Float64(),
    "input_length": pl.Int32(),
    "requested_output_length": pl.Int32(),
    "output_length": pl.Int32(),
    "reused_input_tokens": pl.Int32(),
    "first_admission_reused_input_tokens": pl.Int32(),
    "admission_count": pl.Int32(),
    "readmission_count": pl.Int32(),
    "terminal_status": STATUS,
    "terminal_reason": REASON,
    "prefill_worker_idx": pl.Int32(),
    "prefill_worker_id": pl.Int32(),
    "prefill_dp_rank_used": pl.Int32(),
    "decode_worker_idx": pl.Int32(),
    "decode_worker_id": pl.Int32(),
    "decode_dp_rank_used": pl.Int32(),
    "prefill_admit_ms": pl.Float64(),
    "source_held_ms": pl.Float64(),
    "destination_reserved_ms": pl.Float64(),
    "destination_activated_ms": pl.Float64(),
    "decode_admit_ms": pl.Float64(),
    "source_released_ms": pl.Float64(),
    "decode_reused_input_tokens": pl.Int32(),
    "prefill_route_overlap_tokens": pl.Int32(),
    "decode_route_overlap_tokens": pl.Int32(),
}
"""Columns of `Result.requests`: times in virtual ms, `metadata` as JSON text, undefined = null."""

ADMISSIONS_SCHEMA: dict[str, pl.DataType] = {
    "request": pl.Int32(),
    "pool": POOL,
    "worker": pl.Int32(),
    "rank": pl.Int32(),
    "at_ms": pl.Float64(),
    "reused": pl.Int32(),
}
"""Columns of `Result.admissions`. `request` is a row of `requests`, `reused` counts tokens."""


def requests_frame(workload: Workload, outcome: Outcome, spans: metrics.Latencies) -> pl.DataFrame:
    dp_size = outcome.pools[-1].dp_size
    placed = outcome.rank >= 0
    tokenized, graph = outcome.tokenized_ms, workload.dependencies
    readmissions = np.bincount(outcome.readmission_request, minlength=len(placed))
    columns = {
        "request_id": workload.request_id,
        "session_id": workload.session_id,
        "turn_index": _turns(workload.turn_index),
        "play_id": None if graph is None else graph.play_id.gather(graph.play),
        "metadata": _metadata(workload.metadata),
        "arrival_time_ms": outcome.arrival_ms,
        "dispatched_at_ms": None if graph is None else outcome.arrival_ms,
        "tokenized_ms": tokenized,
        "first_admit_ms": outcome.first_admit_ms,
        "first_token_ms": outcome.first_token_ms,
        "last_token_ms": outcome.last_token_ms,
        "terminal_time_ms": outcome.terminal_ms,
        "ttft_ms": spans.ttft_ms,
        "ttst_ms": spans.ttst_ms,
        "tpot_ms": spans.tpot_ms,
        "e2e_latency_ms": spans.e2e_latency_ms,
        "input_length": outcome.input_length,
        "requested_output_length": workload.output_length,
        "output_length": outcome.output_length,
        "reused_input_tokens": outcome.reused_input_tokens,
        "first_admission_reused_input_tokens": outcome.first_reused_input_tokens,
        "admission_count": outcome.admissions,
        "readmission_count": readmissions,
        "terminal_status": _names(outcome.status, S.STATUS_NAMES, STATUS),
        "terminal_reason": _names(outcome.reason, S.REASON_NAMES, REASON),
        "decode_worker_idx": _where(outcome.rank, placed),
        "decode_worker_id": _where(outcome.rank // dp_size, placed),
        "decode_dp_rank_used": _where(outcome.rank % dp_size, placed),
    }
    if outcome.handoff is not None:
        columns.update(_handoff_columns(outcome))
    rows = len(outcome.status)
    return pl.DataFrame(
        [_column(name, columns.get(name), dtype, rows) for name, dtype in REQUESTS_SCHEMA.items()]
    )


def _handoff_columns(outcome: Outcome) -> dict[str, Any]:
    """What `requests` has of a prefill/decode run only."""
    handoff = outcome.handoff
    dp_size = outcome.pools[0].dp_size
    rank = handoff.prefill_rank
    placed = rank >= 0
    decoded = handoff.decode_admissions > 0
    return {
        "prefill_worker_idx": _where(rank, placed),
        "prefill_worker_id": _where(rank // dp_size, placed),
        "prefill_dp_rank_used": _where(rank % dp_size, placed),
        "prefill_admit_ms": outcome.first_admit_ms,
        "source_held_ms": handoff.source_held_ms,
        "destination_reserved_ms": handoff.destination_reserved_ms,
        "destination_activated_ms": handoff.destination_activated_ms,
        "decode_admit_ms": handoff.decode_admit_ms,
        "source_released_ms": handoff.source_released_ms,
        "decode_reused_input_tokens": _where(handoff.decode_reused, decoded),
    }


def _column(name: str, values: Any, dtype: pl.DataType, rows: int) -> pl.Series:
    """A frame column from a series, an array (NaN = null) or None (all null)."""
    if values is None:
        return _constant(name, None, dtype, rows)
    if isinstance(values, pl.Series):
        return values.cast(dtype).alias(name)
    return pl.Series(name, values, nan_to_null=values.dtype.kind == "f").cast(dtype)


def _constant(name: str, value: Any, dtype: pl.DataType, rows: int) -> pl.Series:
    return pl.Series(name, [value], dtype=dtype).new_from_index(0, rows)


def _where(values: np.ndarray, defined: np.ndarray) -> pl.Series:
    series = pl.Series(values)
    return series if defined.all() else series.set(pl.Series(~defined), None)


def _turns(turn_index: np.ndarray | None) -> pl.Series | None:
    return None if turn_index is None else _where(turn_index, turn_index >= 0)


def _names(codes: np.ndarray, names: tuple[str | None, ...], dtype: pl.Enum) -> pl.Series:
    return pl.Series(names, dtype=dtype).gather(pl.Series(codes, dtype=pl.UInt32))


def _metadata(metadata: list | None) -> pl.Series | None:
    if metadata is None or all(entry is None for entry in metadata):
        return None
    texts = [None if entry is None else json.dumps(entry) for entry in metadata]
    return pl.Series(texts, dtype=pl.String)


def admissions_frame(outcome: Outcome) -> pl.DataFrame:
    handoff = outcome.handoff
    again = outcome.readmission_request
    in_decode = np.zeros(len(again), np.bool_)
    admissions = outcome.admissions
    if handoff is not None:
        in_decode = handoff.readmission_in_decode
        admissions = admissions - handoff.decode_admissions
    parts = [
        _first_admissions(admissions, outcome.first_admit_ms, outcome.first_reused_input_tokens),
        _readmissions(outcome, ~in_decode),
    ]
    if handoff is not None:
        decode = (handoff.decode_admissions, handoff.decode_admit_ms, handoff.decode_first_reused)
        parts += [_first_admissions(*decode), _readmissions(outcome, in_decode)]
    request, at_ms, reused = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    pool = np.repeat(np.arange(len(parts)) // 2, [len(part[0]) for part in parts])
    if len(parts) > 2 or len(again):
        order = np.argsort(request, kind="stable")
        request, at_ms, reused, pool = request[order], at_ms[order], reused[order], pool[order]
    pools = outcome.pools
    ranks = [outcome.rank] if handoff is None else [handoff.prefill_rank, outcome.rank]
    rank = np.array([own[request] for own in ranks])[pool, np.arange(len(request))]
    dp_size = np.array([own.dp_size for own in pools])[pool]
    columns = {
        "request": request,
        "pool": _names(pool, tuple(own.name for own in pools), POOL),
        "worker": rank // dp_size,
        "rank": rank % dp_size,
        "at_ms": at_ms,
        "reused": reused,
    }
    return pl.DataFrame(
        [
            _column(name, columns[name], dtype, len(request))
            for name, dtype in ADMISSIONS_SCHEMA.items()
        ]
    )


def _first_admissions(
    admissions: np.ndarray, at_ms: np.ndarray, reused: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(request, at_ms, reused) of the first admission of each request in one pool."""
    first = np.flatnonzero(admissions > 0).astype(np.int32)
    return first, at_ms[first], reused[first]


def _readmissions(outcome: Outcome, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(request, at_ms, reused) of some readmissions (bool [k])."""
    return (
        outcome.readmission_request[rows],
        outcome.readmission_at_ms[rows],
        outcome.readmission_reused[rows],
    )
