"""Metric definitions: what the numbers of a report mean, and nothing else.

Names and definitions are the reference's unless the README says otherwise. A metric without samples
is None. Populations: *arrived* is every request that entered the simulation, *done* every completed
one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vecsim.kernels.state import status as S
from vecsim.run.outcome import GapDistribution, Outcome, PoolOutcome

if TYPE_CHECKING:
    from vecsim.timing.resolve import Priced

PERCENTILES = (("median", 50), ("p75", 75), ("p90", 90), ("p95", 95), ("p99", 99))
STATISTICS = ("mean", "min", "max", *(name for name, _ in PERCENTILES), "std")

# (name, suffix) of every distribution: the fields are <statistic>_<name><suffix>.
REFERENCE_DISTRIBUTIONS = (
    ("ttft", "_ms"),
    ("ttst", "_ms"),
    ("tpot", "_ms"),
    ("itl", "_ms"),
    ("e2e_latency", "_ms"),
    ("output_token_throughput_per_user", ""),
)
DISTRIBUTIONS = (*REFERENCE_DISTRIBUTIONS, ("queue_time", "_ms"))

_GROWTH_SHARE = 0.1  # backlog growth that counts, as a share of the arrivals of as much time


@dataclass(frozen=True)
class Latencies:
    """Per-request latencies in ms, float64 [n]; NaN for requests outside the population.

    Attributes:
        done: bool [n], completed requests.
        ttft_ms: arrival to first token; done requests with a token.
        ttst_ms: first to second token; done requests with two tokens or more.
        tpot_ms: (last token - first token) / (tokens - 1); as ttst_ms.
        e2e_latency_ms: arrival to last token; as ttft_ms.
        queue_time_ms: arrival to first admission; done requests.
    """

    done: np.ndarray
    ttft_ms: np.ndarray
    ttst_ms: np.ndarray
    tpot_ms: np.ndarray
    e2e_latency_ms: np.ndarray
    queue_time_ms: np.ndarray


def latencies(outcome: Outcome) -> Latencies:
    """Derive the per-request latencies of a run."""
    done = outcome.status == S.COMPLETED
    one = done & (outcome.output_length >= 1)
    two = done & (outcome.output_length >= 2)
    gaps = np.where(two, outcome.output_length - 1, 1)
    return Latencies(
        done=done,
        ttft_ms=_span(outcome.arrival_ms, outcome.first_token_ms, one),
        ttst_ms=_span(outcome.first_token_ms, outcome.second_token_ms, two),
        tpot_ms=_span(outcome.first_token_ms, outcome.last_token_ms, two) / gaps,
        e2e_latency_ms=_span(outcome.arrival_ms, outcome.last_token_ms, one),
        queue_time_ms=_span(outcome.arrival_ms, outcome.first_admit_ms, done),
    )


def _span(start: np.ndarray, end: np.ndarray, population: np.ndarray) -> np.ndarray:
    return np.where(population, np.maximum(end - start, 0.0), np.nan)


def build_report(
    outcome: Outcome,
    spans: Latencies,
    *,
    sla: dict[str, float],
    closed_loop: bool,
    kv_eviction_policy: str,
    window_ms: float | None = None,
) -> dict:
    """Aggregate one run.

    Args:
        outcome: columns of the run, n requests.
        spans: `latencies(outcome)`.
        sla: bounds in ms by `ttft_ms`, `itl_ms`, `e2e_ms`; empty for none.
        closed_loop: arrivals were released by a concurrency cap.
        kv_eviction_policy: name of the policy, echoed.
        window_ms: time that the pools' sums are of; None = to the last event.

    Returns:
        Field name -> number, string, bool, dict of counts, or None where there are no samples, or
        where a sum does not fit a float64.
    """
    report = _counts(outcome)
    report.update(_totals(outcome, spans.done))
    report.update(_distributions(outcome, spans))
    report.update(_pools(outcome, outcome.end_ms if window_ms is None else window_ms))
    report["kv_eviction_policy"] = kv_eviction_policy
    if kv_eviction_policy == "belady":
        report["kv_eviction_assumption"] = "global_input_trace_order_v1"
    report["backlog_growing"] = None if closed_loop else backlog_growing(outcome)
    if sla:
        report.update(_goodput(outcome, spans, sla, report["duration_ms"], report["num_requests"]))
    return {name: _finite_or_none(value) for name, value in report.items()}


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _counts(outcome: Outcome) -> dict:
    statuses = np.bincount(outcome.status, minlength=len(S.STATUS_NAMES))
    reasons = np.bincount(outcome.reason, minlength=len(S.REASON_NAMES))
    counts = {
        f"{name}_requests": int(count) for name, count in zip(S.STATUS_NAMES, statuses, strict=True)
    }
    total = len(outcome.status)
    return {
        "workload_requests": total,
        "num_requests": total - counts["not_arrived_requests"],
        **counts,
        "terminal_reasons": {
            name: int(count)
            for name, count in zip(S.REASON_NAMES, reasons, strict=True)
            if name is not None
        },
    }


def _totals(outcome: Outcome, done: np.ndarray) -> dict:
    inputs = int(outcome.input_length.sum(where=done, dtype=np.int64))
    outputs = int(outcome.output_length.sum(where=done, dtype=np.int64))
    most_reused = outcome.reused_input_tokens
    if outcome.handoff is not None:
        most_reused = np.maximum(most_reused, outcome.handoff.decode_reused)
    reused = int(most_reused.sum(where=done, dtype=np.int64))
    first_reused = int(outcome.first_reused_input_tokens.sum(where=done, dtype=np.int64))
    completed = int(done.sum())
    duration = float(outcome.terminal_ms.max(where=done, initial=0.0)) if completed else None
    first_arrival = float(np.nanmin(outcome.arrival_ms)) if completed else None
    seconds = _seconds(duration)
    return {
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "processed_tokens": inputs + outputs,
        "committed_prefill_tokens": int(outcome.committed_prefill_tokens),
        "duration_ms": duration,
        "makespan_ms": duration - first_arrival if completed else None,
        "last_event_ms": float(outcome.end_ms),
        "request_throughput_rps": completed / seconds,
        "input_throughput_tok_s": inputs / seconds,
        "output_throughput_tok_s": outputs / seconds,
        "total_throughput_tok_s": (inputs + outputs) / seconds,
        "prefix_cache_reused_ratio": reused / inputs if inputs else None,
        "first_admission_prefix_cache_reused_ratio": first_reused / inputs if inputs else None,
        "readmissions": len(outcome.readmission_request),
    }


def _seconds(duration_ms: float | None) -> float:
    """Denominator of every rate: the duration, kept away from zero."""
    return max((duration_ms or 0.0) / 1000.0, 1e-9)


def _distributions(outcome: Outcome, spans: Latencies) -> dict:
    exact = {
        "ttft": spans.ttft_ms,
        "ttst": spans.ttst_ms,
        "tpot": spans.tpot_ms,
        "e2e_latency": spans.e2e_latency_ms,
        "queue_time": spans.queue_time_ms,
    }
    samples = {name: values[~np.isnan(values)] for name, values in exact.items()}
    statistics = {name: exact_statistics(values) for name, values in samples.items()}
    statistics["itl"] = gap_statistics(outcome.gaps)
    statistics["output_token_throughput_per_user"] = rate_statistics(outcome.gaps)
    fields = {
        f"{statistic}_{name}{suffix}": statistics[name][statistic]
        for name, suffix in DISTRIBUTIONS
        for statistic in STATISTICS
    }
    for name in ("ttft", "tpot", "e2e_latency"):
        fields[f"num_{name}_samples"] = len(samples[name])
    return fields


def rank_of(count: int, percent: int) -> int:
    """Index of a percentile among `count` ascending samples: (count - 1) * percent / 100, rounded
    to the nearest integer, halves up."""
    return ((count - 1) * percent + 50) // 100


def exact_statistics(values: np.ndarray) -> dict[str, float | None]:
    """Mean, extremes, percentiles (no interpolation) and population standard deviation.

    Args:
        values: float64 [k], in any order, no NaN.
    """
    count = len(values)
    if count == 0:
        return dict.fromkeys(STATISTICS)
    ordered = np.sort(values)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(ordered.sum() / count)
        deviation = ordered - mean
        std = float(np.sqrt((deviation * deviation).sum() / count))
    statistics = {"mean": mean, "min": float(ordered[0]), "max": float(ordered[-1]), "std": std}
    for name, percent in PERCENTILES:
        statistics[name] = float(ordered[rank_of(count, percent)])
    return statistics


def gap_statistics(gaps: GapDistribution) -> dict[str, float | None]:
    """Statistics of the inter-token gaps (ms). Percentiles come from the bins: within 0.01 % of the
    exact order statistic, and never outside [minimum, maximum]."""
    if gaps.count == 0:
        return dict.fromkeys(STATISTICS)
    statistics = {
        "mean": float(gaps.mean),
        "min": float(gaps.minimum),
        "max": float(gaps.maximum),
        "std": _std(gaps.m2, gaps.count, gaps.minimum, gaps.maximum),
    }
    cumulative = np.cumsum(gaps.bins)
    for name, percent in PERCENTILES:
        rank = rank_of(gaps.count, percent) - gaps.zeros
        statistics[name] = _binned(gaps, cumulative, rank) if rank >= 0 else 0.0
    return statistics


def rate_statistics(gaps: GapDistribution) -> dict[str, float | None]:
    """Statistics of 1000 / gap (tokens/s) over the positive gaps, as `gap_statistics`."""
    count = gaps.count - gaps.zeros
    if count == 0:
        return dict.fromkeys(STATISTICS)
    statistics = {
        "mean": float(gaps.rate_mean),
        "min": 1000.0 / float(gaps.maximum),
        "max": 1000.0 / float(gaps.positive_minimum),
        "std": _std(gaps.rate_m2, count, 1000.0 / gaps.maximum, 1000.0 / gaps.positive_minimum),
    }
    cumulative = np.cumsum(gaps.bins)
    for name, percent in PERCENTILES:
        # The k-th smallest rate belongs to the k-th largest gap.
        rank = count - 1 - rank_of(count, percent)
        statistics[name] = 1000.0 / _binned(gaps, cumulative, rank)
    return statistics


def _std(m2: float, count: int, least: float, most: float) -> float:
    """Population standard deviation from a sum of squares whose last digits are rounding: never
    more than half the range of the values (Popoviciu's inequality), so that equal ones have 0."""
    return min(float(np.sqrt(m2 / count)), (float(most) - float(least)) / 2.0)


def _binned(gaps: GapDistribution, cumulative: np.ndarray, rank: int) -> float:
    """The gap at `rank` among the ascending positive gaps."""
    midpoint = float(gaps.midpoints[np.searchsorted(cumulative, rank, side="right")])
    return min(max(midpoint, float(gaps.positive_minimum)), float(gaps.maximum))


def _pools(outcome: Outcome, time_ms: float) -> dict:
    """Fields of the prefill and the decode pool; an aggregated pool reports as decode."""
    by_side = {"prefill": None, "decode": None}
    for pool in outcome.pools:
        by_side["prefill" if pool.name == "prefill" else "decode"] = pool
    fields: dict = {}
    gpu_seconds = 0.0
    for side, pool in by_side.items():
        entry = _pool(pool, float(time_ms))
        gpu_seconds += entry["worker_seconds"] * entry["gpus_per_worker"]
        fields.update({f"{side}_{name}": value for name, value in entry.items()})
    fields["gpu_hours"] = gpu_seconds / 3600.0
    fields["preemptions"] = sum(int(pool.preemptions.sum()) for pool in outcome.pools)
    return fields


def _pool(pool: PoolOutcome | None, time_ms: float) -> dict:
    if pool is None:
        return {
            "worker_seconds": 0.0,
            "gpus_per_worker": 0,
            "pool_busy_ratio": None,
            "pool_mean_kv_usage": None,
            "pool_passes": None,
        }
    worker_ms = pool.workers * time_ms
    block_ms = worker_ms * pool.dp_size * pool.total_blocks
    return {
        "worker_seconds": worker_ms / 1000.0,
        "gpus_per_worker": pool.gpus_per_worker,
        "pool_busy_ratio": float(pool.busy_ms.sum()) / worker_ms if worker_ms else None,
        "pool_mean_kv_usage": float(pool.kv_block_ms.sum()) / block_ms if block_ms else None,
        "pool_passes": int(pool.passes.sum()),
    }


def timing_fields(priced: tuple[Priced, ...], outside: tuple[int, int] | None) -> dict:
    """What a timing table and an estimate of KV blocks add to the report.

    Args:
        priced: roles with the estimates of their blocks.
        outside: prefill and decode look-ups outside the table's range, or None without a table.
    """
    fields: dict = {}
    for one in priced:
        if one.capacity is not None:
            side = "prefill" if one.role.stage == "prefill" else "decode"
            fields[f"{side}_derived_num_gpu_blocks"] = one.capacity.num_gpu_blocks
    if outside is not None:
        fields["outside_table_prefill_lookups"], fields["outside_table_decode_lookups"] = outside
    return fields


def backlog_growing(outcome: Outcome) -> bool | None:
    """Whether the queue was still growing when arrivals ended.

    The backlog at an instant is the number of requests that have arrived and wait for their first
    admission. It grows when its time average over the last quarter of the arrival window exceeds
    that over the quarter before by at least one request and by more than a tenth of the requests
    that arrive in such a quarter (half of the arrivals in both).

    Returns:
        None when fewer than two distinct arrival instants exist.
    """
    arrived = ~np.isnan(outcome.arrival_ms)
    arrival = outcome.arrival_ms[arrived]
    if len(arrival) == 0:
        return None
    first, last = float(arrival.min()), float(arrival.max())
    if first == last:
        return None
    quarter = (last - first) / 4.0
    admitted, terminal = outcome.first_admit_ms[arrived], outcome.terminal_ms[arrived]
    left = np.where(np.isnan(admitted), terminal, admitted)
    left[np.isnan(left)] = np.inf
    middle, third = last - 2.0 * quarter, last - quarter
    before = _mean_waiting(arrival, left, middle, third)
    after = _mean_waiting(arrival, left, third, last)
    growth = after - before
    return bool(growth >= 1.0 and growth > _GROWTH_SHARE * np.count_nonzero(arrival > middle) / 2)


def _mean_waiting(arrival: np.ndarray, left: np.ndarray, start: float, end: float) -> float:
    """Time average over [start, end] of the number of requests between `arrival` and `left`.

    Where the quarters are too short for float64, an instant: the number waiting at `start`.
    """
    if start == end:
        return float(np.count_nonzero((arrival <= start) & (left > start)))
    waiting = np.clip(left, start, end) - np.clip(arrival, start, end)
    return float(waiting.sum()) / (end - start)


def _goodput(
    outcome: Outcome,
    spans: Latencies,
    sla: dict[str, float],
    duration_ms: float | None,
    num_requests: int,
) -> dict:
    good = _within_sla(outcome, spans, sla)
    requests = int(good.sum())
    tokens = int(outcome.output_length.sum(where=good, dtype=np.int64))
    seconds = _seconds(duration_ms)
    return {
        "goodput_completed_requests": requests,
        "goodput_request_throughput_rps": requests / seconds,
        "goodput_output_throughput_tok_s": tokens / seconds,
        "goodput_ratio": requests / num_requests if num_requests else None,
    }


def _within_sla(outcome: Outcome, spans: Latencies, sla: dict[str, float]) -> np.ndarray:
    """Done requests that meet every bound, inclusive. Without tokens only a lone end-to-end bound
    can be met, by the terminal time; with one token the ITL bound counts as met."""
    tokens = outcome.output_length
    none = spans.done & (tokens == 0)
    good = spans.done & (tokens >= 1)
    e2e, ttft, itl = sla.get("e2e_ms"), sla.get("ttft_ms"), sla.get("itl_ms")
    if e2e is not None:
        good &= spans.e2e_latency_ms <= e2e
        if ttft is None and itl is None:
            good |= none & (outcome.terminal_ms - outcome.arrival_ms <= e2e)
    if ttft is not None:
        good &= spans.ttft_ms <= ttft
    if itl is not None:
        gaps = np.maximum(tokens - 1, 1)
        mean_gap = (spans.e2e_latency_ms - spans.ttft_ms) / gaps
        good &= (tokens <= 1) | (mean_gap <= itl)
    return good
