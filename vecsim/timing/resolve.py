"""From the timing model of a role to what prices its passes, and to its KV blocks."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from vecsim.config.defaults import AUTO
from vecsim.config.roles import Role
from vecsim.config.schema import FixedTiming, PolynomialTiming

if TYPE_CHECKING:
    from vecsim.timing.kv_capacity import KvCapacity

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
