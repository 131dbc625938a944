"""The arrival source of a run on the fleet's clock."""

from __future__ import annotations

import numpy as np

from vecsim.kernels.state import fleet as F
from vecsim.kernels.state.fleet import Arrivals
from vecsim.workload.columns import offsets_of
from vecsim.workload.dependencies import Dependencies, Sessions
from vecsim.workload.workload import Workload


def arrivals_of(workload: Workload, rows: np.ndarray, cap: int | None) -> Arrivals:
    """Who comes when.

    Args:
        workload: n requests.
        rows: int64 [n], row of the workload of each request of the kernels.
        cap: requests, or sessions, in flight at once; None = open loop.
    """
    if workload.dependencies is not None:
        return graph_arrivals(workload.dependencies, rows)
    if workload.sessions is not None:
        return session_arrivals(workload.sessions, workload.arrival_ms, rows, cap)
    n = len(rows)
    return _arrivals(
        np.zeros(n) if cap is not None else workload.arrival_ms[rows].astype(np.float64),
        np.zeros(n, np.int32),
        np.arange(n),
        np.ones(n, np.int64),
        np.zeros(n + 1, np.int64),
        np.zeros((F.EDGE_ROWS, 0), np.int32),
        np.zeros(0),
        lanes=cap,
        rejection_fails=False,
    )


def session_arrivals(
    sessions: Sessions, arrival_ms: np.ndarray, rows: np.ndarray, session_cap: int | None
) -> Arrivals:
    """Sessions as trajectories of one chain each; a cap on them is a number of lanes.

    `rows` int64 [n]: row of the workload of each request of the kernels.
    """
    n = len(rows)
    session = sessions.session[rows]
    later = sessions.turn[rows] > 0
    firsts = np.flatnonzero(~later)
    target = np.flatnonzero(later)
    due = np.zeros(n)
    if session_cap is None:
        due[firsts] = arrival_ms[rows[firsts]]
    has_next = np.zeros(n, np.int64)
    has_next[target - 1] = 1
    return _arrivals(
        due,
        later.astype(np.int32),
        session,
        np.bincount(session, minlength=sessions.count),
        offsets_of(has_next),
        np.array([target, np.ones(len(target))], np.int32),
        sessions.delay_ms[rows[target]],
        lanes=session_cap,
        rejection_fails=False,
    )


def graph_arrivals(graph: Dependencies, rows: np.ndarray) -> Arrivals:
    """A graph, renumbered by node, with its edges grouped by their source.

    `rows` int64 [n]: row of the workload of each request of the kernels.
    """
    n = len(rows)
    number = np.empty(n, np.int64)
    number[rows] = np.arange(n)
    waits_for = np.diff(graph.offsets)
    trajectory = graph.play[rows]
    trajectories = len(graph.play_id)
    missing = waits_for[rows].astype(np.int32)
    due = graph.not_before_ms[rows]
    if graph.lanes is not None:
        earliest = np.full(trajectories, np.inf)
        roots = missing == 0
        np.minimum.at(earliest, trajectory[roots], due[roots])
        due = np.maximum(due - earliest[trajectory], 0.0)
    target = number[np.repeat(np.arange(n), waits_for)]
    source = number[graph.source]
    by_source = np.argsort(source, kind="stable")
    edges = np.array([target, graph.on_completion], np.int32)[:, by_source]
    return _arrivals(
        due,
        missing,
        trajectory,
        np.bincount(trajectory, minlength=trajectories),
        offsets_of(np.bincount(source, minlength=n)),
        np.ascontiguousarray(edges),
        graph.delay_ms[by_source],
        lanes=graph.lanes,
        rejection_fails=True,
    )


def _arrivals(
    due: np.ndarray,
    missing: np.ndarray,
    trajectory: np.ndarray,
    sizes: np.ndarray,
    followers: np.ndarray,
    edges: np.ndarray,
    delays: np.ndarray,
    *,
    lanes: int | None,
    rejection_fails: bool,
) -> Arrivals:
    """The source before the start: the first trajectories are in their lanes, their roots stand by
    time."""
    n, trajectories = len(due), len(sizes)
    started = trajectories if lanes is None else min(lanes, trajectories)
    first = np.flatnonzero((missing == 0) & (trajectory < started))
    first = first[np.argsort(due[first], kind="stable")]
    requests = np.zeros((F.ARRIVAL_ROWS, n), np.int32)
    requests[F.MISSING] = missing
    requests[F.TRAJECTORY] = trajectory
    requests[F.FIRST, : len(first)] = first
    requests[F.MEMBER] = np.argsort(trajectory, kind="stable")
    state = np.zeros(F.ARRIVALS_STATE, np.int64)
    state[F.OWN_TIME] = len(first)
    state[F.NEXT_TRAJECTORY] = started
    state[F.REJECTION_FAILS] = rejection_fails
    by_trajectory = np.zeros((F.TRAJECTORY_ROWS, trajectories), np.int32)
    by_trajectory[F.LEFT] = sizes
    return Arrivals(
        state=state,
        due=due,
        requests=requests,
        followers=followers,
        edges=edges,
        delays=np.ascontiguousarray(delays, np.float64),
        trajectories=by_trajectory,
        members=offsets_of(sizes),
    )
