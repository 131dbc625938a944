"""The handoff conformance fixture: one request through a prefill and a decode worker, on record.

What is recorded is normalised, so that every backend is held against the same rules (reference:
runtimes, section 11).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import polars as pl

from vecsim.config.schema import Backend, EngineDescriptor, ReplayRequest
from vecsim.errors import ConformanceError
from vecsim.kernels.state import fleet as F
from vecsim.run.kv_events import stored_hashes

if TYPE_CHECKING:
    from vecsim.results.result import Result
    from vecsim.run.outcome import HandoffSteps

Order = Literal["SourceFirst", "DestinationFirst"]
Step = Literal[
    "SourceHeld",
    "DestinationAccepted",
    "DestinationReserved",
    "DestinationActivated",
    "SourceReleased",
    "Completed",
]

_STEPS: dict[int, Step] = {
    int(F.STEP_HELD): "SourceHeld",
    int(F.STEP_ACCEPTED): "DestinationAccepted",
    int(F.STEP_RESERVED): "DestinationReserved",
    int(F.STEP_ACTIVATED): "DestinationActivated",
    int(F.STEP_RELEASED): "SourceReleased",
    int(F.STEP_COMPLETED): "Completed",
}
_TAIL: tuple[Step, ...] = ("DestinationActivated", "SourceReleased", "Completed")
_LIFECYCLES: dict[Order, tuple[Step, ...]] = {
    "SourceFirst": ("SourceHeld", "DestinationAccepted", "DestinationReserved", *_TAIL),
    "DestinationFirst": ("DestinationAccepted", "DestinationReserved", "SourceHeld", *_TAIL),
}
_ORDERS: dict[Backend, Order] = {
    "vllm": "SourceFirst",
    "trtllm": "SourceFirst",
    "sglang": "DestinationFirst",
}


class DestinationStored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that the decode rank announced as stored, in numbers.

    Attributes:
        before_activation: by the command that reserves.
        on_activation: by the command that activates: the activation set.
        repeated_activation_hashes_after_activation: at ends of decode passes, of blocks whose
            tokens hash is in the activation set; each time counts.
    """

    before_activation: int
    on_activation: int
    repeated_activation_hashes_after_activation: int


class HandoffConformance(msgspec.Struct, frozen=True, kw_only=True):
    """The normalised record of one handoff.

    Attributes:
        engine_type: backend of both pools.
        order: which side was asked first.
        lifecycle: steps in the order in which they happened.
        source_output_tokens: tokens that came out of the prefill pool.
        destination_output_tokens: output tokens of the run.
        completed_requests: requests that completed.
        destination_stored: what the decode rank announced, and when.
        source_drained, destination_drained: the pool has no request and no held block left.
        driver_drained: no action is left, no transfer, and no request in flight.
    """

    engine_type: Backend
    order: Order
    lifecycle: tuple[Step, ...]
    source_output_tokens: int
    destination_output_tokens: int
    completed_requests: int
    destination_stored: DestinationStored
    source_drained: bool
    destination_drained: bool
    driver_drained: bool


def fixture(engine: EngineDescriptor, request: ReplayRequest | dict[str, Any]) -> dict[str, Any]:
    """The spec of the fixture: one worker in each pool, transfers in no time."""
    pool = {"initial_workers": 1}
    return {
        "topology": {"kind": "disaggregated", "prefill": pool, "decode": pool},
        "engine": msgspec.to_builtins(engine),
        "requests": [msgspec.to_builtins(request)],
    }


def record_of(result: Result) -> HandoffConformance:
    """The record of a run of the fixture with `observe="kv_events"`."""
    handoff = result.outcome.handoff.steps
    source_drained, destination_drained, driver_drained = handoff.drained
    lifecycle = tuple(_STEPS[kind] for kind in handoff.kind.tolist())
    return HandoffConformance(
        engine_type=result.roles[1].backend,
        order=_order(lifecycle),
        lifecycle=lifecycle,
        source_output_tokens=_source_output_tokens(handoff),
        destination_output_tokens=result.report["total_output_tokens"],
        completed_requests=result.report["completed_requests"],
        destination_stored=_destination_stored(result.kv_events),
        source_drained=source_drained,
        destination_drained=destination_drained,
        driver_drained=driver_drained,
    )


def _order(lifecycle: tuple[Step, ...]) -> Order:
    """Which side comes first in a lifecycle."""
    sides = [step for step in lifecycle if step in ("SourceHeld", "DestinationAccepted")]
    return "DestinationFirst" if sides[:1] == ["DestinationAccepted"] else "SourceFirst"


def _source_output_tokens(handoff: HandoffSteps) -> int:
    return int(handoff.source_output.sum())


def _destination_stored(kv_events: pl.DataFrame) -> DestinationStored:
    decode = kv_events.filter(pl.col("pool") == "decode")

    def stored(occasion: str) -> list[int]:
        return stored_hashes(decode.filter(pl.col("occasion") == occasion)).tolist()

    activation = Counter(stored("activate"))
    return DestinationStored(
        before_activation=len(stored("reserve")),
        on_activation=activation.total(),
        repeated_activation_hashes_after_activation=sum(
            tokens_hash in activation for tokens_hash in stored("pass_end")
        ),
    )


def check(record: HandoffConformance) -> None:
    """Hold a record against the rules. Raises ConformanceError naming the group that is broken:
    order, lifecycle, counts, KV visibility or drain."""
    order = _ORDERS[record.engine_type]
    _require("order", "order", record.order, order)
    _require("lifecycle", "lifecycle", record.lifecycle, _LIFECYCLES[order])
    _require("counts", "source_output_tokens", record.source_output_tokens, 1)
    _require("counts", "destination_output_tokens", record.destination_output_tokens, 2)
    _require("counts", "completed_requests", record.completed_requests, 1)
    stored = record.destination_stored
    where = "destination_stored"
    _require("KV visibility", f"{where}.before_activation", stored.before_activation, 0)
    if stored.on_activation <= 0:
        where = f"{where}.on_activation"
        raise ConformanceError("KV visibility", where, stored.on_activation, "more than 0")
    repeated = "repeated_activation_hashes_after_activation"
    _require("KV visibility", f"{where}.{repeated}", getattr(stored, repeated), 0)
    for name in ("source_drained", "destination_drained", "driver_drained"):
        _require("drain", name, getattr(record, name), True)


def _require(group: str, where: str, value: object, expected: object) -> None:
    if value != expected:
        raise ConformanceError(group, where, value, expected)
