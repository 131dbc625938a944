"""What a synthetic workload is made of, as typed, immutable structs. Rates are per second."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from vecsim.config.checks import (
    finite_positive,
    non_negative,
    optional_positive,
    positive,
    refuse,
)
from vecsim.config.schema import UInt
from vecsim.workload.columns import MAX_INT32


class _Closed(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A description in which an unknown key is an error."""


# --- arrivals -------------------------------------------------------------------------------------


class Burst(_Closed, tag_field="kind", tag="burst"):
    """All at 0."""


class Constant(_Closed, tag_field="kind", tag="constant"):
    """Equal gaps of 1000 / rate."""

    rate: float


class Poisson(_Closed, tag_field="kind", tag="poisson"):
    """Exponential gaps with mean 1000 / rate."""

    rate: float


class Gamma(_Closed, tag_field="kind", tag="gamma"):
    """Gamma gaps with mean 1000 / rate; their coefficient of variation is 1 / sqrt(shape)."""

    rate: float
    shape: float


class Segment(_Closed):
    """A decode run of time with one rate; 0 is a pause."""

    duration_s: float
    rate: float


class Piecewise(_Closed, tag_field="kind", tag="piecewise"):
    """A Poisson process whose rate follows the segments, over and over."""

    segments: list[Segment]


class Diurnal(_Closed, tag_field="kind", tag="diurnal"):
    """A Poisson process of rate * (1 + amplitude * cos(2 pi (t - peak_s) / period_s))."""

    rate: float
    amplitude: float = 0.5
    period_s: float = 86400.0
    peak_s: float = 43200.0


Arrivals = Burst | Constant | Poisson | Gamma | Piecewise | Diurnal


# --- lengths --------------------------------------------------------------------------------------


class Fixed(_Closed, tag_field="kind", tag="fixed"):
    """Always `tokens`."""

    tokens: UInt


class Uniform(_Closed, tag_field="kind", tag="uniform"):
    """Whole numbers from `low` to `high`, both included."""

    low: UInt
    high: UInt


class Lognormal(_Closed, tag_field="kind", tag="lognormal"):
    """exp of a normal distribution with median `median` and deviation `sigma` of the logarithm,
    rounded and cut to [low, high]."""

    median: float
    sigma: float
    low: UInt = 1
    high: UInt = MAX_INT32


Length = Fixed | Uniform | Lognormal


class Resample(_Closed):
    """Pairs of prompt and output length drawn, with replacement, from the rows of a trace."""

    path: str
    format: str = "auto"


class SharedPrefix(_Closed):
    """The first round(ratio * blocks) content blocks of a prompt are those of its group."""

    ratio: float
    groups: UInt = 1


class Description(_Closed):
    """A synthetic workload.

    `requests` counts sessions where `turns` is above 1. Lengths are `input_tokens` and
    `output_tokens`, or `resample`. `concurrency` makes it a closed loop of so many sessions.
    Later turns bring `input_tokens` new tokens each, `think_time_ms` after the turn before.
    `cached_prefix_tokens` are common to all prompts. `block_tokens` is the grain of shared content.
    """

    requests: UInt
    arrivals: Arrivals = Burst()
    input_tokens: Length | None = None
    output_tokens: Length | None = None
    resample: Resample | None = None
    concurrency: UInt | None = None
    turns: UInt = 1
    think_time_ms: float = 0.0
    shared_prefix: SharedPrefix | None = None
    cached_prefix_tokens: UInt = 0
    block_tokens: UInt = 64
    seed: UInt = 42


def parse(tree: Any, where: str) -> Description:
    """A description from a mapping, checked.

    A whole number stands for a fixed length, "burst" for that kind of arrivals.

    Raises:
        InputError: a missing, unknown or impossible field; names it, starting with `where`.
    """
    from msgspec import convert, inspect

    from vecsim.config.diagnostics import Inspection

    if not isinstance(tree, dict):
        refuse(where, tree, "a description of a workload: a mapping")
    tree = dict(tree)
    for name in ("input_tokens", "output_tokens"):
        if isinstance(tree.get(name), int) and not isinstance(tree[name], bool):
            tree[name] = {"kind": "fixed", "tokens": tree[name]}
    if isinstance(tree.get("arrivals"), str):
        tree["arrivals"] = {"kind": tree["arrivals"]}
    inspection = Inspection(into_requests=True)
    visited = inspection.visit(tree, inspect.type_info(Description), where)
    if inspection.problems:
        raise inspection.problems[0]
    description = convert(visited, Description)
    check(description, where)
    return description


def check(description: Description, where: str) -> None:
    """Raise InputError if values make no sense together."""
    positive(f"{where}.requests", description.requests)
    positive(f"{where}.turns", description.turns)
    positive(f"{where}.block_tokens", description.block_tokens)
    optional_positive(f"{where}.concurrency", description.concurrency)
    non_negative(f"{where}.think_time_ms", description.think_time_ms)
    _check_arrivals(description.arrivals, f"{where}.arrivals")
    for name in ("input_tokens", "output_tokens"):
        given = getattr(description, name)
        if description.resample is None:
            _check_length(given, f"{where}.{name}")
        elif given is not None:
            refuse(f"{where}.{name}", given, "nothing beside resample")
    shared = description.shared_prefix
    if shared is not None:
        if not 0.0 <= shared.ratio <= 1.0:
            refuse(f"{where}.shared_prefix.ratio", shared.ratio, "a number from 0 to 1")
        if not 1 <= shared.groups < 2**32:
            refuse(f"{where}.shared_prefix.groups", shared.groups, "a whole number from 1")


def _check_arrivals(arrivals: Arrivals, where: str) -> None:
    if isinstance(arrivals, Piecewise):
        for k, segment in enumerate(arrivals.segments):
            finite_positive(f"{where}.segments[{k}].duration_s", segment.duration_s)
            non_negative(f"{where}.segments[{k}].rate", segment.rate)
        if not any(segment.rate for segment in arrivals.segments):
            refuse(f"{where}.segments", arrivals.segments, "a segment with a rate above 0")
    elif not isinstance(arrivals, Burst):
        finite_positive(f"{where}.rate", arrivals.rate)
    if isinstance(arrivals, Gamma):
        finite_positive(f"{where}.shape", arrivals.shape)
    if isinstance(arrivals, Diurnal):
        finite_positive(f"{where}.period_s", arrivals.period_s)
        non_negative(f"{where}.peak_s", arrivals.peak_s)
        if not 0.0 <= arrivals.amplitude <= 1.0:
            refuse(f"{where}.amplitude", arrivals.amplitude, "a number from 0 to 1")


def _check_length(length: Length | None, where: str) -> None:
    if length is None:
        refuse(where, None, "a length in tokens, or resample")
    if isinstance(length, Fixed):
        if length.tokens > MAX_INT32:
            refuse(f"{where}.tokens", length.tokens, f"at most {MAX_INT32}")
        return
    if isinstance(length, Lognormal):
        finite_positive(f"{where}.median", length.median)
        non_negative(f"{where}.sigma", length.sigma)
    if not length.low <= length.high <= MAX_INT32:
        refuse(f"{where}.high", length.high, f"a number from low ({length.low}) to {MAX_INT32}")
