"""Laws of KV events, on random specs of every backend: several workers and ranks, either clock."""

import numpy as np
import polars as pl
import pytest
import xxhash

from tests.fuzz import specs
from vecsim.errors import SimulationError
from vecsim.run.replay import replay

SEEDS = 60
KINDS = {
    "vllm": ("vllm independent", ("prefix",), ("closed_loop",)),
    "vllm_coupled": ("vllm coupled", ("prefix", "closed_loop"), ()),
    "vllm_ranks": ("vllm ranks", ("dp", "prefill_schedule_interval"), ()),
    "vllm_planned": ("vllm planned output", ("planned", "small_pool"), ()),
    "trtllm": ("TensorRT-LLM", ("trtllm",), ()),
    "sglang": ("SGLang independent", ("sglang", "small_pool"), ("closed_loop",)),
    "sglang_belady": ("SGLang by forecast", ("sglang", "belady", "small_pool"), ()),
    "sglang_coupled": ("SGLang coupled", ("sglang", "dp", "closed_loop"), ()),
}


def payloads(kind):
    _, features, without = KINDS[kind]
    start = 700_000 + 1_000 * list(KINDS).index(kind)
    for seed in range(start, start + SEEDS):
        yield specs.make(seed, features, ("refused", *without))


def runs(kind):
    """(run without observation, run with it, payload) of every spec that ends."""
    for payload in payloads(kind):
        try:
            plain = replay(payload)
        except SimulationError:
            continue  # the progress guard: a spec without an end
        yield plain, replay(payload, observe="kv_events"), payload


def chained(parent: int | None, tokens_hash: int) -> int:
    if parent is None:
        return tokens_hash
    return xxhash.xxh3_64_intdigest(np.array([parent, tokens_hash], np.uint64).tobytes(), 1337)


def check_rank(events: pl.DataFrame) -> None:
    """The events of one rank: numbered, in order, of what is there or not there yet."""
    ids = events["event_id"].to_numpy()
    assert ids[0] == 0
    assert set(np.diff(ids)) <= {0, 1}
    assert np.all(np.diff(events["observed_at_ms"].to_numpy()) >= 0)
    whole = events.group_by("event_id").agg(
        pl.col("kind").n_unique(), pl.col("observed_at_ms").n_unique()
    )
    assert whole.select(pl.col("kind", "observed_at_ms").max()).rows() == [(1, 1)]
    stored: dict[int, int | None] = {}
    columns = ("event_id", "kind", "parent_hash", "block_hash", "tokens_hash")
    last = None
    for event_id, kind, parent, block, tokens in events.select(columns).iter_rows():
        if kind == "removed":
            assert (parent, tokens) == (None, None)
            del stored[block]
        else:
            assert block not in stored
            assert block == chained(parent, tokens)
            if last is not None and last[0] == event_id:
                assert parent == last[1]
            stored[block] = parent
        last = (event_id, block)


@pytest.mark.parametrize("kind", KINDS, ids=[title for title, _, _ in KINDS.values()])
def test_laws(kind):
    seen = {"stored": 0, "removed": 0}
    for plain, observed, payload in runs(kind):
        # Looking does not change the run.
        assert observed.requests.equals(plain.requests)
        assert observed.admissions.equals(plain.admissions)
        assert observed.report == plain.report
        events = observed.kv_events
        for _, of_rank in events.group_by("worker", "rank", maintain_order=True):
            check_rank(of_rank)
        spec = payload.get("spec", payload)
        workers = spec["topology"]["workers"]["initial_workers"]
        assert events["worker"].is_sorted()
        assert events.filter(pl.col("worker") >= workers).is_empty()
        if not spec["engine"]["rank"].get("enable_prefix_caching", True):
            assert events.is_empty()
        for name in seen:
            seen[name] += events.filter(pl.col("kind") == name).height
    assert seen["stored"] > 300
    assert seen["removed"] > 50


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_any_number_of_threads(kind):
    for payload in list(payloads(kind))[:20]:
        one, three = (replay(payload, observe="kv_events", threads=n).kv_events for n in (1, 3))
        assert one.equals(three)
