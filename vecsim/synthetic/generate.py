"""Synthetic workloads from a description."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from vecsim.errors import InputError
from vecsim.synthetic.content import prompt_blocks
from vecsim.synthetic.description import Description, Resample, parse
from vecsim.synthetic.draws import arrivals_of, lengths_of
from vecsim.synthetic.rng import Random
from vecsim.workload.dependencies import Sessions
from vecsim.workload.workload import Workload

_STREAMS = ("arrivals", "input", "output", "resample", "groups")
_STREAM_STEP = 0x9E3779B97F4A7C15


def synthesize(
    requests: int,
    *,
    input_tokens: int | dict[str, Any] | None = None,
    output_tokens: int | dict[str, Any] | None = None,
    arrivals: str | dict[str, Any] = "burst",
    **more: Any,
) -> Workload:
    """A synthetic workload; equal arguments give equal workloads on any machine.

    Args:
        requests: number of requests, or of sessions where `turns` is above 1.
        input_tokens, output_tokens: a number, or a distribution: {"kind": "fixed", "tokens"},
            {"kind": "uniform", "low", "high"} or {"kind": "lognormal", "median", "sigma", "low",
            "high"}.
        arrivals: "burst" (all at 0), or {"kind": "constant" | "poisson", "rate"}, {"kind": "gamma",
            "rate", "shape"}, {"kind": "piecewise", "segments": [{"duration_s", "rate"}, ...]} or
            {"kind": "diurnal", "rate", "amplitude", "period_s", "peak_s"}. Rates are per second.
            Poisson arrivals are the reference's for the same seed.
        more: `resample` ({"path", "format"}: lengths from a trace, in place of the two),
            `concurrency` (closed loop of so many sessions), `turns` and `think_time_ms`,
            `shared_prefix` ({"ratio", "groups"}), `cached_prefix_tokens`, `block_tokens` (grain of
            shared content, default 64) and `seed` (default 42).

    Raises:
        InputError: a missing, unknown or impossible argument; names it.
    """
    tree = {"requests": requests, "arrivals": arrivals, **more}
    for name, value in (("input_tokens", input_tokens), ("output_tokens", output_tokens)):
        if value is not None:
            tree[name] = value
    return generate(parse(tree, "synthesize"), "synthesize")


def workload_of_description(tree: Any) -> Workload:
    """The workload that the `workload` of a spec describes. Raises InputError."""
    return generate(parse(tree, "workload"), "workload")


def generate(description: Description, where: str = "workload") -> Workload:
    """The workload of a checked description. Raises InputError naming a field below `where`."""
    d = description
    streams = {name: Random((d.seed + k * _STREAM_STEP) % 2**64) for k, name in enumerate(_STREAMS)}
    rows = d.requests * d.turns
    if d.resample is not None:
        inputs, outputs = _resampled(d.resample, streams["resample"], rows)
    else:
        inputs = lengths_of(d.input_tokens, streams["input"], rows)
        outputs = lengths_of(d.output_tokens, streams["output"], rows)
    group, ratio = np.zeros(d.requests, np.int64), 0.0
    if d.shared_prefix is not None:
        ratio = d.shared_prefix.ratio
        group = streams["groups"].below(d.shared_prefix.groups, d.requests)
    return assemble(
        arrivals_of(d.arrivals, streams["arrivals"], d.requests),
        inputs,
        outputs,
        turns=d.turns,
        think_time_ms=d.think_time_ms,
        block=d.block_tokens,
        ratio=ratio,
        group=group,
        cached_prefix_tokens=d.cached_prefix_tokens,
        session_cap=d.concurrency,
        where=where,
    )


def assemble(
    first_arrival_ms: np.ndarray,
    inputs: np.ndarray,
    outputs: np.ndarray,
    *,
    turns: int,
    think_time_ms: float,
    block: int,
    ratio: float,
    group: np.ndarray,
    cached_prefix_tokens: int,
    session_cap: int | None,
    where: str,
) -> Workload:
    """A workload of sessions with `turns` turns each, rows by session and turn.

    Args:
        first_arrival_ms: float64 [sessions].
        inputs, outputs: int64 [sessions * turns], new prompt tokens and output tokens per turn.
        group: int64 [sessions], group of shared content.
    """
    count = len(first_arrival_ms)
    turn = np.tile(np.arange(turns, dtype=np.int32), count)
    too_short = np.flatnonzero((turn == 0) & (inputs < cached_prefix_tokens))
    if too_short.size:
        expected = f"at most the shortest prompt, {int(inputs[too_short].min())} tokens"
        raise InputError(f"{where}.cached_prefix_tokens", cached_prefix_tokens, expected)
    blocks = None
    if turns > 1 or ratio > 0.0 or cached_prefix_tokens > 0:
        cached = np.where(turn == 0, cached_prefix_tokens, 0)
        blocks = prompt_blocks(inputs, block, ratio, np.repeat(group, turns), cached)
    session = np.repeat(np.arange(count, dtype=np.int32), turns)
    n = count * turns
    return Workload(
        arrival_ms=np.repeat(first_arrival_ms, turns),
        input_length=inputs.astype(np.int32),
        output_length=outputs.astype(np.int32),
        dp_rank=np.full(n, -1, np.int32),
        prefill_dp_rank=np.full(n, -1, np.int32),
        session_id=("session_" + pl.Series(session).cast(pl.String)).alias("session_id"),
        turn_index=turn,
        block_offsets=None if blocks is None else blocks[0],
        block_ids=None if blocks is None else blocks[1],
        block_tokens=block,
        sessions=None
        if turns == 1
        else Sessions(
            session=session,
            turn=turn,
            delay_ms=np.where(turn > 0, think_time_ms, 0.0),
            count=count,
            accumulate=True,
        ),
        session_cap=session_cap,
    )


def _resampled(resample: Resample, random: Random, rows: int) -> tuple[np.ndarray, np.ndarray]:
    from vecsim.traces import read_trace

    source = read_trace(resample.path, resample.format)
    if len(source) == 0:
        raise InputError(resample.path, "no rows", "a trace to draw lengths from")
    drawn = np.floor(random.uniform(rows) * len(source)).astype(np.int64)
    return (
        source.input_length[drawn].astype(np.int64),
        source.output_length[drawn].astype(np.int64),
    )
