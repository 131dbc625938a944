"""Charts of a run and of a sweep. Every chart carries its data, so it can be saved anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from vecsim.errors import InputError, VecsimError
from vecsim.files import replace_file
from vecsim.plots.labels import title
from vecsim.results.metrics import rank_of
from vecsim.sweeps.pareto import pareto_front

if TYPE_CHECKING:
    import altair as alt

    from vecsim.results.result import Result

_CDF_POINTS = 200
_BUCKETS = 60
_WIDTH, _HEIGHT = 520, 260
_LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_latency_ms": "E2E latency"}
_OVER_TIME = {"ttft_ms": "TTFT", "tpot_ms": "TPOT (mean ITL)"}


def _altair() -> Any:
    try:
        import altair
    except ImportError:
        raise VecsimError("charts need Altair: pip install 'vecsim[plot]'") from None
    return altair


def save(chart: alt.TopLevelMixin, path: str | Path, scale: float = 2.0) -> Path:
    """Write a chart as .svg, .png or Vega-Lite .json, whole or not at all.

    Args:
        chart: any chart of this module.
        path: file to write; its suffix decides the format.
        scale: pixels per unit of a PNG.

    Raises:
        InputError: another suffix.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind == ".json":
        replace_file(path, lambda file: file.write_text(chart.to_json(), encoding="utf-8"))
    elif kind == ".svg":
        replace_file(path, lambda file: file.write_text(to_svg(chart), encoding="utf-8"))
    elif kind == ".png":
        png = _converter().vegalite_to_png(chart.to_dict(), scale=scale)
        replace_file(path, lambda file: file.write_bytes(png))
    else:
        raise InputError("path", str(path), "a name that ends in .svg, .png or .json")
    return path


def to_svg(chart: alt.TopLevelMixin) -> str:
    """The chart as SVG text."""
    return _converter().vegalite_to_svg(chart.to_dict())


def _converter() -> Any:
    try:
        import vl_convert
    except ImportError:
        raise VecsimError("pictures need vl-convert: pip install 'vecsim[plot]'") from None
    return vl_convert


def _chart(frame: pl.DataFrame, heading: str) -> Any:
    alt = _altair()
    values = [
        {name: _finite(value) for name, value in row.items()} for row in frame.iter_rows(named=True)
    ]
    return alt.Chart(alt.InlineData(values=values), title=heading).properties(
        width=_WIDTH, height=_HEIGHT
    )


def _log_scale(values: pl.Series) -> Any:
    """A logarithmic scale; where values are zero, one that is linear near zero."""
    alt = _altair()
    positive = len(values) > 0 and values.min() > 0
    return alt.Scale(type="log" if positive else "symlog", nice=False)


