"""The frame of a sweep: one row a point, its schema, costs, and the Pareto front."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vecsim.config.checks import finite_positive
from vecsim.errors import InputError
from vecsim.results import metrics as metrics
from vecsim.run.outcome import GapDistribution, Outcome
from vecsim.sweeps.axes import Point
from vecsim.sweeps.pareto import pareto_front

if TYPE_CHECKING:
    from vecsim.plots.charts import SweepPlots

_VERDICT = {
    "status": pl.Enum(("ok", "invalid", "unsupported", "failed")),
    "reason": pl.String(),
    "feasible": pl.Boolean(),
    "slo_miss": pl.String(),
    "dropped": pl.String(),
    "gpus": pl.Int64(),
}
_PER_GPU = (
    "request_throughput_rps",
    "output_throughput_tok_s",
    "total_throughput_tok_s",
    "goodput_request_throughput_rps",
)
# Fields of a report that an empty run leaves null or out.
_UNTOLD = {
    "backlog_growing": pl.Boolean(),
    "prefill_pool_passes": pl.Int64(),
    "decode_pool_passes": pl.Int64(),
    "kv_eviction_assumption": pl.String(),
    "goodput_completed_requests": pl.Int64(),
}


class SweepFrame(pl.DataFrame):
    """A Polars frame with one row a point: `point`, the axes, `status`, `reason`, `feasible`,
    `slo_miss`, `dropped`, `gpus`, the whole report, and figures per GPU and per token.

    Polars' own operations return plain frames; `SweepFrame(frame)` gives one its charts back.
    """

    @property
    def plot(self) -> SweepPlots:
        """Charts of the sweep (needs `pip install vecsim[plot]`)."""
        from vecsim.plots.charts import SweepPlots

        return SweepPlots(self)

    @property
    def axes(self) -> list[str]:
        """Names of the axis columns: those before `status`."""
        return self.columns[1 : self.columns.index("status")]

    def pareto_front(self, objectives: Mapping[str, str]) -> SweepFrame:
        """`vecsim.pareto_front` of this sweep."""
        return SweepFrame(pareto_front(self, objectives))


@functools.cache
def report_schema() -> dict[str, pl.DataType]:
    """Name -> dtype of the fields of a report, in its order."""
    gaps = GapDistribution(
        **{f.name: 0 for f in dataclasses.fields(GapDistribution)},
    )
    columns = {f.name: np.zeros(0, np.int64) for f in dataclasses.fields(Outcome)}
    columns.update(gaps=gaps, pools=(), handoff=None, end_ms=0.0, committed_prefill_tokens=0)
    outcome = Outcome(**columns)
    report = metrics.build_report(
        outcome,
        metrics.latencies(outcome),
        sla={"ttft_ms": 1.0},
        closed_loop=True,
        kv_eviction_policy="",
    )
    return {name: _UNTOLD.get(name) or _dtype([value]) for name, value in report.items()}


def _dtype(values: Sequence[Any]) -> pl.DataType:
    """The dtype that holds all values; Float64 where there are none."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pl.Boolean()
    if kinds == {int}:
        return pl.Int64()
    if kinds == {dict}:
        names = dict.fromkeys(name for value in values if value for name in value)
        fields = {name: _dtype([v.get(name) for v in values if v]) for name in names}
        return pl.Struct([pl.Field(name, dtype) for name, dtype in fields.items()])
    if kinds <= {int, float}:
        return pl.Float64()
    return pl.String()


def sweep_frame(
    rows: Sequence[Mapping[str, Any]],
    points: Sequence[Point],
    gpu_hour_price: float | Mapping[str, float] | None = None,
) -> SweepFrame:
    """Rows, in any order, as a frame in order of the points.

    Args:
        rows: what `Evaluator.row` returned.
        points: all points of the sweep, so that the schema does not depend on which rows are there.
        gpu_hour_price: see `with_costs`.
    """
    ordered = sorted(rows, key=lambda row: row["point"])
    axes = dict.fromkeys(name for point in points for name in point.labels)
    schema: dict[str, pl.DataType] = {"point": pl.Int64()}
    for name in axes:
        schema[name] = _axis_dtype([point.labels.get(name) for point in points])
    schema.update(_VERDICT)
    reported = dict(report_schema())
    for row in ordered:
        for name, value in row.items():
            if name not in schema and name not in reported:
                reported[name] = _dtype([value])
    schema.update(reported)
    columns = [_column(name, dtype, ordered) for name, dtype in schema.items()]
    return SweepFrame(with_costs(pl.DataFrame(columns), gpu_hour_price))


def _axis_dtype(labels: list[Any]) -> pl.DataType:
    kinds = {type(label) for label in labels if label is not None}
    mixed = len(kinds) > 1 and not kinds <= {int, float}
    return pl.String() if mixed or not kinds else _dtype(labels)


def _column(name: str, dtype: pl.DataType, rows: Sequence[Mapping[str, Any]]) -> pl.Series:
    values = [row.get(name) for row in rows]
    if dtype == pl.String:
        values = [value if value is None else str(value) for value in values]
    return pl.Series(name, values, dtype=dtype, strict=False)


# --- costs ----------------------------------------------------------------------------------------


def with_costs(
    frame: pl.DataFrame, gpu_hour_price: float | Mapping[str, float] | None = None
) -> pl.DataFrame:
    """Add figures per GPU, and with a price those of cost.

    `<throughput>_per_gpu` divides by `gpus`, the modelled GPUs of all pools. `cost` is the price of
    the run's GPU-hours (both pools); `cost_per_million_tokens` and
    `cost_per_million_output_tokens` divide it by the millions of tokens processed (prompt and
    output of completed requests) and of output tokens. Null where there are no tokens.

    Args:
        frame: rows with report columns.
        gpu_hour_price: price of a GPU-hour in any currency; or one for each pool, as
            `{"prefill": ..., "decode": ...}` (an aggregated pool counts as decode).

    Raises:
        InputError: a price that is not a finite number above 0.
    """
    per_gpu = [
        (pl.col(name) / pl.col("gpus")).alias(f"{name}_per_gpu")
        for name in _PER_GPU
        if name in frame.columns
    ]
    frame = frame.with_columns(per_gpu)
    if gpu_hour_price is None:
        return frame
    prices = pool_prices(gpu_hour_price)
    cost = sum(
        pl.col(f"{pool}_worker_seconds") * pl.col(f"{pool}_gpus_per_worker") * (price / 3600.0)
        for pool, price in prices.items()
    )
    frame = frame.with_columns(cost.alias("cost"))
    tokens = {"tokens": "processed_tokens", "output_tokens": "total_output_tokens"}
    return frame.with_columns(
        pl.when(pl.col(count) > 0)
        .then(pl.col("cost") * 1e6 / pl.col(count))
        .alias(f"cost_per_million_{name}")
        for name, count in tokens.items()
    )


def pool_prices(gpu_hour_price: float | Mapping[str, float]) -> dict[str, float]:
    """Price of a GPU-hour of each pool. Raises InputError."""
    where = "gpu_hour_price"
    given = gpu_hour_price
    if not isinstance(given, Mapping):
        given = {"prefill": gpu_hour_price, "decode": gpu_hour_price}
    if set(given) != {"prefill", "decode"}:
        raise InputError(where, dict(given), "a number, or one for each of prefill and decode")
    for price in given.values():
        if isinstance(price, bool) or not isinstance(price, int | float):
            raise InputError(where, price, "a finite number > 0")
        finite_positive(where, price)
    return dict(given)
