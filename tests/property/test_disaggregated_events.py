"""KV events of prefill/decode pools: laws, and those of the slow model, on random specs."""

import numpy as np
import polars as pl
import pytest

from tests.fuzz import specs
from tests.models import slow_events
from tests.models.slow_model import Endless
from tests.property.test_kv_events import check_rank
from vecsim.errors import SimulationError
from vecsim.kernels.state import fleet as F
from vecsim.results.result import Result
from vecsim.run.kv_events import KIND, OCCASION
from vecsim.run.replay import replay

SEEDS = 30
KINDS = {
    "vllm": ("prefix",),
    "vllm_small": ("prefix", "small_pool", "closed_loop"),
    "vllm_ranks": ("dp", "workers", "prefix"),
    "vllm_planned": ("planned", "small_pool"),
    "vllm_empty": ("empty_prompt", "small_pool", "prefix"),
    "vllm_cut": ("time_limit", "prefix"),
    "trtllm": ("trtllm", "prefix", "small_pool"),
    "trtllm_ranks": ("trtllm", "dp", "workers", "prefix"),
    "sglang": ("sglang", "prefix"),
    "sglang_small": ("sglang", "prefix", "small_pool", "closed_loop"),
    "sglang_ranks": ("sglang", "dp", "workers", "prefix"),
    "sglang_planned": ("sglang", "planned", "small_pool"),
    "sglang_empty": ("sglang", "empty_prompt", "small_pool", "prefix"),
    "sglang_cut": ("sglang", "time_limit", "prefix"),
}
FIRST_SEED = 760_000
INSTANTS = {
    F.STEP_HELD: "source_held_ms",
    F.STEP_RESERVED: "destination_reserved_ms",
    F.STEP_ACTIVATED: "destination_activated_ms",
    F.STEP_RELEASED: "source_released_ms",
}


def payloads(kind):
    start = FIRST_SEED + 1_000 * list(KINDS).index(kind)
    for seed in range(start, start + SEEDS):
        yield specs.make(seed, ("disagg", *KINDS[kind]), ("refused",))


def runs(kind):
    """(payload, run without observation, run with it) of every spec that ends."""
    for payload in payloads(kind):
        try:
            plain = replay(payload)
        except SimulationError:
            continue  # the progress guard: a spec without an end
        yield payload, plain, replay(payload, observe="kv_events")


def events_of(frame: pl.DataFrame) -> list[tuple]:
    """The events of one rank, in the form of `slow_events.Event`."""
    first = pl.col("observed_at_ms", "kind", "parent_hash").first()
    events = frame.group_by("event_id", maintain_order=True).agg(first, pl.col("block_hash"))
    return events.rows()


def check_names(fast: list[tuple], slow: list[tuple], names: dict[int, int]) -> None:
    """Equal events, but for what blocks are called: `names` has the hash of each slow number."""
    assert [event[:3] for event in fast] == [event[:3] for event in slow]
    for (*_, parent, blocks), (*_, slow_parent, slow_blocks) in zip(fast, slow, strict=True):
        for block_hash, number in zip(blocks, slow_blocks, strict=True):
            assert names.setdefault(number, block_hash) == block_hash
        assert parent == (None if slow_parent is None else names[slow_parent])


def check_events(frame: pl.DataFrame, expected: list[tuple]) -> None:
    """The events of all ranks, and nothing else."""
    names: dict[str, dict[int, int]] = {"prefill": {}, "decode": {}}
    for pool, worker, rank, slow in expected:
        own = frame.filter(pool=pool, worker=worker, rank=rank)
        check_names(events_of(own), slow, names[pool])
        if len(own):
            check_rank(own)
    for called in names.values():
        assert len(set(called.values())) == len(called)
    assert frame.height == sum(len(e[4]) for *_, slow in expected for e in slow)


IN_ORDER = (
    F.STEP_HELD,
    F.STEP_ACCEPTED,
    F.STEP_RESERVED,
    F.STEP_ACTIVATED,
    F.STEP_COMPLETED,
)
DESTINATION_FIRST = (*IN_ORDER[1:3], IN_ORDER[0], *IN_ORDER[3:])


def check_steps(observed: Result, sglang: bool) -> None:
    """Steps of a handoff stand in the order of the backend, at the instants of the requests."""
    order = DESTINATION_FIRST if sglang else IN_ORDER
    log = observed.outcome.handoff.steps
    assert np.all(np.diff(log.at_ms) >= 0)
    for kind, column in INSTANTS.items():
        expected = observed.requests[column].to_numpy()
        at_ms = np.full(len(expected), np.nan)
        chosen = log.kind == kind
        at_ms[log.request[chosen]] = log.at_ms[chosen]
        assert np.array_equal(at_ms, expected, equal_nan=True)
    for row in set(log.request.tolist()):
        own = log.kind[log.request == row].tolist()
        assert len(set(own)) == len(own)
        # A source may be released after its request has ended.
        in_order = [k for k in own if k != F.STEP_RELEASED]
        assert in_order == [k for k in order if k in own]
    if observed.payload.spec.max_sim_time_ms is None:
        all_came = observed.requests.filter(terminal_status="not_arrived").is_empty()
        assert log.drained == (True, True, all_came)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_those_of_the_slow_model(kind):
    met = dict.fromkeys((*OCCASION.categories, *KIND.categories), 0)
    for payload, plain, observed in runs(kind):
        # Looking does not change the run.
        assert observed.requests.equals(plain.requests)
        assert observed.admissions.equals(plain.admissions)
        assert observed.report == plain.report
        check_steps(observed, kind.startswith("sglang"))
        frame = observed.kv_events
        assert frame.filter(kind="stored", occasion="reserve").is_empty()
        for name in met:
            column = "kind" if name in KIND.categories else "occasion"
            met[name] += frame.filter(pl.col(column) == name).height
        try:
            expected = slow_events.events(payload)
        except Endless:
            continue
        check_events(frame, expected)
    assert met["pass_end"] > 60
    assert met["activate"] > 40
    if "time_limit" not in KINDS[kind]:
        assert met["removed"] > 20
    if "small_pool" in KINDS[kind]:
        assert met["reserve"] > 3
