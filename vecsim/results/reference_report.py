"""A result in the reference's own shape: its field names and its records of requests."""

from __future__ import annotations

import json

import polars as pl

from vecsim.results import metrics as metrics

# Statuses that end a request; the reference lists only these requests.
_TERMINAL = frozenset(("completed", "rejected", "shed", "failed", "canceled"))

CONDITIONAL_FIELDS = (
    "kv_eviction_assumption",
    "goodput_completed_requests",
    "goodput_request_throughput_rps",
    "goodput_output_throughput_tok_s",
)


def reference_fields() -> list[str]:
    sides = [
        f"{side}_{name}"
        for side in ("prefill", "decode")
        for name in ("worker_seconds", "gpus_per_worker")
    ]
    distributions = [
        f"{statistic}_{name}{suffix}"
        for name, suffix in metrics.REFERENCE_DISTRIBUTIONS
        for statistic in metrics.STATISTICS
    ]
    return [
        "num_requests",
        "completed_requests",
        "total_input_tokens",
        "total_output_tokens",
        "duration_ms",
        "request_throughput_rps",
        "input_throughput_tok_s",
        "output_throughput_tok_s",
        "total_throughput_tok_s",
        "processed_tokens",
        *sides,
        "gpu_hours",
        "prefix_cache_reused_ratio",
        "first_admission_prefix_cache_reused_ratio",
        "committed_prefill_tokens",
        "num_ttft_samples",
        "num_tpot_samples",
        "num_e2e_latency_samples",
        "kv_eviction_policy",
        *distributions,
    ]


def request_records(
    requests: pl.DataFrame, admissions: pl.DataFrame, pools: tuple[str, ...]
) -> list[dict]:
    """Records of the reference's `per_request` list, in its order.

    `pools`: names, in order of placement.
    """
    histories: dict[int, list[dict]] = {}
    for request, pool, _, _, at_ms, reused in admissions.iter_rows():
        history = histories.setdefault(request, [])
        in_pool = sum(entry["pool"] == pool for entry in history)
        history.append(
            {
                "admission_ordinal": len(history),
                "pool_admission_ordinal": in_pool,
                "pool": pool,
                "at_ms": at_ms,
                "reused_input_tokens": reused,
                "is_readmission": in_pool > 0,
            }
        )
    records = [
        (_record_order(row, index), _record(row, index, histories.get(index, []), pools))
        for index, row in enumerate(requests.iter_rows(named=True))
        if row["terminal_status"] in _TERMINAL
    ]
    records.sort(key=lambda pair: pair[0])
    return [record for _, record in records]


def _record_order(row: dict, index: int) -> tuple:
    name = row["request_id"]
    return (name is not None, (name or "").encode(), row["arrival_time_ms"], index)


_OWN_COLUMNS = (
    "terminal_reason",
    "prefill_worker_id",
    "prefill_dp_rank_used",
    "decode_worker_id",
    "decode_dp_rank_used",
)
_ABSENT_WHEN_NULL = ("request_id", "play_id", "metadata", "tokenized_ms")


def _record(row: dict, index: int, history: list[dict], pools: tuple[str, ...]) -> dict:
    record = {name: value for name, value in row.items() if name not in _OWN_COLUMNS}
    for name in _ABSENT_WHEN_NULL:
        if record[name] is None:
            del record[name]
    if "metadata" in record:
        record["metadata"] = json.loads(record["metadata"])
    record["itl_ms"] = record.pop("tpot_ms")
    record["uuid"] = f"{index + 1:032x}"
    record["uuid"] = "-".join(
        record["uuid"][a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    )
    record["pressure_record_ordinals"] = []
    record["admission_history"] = history
    sides = [(pool, "prefill" if pool == "prefill" else "decode") for pool in pools]
    record["routing_history"] = [
        _routing(row, pool, side) for pool, side in sides if row[f"{side}_worker_idx"] is not None
    ]
    return record


def _routing(row: dict, pool: str, side: str) -> dict:
    return {
        "pool": pool,
        "outcome": "immediate",
        "queue_entered_at_ms": None,
        "released_at_ms": None,
        "queue_wait_ms": 0.0,
        "logical_worker_id": row[f"{side}_worker_id"],
        "scheduler_id": row[f"{side}_worker_idx"],
        "dp_rank": row[f"{side}_dp_rank_used"],
        "reported_overlap_tokens": 0,
        "selected_overlap_blocks": None,
        "best_available_overlap_blocks": None,
        "overlap_regret_blocks": None,
        "placement_replica_id": None,
    }
