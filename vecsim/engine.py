"""The engine surface under its reference names: configuration, factories, and the replay entry.

Everything here is a thin face of `vecsim.config.schema`, `vecsim.config.roles` and `vecsim.replay`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vecsim.config.defaults import AUTO
from vecsim.config.load import Source
from vecsim.config.roles import Role, resolve_role
from vecsim.config.schema import (
    AggregatedTopology,
    Backend,
    DisaggregatedTopology,
    EngineDescriptor,
    ReplayRequest,
    ReplaySpec,
    RoleDescriptor,
    Stage,
)
from vecsim.config.validate import check_engine
from vecsim.config.validate_rank import check_role

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

    from vecsim.results.handoff_conformance import HandoffConformance
    from vecsim.results.result import Result
    from vecsim.workload.workload import Workload

ReplayRoleConfig = RoleDescriptor
"""What one stage runs; `vecsim.config.schema.RoleDescriptor` under its reference name."""


class ReplayEngineConfig(EngineDescriptor, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine of a replay: `EngineDescriptor` with the questions that are asked of it."""

    def role(self, stage: Stage) -> ReplayRoleConfig:
        """The settings of one stage: its own block, taken whole, or else the shared one."""
        role = resolve_role(self, stage)
        return RoleDescriptor(
            dp_size=role.dp_size,
            tensor_parallel_size=role.tensor_parallel_size,
            prefill_context_parallel_size=role.prefill_context_parallel_size,
            rank=role.rank,
        )

    def validate_topology(self, topology: AggregatedTopology | DisaggregatedTopology) -> None:
        """Check the engine against a topology. Raises InputError naming the field."""
        check_engine(ReplaySpec(topology=topology, engine=self, requests=[]))


@dataclass(frozen=True)
class ReplayWorker:
    """One logical worker of a role.

    Attributes:
        worker_id: number of the worker in its pool, from 0.
        role: what it runs.
        timing: the timing model that prices its passes.
        scheduler_ids: identity of each of its attention-DP ranks in the pool.
    """

    worker_id: int
    role: Role
    timing: Any
    scheduler_ids: tuple[int, ...]


@dataclass(frozen=True)
class ReplayRoleFactory:
    """Makes the workers of one role.

    Attributes:
        role: the resolved and checked role.
        timing: the timing model of its workers.
    """

    role: Role
    timing: Any

    @property
    def dp_size(self) -> int:
        """Attention-DP ranks per worker."""
        return self.role.dp_size

    @property
    def gpus_per_worker(self) -> int:
        """GPUs that one worker stands for."""
        return self.role.gpus_per_worker

    @property
    def backend(self) -> Backend:
        """Scheduler semantics."""
        return self.role.backend

    @property
    def total_blocks(self) -> int:
        """KV blocks of one rank."""
        return self.role.total_blocks

    def build(self, worker_id: int) -> ReplayWorker:
        """The worker of this number (>= 0), with the identities of its ranks."""
        first = worker_id * self.dp_size
        ids = tuple(range(first, first + self.dp_size))
        return ReplayWorker(worker_id, self.role, self.timing, ids)


@dataclass(frozen=True)
class ReplayEngineFactory:
    """Timing models that are given in Python rather than in the descriptor.

    Attributes:
        timing: for every role that has no model of its own here; None = the descriptor's.
        prefill_timing, decode_timing: for that role only; they win over `timing`.
    """

    timing: Any = None
    prefill_timing: Any = None
    decode_timing: Any = None

    def role_factory(
        self, config: EngineDescriptor, stage: Stage, emit_kv_events: bool = False
    ) -> ReplayRoleFactory:
        """The factory of one stage. Raises InputError where the role is wrong."""
        role = resolve_role(config, stage, emit_kv_events)
        check_role(role)
        if role.rank.num_gpu_blocks == AUTO:
            from vecsim.timing.resolve import price_role

            role = price_role(role).role
        own = {"prefill": self.prefill_timing, "decode": self.decode_timing}.get(stage)
        for timing in (own, self.timing):
            if timing is not None:
                return ReplayRoleFactory(role, timing)
        return ReplayRoleFactory(role, role.rank.timing_model)


def run_engine_replay(
    source: Source,
    factory: ReplayEngineFactory | None = None,
    *,
    workload: Workload | None = None,
    observe: str | None = None,
) -> Result:
    """Run one replay; `factory` carries timing models, everything else is in the spec.

    The same as `vecsim.replay`, `observe` included. Raises InputError where the spec is wrong.
    """
    from vecsim.run.replay import replay

    factory = factory or ReplayEngineFactory()
    return replay(
        source,
        workload=workload,
        timing=factory.timing,
        prefill_timing=factory.prefill_timing,
        decode_timing=factory.decode_timing,
        observe=observe,
    )


def run_engine_handoff_conformance(
    config: EngineDescriptor,
    request: ReplayRequest | dict[str, Any],
    factory: ReplayEngineFactory | None = None,
) -> HandoffConformance:
    """Run one request through one prefill and one decode worker, and hold the handoff against the
    rules (reference: runtimes, section 11).

    Args:
        config: the engine of both workers; its prefix cache has to be on.
        request: two output tokens, and a prompt of one KV block at least.
        factory: timing models that replace the descriptor's.

    Returns:
        The normalised record, which keeps to all rules.

    Raises:
        ConformanceError: it does not; the message names the group of rules.
        InputError, NotSupportedYetError: as of `run_engine_replay`.
    """
    from vecsim.results.handoff_conformance import check, fixture, record_of

    result = run_engine_replay(fixture(config, request), factory, observe="kv_events")
    record = record_of(result)
    check(record)
    return record


def stored_hashes(kv_events: pl.DataFrame) -> np.ndarray:
    """The tokens hashes of all stored blocks of `Result.kv_events` (see `vecsim.stored_hashes`)."""
    from vecsim.run import kv_events as observed

    return observed.stored_hashes(kv_events)
