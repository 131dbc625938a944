"""The reference's synthetic load: `traffic` with `source_type` synthetic or synthetic-session
(reference: traffic, section 5)."""

from __future__ import annotations

import math

import numpy as np

from vecsim.config.defaults import AUTO
from vecsim.config.roles import Role, resolve
from vecsim.config.schema import AggregatedTopology, ReplaySpec, Traffic
from vecsim.errors import InputError
from vecsim.synthetic.description import Arrivals, Burst, Constant, Poisson
from vecsim.synthetic.draws import arrivals_of
from vecsim.synthetic.generate import assemble
from vecsim.synthetic.rng import Random
from vecsim.workload.workload import Workload

_DEFAULT_SEED = 42
_DEFAULT_TURNS = 4
_GROUP_SEED = 0


def workload_of_synthetic(traffic: Traffic, spec: ReplaySpec) -> Workload:
    """The workload of a checked `traffic`; equal seeds draw what the reference draws.

    Raises:
        InputError: arrivals that are not finite, or a KV pool that holds no request.
    """
    roles = resolve(spec)
    cap = traffic.concurrency
    if traffic.load_type == "kv_capacity_fraction":
        cap = _kv_concurrency(traffic, spec, roles[-1])
    count = traffic.request_count
    if count is None:
        count = max(1, math.floor(traffic.num_request_ratio * _load(traffic, cap) + 0.5))
    turns = 1
    if traffic.source_type == "synthetic-session":
        turns = _DEFAULT_TURNS if traffic.turns_per_session is None else traffic.turns_per_session
    seed = _DEFAULT_SEED if traffic.arrival_seed is None else traffic.arrival_seed
    groups, ratio = traffic.num_prefix_groups or 0, traffic.shared_prefix_ratio or 0.0
    group = np.zeros(count, np.int64)
    if groups > 0 and ratio > 0.0:
        group = Random(_GROUP_SEED).below(groups, count)
    else:
        ratio = 0.0
    return assemble(
        arrivals_of(_arrivals(traffic), Random(seed), count),
        np.full(count * turns, max(1, traffic.isl), np.int64),  # lengths of 0 count as 1
        np.full(count * turns, max(1, traffic.osl), np.int64),
        turns=turns,
        think_time_ms=traffic.inter_turn_delay_ms or 0.0,
        block=roles[0].rank.block_tokens,
        ratio=ratio,
        group=group,
        cached_prefix_tokens=traffic.cached_prefix_tokens or 0,
        session_cap=cap,
        where="traffic",
    )


def _arrivals(traffic: Traffic) -> Arrivals:
    if traffic.load_type == "poisson":
        return Poisson(rate=traffic.request_rate)
    if traffic.load_type == "constant_rate":
        rate = traffic.request_rate
        # An interval becomes a rate first, with the rounding that brings.
        return Constant(rate=1000.0 / traffic.arrival_interval_ms if rate is None else rate)
    return Burst()


def _load(traffic: Traffic, cap: int | None) -> float:
    """What `num_request_ratio` multiplies."""
    if cap is not None:
        return cap
    if traffic.request_rate is not None:
        return traffic.request_rate
    if traffic.arrival_interval_ms is not None:
        return 1000.0 / traffic.arrival_interval_ms
    raise InputError(
        "traffic.num_request_ratio",
        traffic.num_request_ratio,
        "a concurrency or a rate beside it, or request_count",
    )


def _kv_concurrency(traffic: Traffic, spec: ReplaySpec, role: Role) -> int:
    """The cap that fills `kv_load_ratio` of the (decode) pool's KV capacity (section 5.5)."""
    if role.rank.num_gpu_blocks == AUTO:
        from vecsim.timing.resolve import price_role

        role = price_role(role).role
    tokens = role.rank.num_gpu_blocks * role.rank.block_tokens * role.dp_size * _workers(spec)
    capacity = tokens // max(1, traffic.isl + traffic.osl // 2)
    return max(1, math.floor(traffic.kv_load_ratio * capacity))


def _workers(spec: ReplaySpec) -> int:
    topology = spec.topology
    pool = topology.workers if isinstance(topology, AggregatedTopology) else topology.decode
    return pool.initial_workers
