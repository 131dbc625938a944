"""Service-level objectives of a sweep: bounds on report metrics, and what a run missed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vecsim.errors import InputError
from vecsim.kernels.state import status as S
from vecsim.sweeps.steadiness import STABLE

if TYPE_CHECKING:
    from vecsim.sweeps.axes import Point

_BOUND = re.compile(r"\s*(<=|>=)\s*(\S+)\s*")
_DROPPED = ("rejected", "shed", "failed", "canceled")
_EXPECTED = "a finite number (an upper bound, inclusive), or '<= number' or '>= number'"


@dataclass(frozen=True)
class Bound:
    """One inclusive bound on a metric of the report.

    Attributes:
        metric: name in the report, e.g. `p99_ttft_ms`.
        limit: the bound.
        upper: the metric must not exceed it; else it must not fall below it.
    """

    metric: str
    limit: float
    upper: bool

    def excess(self, report: Mapping[str, Any]) -> float:
        """How far the metric is beyond the bound, as a share of the bound (0 = met). A metric
        without samples is met if anything completed at all, else missed without end."""
        if self.metric not in report:
            return math.inf
        value = report[self.metric]
        if value is None:
            return 0.0 if report["completed_requests"] else math.inf
        beyond = value - self.limit if self.upper else self.limit - value
        return max(beyond, 0.0) / max(abs(self.limit), 1e-9)

    def miss(self, report: Mapping[str, Any]) -> str:
        """One phrase that says how the bound was missed."""
        if self.metric not in report:
            return f"{self.metric} is not in the report"
        value = report[self.metric]
        if value is None:
            return f"{self.metric} has no samples"
        return f"{self.metric} {value:.6g} {'>' if self.upper else '<'} {self.limit:g}"


def read_slo(slo: Mapping[str, Any] | None) -> tuple[Bound, ...]:
    """Bounds from `{metric: limit}`; a plain number is an upper bound, `">= 0.99"` a lower one.

    Raises:
        InputError: an unknown metric, or a limit that is no number.
    """
    from vecsim.sweeps.frame import report_schema

    if slo is None:
        return ()
    if not isinstance(slo, Mapping):
        raise InputError("slo", slo, "a mapping of report metrics to bounds")
    numeric = [name for name, dtype in report_schema().items() if dtype.is_numeric()]
    bounds = []
    for metric, limit in slo.items():
        if metric not in numeric:
            import difflib

            near = difflib.get_close_matches(str(metric), numeric, n=1, cutoff=0.0)
            raise InputError(f"slo.{metric}", limit, f"a metric of the report such as {near[0]}")
        bounds.append(_bound(metric, limit))
    return tuple(bounds)


def check_slo_metrics(
    bounds: tuple[Bound, ...], tree: Mapping[str, Any], points: Sequence[Point]
) -> None:
    """Refuse bounds on what no report of a sweep will hold: goodput, where no point has an `sla`.

    Args:
        bounds: of `read_slo`.
        tree: the base spec.
        points: what is set in it.

    Raises:
        InputError: such a bound.
    """
    spec = tree.get("spec", tree)
    sla = spec.get("sla") if isinstance(spec, Mapping) else None
    given = isinstance(sla, Mapping) and any(value is not None for value in sla.values())
    given = given or any(
        path.removeprefix("spec.").startswith("sla") for point in points for path in point.fields
    )
    for bound in bounds:
        if bound.metric.startswith("goodput") and not given:
            expected = "sla.ttft_ms, sla.itl_ms or sla.e2e_ms in the spec: goodput is held to it"
            raise InputError(f"slo.{bound.metric}", bound.limit, expected)


def _bound(metric: str, limit: Any) -> Bound:
    sign, value = "<=", limit
    if isinstance(limit, str):
        match = _BOUND.fullmatch(limit)
        if match is None:
            raise InputError(f"slo.{metric}", limit, _EXPECTED)
        sign, text = match.groups()
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"slo.{metric}", limit, _EXPECTED) from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"slo.{metric}", limit, _EXPECTED)
    return Bound(metric, float(value), sign == "<=")


def dropped(report: Mapping[str, Any]) -> str | None:
    """Requests that ended without completing, in words; None if there are none.

    A request that does not fit the KV pool is dropped, not slow: it is never an SLO miss.
    """
    counts = {status: report[f"{status}_requests"] for status in _DROPPED}
    total = sum(counts.values())
    if total == 0:
        return None
    words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    plain_end = S.REASON_NAMES[int(S.LENGTH)]
    reasons = [
        f"{count} {reason}"
        for reason, count in report["terminal_reasons"].items()
        if count and reason != plain_end
    ]
    return f"{words} ({', '.join(reasons)})" if reasons else words


def slo_miss(report: Mapping[str, Any], bounds: tuple[Bound, ...]) -> str | None:
    """The bounds that a report misses, in words; None if it meets them all."""
    missed = [bound.miss(report) for bound in bounds if bound.excess(report) > 0.0]
    return "; ".join(missed) or None


def shortfall(row: Mapping[str, Any], bounds: tuple[Bound, ...]) -> tuple[float, ...]:
    """How badly a row misses, for finding the nearest miss: smaller is nearer.

    First whether it ran at all, then the share of requests dropped, then the largest excess over
    a bound, then whether the backlog grew.
    """
    if row["status"] != "ok":
        return (1.0, 0.0, 0.0, 0.0)
    growing = row.get("load_state") not in (None, STABLE) or bool(row["backlog_growing"])
    lost = sum(row[f"{status}_requests"] for status in _DROPPED)
    share = lost / max(row["num_requests"], 1)
    worst = max((bound.excess(row) for bound in bounds), default=0.0)
    return (0.0, share, worst, float(growing))
