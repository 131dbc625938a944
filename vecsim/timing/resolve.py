"""From the timing model of a role to what prices its passes, and to its KV blocks."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from vecsim.config.defaults import AUTO
from vecsim.config.roles import Role
from vecsim.config.schema import FixedTiming, PolynomialTiming, RooflineTiming

if TYPE_CHECKING:
    from vecsim.timing.machine.kv_capacity import KvCapacity

_making = threading.RLock()


class TimingWarning(UserWarning):
    """Something about a timing model that makes its prices less certain."""


@dataclass(frozen=True)
class Priced:
    """A role with what its timing model says.

    Attributes:
        role: the role, its `num_gpu_blocks` a number.
        timing: what prices its passes; None = the built-in models.
        capacity: the estimate its blocks come from; None = they were given.
    """

    role: Role
    timing: Any
    capacity: KvCapacity | None


def price_role(role: Role, given: Any = None) -> Priced:
    """Make the timing model of a role, and estimate its blocks where they are "auto".

    Args:
        role: a checked role.
        given: a timing model that replaces the descriptor's.

    Raises:
        InputError: a model, GPU, file or function that cannot be used, or nothing to go by.
    """
    where = f"{role.path}.rank.timing_model"
    model = role.rank.timing_model
    role = _with_transfer_bytes(where, model, role)
    timing = given
    blocks_are_given = role.rank.num_gpu_blocks != AUTO
    if blocks_are_given and (
        given is not None or isinstance(model, PolynomialTiming | FixedTiming)
    ):
        return Priced(role, given, None)
    # Who needs none of it does not wait for its import.
    from vecsim.timing.providers import capacity_of, timing_of

    if timing is None:
        with _making:  # threads of a sweep ask for the same table at once
            timing = timing_of(where, model, role)
    if blocks_are_given:
        return Priced(role, timing, None)
    capacity = capacity_of(where, model, role, timing)
    rank = msgspec.structs.replace(role.rank, num_gpu_blocks=capacity.num_gpu_blocks)
    return Priced(replace(role, rank=rank), timing, capacity)


def _with_transfer_bytes(where: str, model: Any, role: Role) -> Role:
    """The role with the bytes a token that its model says, where transfers have a bandwidth and no
    bytes."""
    rank = role.rank
    if not rank.kv_transfer_bandwidth or rank.kv_transfer_bytes_per_token is not None:
        return role
    if role.stage != "prefill" or not isinstance(model, RooflineTiming):
        return role
    from vecsim.timing.providers import transfer_bytes

    size = transfer_bytes(where, model, role)
    return replace(role, rank=msgspec.structs.replace(rank, kv_transfer_bytes_per_token=size))


def note_free_transfers(roles: tuple[Role, ...], topology: Any) -> None:
    """Warn where prefill/decode transfers take no time although their bytes are known."""
    role = roles[0]
    model = role.rank.timing_model
    if role.stage != "prefill" or not isinstance(model, RooflineTiming):
        return
    if role.rank.kv_transfer_bandwidth or topology.handoff_latency_ms:
        return
    from vecsim.timing.providers import free_transfer

    field = f"{role.path}.rank.kv_transfer_bandwidth"
    said = free_transfer(f"{role.path}.rank.timing_model", model, role)
    message = f"prefill/decode transfers are free: {field} (GB/s) is not set; {said}"
    warnings.warn(message, TimingWarning, stacklevel=3)
