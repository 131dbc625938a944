"""Files and frames of timing points: reading, checking, writing.

Layout (timing providers, section 3.4): `role`, `batch_size`, `isl`, `prefix`, `context`,
`latency_ms`, with the deployment in the file's metadata or, where a file holds several, in columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from vecsim.errors import MISSING, InputError
from vecsim.files import replace_file

SCHEMA = "vecsim-timing-v1"
PREFILL, DECODE = "prefill", "decode"

COLUMNS: dict[str, pl.DataType] = {
    "role": pl.String(),
    "batch_size": pl.Int32(),
    "isl": pl.Int32(),
    "prefix": pl.Int32(),
    "context": pl.Int32(),
    "latency_ms": pl.Float64(),
}
"""Columns of a table: tokens, requests, ms. `isl` and `prefix` are null for decode, `context` is
null for prefill."""

DEPLOYMENT = (
    "model",
    "system",
    "backend",
    "backend_version",
    "tp",
    "pp",
    "dp",
    "moe_tp",
    "moe_ep",
    "kv_dtype",
    "weight_dtype",
)
"""What a deployment is told apart by, in columns or metadata."""

MOST_BATCHES = 2**16
_MOST_TOKENS = 2**30
_SIZES = {
    PREFILL: {"batch_size": 1, "isl": 1, "prefix": 0},
    DECODE: {"batch_size": 1, "context": 0},
}
_LEAST_MS, _MOST_MS = 0.05, 1500.0
"""The quickest pass of a table lies between these on any machine: no decoder reads its weights in
50 microseconds, and none takes a second and a half for one token."""
_LONGEST_MS = 1e9
"""Far beyond any pass; even extrapolated, it stays a duration that the clock can represent."""
_OTHER_UNITS = ("latency", "latency_s", "latency_sec", "latency_us", "latency_ns", "time", "time_s")


def read_points(
    path: str | Path, deployment: Mapping[str, Any] | None = None, both_phases: bool = True
) -> tuple[pl.DataFrame, dict[str, str]]:
    """(points, metadata) of a .parquet or .csv file.

    Args:
        path: the file.
        deployment: values of deployment columns by which the rows of a file that holds several
            deployments are chosen.
        both_phases: refuse a file without rows of one of the phases.

    Raises:
        InputError: an unreadable file, a missing column, a bad cell (with its row, counted from 1),
            several deployments to choose from, or none.
    """
    path = Path(path)
    frame, metadata = _read(path)
    schema = metadata.pop("schema", SCHEMA)
    if schema != SCHEMA:
        raise InputError(f"{path.name}, schema", schema, SCHEMA)
    frame = frame.with_row_index("__row", offset=1)
    chosen = _choose(frame, dict(deployment or {}), metadata, path.name)
    for name in DEPLOYMENT:
        if name in chosen.columns and chosen.height and chosen[name][0] is not None:
            metadata[name] = str(chosen[name][0])
    points = points_of if both_phases else phase_points
    return points(chosen, path.name), metadata


def write_points(path: Path, points: pl.DataFrame, metadata: Mapping[str, str]) -> None:
    """Write a Parquet table. Raises InputError for a name that does not end in .parquet."""
    if path.suffix.lower() != ".parquet":
        raise InputError("output", str(path), "a file name ending in .parquet")
    described = {"schema": SCHEMA, **metadata}
    replace_file(
        path,
        lambda target: points.write_parquet(
            target, compression="zstd", compression_level=9, metadata=described
        ),
    )


def _read(path: Path) -> tuple[pl.DataFrame, dict[str, str]]:
    suffix = path.suffix.lower()
    if not path.is_file():
        raise InputError(str(path), "no such file", "a .parquet or .csv file")
    try:
        if suffix == ".parquet":
            metadata = pl.read_parquet_metadata(path)
            kept = {k: v for k, v in metadata.items() if not k.startswith("ARROW:")}
            return pl.read_parquet(path), kept
        if suffix == ".csv":
            return pl.read_csv(path, infer_schema_length=None), {}
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "a readable file") from None
    except pl.exceptions.PolarsError as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(str(path), reason, f"a table in {suffix[1:]} format") from None
    raise InputError(str(path), path.suffix, "a file name ending in .parquet or .csv")


def _choose(
    frame: pl.DataFrame, deployment: dict[str, Any], metadata: dict[str, str], where: str
) -> pl.DataFrame:
    """The rows of one deployment."""
    for name, value in deployment.items():
        if name not in DEPLOYMENT:
            raise InputError(f"deployment.{name}", value, f"one of {', '.join(DEPLOYMENT)}")
        if name in frame.columns:
            frame = frame.filter(pl.col(name).cast(pl.String) == str(value))
        elif metadata.get(name) != str(value):
            found = metadata.get(name, MISSING)
            raise InputError(f"{where}, {name}", found, f"{value!r} as deployment says")
    columns = [name for name in DEPLOYMENT if name in frame.columns]
    if not columns:
        return frame
    found = frame.select(columns).unique(maintain_order=True)
    if found.height > 1:
        differing = [name for name in columns if found[name].n_unique() > 1]
        shown = "; ".join(
            ", ".join(f"{n}: {row[n]}" for n in differing) for row in found.head(3).to_dicts()
        )
        expected = f"one, chosen by deployment (such as {shown})"
        raise InputError(where, f"{found.height} deployments", expected)
    if found.height == 0:
        raise InputError(where, deployment, "a deployment that the file has")
    return frame


def points_of(frame: pl.DataFrame, where: str) -> pl.DataFrame:
    """The points of a frame as `phase_points` gives them; both phases have some.

    Raises what `phase_points` raises, and InputError for a phase without points.
    """
    points = phase_points(frame, where)
    for role in (PREFILL, DECODE):
        if not (points["role"] == role).any():
            raise InputError(where, f"no {role} rows", "rows of both roles, prefill and decode")
    return points


def phase_points(frame: pl.DataFrame, where: str) -> pl.DataFrame:
    """The points of a frame, checked, with the columns of `COLUMNS`, by role and size; points that
    were measured several times have their median.

    Raises:
        InputError: a missing column, a bad cell, no rows, another unit than ms.
    """
    if not isinstance(frame, pl.DataFrame):
        raise InputError(where, frame, "a polars.DataFrame of timing points")
    if "__row" not in frame.columns:
        frame = frame.with_row_index("__row", offset=1)
    _check_columns(frame, where)
    frame = _typed(frame, where)
    if frame.height == 0:
        raise InputError(where, "no rows", "timing points")
    for role, sizes in _SIZES.items():
        rows = frame.filter(pl.col("role") == role)
        for name, least in sizes.items():
            most = MOST_BATCHES if name == "batch_size" else _MOST_TOKENS
            expected = f"a whole number from {least} to {most}, as the role is {role}"
            _refuse(rows, ~pl.col(name).is_between(least, most), name, expected, where)
    bad = ~pl.col("latency_ms").is_between(0.0, _LONGEST_MS, closed="right")
    bad = bad | pl.col("latency_ms").is_nan()
    _refuse(frame, bad, "latency_ms", "a finite number of ms above 0, at most 1e9", where)
    prefill = frame.filter(pl.col("role") == PREFILL)
    expected = "more than prefix: the length after the pass"
    _refuse(prefill, pl.col("isl") <= pl.col("prefix"), "isl", expected, where)
    _check_unit(frame, where)
    unused = pl.col("role") == DECODE
    keys = ["role", "batch_size", "prefix", "isl", "context"]
    frame = frame.with_columns(
        isl=pl.when(~unused).then("isl"),
        prefix=pl.when(~unused).then("prefix"),
        context=pl.when(unused).then("context"),
    ).select(*COLUMNS)
    if frame.select(keys).is_duplicated().any():
        frame = frame.group_by(keys).agg(pl.col("latency_ms").median()).select(*COLUMNS)
    return frame.sort(keys, descending=[True, False, False, False, False])


def _check_columns(frame: pl.DataFrame, where: str) -> None:
    for name in COLUMNS:
        if name in frame.columns:
            continue
        if name == "latency_ms":
            other = next((unit for unit in _OTHER_UNITS if unit in frame.columns), None)
            if other is not None:
                raise InputError(f"{where}, {other}", other, "latencies in ms, named latency_ms")
        raise InputError(f"{where}, {name}", MISSING, f"the columns {', '.join(COLUMNS)}")


def _typed(frame: pl.DataFrame, where: str) -> pl.DataFrame:
    """The columns in their types; what does not convert is named with its row."""
    roles = pl.col("role").cast(pl.String, strict=False)
    bad = roles.is_null() | ~roles.is_in([PREFILL, DECODE])
    _refuse(frame, bad, "role", f"{PREFILL!r} or {DECODE!r}", where)
    for name, dtype in COLUMNS.items():
        if frame[name].dtype == dtype:
            continue
        if dtype == pl.Int32:
            as_float = pl.col(name).cast(pl.Float64, strict=False)
            whole = as_float.is_not_null() & (as_float == as_float.round()) & as_float.is_finite()
            bad = pl.col(name).is_not_null() & ~whole
            _refuse(frame, bad, name, "a whole number", where)
            within = as_float.is_between(-(2**31), 2**31 - 1)
            _refuse(frame, as_float.is_not_null() & ~within, name, "at most 2**30", where)
            frame = frame.with_columns(as_float.cast(dtype).alias(name))
            continue
        cast = pl.col(name).cast(dtype, strict=False)
        bad = pl.col(name).is_not_null() & cast.is_null()
        _refuse(frame, bad, name, "a number of ms" if name == "latency_ms" else "text", where)
        frame = frame.with_columns(cast)
    return frame


def _refuse(frame: pl.DataFrame, bad: pl.Expr, name: str, expected: str, where: str) -> None:
    """Raise InputError for the first row that is bad, or null where `bad` cannot be told."""
    rows = frame.filter(bad.fill_null(value=True))
    if rows.height:
        first = rows.row(0, named=True)
        value = MISSING if first[name] is None else first[name]
        raise InputError(f"{where}, row {first['__row']}, {name}", value, expected)


def _check_unit(frame: pl.DataFrame, where: str) -> None:
    for role in (PREFILL, DECODE):
        least = frame.filter(pl.col("role") == role)["latency_ms"].min()
        if least is not None and not _LEAST_MS <= least <= _MOST_MS:
            unit = "seconds" if least < _LEAST_MS else "microseconds"
            expected = f"ms: the quickest {role} pass looks like {unit}"
            raise InputError(f"{where}, latency_ms", least, expected)
