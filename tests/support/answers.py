"""One form for the answers of the reference, of vecsim and of the slow model, and their comparison.

An `Answer` holds one record per request of the workload (None where the answer does not list it:
the reference leaves out what a time limit cut) and the report under the reference's names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tests.models.slow_model import SlowOutcome

Record = dict[str, Any]

PERCENTILES = {"median": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99}
SKETCHED = {
    f"{p}_{name}" for p in PERCENTILES for name in ("itl_ms", "output_token_throughput_per_user")
}
TOLERANCE = 1e-9
SKETCH_TOLERANCE = 2e-3

# What depends on the machine, or describes the run rather than its outcome.
UNCOMPARED = {
    "wall_time_ms",
    "processed_tokens_per_s",
    "processed_output_tokens_per_s",
    "power_w",
    "power_coverage",
    "power_diagnostics",
    "prediction_provenance",
    "performance_diagnostics",
    "per_request",
    "agentic_graph",
    "agentic_input_format",
    "agentic_lifecycle_digest",
    "agentic_lifecycle_event_count",
    "agentic_model_projection",
    "agentic_qualification",
    "weka_nested_timestamp_basis",
}

HANDOFF_COLUMNS = (
    "prefill_admit_ms",
    "source_held_ms",
    "destination_reserved_ms",
    "destination_activated_ms",
    "decode_admit_ms",
    "source_released_ms",
    "decode_reused_input_tokens",
)

COLUMNS = (
    "terminal_status",
    "arrival_time_ms",
    "tokenized_ms",
    "first_admit_ms",
    "first_token_ms",
    "last_token_ms",
    "terminal_time_ms",
    "ttft_ms",
    "ttst_ms",
    "tpot_ms",
    "e2e_latency_ms",
    "input_length",
    "requested_output_length",
    "output_length",
    "reused_input_tokens",
    "first_admission_reused_input_tokens",
    "admission_count",
    "readmission_count",
    "prefill_worker_idx",
    "decode_worker_idx",
    *HANDOFF_COLUMNS,
)


@dataclass(frozen=True)
class Answer:
    """`requests[i]`: COLUMNS, `admission_history` of (pool, ms, reused), maybe `terminal_reason`.

    An `exhaustive` answer lists every request, whatever its status.
    """

    requests: list[Record | None]
    report: dict[str, Any]
    exhaustive: bool


def _compared(report: dict) -> dict:
    """What is compared of a report."""
    return {k: v for k, v in report.items() if k not in UNCOMPARED}


# --- from the reference ---------------------------------------------------------------------------


def from_reference(report: dict, ids: list[str]) -> Answer:
    """The reference's own report; `ids` are the authored request ids in workload order."""
    position = {request_id: k for k, request_id in enumerate(ids)}
    requests: list[Record | None] = [None] * len(ids)
    for row in report["per_request"]:
        record = {name: row.get(name) for name in COLUMNS}
        record["tpot_ms"] = row.get("itl_ms")
        record["admission_history"] = [
            (a["pool"], a["at_ms"], a["reused_input_tokens"]) for a in row["admission_history"]
        ]
        requests[position[row["request_id"]]] = record
    return Answer(requests, _compared(report), False)


def from_case(expect: dict, count: int) -> Answer:
    """The `expect` of a stored case of `count` requests."""
    requests: list[Record | None] = [None] * count
    for row in expect["requests"] or ():
        record = {name: row.get(name) for name in COLUMNS}
        record["admission_history"] = [tuple(a[:3]) for a in row["admission_history"]]
        requests[row["index"]] = record
    return Answer(requests, _compared(expect["report"]), False)


# --- from vecsim ----------------------------------------------------------------------------------


def from_result(result) -> Answer:
    """A `vecsim.Result`."""
    requests = [
        {name: row.get(name) for name in (*COLUMNS, "terminal_reason")} | {"admission_history": []}
        for row in result.requests.to_dicts()
    ]
    for row in result.admissions.to_dicts():
        entry = (row["pool"], row["at_ms"], row["reused"])
        requests[row["request"]]["admission_history"].append(entry)
    return Answer(requests, _compared(result.reference_report()), True)


# --- from the slow model --------------------------------------------------------------------------


def from_slow(payload: dict, outcome: SlowOutcome) -> Answer:
    requests = [_slow_record(outcome, i) for i in range(len(outcome.status))]
    return Answer(requests, _slow_report(payload.get("spec", payload), outcome, requests), True)


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(end - start, 0.0)


