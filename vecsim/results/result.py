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

import polars as pl

from vecsim.errors import InputError
from vecsim.files import json_text, replace_files
from vecsim.results import metrics as metrics
from vecsim.results.frames import admissions_frame, requests_frame
from vecsim.results.reference_report import CONDITIONAL_FIELDS, reference_fields, request_records
from vecsim.results.summary import summary_of
from vecsim.results.trajectories import Plays, play_outcomes, plays_of, trajectory_fields
from vecsim.run.window import Measured, restrict
from vecsim.workload.dependencies import session_cap

if TYPE_CHECKING:
    from rich.console import Group

    from vecsim.config.roles import Role
    from vecsim.config.schema import Payload
    from vecsim.plots.charts import ResultPlots
    from vecsim.run.outcome import Outcome
    from vecsim.timing.resolve import Priced
    from vecsim.workload.workload import Workload

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
            window_ms=None if self.measured is None else self.measured.window_ms(self.outcome),
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
        return requests_frame(self.workload, self.outcome, self._latencies)

    @cached_property
    def admissions(self) -> pl.DataFrame:
        """One row per admission, by request and time; columns of `ADMISSIONS_SCHEMA`."""
        return admissions_frame(self.outcome)

    @cached_property
    def kv_events(self) -> pl.DataFrame:
        """One row per block of a KV event, by worker and rank, then in the order of the events;
        columns of `vecsim.run.kv_events.KV_EVENTS_SCHEMA`. Needs `replay(...,
        observe="kv_events")`.

        Raises:
            InputError: the run observed none.
        """
        if self.outcome.kv_events is None:
            raise InputError("observe", None, '"kv_events", for a result that has them')
        from vecsim.run.kv_events import frame_of

        return frame_of(list(self.outcome.kv_events))

    def timeline(self, bucket_ms: float | None = None, by: str = "pool") -> pl.DataFrame:
        """Time series of the run, which needs `replay(..., timeline=True)`.

        Args:
            bucket_ms: width of a bucket (virtual ms); None = a round width, about 200 buckets.
            by: "pool" for each pool as a whole, "worker" for each worker.

        Returns:
            Columns of `vecsim.results.timeline.TIMELINE_SCHEMA`, by pool, worker, then time.

        Raises:
            InputError: the run kept no segment log; an impossible width.
        """
        from vecsim.results.timeline import build_timeline

        return build_timeline(self.outcome, bucket_ms, by)

    @property
    def plot(self) -> ResultPlots:
        """Charts of the run (needs `pip install vecsim[plot]`)."""
        from vecsim.plots.charts import ResultPlots

        return ResultPlots.of(self)

    @cached_property
    def effective_config(self) -> dict[str, Any]:
        """The configuration that ran, without inline requests: `payload`, `defaulted` (paths left
        to their default), `roles`, `workload` and `vecsim_version`."""
        from msgspec.structs import replace

        from vecsim.config.load import to_json

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
        names = [*reference_fields(), *(name for name in self.report if "trajector" in name)]
        report = {name: self.report[name] for name in names}
        report.update({name: 0.0 for name, value in report.items() if value is None})
        report.update(
            {name: self.report[name] for name in CONDITIONAL_FIELDS if name in self.report}
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
            report["per_request"] = request_records(self.requests, self.admissions, pools)
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
        if self.outcome.has_segments:
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
        return summary_of(self.report)

    def __repr__(self) -> str:
        report = self.report
        shown = [f"{report['completed_requests']} of {report['workload_requests']} completed"]
        if report["mean_ttft_ms"] is not None:
            shown.append(f"mean TTFT {report['mean_ttft_ms']:.3f} ms")
        if report["duration_ms"] is not None:
            shown.append(f"duration {report['duration_ms']:.3f} ms")
        return f"Result({', '.join(shown)})"


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
