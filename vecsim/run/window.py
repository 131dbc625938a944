"""Warm-up and cool-down: which requests the metrics of a report cover."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from vecsim.config.checks import non_negative
from vecsim.errors import InputError
from vecsim.run.outcome import PER_REQUEST, HandoffOutcome, Outcome

_TIMES = tuple(name for name in PER_REQUEST if name.endswith("_ms"))


@dataclass(frozen=True)
class Measured:
    """The requests that metrics cover, and the stretch of time that they arrive in.

    Attributes:
        rows: bool [n].
        start_ms: first arrival + warm-up.
        end_ms: last arrival - cool-down; without a cool-down infinite, for the end of the run.
        use: for each pool what its workers did from start to end (`timeline.use_between`), once
        known.
    """

    rows: np.ndarray
    start_ms: float
    end_ms: float
    use: tuple[dict[str, np.ndarray], ...] = ()

    def window_ms(self, outcome: Outcome) -> float:
        """How long the stretch is."""
        return min(self.end_ms, outcome.end_ms) - self.start_ms


def check_windows(warmup_ms: float, cooldown_ms: float) -> None:
    """Raise InputError unless both are finite and 0 or more."""
    non_negative("warmup_ms", warmup_ms)
    non_negative("cooldown_ms", cooldown_ms)


def measured_of(arrival_ms: np.ndarray, warmup_ms: float, cooldown_ms: float) -> Measured | None:
    """Requests that arrive `warmup_ms` or more after the first and `cooldown_ms` before the last.

    None without windows. `arrival_ms` are recorded arrivals, NaN for requests that never arrived:
    those are not covered.

    Raises:
        InputError: no request is covered.
    """
    if not warmup_ms and not cooldown_ms:
        return None
    arrived = arrival_ms[~np.isnan(arrival_ms)]
    start = float(arrived.min(initial=np.inf)) + warmup_ms
    end = float(arrived.max(initial=-np.inf)) - cooldown_ms
    with np.errstate(invalid="ignore"):
        rows = (arrival_ms >= start) & (arrival_ms <= end)
    if not rows.any():
        where, value = ("warmup_ms", warmup_ms) if warmup_ms else ("cooldown_ms", cooldown_ms)
        span = float(np.ptp(arrived)) if len(arrived) else 0.0
        expected = f"warm-up and cool-down that leave requests, which arrive over {span:g} ms"
        raise InputError(where, value, expected)
    return Measured(rows, start, end if cooldown_ms else np.inf)


def restrict(outcome: Outcome, measured: Measured) -> Outcome:
    """The outcome of the covered requests, with times from `start_ms` on; what pools did is that
    of the window, but for their preemptions."""
    columns = {name: getattr(outcome, name)[measured.rows] for name in PER_REQUEST}
    for name in _TIMES:
        columns[name] = columns[name] - measured.start_ms
    again = measured.rows[outcome.readmission_request]
    return replace(
        outcome,
        **columns,
        tokenized_ms=None
        if outcome.tokenized_ms is None
        else outcome.tokenized_ms[measured.rows] - measured.start_ms,
        readmission_request=outcome.readmission_request[again],
        readmission_at_ms=outcome.readmission_at_ms[again],
        readmission_reused=outcome.readmission_reused[again],
        end_ms=outcome.end_ms - measured.start_ms,
        pools=tuple(
            replace(pool, **use) for pool, use in zip(outcome.pools, measured.use, strict=True)
        ),
        handoff=None if outcome.handoff is None else _restrict(outcome.handoff, measured, again),
    )


def _restrict(handoff: HandoffOutcome, measured: Measured, again: np.ndarray) -> HandoffOutcome:
    columns = {own.name: getattr(handoff, own.name) for own in fields(handoff)}
    kept = {
        name: column[again if name == "readmission_in_decode" else measured.rows]
        for name, column in columns.items()
        if isinstance(column, np.ndarray)
    }
    for name in kept:
        if name.endswith("_ms"):
            kept[name] = kept[name] - measured.start_ms
    return replace(handoff, **kept)