def _slow_record(o: SlowOutcome, i: int) -> Record:
    times = o.token_ms[i]
    done = o.status[i] == "completed"
    two = len(times) > 1
    admissions = o.admissions[i]
    record = {
        **dict.fromkeys(HANDOFF_COLUMNS),
        "terminal_status": o.status[i],
        "terminal_reason": o.reason[i],
        "arrival_time_ms": o.arrival_ms[i],
        "tokenized_ms": o.tokenized_ms[i],
        "first_admit_ms": o.first_admit_ms[i],
        "first_token_ms": o.first_token_ms[i],
        "last_token_ms": o.last_token_ms[i],
        "terminal_time_ms": o.terminal_ms[i],
        "ttft_ms": _span(o.arrival_ms[i], o.first_token_ms[i]) if done else None,
        "ttst_ms": _span(o.first_token_ms[i], o.second_token_ms[i]) if done else None,
        "tpot_ms": (times[-1] - times[0]) / (len(times) - 1) if done and two else None,
        "e2e_latency_ms": _span(o.arrival_ms[i], o.last_token_ms[i]) if done else None,
        "input_length": o.input_length[i],
        "requested_output_length": o.requested_output_length[i],
        "output_length": o.output_length[i],
        "reused_input_tokens": o.reused_input_tokens[i],
        "first_admission_reused_input_tokens": o.first_reused_input_tokens[i],
        "admission_count": len(admissions),
        "readmission_count": max(0, len(admissions) - 1),
        "prefill_worker_idx": None,
        "decode_worker_idx": o.rank[i] if o.rank[i] >= 0 else None,
        "admission_history": [("agg", at, reused) for at, reused in admissions],
    }
    return record if o.handoffs is None else {**record, **o.handoffs[i]}


def _slow_report(spec: dict, o: SlowOutcome, requests: list[Record]) -> dict:
    engine = spec.get("engine") or {}
    seconds_of, gpus_of = o.worker_seconds, o.gpus_per_worker
    if seconds_of is None:
        workers = spec["topology"]["workers"]["initial_workers"]
        seconds_of = (0.0, workers * o.end_ms / 1000)
        gpus_of = (0, engine.get("dp_size", 1) * engine.get("tensor_parallel_size", 1))
    done = [r for r in requests if r["terminal_status"] == "completed"]
    duration = max((r["terminal_time_ms"] for r in done), default=0.0)
    seconds = max(duration / 1000, 1e-9)
    inputs = sum(r["input_length"] for r in done)
    outputs = sum(r["output_length"] for r in done)
    reused = sum(max(r["reused_input_tokens"], r["decode_reused_input_tokens"] or 0) for r in done)
    first = sum(r["first_admission_reused_input_tokens"] for r in done)
    spans = {
        name: [r[name] for r in done if r[name] is not None]
        for name in ("ttft_ms", "ttst_ms", "tpot_ms", "e2e_latency_ms")
    }
    report = {
        "num_requests": sum(r["arrival_time_ms"] is not None for r in requests),
        "completed_requests": len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "processed_tokens": inputs + outputs,
        "duration_ms": duration,
        "request_throughput_rps": len(done) / seconds,
        "input_throughput_tok_s": inputs / seconds,
        "output_throughput_tok_s": outputs / seconds,
        "total_throughput_tok_s": (inputs + outputs) / seconds,
        "prefill_worker_seconds": seconds_of[0],
        "decode_worker_seconds": seconds_of[1],
        "prefill_gpus_per_worker": gpus_of[0],
        "decode_gpus_per_worker": gpus_of[1],
        "gpu_hours": sum(s * g for s, g in zip(seconds_of, gpus_of, strict=True)) / 3600,
        "prefix_cache_reused_ratio": reused / inputs if inputs else 0.0,
        "first_admission_prefix_cache_reused_ratio": first / inputs if inputs else 0.0,
        "committed_prefill_tokens": o.committed_prefill_tokens,
        "num_ttft_samples": len(spans["ttft_ms"]),
        "num_tpot_samples": len(spans["tpot_ms"]),
        "num_e2e_latency_samples": len(spans["e2e_latency_ms"]),
        "kv_eviction_policy": engine.get("kv_eviction_policy", "lru"),
    }
    spans["itl_ms"] = o.gaps
    spans["output_token_throughput_per_user"] = [1000 / g for g in o.gaps if g > 0]
    for name, values in spans.items():
        for statistic, value in statistics(values).items():
            report[f"{statistic}_{name}"] = value
    if report["kv_eviction_policy"] == "belady":
        report["kv_eviction_assumption"] = "global_input_trace_order_v1"
    report.update(_goodput(spec.get("sla") or {}, done, seconds))
    return report


