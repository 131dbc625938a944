"""The one way to run: descriptor and workload in, result out."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from typing import TYPE_CHECKING

import numpy as np

from vecsim.config.load import Source, defaulted, load
from vecsim.config.roles import Role, resolve
from vecsim.config.schema import Payload, Tokenization
from vecsim.config.validate import check_supported, validate
from vecsim.errors import InputError, SimulationError
from vecsim.kernels.state import status as S
from vecsim.run.execute import Progress, RunOptions, run_fleet, run_independent
from vecsim.run.lower.fleet import PoolPlan, lower_fleet
from vecsim.run.lower.independent import lower_independent
from vecsim.run.outcome import Outcome
from vecsim.run.window import Measured, check_windows, measured_of
from vecsim.timing.model import BoundTiming, PassTiming, check_timing
from vecsim.timing.resolve import TimingWarning, note_free_transfers, price_role
from vecsim.workload.columns import positive_int
from vecsim.workload.dependencies import session_cap
from vecsim.workload.workload import Workload

if TYPE_CHECKING:
    from vecsim.results.result import Result


def replay(
    source: Source,
    *,
    workload: Workload | None = None,
    timing: PassTiming | None = None,
    prefill_timing: PassTiming | None = None,
    decode_timing: PassTiming | None = None,
    threads: int | None = None,
    progress: bool | Progress = False,
    timeline: bool = False,
    observe: str | None = None,
    warmup_ms: float = 0.0,
    cooldown_ms: float = 0.0,
) -> Result:
    """Replay a workload against a fleet, in virtual time.

    Args:
        source: the descriptor: a dict, the path of a YAML or JSON file, `ReplaySpec` or `Payload`.
        workload: requests; replaces those of the descriptor.
        timing, prefill_timing, decode_timing: pass prices (`CompiledTiming` or `TimingTable`) that
            replace the descriptor's, for all roles or for one stage.
        threads: worker threads; None = one a core. Results do not depend on it.
        progress: True prints a progress line to stderr; a function is called with (requests ended,
            requests) now and then.
        timeline: keep what `Result.timeline` is made of: a line for each pass or decode run of
        passes. observe: "kv_events" records what every rank's prefix cache stores and removes, for
            `Result.kv_events`; None = nothing, which costs nothing.
        warmup_ms, cooldown_ms: the metrics leave out requests that arrive less than this after the
            first arrival, or before the last; they are simulated all the same.

    Returns:
        The complete result.

    Raises:
        InputError: a malformed or impossible descriptor, workload or argument.
        NotSupportedYetError: a valid one that needs a feature that is not built.
        SimulationError: a timing model gave an unusable duration.

    Warns:
        TimingWarning: passes outside the range of a timing table were priced by extrapolation.
    """
    started = time.perf_counter()
    for name, model in (
        ("timing", timing),
        ("prefill_timing", prefill_timing),
        ("decode_timing", decode_timing),
    ):
        check_timing(name, model)
    check_windows(warmup_ms, cooldown_ms)
    if observe not in (None, "kv_events"):
        raise InputError("observe", observe, "kv_events, or nothing")
    payload = load(source)
    validate(payload)
    check_supported(payload)
    roles = resolve(payload.spec, emit_kv_events=observe is not None)
    _check_stages(roles, prefill_timing, decode_timing)
    progress = _progress(progress)
    threads = thread_count(threads)
    given = {"prefill": prefill_timing or timing, "decode": decode_timing or timing}
    priced = tuple(price_role(role, given.get(role.stage, timing)) for role in roles)
    roles = tuple(one.role for one in priced)
    note_free_transfers(roles, payload.spec.topology)
    if workload is None:
        workload = authored_workload(payload)
    else:
        workload = _checked_workload(workload, roles, payload)
    _check_waits(payload, workload, roles)
    _check_services(payload.tokenization, workload)
    outcome, measured, outside = _run(
        payload,
        workload,
        roles,
        tuple(one.timing for one in priced),
        threads,
        progress,
        timeline,
        (warmup_ms, cooldown_ms),
    )
    wall_time_ms = (time.perf_counter() - started) * 1000.0
    from vecsim.results.result import Result  # results stand on runs, not the reverse

    return Result(
        payload,
        workload,
        outcome,
        roles,
        defaulted(source),
        wall_time_ms,
        measured=measured,
        priced=priced,
        outside=outside,
    )


def authored_workload(payload: Payload) -> Workload:
    """The workload that a payload describes itself: its `traffic`, else its inline requests."""
    if payload.traffic is not None:
        return Workload.from_traffic(payload.traffic, payload.spec)
    if payload.workload is not None:
        from vecsim.synthetic.generate import workload_of_description

        return workload_of_description(payload.workload)
    return Workload.from_requests(payload.spec.requests)


def _check_stages(
    roles: tuple[Role, ...],
    prefill_timing: PassTiming | None,
    decode_timing: PassTiming | None,
) -> None:
    """Refuse the price of a stage that the topology does not have."""
    stages = {"prefill_timing": prefill_timing, "decode_timing": decode_timing}
    for name, model in stages.items():
        if model is not None and roles[0].stage == "aggregated":
            raise InputError(name, model, "none: the pool is aggregated; use timing")


def _checked_workload(workload: Workload, roles: tuple[Role, ...], payload: Payload) -> Workload:
    """The workload with its columns in order, after what the descriptor's own checks would have
    said of these requests."""
    if not isinstance(workload, Workload):
        raise InputError("workload", workload, "a vecsim.Workload")
    try:
        workload = workload.checked()
    except InputError as error:
        raise InputError(f"workload.{error.where}", error.value, error.expected) from None
    _check_pins(workload, roles)
    belady = payload.spec.engine.kv_eviction_policy == "belady"
    if belady and len(workload) and workload.block_offsets is None:
        raise InputError(
            "workload", "lengths only", "token or hash ids: belady looks them up ahead"
        )
    return workload


def _check_pins(workload: Workload, roles: tuple[Role, ...]) -> None:
    """Refuse pins to ranks that a role does not have."""
    for role in roles:
        pins, name = workload.dp_rank, "dp_rank"
        if role.stage == "prefill":
            own = workload.prefill_dp_rank
            pins = np.where(own < 0, workload.dp_rank, own)
            name = "prefill_dp_rank (or dp_rank)"
        too_high = np.flatnonzero(pins >= role.dp_size)
        if too_high.size:
            row = int(too_high[0])
            expected = f"a rank below {role.path}.dp_size = {role.dp_size}"
            raise InputError(f"workload.{name}[{row}]", int(pins[row]), expected)
    pinned = np.flatnonzero(workload.prefill_dp_rank >= 0)
    if pinned.size and roles[0].stage == "aggregated":
        row = int(pinned[0])
        value = int(workload.prefill_dp_rank[row])
        raise InputError(f"workload.prefill_dp_rank[{row}]", value, "none: the pool is aggregated")


def _check_services(tokenization: Tokenization | None, workload: Workload) -> None:
    """Refuse tokenization under which time, in float64 ms, could run out."""
    if tokenization is None or len(workload) == 0:
        return
    tokens = float(workload.input_length.sum(dtype=np.float64))
    service_ms = len(workload) * tokenization.base_ms + tokens * tokenization.per_input_token_ms
    if not math.isfinite(float(workload.arrival_ms.max()) + service_ms):
        name = "base_ms" if tokenization.base_ms > 0 else "per_input_token_ms"
        value = getattr(tokenization, name)
        expected = "a service time that keeps the times of all requests finite"
        raise InputError(f"tokenization.{name}", value, expected)


def _check_waits(payload: Payload, workload: Workload, roles: tuple[Role, ...]) -> None:
    """Refuse what cannot go with requests that wait for others (reference: configuration)."""
    role = roles[0]
    graph = workload.dependencies is not None
    if workload.sessions is None and not graph:
        return
    spec = payload.spec
    if spec.engine.kv_eviction_policy == "belady":
        expected = "lru: belady looks ahead, and these requests arrive when others have ended"
        raise InputError("engine.kv_eviction_policy", "belady", expected)
    if graph and payload.traffic is not None and role.backend == "trtllm":
        raise InputError(f"{role.path}.rank.backend", "trtllm", "vllm or sglang for agents")
    if graph and payload.traffic is None and spec.max_in_flight is not None:
        expected = "none: requests of a graph come when those they wait for allow it"
        raise InputError("max_in_flight", spec.max_in_flight, expected)


def thread_count(threads: int | None) -> int:
    """The number of threads to use; None = one a core. Raises InputError."""
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return positive_int("threads", threads)


def _progress(progress: bool | Progress) -> Progress | None:
    if progress is False or progress is None:
        return None
    if progress is not True:
        if not callable(progress):
            raise InputError("progress", progress, "True, False, or a function of two numbers")
        return progress
    from rich.console import Console

    console = Console(stderr=True)
    return lambda ended, total: console.print(f"{ended} of {total} requests", end="\r")


def _run(
    payload: Payload,
    workload: Workload,
    roles: tuple[Role, ...],
    timings: tuple[PassTiming | None, ...],
    threads: int,
    progress: Progress | None,
    timeline: bool,
    windows: tuple[float, float],
) -> tuple[Outcome, Measured | None, tuple[int, int] | None]:
    spec = payload.spec
    max_in_flight = spec.max_in_flight
    authored_order = False
    if payload.traffic is not None or workload.session_cap is not None:
        max_in_flight = session_cap(payload.traffic, workload)
        authored_order = max_in_flight is not None
    tokenization = payload.tokenization
    if tokenization and not (tokenization.base_ms or tokenization.per_input_token_ms):
        tokenization = None
    horizon = np.inf if spec.max_sim_time_ms is None else spec.max_sim_time_ms
    logged = timeline or any(windows)  # a window counts what pools did in it
    options = RunOptions(horizon, threads, progress, logged, tokenization is not None)
    bounds: tuple[BoundTiming | None, ...] = ()

    def run(counted: np.ndarray | None) -> Outcome:
        nonlocal bounds
        bounds = tuple(None if timing is None else timing.bind() for timing in timings)
        try:
            return _simulate(
                payload,
                workload,
                roles,
                bounds,
                options,
                max_in_flight,
                authored_order,
                counted,
            )
        except SimulationError as error:
            refusals = [bound.refusal for bound in bounds if bound is not None]
            raise SimulationError(next(filter(None, refusals), str(error))) from None

    told = None
    if any(windows) and max_in_flight is None and workload.dependencies is None:
        # Who arrives in the window is known ahead where arrivals are, except for later turns.
        told = measured_of(workload.arrival_ms, *windows).rows
    outcome = run(told)
    measured = measured_of(outcome.arrival_ms, *windows)
    counted = outcome.status == S.COMPLETED
    if measured is not None:
        counted &= measured.rows
    wrong = counted != (True if told is None else told)
    if np.any(outcome.output_length[wrong] > 1):
        # Gaps count for completed requests of the window only, and who they are is known only now.
        options = dataclasses.replace(options, progress=None)
        outcome = run(counted)
    if measured is not None:
        from vecsim.results.timeline import with_use

        measured = with_use(measured, outcome)
    if logged and not timeline:
        pools = tuple(dataclasses.replace(pool, segments=None) for pool in outcome.pools)
        outcome = dataclasses.replace(outcome, pools=pools)
    outside = _outside(bounds)
    if outside is not None and any(outside):
        far = dict.fromkeys(
            said for bound in bounds if bound is not None for said in bound.farthest
        )
        message = (
            f"passes outside the timing table are extrapolated: {'; '.join(far)};"
            " outside_table_* counts them"
        )
        warnings.warn(message, TimingWarning, stacklevel=3)
    return outcome, measured, outside


def _simulate(
    payload: Payload,
    workload: Workload,
    roles: tuple[Role, ...],
    timings: tuple[BoundTiming | None, ...],
    options: RunOptions,
    cap: int | None,
    authored_order: bool,
    counted: np.ndarray | None,
) -> Outcome:
    """Lower and run: workers that nothing couples on their own, all others on the fleet's clock."""
    topology = payload.spec.topology
    eviction = payload.spec.engine.kv_eviction_policy
    tokenization = payload.tokenization if options.tokenized else None
    if roles[0].stage == "aggregated":
        workers = topology.workers.initial_workers
        waits = workload.sessions is not None or workload.dependencies is not None
        # Belady's next-use table is shared by all workers, and counts requests as they come to the
        # fleet.
        looks_ahead = eviction == "belady" and (workers > 1 or options.tokenized)
        if not (waits or cap is not None or looks_ahead):
            state = lower_independent(
                roles[0],
                workload,
                workers,
                eviction=eviction,
                tokenization=tokenization,
                timing=timings[0],
                counted=counted,
            )
            return run_independent(state, workload, roles[0], options)
        plans = (PoolPlan(roles[0], workers, timings[0]),)
        topology = None
    else:
        counts = (topology.prefill.initial_workers, topology.decode.initial_workers)
        plans = tuple(map(PoolPlan, roles, counts, timings))
        eviction = "lru"
    state = lower_fleet(
        plans,
        workload,
        topology=topology,
        eviction=eviction,
        tokenization=tokenization,
        authored_order=authored_order,
        cap=cap,
        horizon_ms=options.horizon_ms,
        record_segments=options.record_segments,
        counted=counted,
    )
    return run_fleet(state, workload, options)


def _outside(bounds: tuple[BoundTiming | None, ...]) -> tuple[int, int] | None:
    """Prefill and decode look-ups of all roles outside their tables; None without a table."""
    counts = [bound.outside for bound in bounds if bound is not None]
    counts = [count for count in counts if count is not None]
    return tuple(map(sum, zip(*counts, strict=True))) if counts else None
