"""What a run returns: a report, one row per request, one row per admission."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vecsim import report as metrics
from vecsim.errors import InputError
from vecsim.files import json_text, replace_files
from vecsim.kernels import layout
from vecsim.measuring import Measured, restrict
from vecsim.plays import Plays, play_outcomes, plays_of, trajectory_fields
from vecsim.sessions import session_cap

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from vecsim.descriptors import Payload
    from vecsim.outcome import Outcome
    from vecsim.pictures.charts import ResultPlots
    from vecsim.pricing.providers import Priced
    from vecsim.roles import Role
    from vecsim.workload import Workload

STATUS = pl.Enum(layout.STATUS_NAMES)
REASON = pl.Enum([name for name in layout.REASON_NAMES if name is not None])
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

_WRITERS: dict[str, Callable[[pl.DataFrame, Path], Any]] = {
    "parquet": lambda frame, path: frame.write_parquet(path),
    "csv": lambda frame, path: frame.write_csv(path),
    "jsonl": lambda frame, path: frame.write_ndjson(path),
}

RESULT_FILES = (
    *(f"requests.{name}" for name in _WRITERS),
    "report.json",
    "config.json",
    "timeline.parquet",
    "kv_events.parquet",
)
"""Every name that `Result.write` may use in its folder."""

# Statuses that end a request; the reference lists only these requests.
_TERMINAL = frozenset(("completed", "rejected", "shed", "failed", "canceled"))

_SUMMARY_DISTRIBUTIONS = (
    ("TTFT", "ms", "ttft", "_ms"),
    ("queue time", "ms", "queue_time", "_ms"),
    ("TTST", "ms", "ttst", "_ms"),
    ("TPOT", "ms", "tpot", "_ms"),
    ("ITL", "ms", "itl", "_ms"),
    ("E2E latency", "ms", "e2e_latency", "_ms"),
    ("output per user", "tok/s", "output_token_throughput_per_user", ""),
)
_SUMMARY_STATISTICS = ("mean", "median", "p90", "p99", "max")
_SUMMARY_SCALARS = (
    ("completed", "requests", "completed_requests", ",d"),
    ("duration", "ms", "duration_ms", ",.3f"),
    ("request throughput", "req/s", "request_throughput_rps", ",.3f"),
    ("input throughput", "tok/s", "input_throughput_tok_s", ",.1f"),
    ("output throughput", "tok/s", "output_throughput_tok_s", ",.1f"),
    ("goodput", "req/s", "goodput_request_throughput_rps", ",.3f"),
    ("goodput ratio", "of requests", "goodput_ratio", ".5f"),
    ("reuse ratio", "of prompt tokens", "prefix_cache_reused_ratio", ".5f"),
    ("preemptions", "", "preemptions", ",d"),
    ("prefill pool busy", "of the time", "prefill_pool_busy_ratio", ".5f"),
    ("prefill KV use", "of the blocks", "prefill_pool_mean_kv_usage", ".5f"),
    ("pool busy", "of the time", "decode_pool_busy_ratio", ".5f"),
    ("KV use", "of the blocks", "decode_pool_mean_kv_usage", ".5f"),
    ("GPU hours", "h", "gpu_hours", ",.4f"),
    ("prefill KV blocks, derived", "a rank", "prefill_derived_num_gpu_blocks", ",d"),
    ("KV blocks, derived", "a rank", "decode_derived_num_gpu_blocks", ",d"),
    ("prefills outside the table", "look-ups", "outside_table_prefill_lookups", ",d"),
    ("decodes outside the table", "look-ups", "outside_table_decode_lookups", ",d"),
)


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """One finished run.

    Attributes:
        payload: the validated descriptor.
        workload: the requests, n rows.
        outcome: raw columns of the run.
        roles: resolved worker roles.
        defaulted: field paths of the descriptor that were left to their default.
        wall_time_ms: host time of the run (ms); the only number here that is not simulated.
        source: where the workload came from, echoed in `effective_config`.
        measured: what the report covers, where there is a warm-up or cool-down; None = everything.
        priced: the roles with their timing models and the estimates of their KV blocks.
        outside: prefill and decode look-ups outside a timing table's range; None without a table.
    """

    payload: Payload
    workload: Workload
    outcome: Outcome
    roles: tuple[Role, ...]
    defaulted: list[str]
    wall_time_ms: float
    source: dict[str, Any] = field(default_factory=dict)
    measured: Measured | None = None
    priced: tuple[Priced, ...] = ()
    outside: tuple[int, int] | None = None

    @cached_property
    def _latencies(self) -> metrics.Latencies:
        return metrics.latencies(self.outcome)

    @cached_property
    def report(self) -> dict[str, Any]:
        """Aggregate metrics by name; None where there are no samples. Holds simulated facts only,
        so that equal inputs give equal reports."""
        spec = self.payload.spec
        bounds = {name: getattr(spec.sla, name) for name in ("ttft_ms", "itl_ms", "e2e_ms")}
        outcome, latencies = self.outcome, self._latencies
        if self.measured is not None:
            outcome = restrict(outcome, self.measured)
            latencies = metrics.latencies(outcome)
        report = metrics.build_report(
            outcome,
            latencies,
            sla={name: bound for name, bound in bounds.items() if bound is not None},
            closed_loop=self._closed_loop,
            kv_eviction_policy=str(spec.engine.kv_eviction_policy),
        )
        if self.measured is not None:
            report["excluded_requests"] = int((~self.measured.rows).sum())
        if self._plays is not None:
            report.update(trajectory_fields(self._plays))
        report.update(metrics.timing_fields(self.priced, self.outside))
        return report

    @cached_property
    def _plays(self) -> Plays | None:
        """How the plays of a graph of requests went, all of them; None without a graph."""
        graph = self.workload.dependencies
        return None if graph is None else plays_of(graph, self.outcome)

    @property
    def _closed_loop(self) -> bool:
        if self.payload.traffic is not None or self.workload.session_cap is not None:
            return session_cap(self.payload.traffic, self.workload) is not None
        return self.payload.spec.max_in_flight is not None

    @cached_property
    def requests(self) -> pl.DataFrame:
        """One row per request of the workload, in workload order; columns of `REQUESTS_SCHEMA`."""
        return _requests_frame(self.workload, self.outcome, self._latencies)

    @cached_property
    def admissions(self) -> pl.DataFrame:
        """One row per admission, by request and time; columns of `ADMISSIONS_SCHEMA`."""
        return _admissions_frame(self.outcome)

    @cached_property
    def kv_events(self) -> pl.DataFrame:
        """One row per block of a KV event, by worker and rank, then in the order of the events;
        columns of `vecsim.kv_events.KV_EVENTS_SCHEMA`. Needs `replay(..., observe="kv_events")`.

        Raises:
            InputError: the run observed none.
        """
        if self.outcome.kv_events is None:
            raise InputError("observe", None, '"kv_events", for a result that has them')
        from vecsim.kv_events import frame_of

        return frame_of(list(self.outcome.kv_events))

    def timeline(self, bucket_ms: float | None = None, by: str = "pool") -> pl.DataFrame:
        """Time series of the run, which needs `replay(..., timeline=True)`.

        Args:
            bucket_ms: width of a bucket (virtual ms); None = a round width, about 200 buckets.
            by: "pool" for the whole pool, "worker" for each worker.

        Returns:
            Columns of `vecsim.timeline.TIMELINE_SCHEMA`, by worker, then time.

        Raises:
            InputError: the run kept no segment log; an impossible width.
        """
        from vecsim.timeline import build_timeline

        return build_timeline(self.outcome, bucket_ms, by)

    @property
    def plot(self) -> ResultPlots:
        """Charts of the run (needs `pip install vecsim[plot]`)."""
        from vecsim.pictures.charts import ResultPlots

        return ResultPlots.of(self)

    @cached_property
    def effective_config(self) -> dict[str, Any]:
        """The configuration that ran, without inline requests: `payload`, `defaulted` (paths left
        to their default), `roles`, `workload` and `vecsim_version`."""
        from msgspec.structs import replace

        from vecsim.spec import to_json

        bare = replace(self.payload, spec=replace(self.payload.spec, requests=[]))
        payload = json.loads(to_json(bare))
        del payload["spec"]["requests"]
        return {
            "vecsim_version": version("vecsim"),
            "payload": payload,
            "defaulted": list(self.defaulted),
            "roles": [_role_dict(role) for role in self.roles],
            **_timing_dict(self.priced),
            "workload": {"requests": len(self.outcome.status), **self.source},
        }

    def reference_report(self) -> dict[str, Any]:
        """The report in the reference's own shape: its names only, 0.0 where it has 0.0, requests
        that reached a terminal status in `per_request` (absent when recording is off), host rates
        included. Power and provenance are null: they are not modelled."""
        names = [*_reference_fields(), *(name for name in self.report if "trajector" in name)]
        report = {name: self.report[name] for name in names}
        report.update({name: 0.0 for name, value in report.items() if value is None})
        report.update(
            {name: self.report[name] for name in _CONDITIONAL_FIELDS if name in self.report}
        )
        if self._plays is not None:
            report["agentic_lanes"] = self.workload.dependencies.lanes
            report["agentic_play_outcomes"] = play_outcomes(
                self._plays, self.outcome, self.workload.request_id
            )
        wall_s = self.wall_time_ms / 1000.0
        report.update(
            wall_time_ms=self.wall_time_ms,
            processed_tokens_per_s=report["processed_tokens"] / wall_s if wall_s > 0 else 0.0,
            processed_output_tokens_per_s=(
                report["total_output_tokens"] / wall_s if wall_s > 0 else 0.0
            ),
            power_w=None,
            power_coverage=None,
            power_diagnostics=None,
            prediction_provenance=None,
        )
        if self.payload.spec.record_per_request:
            pools = tuple(pool.name for pool in self.outcome.pools)
            if self.roles[0].backend == "sglang":
                pools = pools[::-1]
            report["per_request"] = _per_request(self.requests, self.admissions, pools)
        return report

    def write(
        self, folder: str | Path, requests_format: str = "parquet", overwrite: bool = False
    ) -> Path:
        """Write `requests.<format>`, `report.json` and `config.json` into `folder`, and
        `timeline.parquet` and `kv_events.parquet` if the run recorded them.

        Files appear whole or not at all: they are written under temporary names and renamed.

        Args:
            folder: created if absent.
            requests_format: "parquet", "csv" or "jsonl".
            overwrite: replace the files of an earlier run in that folder.

        Raises:
            InputError: unknown format, `folder` is a file, or it holds results and `overwrite`
                is off.
        """
        if requests_format not in _WRITERS:
            raise InputError("requests_format", requests_format, f"one of {', '.join(_WRITERS)}")
        if not isinstance(folder, str | os.PathLike):
            raise InputError("folder", folder, "the path of a folder")
        folder = Path(folder)
        writer = _WRITERS[requests_format]
        report, config = json_text(self.report), json_text(self.effective_config)
        files = {
            f"requests.{requests_format}": lambda path: writer(self.requests, path),
            "report.json": lambda path: path.write_text(report, encoding="utf-8"),
            "config.json": lambda path: path.write_text(config, encoding="utf-8"),
        }
        if self.outcome.kv_events is not None:
            files["kv_events.parquet"] = lambda path: self.kv_events.write_parquet(path)
        if self.outcome.segments is not None:
            files["timeline.parquet"] = lambda path: self.timeline().write_parquet(path)
        replace_files(
            folder,
            files,
            owned=RESULT_FILES,
            overwrite=overwrite,
        )
        return folder

    def headline(self) -> str:
        """One line: what ran, how much of virtual time it took, and how long the host needed."""
        fleet = ", ".join(
            f"{pool.workers} x {role.stage} {role.backend} (dp {role.dp_size}, "
            f"{role.total_blocks:,}{derived} blocks of {role.rank.block_tokens} tokens a rank)"
            for pool, role, derived in zip(
                self.outcome.pools, self.roles, self._derived(), strict=True
            )
        )
        simulated_s, wall_s = self.outcome.end_ms / 1000.0, self.wall_time_ms / 1000.0
        return (
            f"{len(self.outcome.status):,} requests on {fleet}: "
            f"{simulated_s:,.1f} s simulated in {wall_s:,.3f} s"
        )

    def _derived(self) -> list[str]:
        """For each role, a word where its block count was estimated."""
        estimated = {one.role.stage for one in self.priced if one.capacity is not None}
        return [" derived" if role.stage in estimated else "" for role in self.roles]

    def summary(self) -> Group:
        """The main numbers with their units, as Rich tables."""
        return _summary(self.report)

    def __repr__(self) -> str:
        report = self.report
        shown = [f"{report['completed_requests']} of {report['workload_requests']} completed"]
        if report["mean_ttft_ms"] is not None:
            shown.append(f"mean TTFT {report['mean_ttft_ms']:.3f} ms")
        if report["duration_ms"] is not None:
            shown.append(f"duration {report['duration_ms']:.3f} ms")
        return f"Result({', '.join(shown)})"


_CONDITIONAL_FIELDS = (
    "kv_eviction_assumption",
    "goodput_completed_requests",
    "goodput_request_throughput_rps",
    "goodput_output_throughput_tok_s",
)


def _reference_fields() -> list[str]:
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


def _requests_frame(workload: Workload, outcome: Outcome, spans: metrics.Latencies) -> pl.DataFrame:
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
        "terminal_status": _names(outcome.status, layout.STATUS_NAMES, STATUS),
        "terminal_reason": _names(outcome.reason, layout.REASON_NAMES, REASON),
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


def _admissions_frame(outcome: Outcome) -> pl.DataFrame:
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


def _per_request(
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


def _role_dict(role: Role) -> dict[str, Any]:
    return {
        "stage": str(role.stage),
        "backend": str(role.backend),
        "dp_size": role.dp_size,
        "gpus_per_worker": role.gpus_per_worker,
        "total_blocks": role.total_blocks,
        "block_tokens": role.rank.block_tokens,
    }


def _timing_dict(priced: tuple[Priced, ...]) -> dict[str, Any]:
    """What timing models and estimates of KV blocks rest on, by stage, where there are any."""
    described: dict[str, Any] = {}
    for one in priced:
        stage = str(one.role.stage)
        metadata = getattr(one.timing, "metadata", None)
        if metadata:
            described.setdefault("timing", {})[stage] = dict(metadata)
        if one.capacity is not None:
            described.setdefault("kv_capacity", {})[stage] = one.capacity.to_dict()
    return described


def _summary(report: dict) -> Group:
    from rich.console import Group

    latencies = _table("metric", "unit", *_SUMMARY_STATISTICS)
    for label, unit, name, suffix in _SUMMARY_DISTRIBUTIONS:
        values = [report[f"{statistic}_{name}{suffix}"] for statistic in _SUMMARY_STATISTICS]
        if values[0] is not None:
            latencies.add_row(label, unit, *map(_short, values))
    scalars = _table("metric", "unit", "value")
    for row in _summary_scalars(report):
        scalars.add_row(*row)
    return Group(latencies, scalars) if latencies.row_count else Group(scalars)


def _table(label: str, unit: str, *numbers: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(label, overflow="fold")
    table.add_column(unit, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", overflow="fold")
    return table


def _short(value: float) -> str:
    return f"{value:,.3f}" if abs(value) < 10_000 else f"{value:,.1f}"


def _summary_scalars(report: dict) -> list[tuple[str, str, str]]:
    rows = [
        (label, unit, format(report[name], form))
        for label, unit, name, form in _SUMMARY_SCALARS
        if report.get(name) is not None
    ]
    counts = {name: report[f"{name}_requests"] for name in layout.STATUS_NAMES[1:]}
    counts.update({f"  {name}": count for name, count in report["terminal_reasons"].items()})
    rows += [
        (name.replace("_", " "), "requests", f"{count:,d}")
        for name, count in counts.items()
        if count
    ]
    if report["backlog_growing"]:
        rows.append(("backlog growing", "when arrivals ended", "yes"))
    return rows