def _number_axis(dtype: pl.DataType) -> Any:
    """Whole numbers have whole ticks."""
    alt = _altair()
    return alt.Axis(format="d", tickMinStep=1) if dtype.is_integer() else alt.Axis()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResultPlots:
    """Charts of one run.

    Attributes:
        requests: the request rows.
        series: time series of every pool, or None when they were not recorded.
    """

    requests: pl.DataFrame
    series: pl.DataFrame | None

    @classmethod
    def of(cls, result: Result) -> ResultPlots:
        """The charts of a result."""
        recorded = result.outcome.has_segments
        return cls(result.requests, result.timeline() if recorded else None)

    def latency_cdf_data(self) -> pl.DataFrame:
        """`metric`, `latency_ms`, `share`: the share of requests that took no longer."""
        parts = []
        for column, name in _LATENCIES.items():
            values = np.sort(self.requests[column].drop_nulls().to_numpy())
            if len(values) == 0:
                continue
            at = np.unique(np.linspace(0, len(values) - 1, _CDF_POINTS).round().astype(int))
            parts.append(
                pl.DataFrame(
                    {
                        "metric": [name] * len(at),
                        "latency_ms": values[at],
                        "share": (at + 1) / len(values),
                    }
                )
            )
        schema = {"metric": pl.String, "latency_ms": pl.Float64, "share": pl.Float64}
        return pl.concat(parts) if parts else pl.DataFrame(schema=schema)

    def latency_cdf(self) -> alt.Chart:
        """Cumulative distributions of TTFT, TPOT and E2E latency."""
        alt = _altair()
        data = self.latency_cdf_data()
        return (
            _chart(data, "Latency distributions")
            .mark_line(interpolate="step-after")
            .encode(
                x=alt.X("latency_ms:Q", title="latency (ms)", scale=_log_scale(data["latency_ms"])),
                y=alt.Y("share:Q", title="requests that took no longer (share)"),
                color=alt.Color("metric:N", title="metric"),
            )
        )

    def latency_over_time_data(self) -> pl.DataFrame:
        """`metric`, `statistic`, `arrival_s`, `latency_ms`: median and p99 of the requests that
        arrived in each of 60 buckets."""
        frame = self.requests.filter(pl.col("arrival_time_ms").is_not_null())
        end = frame["arrival_time_ms"].max() or 0.0
        width = max(end / _BUCKETS, 1e-3)
        frame = frame.with_columns(
            (
                (pl.col("arrival_time_ms") / width).floor().clip(0, _BUCKETS - 1) * width / 1000.0
            ).alias("arrival_s")
        )
        rows = []
        for column, name in _OVER_TIME.items():
            known = frame.filter(pl.col(column).is_not_null()).sort("arrival_s")
            for (start,), group in known.group_by("arrival_s", maintain_order=True):
                values = np.sort(group[column].to_numpy())
                for statistic, percent in (("median", 50), ("p99", 99)):
                    value = float(values[rank_of(len(values), percent)])
                    rows.append((name, statistic, start, value))
        schema = {
            "metric": pl.String,
            "statistic": pl.String,
            "arrival_s": pl.Float64,
            "latency_ms": pl.Float64,
        }
        return pl.DataFrame(rows, schema=schema, orient="row")

    def latency_over_time(self) -> alt.Chart:
        """TTFT and mean ITL of a request over the time of its arrival."""
        alt = _altair()
        data = self.latency_over_time_data()
        return (
            _chart(data, "Latency over time")
            .mark_line()
            .encode(
                x=alt.X("arrival_s:Q", title="time of arrival (s)"),
                y=alt.Y("latency_ms:Q", title="latency (ms)", scale=_log_scale(data["latency_ms"])),
                color=alt.Color("metric:N", title="metric"),
                strokeDash=alt.StrokeDash("statistic:N", title="statistic"),
            )
        )

    def load_data(self) -> pl.DataFrame:
        """`pool`, `state`, `time_s`, `requests`: running and waiting ones. Raises InputError."""
        return (
            self._recorded()
            .select(
                pl.col("pool"),
                (pl.col("start_ms") / 1000.0).alias("time_s"),
                pl.col("running"),
                pl.col("waiting"),
            )
            .unpivot(index=["pool", "time_s"], variable_name="state", value_name="requests")
            .select("pool", "state", "time_s", "requests")
        )

    def load(self) -> alt.Chart:
        """Running and waiting requests over time; needs a recorded timeline."""
        alt = _altair()
        return (
            _chart(self.load_data(), "Load over time")
            .mark_line(interpolate="step-after")
            .encode(
                x=alt.X("time_s:Q", title="virtual time (s)"),
                y=alt.Y("requests:Q", title="requests (count)"),
                color=alt.Color("state:N", title="state"),
                **self._rows(),
            )
        )

    def kv_usage_data(self) -> pl.DataFrame:
        """`pool`, `time_s`, `kv_usage`: share of KV blocks in use. Raises InputError."""
        return self._recorded().select(
            pl.col("pool"), (pl.col("start_ms") / 1000.0).alias("time_s"), pl.col("kv_usage")
        )

    def kv_usage(self) -> alt.Chart:
        """KV blocks in use over time; needs a recorded timeline."""
        alt = _altair()
        return (
            _chart(self.kv_usage_data(), "KV cache use over time")
            .mark_area(interpolate="step-after", opacity=0.6)
            .encode(
                x=alt.X("time_s:Q", title="virtual time (s)"),
                y=alt.Y("kv_usage:Q", title="KV blocks in use (share)"),
                **self._rows(),
            )
        )

    def all(self) -> dict[str, alt.Chart]:
        """Every chart that can be drawn, by name."""
        charts = {
            "latency_cdf": self.latency_cdf(),
            "latency_over_time": self.latency_over_time(),
        }
        if self.series is not None:
            charts.update(load=self.load(), kv_usage=self.kv_usage())
        return charts

    def _rows(self) -> dict[str, alt.Row]:
        """One picture below the other where there are several pools."""
        alt = _altair()
        pools = self._recorded()["pool"].unique(maintain_order=True).to_list()
        return {"row": alt.Row("pool:N", title="pool", sort=pools)} if len(pools) > 1 else {}

    def _recorded(self) -> pl.DataFrame:
        if self.series is None:
            raise InputError("timeline", "a run without it", "replay(..., timeline=True)")
        return self.series


