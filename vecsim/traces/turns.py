"""Rows of a trace as turns of sessions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.traces.table import TraceTable
from vecsim.workload.dependencies import Sessions


def session_names(table: TraceTable) -> pl.Series:
    """The session of each row: as authored, else `request_<line>`."""
    own = ("request_" + pl.Series(table.numbers).cast(pl.String)).alias("session_id")
    if table.session_id is None:
        return own
    return table.session_id.fill_null(own).alias("session_id")


def sessions_of(
    table: TraceTable, names: pl.Series, place: Callable[[int], str]
) -> Sessions | None:
    """The sessions of a table; None where every row is a session of its own.

    Rows of equal session name are turns in row order. The delay of a later turn is the authored
    one, else the time since the last time stamp in the session, else 0 (reference: traffic,
    section 2.4). `place(row)` names a row in messages.

    Raises:
        InputError: a delay on a first turn, an invalid delay, or no time stamp to tell it from.
    """
    delays = table.delay_ms
    if table.session_id is None and delays is None:
        return None
    order = (
        names.to_frame("name")
        .with_row_index("row")
        .with_columns(
            first=pl.col("row").first().over("name"),
            turn=pl.int_range(pl.len(), dtype=pl.Int32).over("name"),
        )
    )
    turn = order["turn"].to_numpy()
    delay = np.full(len(turn), np.nan) if delays is None else delays
    for row in np.flatnonzero((turn == 0) & (np.nan_to_num(delay) != 0)):
        expected = f"0 on the first turn of session {names[int(row)]!r}"
        raise InputError(f"{place(int(row))}, delay", float(delay[row]), expected)
    if not turn.any():
        return None
    firsts, session = np.unique(order["first"].to_numpy(), return_inverse=True)
    return Sessions(
        session=session.astype(np.int32),
        turn=turn.copy(),
        delay_ms=_delays(table, session, turn, delay, names, place),
        count=len(firsts),
        accumulate=table.accumulate,
    )


def _delays(
    table: TraceTable,
    session: np.ndarray,
    turn: np.ndarray,
    authored: np.ndarray,
    names: pl.Series,
    place: Callable[[int], str],
) -> np.ndarray:
    times = table.times.values
    dates = times.dtype.kind == "i"
    result = np.zeros(len(turn))
    last: dict[int, float | int] = {}
    for row, (key, k, time, delay) in enumerate(
        zip(session.tolist(), turn.tolist(), times.tolist(), authored.tolist(), strict=True)
    ):
        given = dates or time == time
        if k > 0 and delay == delay:
            if not 0 <= delay < np.inf:
                raise InputError(f"{place(row)}, delay", delay, "0 or more")
            result[row] = delay
        elif k > 0 and given:
            if key not in last:
                expected = f"an earlier timestamp in session {names[row]!r}, or a delay"
                raise InputError(f"{place(row)}, timestamp", time, expected)
            if time < last[key]:
                expected = f"a time not before {last[key]}, the turn before"
                raise InputError(f"{place(row)}, timestamp", time, expected)
            result[row] = (time - last[key]) / 1e6 if dates else time - last[key]
        if given:
            last[key] = time
    return result