def statistics(values: list[float]) -> dict[str, float]:
    """Mean, extremes, percentiles (nearest rank, halves up), population deviation; 0 if empty."""
    if not values:
        return dict.fromkeys(("mean", "min", "max", "std", *PERCENTILES), 0.0)
    ordered = sorted(values)
    mean = math.fsum(values) / len(values)
    answer = {
        "mean": mean,
        "min": ordered[0],
        "max": ordered[-1],
        "std": math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)),
    }
    for name, percent in PERCENTILES.items():
        answer[name] = ordered[math.floor((len(values) - 1) * percent / 100 + 0.5)]
    return answer


def _goodput(sla: dict, done: list[Record], seconds: float) -> dict:
    bounds = {k: v for k, v in sla.items() if v is not None}
    if not bounds:
        return {}
    good = [r for r in done if _meets(bounds, r)]
    return {
        "goodput_completed_requests": len(good),
        "goodput_request_throughput_rps": len(good) / seconds,
        "goodput_output_throughput_tok_s": sum(r["output_length"] for r in good) / seconds,
    }


def _meets(bounds: dict, r: Record) -> bool:
    if r["ttft_ms"] is None:
        span = r["terminal_time_ms"] - r["arrival_time_ms"]
        return list(bounds) == ["e2e_ms"] and span <= bounds["e2e_ms"]
    n = r["output_length"]
    gap = (r["e2e_latency_ms"] - r["ttft_ms"]) / (n - 1) if n > 1 else 0.0
    return (
        r["e2e_latency_ms"] <= bounds.get("e2e_ms", math.inf)
        and r["ttft_ms"] <= bounds.get("ttft_ms", math.inf)
        and gap <= bounds.get("itl_ms", math.inf)
    )


# --- comparison -----------------------------------------------------------------------------------


def close(expected: float, got: float, relative: float = TOLERANCE) -> bool:
    return math.isclose(expected, got, rel_tol=relative, abs_tol=1e-9)


def same(expected: Any, got: Any, relative: float = TOLERANCE) -> bool:
    if isinstance(expected, float) and isinstance(got, int | float):
        return close(expected, got, relative)
    if isinstance(expected, tuple | list):
        return (
            isinstance(got, tuple | list)
            and len(expected) == len(got)
            and all(map(same, expected, got))
        )
    return expected == got


def differences(expected: Answer, got: Answer) -> list[str]:
    """One line per field in which `got` differs; empty when they agree.

    Integers, texts and missing values are compared exactly, times within 1e-9, percentiles of the
    token gaps within 2e-3 (the reference sketches them).
    """
    if len(expected.requests) != len(got.requests):
        return [f"{len(expected.requests)} requests expected, got {len(got.requests)}"]
    lines = []
    for i, (want, have) in enumerate(zip(expected.requests, got.requests, strict=True)):
        lines += _record_differences(i, want, have, got.exhaustive)
    for name, want in expected.report.items():
        relative = SKETCH_TOLERANCE if name in SKETCHED else TOLERANCE
        have = got.report.get(name, "absent")
        if not same(want, have, relative):
            lines.append(f"report {name}: expected {want!r}, got {have!r}")
    return lines


def _record_differences(
    i: int, want: Record | None, have: Record | None, exhaustive: bool
) -> list[str]:
    if want is None:
        cut = have is None or have["terminal_status"] in ("unfinished", "not_arrived")
        return [] if cut else [f"request {i}: expected cut, got {have['terminal_status']}"]
    if have is None:
        cut = not exhaustive and want["terminal_status"] in ("unfinished", "not_arrived")
        return [] if cut else [f"request {i}: expected {want['terminal_status']}, got nothing"]
    return [
        f"request {i} {name}: expected {value!r}, got {have.get(name, 'absent')!r}"
        for name, value in want.items()
        if not same(value, have.get(name, "absent"))
    ]