# --- a sweep --------------------------------------------------------------------------------------


class SweepPlots:
    """Charts of a sweep.

    Args:
        frame: rows of a sweep; those that did not run are left out of every chart.
    """

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame
        self._ran = frame.filter(pl.col("status").cast(pl.String) == "ok")
        self._axes = frame.columns[1 : frame.columns.index("status")]

    def pareto_data(
        self, x: str = "output_throughput_tok_s_per_gpu", y: str = "p99_ttft_ms", **directions: str
    ) -> pl.DataFrame:
        """`x`, `y`, the axes and `on_front`, whether no other point dominates it."""
        objectives = self._objectives(x, y, directions)
        on_front = pareto_front(self._ran, objectives)["point"].implode()
        columns = dict.fromkeys(["point", x, y, *self._axes])
        return self._ran.select(*columns, on_front=pl.col("point").is_in(on_front))

    def pareto(
        self, x: str = "output_throughput_tok_s_per_gpu", y: str = "p99_ttft_ms", **directions: str
    ) -> alt.LayerChart:
        """All points, and the line of the Pareto front.

        Args:
            x, y: columns to set against each other.
            directions: column -> "min" or "max"; by default throughputs are to be high and all
                else is to be low.
        """
        alt = _altair()
        data = self.pareto_data(x, y, **directions)
        base = _chart(data, "Pareto front").encode(
            x=alt.X(f"{x}:Q", title=title(x), scale=alt.Scale(zero=False)),
            y=alt.Y(f"{y}:Q", title=title(y), scale=alt.Scale(zero=False)),
        )
        dots = base.mark_point(filled=True, size=45).encode(
            color=alt.Color("on_front:N", title="on the front"),
            tooltip=[
                alt.Tooltip(f"{_escaped(name)}:N", title=name) for name in (*self._axes, x, y)
            ],
        )
        line = (
            base.transform_filter("datum.on_front")
            .mark_line(color="#e4572e")
            .encode(order=f"{x}:Q")
        )
        return line + dots

    def _objectives(self, x: str, y: str, directions: dict[str, str]) -> dict[str, str]:
        return {
            name: directions.get(name, "max" if "throughput" in name else "min") for name in (x, y)
        }

    def slo_heatmap_data(
        self, x: str | None = None, y: str | None = None, metric: str = "p99_ttft_ms"
    ) -> pl.DataFrame:
        """`x`, `y`, `metric`, `feasible` and `others` (the values of the other axes as text) of
        every point that ran."""
        x, y = self._two_axes(x, y)
        return self._ran.select(x, y, metric, "feasible", others=self._others(x, y))

    def slo_heatmap(
        self, x: str | None = None, y: str | None = None, metric: str = "p99_ttft_ms"
    ) -> alt.TopLevelMixin:
        """A metric over two axes; a tick stands where a point is feasible. With further axes, a
        picture for each combination of their values.

        Args:
            x, y: axis columns; None = the first and the second.
            metric: column that gives the colour.
        """
        alt = _altair()
        x, y = self._two_axes(x, y)
        base = _chart(self.slo_heatmap_data(x, y, metric), f"{title(metric)}, ✓ feasible").encode(
            x=alt.X(f"{_escaped(x)}:O", title=title(x), axis=alt.Axis(labelAngle=0)),
            y=alt.Y(f"{_escaped(y)}:O", title=title(y), sort="descending"),
        )
        colour = alt.Color(f"{metric}:Q", title=title(metric), scale=alt.Scale(scheme="viridis"))
        ticks = base.transform_filter("datum.feasible").mark_text(
            text="✓", fontSize=14, color="white"
        )
        layers = base.mark_rect().encode(color=colour) + ticks
        data = self.slo_heatmap_data(x, y, metric)
        if data["others"].n_unique() < 2:
            return layers
        return layers.facet(
            facet=alt.Facet("others:N", title=None), columns=2, title=layers.layer[0].title
        )

    def _others(self, *shown: str) -> pl.Expr:
        """The values of all other axes, as text."""
        parts = [
            pl.format("{}={}", pl.lit(name), pl.col(name).cast(pl.String).fill_null("-"))
            for name in self._axes
            if name not in shown
        ]
        return pl.concat_str(parts, separator=", ") if parts else pl.lit("all")

    def _two_axes(self, x: str | None, y: str | None) -> tuple[str, str]:
        varied = [name for name in self._axes if self._frame[name].n_unique() > 1]
        rest = [name for name in (*varied, *self._axes) if name not in (x, y)]
        x = rest.pop(0) if x is None and rest else x
        rest = [name for name in rest if name != x]
        y = rest.pop(0) if y is None and rest else y
        if x is None or y is None:
            raise InputError("sweep", self._axes, "at least two axes for a heat map")
        return x, y

    def lines_data(self, metric: str = "p99_ttft_ms", x: str | None = None) -> pl.DataFrame:
        """`x`, `metric` and `others`, the values of the other axes as text."""
        x = self._axes[0] if x is None else x
        return self._ran.select(x, metric, others=self._others(x))

    def lines(self, metric: str = "p99_ttft_ms", x: str | None = None) -> alt.Chart:
        """A metric over one axis, a line for each combination of the others."""
        alt = _altair()
        x = self._axes[0] if x is None else x
        kind = "Q" if self._frame.schema[x].is_numeric() else "N"
        return (
            _chart(self.lines_data(metric, x), f"{title(metric)} over {title(x)}")
            .mark_line(point=True)
            .encode(
                x=alt.X(
                    f"{_escaped(x)}:{kind}",
                    title=title(x),
                    axis=_number_axis(self._frame.schema[x]),
                ),
                y=alt.Y(
                    f"{metric}:Q",
                    title=title(metric),
                    axis=_number_axis(self._frame.schema[metric]),
                ),
                color=alt.Color("others:N", title="other axes"),
            )
        )

    def all(self) -> dict[str, alt.TopLevelMixin]:
        """The standard charts, by name: those that the number of axes and points allows."""
        if self._ran.is_empty():
            return {}
        charts: dict[str, Any] = {"pareto": self.pareto()}
        if self._axes:
            charts["lines"] = self.lines()
        if len(self._axes) > 1:
            charts["slo_heatmap"] = self.slo_heatmap()
        return charts


def _escaped(column: str) -> str:
    """A column as Vega-Lite names it: dots would mean nested objects."""
    return column.replace(".", "\\.").replace("[", "\\[").replace("]", "\\]")
