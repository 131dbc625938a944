"""Running the kernels over a prefill and a decode pool, and reading the columns out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vecsim.config.roles import Role
from vecsim.errors import SimulationError
from vecsim.kernels.cache.kv_events import ObservedScratch
from vecsim.kernels.fleet import handoff as kernel
from vecsim.kernels.fleet.handoff import Handoff, Side
from vecsim.kernels.state import layout
from vecsim.run.execute import (
    Progress,
    failure,
    gap_distribution,
    pool_outcome,
    settle_fronts,
    with_longer_logs,
)
from vecsim.run.lower import grown_forest, lacks_nodes
from vecsim.run.lower_handoff import HandoffState, is_forest
from vecsim.run.outcome import HandoffOutcome, HandoffSteps, Outcome

if TYPE_CHECKING:
    from vecsim.run.kv_events import KvEvents
    from vecsim.workload.workload import Workload


def simulate_handoff(
    state: HandoffState,
    workload: Workload,
    roles: tuple[Role, Role],
    progress: Progress | None,
    tokenized: bool,
) -> Outcome:
    """Run to the end or to the horizon, and return the columns in workload order.

    Args:
        state: lowered state; its arrays are used up.
        workload: n requests.
        roles: prefill and decode.
        progress: called with (requests ended, requests) now and then, or None.
        tokenized: there is a tokenization stage.

    Raises:
        SimulationError: an unusable pass duration, or a standstill that no rule settles.
    """
    prefill, decode, handoff = state.prefill, state.decode, state.handoff
    logged: tuple[list[np.ndarray], ...] = ([], [])
    while True:
        code = state.entries.run_disaggregated(prefill, decode, handoff)
        if progress is not None:
            progress(int(handoff.state[kernel.ENDED]), handoff.requests.shape[1])
        if code == layout.DONE:
            break
        if code == layout.LOG_FULL:
            prefill, decode = _with_longer_logs(prefill), _with_longer_logs(decode)
        elif code == layout.FOREST_FULL:
            if state.watched is not None:
                _empty_event_logs((prefill, decode), logged)
            prefill, decode = _with_larger_forest(prefill), _with_larger_forest(decode)
        elif code != layout.PAUSED:
            raise SimulationError(_failure(int(code), prefill, decode, handoff))
    outcome = _Reading(state, prefill, decode).outcome(roles, tokenized)
    if state.watched is None:
        return outcome
    return replace(outcome, kv_events=_kv_events(state, workload, roles, (prefill, decode), logged))


def _empty_event_logs(sides: tuple[Side, Side], logged: tuple[list[np.ndarray], ...]) -> None:
    """Room in the logs of KV events for the next pass."""
    from vecsim.run.kv_events import lacks_room, taken_out

    for side, parts in zip(sides, logged, strict=True):
        if lacks_room(side.pools.events):
            parts.append(taken_out(side.pools.events))


def _kv_events(
    state: HandoffState,
    workload: Workload,
    roles: tuple[Role, Role],
    sides: tuple[Side, Side],
    logged: tuple[list[np.ndarray], ...],
) -> tuple[KvEvents, ...]:
    """What the ranks of both pools announced."""
    from vecsim.run.kv_events import collect, taken_out

    return tuple(
        collect(
            [[*parts, taken_out(side.pools.events)]],
            watched,
            side.ranks,
            workload,
            state.order,
            role.stage,
            role.dp_size,
        )
        for role, side, watched, parts in zip(roles, sides, state.watched, logged, strict=True)
    )


def _with_longer_logs(side: Side) -> Side:
    return side._replace(scratch=with_longer_logs(side.ranks, side.scratch))


def _with_larger_forest(side: Side) -> Side:
    """The side with room in its radix trees, if it has any, for the next pass."""
    dp_size = len(side.ranks.fields) // len(side.workers.state)
    if not is_forest(side) or not lacks_nodes(side.pools, side.ranks, dp_size):
        return side
    pools = grown_forest(side.pools, side.ranks)
    scratch = side.scratch
    if isinstance(scratch, ObservedScratch):
        scratch = scratch._replace(pools=pools)
    return side._replace(pools=pools, scratch=scratch)


def _failure(code: int, prefill: Side, decode: Side, handoff: Handoff) -> str:
    """The pool of the worker whose pass has no price speaks, or that whose workers got nowhere."""
    sides = (("prefill", prefill), ("decode", decode))
    if code == layout.BAD_PRICE:
        driven = handoff.lists[kernel.TO_DRIVE, 0]
        name, side = sides[int(driven >= len(prefill.workers.state))]
    else:
        name, side = max(sides, key=lambda pair: pair[1].workers.state[:, layout.FRUITLESS].max())
    return f"{name} pool: {failure(code, side.ranks, side.workers)}"


class _Reading:
    """Reads the columns of a finished run."""

    def __init__(self, state: HandoffState, prefill: Side, decode: Side) -> None:
        self.order = state.order
        self.observed = state.watched is not None
        self.handoff = state.handoff
        self.prefill = prefill
        self.decode = decode

    def _restored(self, column: np.ndarray) -> np.ndarray:
        """A column in workload order."""
        if self.order is None:
            return column.copy()
        restored = np.empty_like(column)
        restored[self.order] = column
        return restored

    def outcome(self, roles: tuple[Role, Role], tokenized: bool) -> Outcome:
        prefill, decode, handoff = self.prefill, self.decode, self.handoff
        settle_fronts(decode.ranks, decode.workers, decode.requests, is_forest(decode))
        source, target = prefill.requests.state, decode.requests.state
        source_time, target_time = prefill.requests.time, decode.requests.time
        released = source_time[layout.RELEASED]
        arrival = source_time[layout.ARRIVAL]
        horizon = handoff.time[kernel.HORIZON]
        arrived = released <= horizon
        ended_early = arrived & (source[layout.STATUS] != layout.UNFINISHED)
        status = np.where(ended_early, source[layout.STATUS], target[layout.STATUS])
        reason = np.where(ended_early, source[layout.REASON], target[layout.REASON])
        status[~arrived] = layout.NOT_ARRIVED
        reason[(status == layout.UNFINISHED) | ~arrived] = layout.NO_REASON
        terminal = np.where(ended_early, source_time[layout.TERMINAL], target_time[layout.TERMINAL])
        request, at_ms, reused, in_decode = self._readmissions()
        restored = self._restored
        return Outcome(
            arrival_ms=restored(np.where(arrived, released, np.nan)),
            tokenized_ms=restored(np.where(arrived, arrival, np.nan)) if tokenized else None,
            first_admit_ms=restored(source_time[layout.FIRST_ADMIT]),
            first_token_ms=restored(target_time[layout.FIRST_TOKEN]),
            second_token_ms=restored(target_time[layout.SECOND_TOKEN]),
            last_token_ms=restored(target_time[layout.LAST_TOKEN]),
            terminal_ms=restored(terminal),
            input_length=restored(target[layout.ISL]),
            output_length=restored(target[layout.GENERATED]),
            reused_input_tokens=restored(source[layout.REUSED]),
            first_reused_input_tokens=restored(source[layout.FIRST_REUSED]),
            admissions=restored(source[layout.ADMISSIONS] + target[layout.ADMISSIONS]),
            status=restored(status).astype(np.uint8),
            reason=restored(reason).astype(np.uint8),
            rank=restored(target[layout.RANK]),
            readmission_request=request,
            readmission_at_ms=at_ms,
            readmission_reused=reused,
            end_ms=self._end_ms(arrived, horizon),
            committed_prefill_tokens=sum(
                int(side.ranks.fields[:, layout.COMMITTED_PREFILL].sum())
                for side in (prefill, decode)
            ),
            gaps=gap_distribution(decode.workers, [decode.scratch.bins]),
            pools=tuple(
                pool_outcome(role.stage, role, side.ranks, side.workers, [side.scratch])
                for role, side in zip(roles, (prefill, decode), strict=True)
            ),
            handoff=self._columns(in_decode, not is_forest(decode)),
        )

    def _columns(self, in_decode: np.ndarray, source_first: bool) -> HandoffOutcome:
        instants = self.handoff.instants
        target = self.decode.requests.state
        restored = self._restored
        return HandoffOutcome(
            source_first=source_first,
            prefill_rank=restored(self.prefill.requests.state[layout.RANK]),
            source_held_ms=restored(instants[kernel.HELD_AT]),
            destination_reserved_ms=restored(instants[kernel.RESERVED_AT]),
            destination_activated_ms=restored(instants[kernel.ACTIVATED_AT]),
            decode_admit_ms=restored(self.decode.requests.time[layout.FIRST_ADMIT]),
            source_released_ms=restored(instants[kernel.RELEASED_AT]),
            decode_admissions=restored(target[layout.ADMISSIONS]),
            decode_reused=restored(target[layout.REUSED]),
            decode_first_reused=restored(target[layout.FIRST_REUSED]),
            readmission_in_decode=in_decode,
            steps=self._steps() if self.observed else None,
        )

    def _steps(self) -> HandoffSteps:
        from vecsim.kernels.fleet import handoff_events as kernel_steps

        steps = self.decode.pools.steps
        lines = steps.lines[:, : int(steps.length[0])]
        kind = lines[kernel_steps.STEP_KIND].astype(np.uint8)
        request = lines[kernel_steps.STEP_REQUEST].astype(np.int64)
        # Blocks of a source that was canceled were given back as well.
        released = ~np.isnan(self.handoff.instants[kernel.RELEASED_AT])
        kept = (kind != kernel_steps.SOURCE_RELEASED) | released[request]
        if self.order is not None:
            request = self.order[request]
        return HandoffSteps(
            kind=kind[kept],
            request=request[kept].astype(np.int32),
            at_ms=lines[kernel_steps.STEP_MS, kept],
            source_output=self._restored(self.prefill.requests.state[layout.GENERATED]),
            drained=(_is_drained(self.prefill), _is_drained(self.decode), self._is_done()),
        )

    def _is_done(self) -> bool:
        """Whether no request is on its way, and nothing is left to do."""
        handoff = self.handoff
        state, lists = handoff.state, handoff.lists
        return bool(
            state[kernel.ACTIONS] == 0
            and state[kernel.AWAKE] == 0
            and state[kernel.TAKEN] == state[kernel.ENDED] == handoff.requests.shape[1]
            and np.all(lists[kernel.FIRST_DEFERRED] == layout.NONE)
            and np.all(np.isinf(handoff.transfers))
            and np.all(np.isinf(handoff.passes))
        )

    def _end_ms(self, arrived: np.ndarray, horizon: float) -> float:
        """The last processed event."""
        times = self.prefill.requests.time
        arrival = times[layout.ARRIVAL]
        queued = arrival <= horizon
        return max(
            float(self.prefill.workers.time[:, layout.CLOCK].max()),
            float(self.decode.workers.time[:, layout.CLOCK].max()),
            float(times[layout.RELEASED][arrived].max(initial=0.0)),
            float(arrival[queued].max(initial=0.0)),
            float(self.handoff.time[kernel.NOW]),
        )

    def _readmissions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(request, at_ms, reused tokens, whether in the decode pool) of all readmissions, by
        request, then pool, then time."""
        scratches = (self.prefill.scratch, self.decode.scratch)
        logs = [s.log[:, : int(s.log_length[0])] for s in scratches]
        log = np.concatenate(logs, axis=1)
        in_decode = np.arange(log.shape[1]) >= logs[0].shape[1]
        request = log[0].astype(np.int64)
        if self.order is not None:
            request = self.order[request]
        by_request = np.argsort(request, kind="stable")
        return (
            request[by_request].astype(np.int32),
            log[1][by_request],
            log[2][by_request].astype(np.int32),
            in_decode[by_request],
        )


def _is_drained(side: Side) -> bool:
    """Whether no rank runs, keeps or awaits a request, or holds a block."""
    fields = side.ranks.fields
    held = fields[:, layout.NUM_BLOCKS] - fields[:, layout.FREE] - fields[:, layout.IDLE]
    counts = (layout.RUNNING, layout.HELD, layout.PROMISED, layout.PREEMPTED_COUNT)
    heads = (layout.QUEUE_HEAD, layout.READY_HEAD, layout.ACTIVATED_HEAD)
    return bool(
        np.all(held == 0)
        and np.all(fields[:, counts] == 0)
        and np.all(fields[:, heads] == layout.NONE)
        and np.all(side.workers.state[:, layout.PENDING] == layout.NO_PASS)
    )
