"""Outcomes built by hand or from the reference's records, for tests that need no kernels."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl

from vecsim.config.load import load
from vecsim.config.roles import resolve
from vecsim.kernels.state import status as S
from vecsim.results.result import Result
from vecsim.run.outcome import GapDistribution, Outcome, PoolOutcome

CASES = Path(__file__).parents[1] / "conformance" / "cases"


def cases(name: str) -> list[dict]:
    """All cases of one file of reference answers."""
    return json.loads((CASES / f"{name}_cases.json").read_text())["cases"]


def gaps_of(values) -> GapDistribution:
    """A gap distribution with one exact bin per distinct positive gap."""
    values = np.asarray(values, dtype=np.float64)
    positive = values[values > 0]
    midpoints, bins = np.unique(positive, return_counts=True)
    rates = 1000.0 / positive
    nan = float("nan")
    return GapDistribution(
        count=len(values),
        zeros=len(values) - len(positive),
        minimum=values.min() if len(values) else nan,
        maximum=values.max() if len(values) else nan,
        mean=values.mean() if len(values) else nan,
        m2=((values - values.mean()) ** 2).sum() if len(values) else 0.0,
        rate_mean=rates.mean() if len(rates) else nan,
        rate_m2=((rates - rates.mean()) ** 2).sum() if len(rates) else 0.0,
        positive_minimum=positive.min() if len(positive) else nan,
        bins=bins.astype(np.int64),
        midpoints=midpoints,
    )


def pool(**changes) -> PoolOutcome:
    """One aggregated worker with one rank of 100 blocks."""
    fields = {
        "name": "agg",
        "workers": 1,
        "dp_size": 1,
        "gpus_per_worker": 1,
        "busy_ms": np.zeros(1),
        "kv_block_ms": np.zeros(1),
        "total_blocks": 100,
        "passes": np.zeros(1, dtype=np.int64),
        "preemptions": np.zeros(1, dtype=np.int64),
    }
    return PoolOutcome(**{**fields, **changes})


_TIMES = (
    "arrival_ms",
    "first_admit_ms",
    "first_token_ms",
    "second_token_ms",
    "last_token_ms",
    "terminal_ms",
)
_INTEGERS = (
    "input_length",
    "output_length",
    "reused_input_tokens",
    "first_reused_input_tokens",
    "admissions",
)


def outcome_of(rows: list[dict], gaps=None, **changes) -> Outcome:
    """An outcome from one dict per request; keys are Outcome columns, absent = undefined.

    `status` and `reason` are names; `readmissions` is a list of (at_ms, reused).
    """
    columns = {
        name: np.array([row.get(name, np.nan) for row in rows], dtype=np.float64) for name in _TIMES
    }
    for name in _INTEGERS:
        columns[name] = np.array([row.get(name, 0) for row in rows], dtype=np.int32)
    status = [S.STATUS_NAMES.index(row.get("status", "completed")) for row in rows]
    reason = [S.REASON_NAMES.index(row.get("reason")) for row in rows]
    again = [(i, *entry) for i, row in enumerate(rows) for entry in row.get("readmissions", [])]
    fields = {
        **columns,
        "tokenized_ms": None,
        "status": np.array(status, dtype=np.uint8),
        "reason": np.array(reason, dtype=np.uint8),
        "rank": np.array([row.get("rank", 0) for row in rows], dtype=np.int32),
        "readmission_request": np.array([entry[0] for entry in again], dtype=np.int32),
        "readmission_at_ms": np.array([entry[1] for entry in again], dtype=np.float64),
        "readmission_reused": np.array([entry[2] for entry in again], dtype=np.int32),
        "end_ms": float(np.nanmax(columns["terminal_ms"], initial=0.0)),
        "committed_prefill_tokens": 0,
        "gaps": gaps_of([]) if gaps is None else gaps,
        "pools": (pool(),),
    }
    return Outcome(**{**fields, **changes})


def workload_of(rows: list[dict]) -> SimpleNamespace:
    """The workload columns a result reads, from the same dicts (`input_length`, `asked`, ...)."""
    names = [row.get("request_id") for row in rows]
    sessions = [row.get("session_id") for row in rows]
    return SimpleNamespace(
        session_cap=None,
        dependencies=None,
        input_length=np.array([row.get("input_length", 0) for row in rows], dtype=np.int32),
        output_length=np.array(
            [row.get("asked", row.get("output_length", 0)) for row in rows], dtype=np.int32
        ),
        request_id=pl.Series(names, dtype=pl.String) if any(names) else None,
        session_id=pl.Series(sessions, dtype=pl.String) if any(sessions) else None,
        turn_index=(
            np.array([row["turn_index"] for row in rows], dtype=np.int32) if any(sessions) else None
        ),
        metadata=[row.get("metadata") for row in rows],
    )


def result_of(rows: list[dict], payload: dict | None = None, **changes) -> Result:
    """A finished run made of `rows`."""
    loaded = load(payload or plain_payload())
    return Result(
        payload=loaded,
        workload=workload_of(rows),
        outcome=outcome_of(rows, **changes),
        roles=resolve(loaded.spec),
        defaulted=["engine"],
        wall_time_ms=2.0,
    )


def plain_payload(**changes) -> dict:
    """A bare spec: one aggregated vLLM worker, all defaults, no requests."""
    return {
        "version": 1,
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "requests": [],
        **changes,
    }


def rows_of_case(case: dict) -> list[dict]:
    """Rows for `result_of` from the records of an accepted aggregated case. Requests that the
    reference leaves out (unfinished at a time limit) are appended, with their times undefined."""
    rows = [_row(record) for record in case["expect"]["requests"]]
    arrived = case["expect"]["report"]["num_requests"]
    rows += [{"status": "unfinished", "arrival_ms": 0.0} for _ in range(arrived - len(rows))]
    return rows


def _row(record: dict) -> dict:
    history = record["admission_history"]
    first = record["first_token_ms"]
    second = None if record["ttst_ms"] is None else first + record["ttst_ms"]
    row = {
        "arrival_ms": record["arrival_time_ms"],
        "first_admit_ms": record["first_admit_ms"],
        "first_token_ms": first,
        "second_token_ms": second,
        "last_token_ms": record["last_token_ms"],
        "terminal_ms": record["terminal_time_ms"],
        "status": record["terminal_status"],
        "output_length": record["output_length"],
        "asked": record["requested_output_length"],
        "input_length": record["input_length"],
        "reused_input_tokens": record["reused_input_tokens"],
        "first_reused_input_tokens": record["first_admission_reused_input_tokens"],
        "admissions": record["admission_count"],
        "rank": record["decode_worker_idx"],
        "readmissions": [(at_ms, reused) for _, at_ms, reused, *_ in history[1:]],
        "request_id": record["request_id"],
        "session_id": record.get("session_id"),
        "turn_index": record.get("turn_index"),
        "metadata": record.get("metadata"),
    }
    return {name: value for name, value in row.items() if value is not None}


def gap_values(case: dict) -> np.ndarray | None:
    """All inter-token gaps of a case, or None where its records do not determine them."""
    report = case["expect"]["report"]
    values: list[float] = []
    for record in case["expect"]["requests"]:
        tokens = record["output_length"]
        if record["terminal_status"] != "completed" or tokens < 2:
            continue
        second = record["first_token_ms"] + record["ttst_ms"]
        if tokens <= 3:
            values += [record["ttst_ms"], record["last_token_ms"] - second][: tokens - 1]
        elif report["max_itl_ms"] - report["min_itl_ms"] < 1e-9:
            values += [report["max_itl_ms"]] * (tokens - 1)
        else:
            return None
    return np.array(values)
