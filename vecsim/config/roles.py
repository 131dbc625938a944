"""Roles: the shared and per-stage engine settings resolved to what each stage really runs."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from vecsim.config.schema import (
    AggregatedTopology,
    Backend,
    DisaggregatedTopology,
    EngineDescriptor,
    RankConfig,
    ReplaySpec,
    RoleDescriptor,
    Stage,
)


@dataclass(frozen=True)
class Role:
    """A worker of one stage.

    Attributes:
        stage: "aggregated", "prefill" or "decode".
        dp_size: attention-DP ranks per worker.
        tensor_parallel_size, prefill_context_parallel_size: GPUs per rank are their product.
        rank: settings of every rank, with `worker_type` and `emit_kv_events` overwritten.
        path: field path of the block the role was taken from (`engine` or `engine.prefill`).
    """

    stage: Stage
    dp_size: int
    tensor_parallel_size: int
    prefill_context_parallel_size: int
    rank: RankConfig
    path: str

    @property
    def gpus_per_worker(self) -> int:
        """GPUs that one worker stands for."""
        return self.dp_size * self.tensor_parallel_size * self.prefill_context_parallel_size

    @property
    def total_blocks(self) -> int:
        """KV blocks of one rank."""
        return self.rank.num_gpu_blocks

    @property
    def backend(self) -> Backend:
        """Scheduler semantics of the role."""
        return self.rank.backend


def stages(topology: AggregatedTopology | DisaggregatedTopology) -> tuple[Stage, ...]:
    """The stages that a topology runs, prefill before decode."""
    if isinstance(topology, AggregatedTopology):
        return ("aggregated",)
    return ("prefill", "decode")


def resolve_role(engine: EngineDescriptor, stage: Stage, emit_kv_events: bool = False) -> Role:
    """The role of one stage: its own block if there is one, taken whole, else the shared one."""
    own = None if stage == "aggregated" else getattr(engine, stage)
    block: RoleDescriptor = engine if own is None else own
    return Role(
        stage=stage,
        dp_size=block.dp_size,
        tensor_parallel_size=block.tensor_parallel_size,
        prefill_context_parallel_size=block.prefill_context_parallel_size,
        rank=msgspec.structs.replace(block.rank, worker_type=stage, emit_kv_events=emit_kv_events),
        path="engine" if own is None else f"engine.{stage}",
    )


def resolve(spec: ReplaySpec, emit_kv_events: bool = False) -> tuple[Role, ...]:
    """The roles of a spec, one for each stage of its topology, prefill before decode."""
    return tuple(
        resolve_role(spec.engine, stage, emit_kv_events) for stage in stages(spec.topology)
    )
