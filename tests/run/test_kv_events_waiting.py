"""KV events of requests that wait for others: blocks of growing prompts have their names."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import polars as pl
import pytest
import xxhash

import vecsim
from tests.fuzz.traffic import BACKENDS, FILE, Draw
from tests.models import slow_events
from tests.models.slow_model import Endless
from tests.property.test_disaggregated_events import check_events, check_steps
from tests.property.test_kv_events import chained, check_rank
from tests.support.signatures import assert_one_a_combination
from tests.support.trace_text import write
from vecsim.errors import InputError, SimulationError
from vecsim.kernels.compile.jit import DISABLED
from vecsim.run.replay import replay


def fleet(backend="vllm", workers=1, **rank):
    timing = {"type": "fixed", "prefill_ms": 100, "decode_ms": 10}
    return {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": workers}},
        "engine": {"rank": {"backend": backend, "block_size": 4, "timing_model": timing, **rank}},
        "requests": [],
    }


def turns(folder, *beside: str) -> vecsim.Workload:
    """Prompts of 6, 5 and 3 new tokens, outputs of 4, 3 and 2 given ones; `beside` are more
    rows."""
    rows = [
        '{"session_id": "s", "request_id": "a", "input_length": 6, "output_length": 4,'
        ' "hash_ids": [7, 8], "output_token_ids": [100, 101, 102, 103], "timestamp": 0}',
        '{"session_id": "s", "request_id": "b", "input_length": 5, "output_length": 3,'
        ' "hash_ids": [9, 7], "output_token_ids": [104, 105, 106], "delay": 5}',
        '{"session_id": "s", "request_id": "c", "input_length": 3, "output_length": 2,'
        ' "hash_ids": [10], "output_token_ids": [107, 108], "delay": 5}',
        *beside,
    ]
    path = write(folder, "\n".join(rows))
    return vecsim.read_trace(path, format="mooncake-delta", block_size=4)


SAID = [0, 0, 0, 0, 1, 1, 100, 101, 102, 103]
SAID += [2, 2, 2, 2, 0, 104, 105, 106]
SAID += [3, 3, 3, 107, 108]
"""The conversation, turn by turn; hash ids are numbered as they are first met."""


def names(tokens: list[int]) -> list[tuple[int | None, int, int]]:
    """(parent_hash, block_hash, tokens_hash) of the full blocks."""
    found, parent = [], None
    for k in range(len(tokens) // 4):
        block = np.array(tokens[4 * k : 4 * k + 4], np.uint32)
        own = xxhash.xxh3_64_intdigest(block.tobytes(), 1337)
        found.append((parent, chained(parent, own), own))
        parent = found[-1][1]
    return found


COLUMNS = ("parent_hash", "block_hash", "tokens_hash")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_conversation_is_stored_block_by_block(backend, tmp_path) -> None:
    """The last token said has not been computed, so that its block comes with the next turn."""
    result = replay(fleet(backend), workload=turns(tmp_path), observe="kv_events")
    assert result.requests["input_length"].to_list() == [6, 15, 21]
    assert result.requests["reused_input_tokens"].to_list() == [0, 8, 16]
    events = result.kv_events
    assert set(events["kind"]) == {"stored"}
    assert events.select(COLUMNS).rows() == names(SAID)[:5]
    ends = result.requests["terminal_time_ms"].to_list()
    assert events["observed_at_ms"].to_list()[-1] <= ends[2]
    assert (events["observed_at_ms"] <= ends[0]).sum() == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_worker_names_the_whole_conversation(backend, tmp_path) -> None:
    """Turns go to the workers in turn: each computes what the others have said."""
    result = replay(fleet(backend, workers=3), workload=turns(tmp_path), observe="kv_events")
    assert result.requests["decode_worker_id"].to_list() == [0, 1, 2]
    whole = names(SAID)
    for worker, blocks in enumerate((2, 4, 5)):
        own = result.kv_events.filter(worker=worker)
        assert own.select(COLUMNS).rows() == whole[:blocks]


@pytest.mark.filterwarnings("ignore")
def test_looking_changes_nothing_and_events_obey_their_laws(tmp_path, monkeypatch) -> None:
    """Random traffic on several workers and ranks."""
    monkeypatch.chdir(tmp_path)
    backends, kinds = Counter(), Counter()
    waited = 0
    for seed in range(910_000, 910_250):
        draw = Draw(seed)
        payload, text = draw.payload()
        (tmp_path / FILE).write_text(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                plain = replay(payload)
            except (InputError, SimulationError):
                continue
            seen = replay(payload, observe="kv_events")
        assert seen.requests.equals(plain.requests)
        assert seen.admissions.equals(plain.admissions)
        assert seen.report == plain.report
        for _, events in seen.kv_events.group_by("worker", "rank", maintain_order=True):
            check_rank(events)
        workload = plain.workload
        waits = workload.sessions is not None or workload.dependencies is not None
        waited += waits
        if waits:
            backends[str(plain.roles[0].backend)] += seen.kv_events.height
            kinds.update(seen.kv_events["kind"].cast(pl.String).to_list())
    assert waited >= 100
    assert set(backends) == set(BACKENDS)
    assert min(backends.values()) > 300
    assert kinds["removed"] > 300


# --- prefill/decode fleets ------------------------------------------------------------------------


def pools(backend="vllm", **rank):
    pool = {"initial_workers": 1}
    topology = {"kind": "disaggregated", "prefill": pool, "decode": pool}
    return {**fleet(backend, **rank), "topology": {**topology, "handoff_latency_ms": 5}}


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_pools_store_a_conversation(backend, tmp_path) -> None:
    """The prefill pool stores prompts, which have all that was said before; the decode pool the
    whole of it, when prompts are activated and when blocks are full."""
    result = replay(pools(backend), workload=turns(tmp_path), observe="kv_events")
    assert result.requests["reused_input_tokens"].to_list() == [0, 4, 12]
    columns = ("worker", "kind", *COLUMNS)
    whole = [(0, "stored", *name) for name in names(SAID)]
    for pool in ("prefill", "decode"):
        events = result.kv_events.filter(pool=pool)
        assert events.select(columns).rows() == whole[:5]
    # Blocks 1 and 3 of the decode pool are full when tokens are said.
    activated = result.kv_events.filter(occasion="activate")
    assert activated["block_hash"].to_list() == [names(SAID)[k][1] for k in (0, 2, 4)]


def test_what_was_said_is_seen_with_the_next_prompt(tmp_path) -> None:
    """An SGLang rank does not report the end of a turn while somebody else runs, here a request of
    35 tokens from 105 on. Its passes, of 10 ms each, are what reservations and activations wait
    for: turns that come at 150 and 300 get pages at 155 and 305, and run from 265 and 415 on."""
    row = '{"session_id": "x", "input_length": 3, "output_length": 35, "hash_ids": [11],'
    workload = turns(tmp_path, row + ' "timestamp": 0}')
    result = replay(pools("sglang"), workload=workload, observe="kv_events")
    assert result.requests["terminal_time_ms"].to_list() == [145.0, 295.0, 435.0, 455.0]
    said = [name[1] for name in names(SAID)]
    events = result.kv_events.filter(pl.col("block_hash").is_in(said))
    columns = ("observed_at_ms", "occasion", "block_hash")
    assert events.filter(pool="prefill").select(columns).rows() == [
        (100.0, "pass_end", said[0]),
        (255.0, "pass_end", said[1]),
        (255.0, "pass_end", said[2]),
        (405.0, "pass_end", said[3]),
        (405.0, "pass_end", said[4]),
    ]
    assert events.filter(pool="decode").select(columns).rows() == [
        (105.0, "activate", said[0]),
        (265.0, "pass_end", said[1]),
        (265.0, "activate", said[2]),
        (415.0, "pass_end", said[3]),
        (415.0, "activate", said[4]),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_traffic_of_fleets_equals_the_slow_model(backend, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    compared, met = 0, Counter()
    for seed in range(920_000, 920_300):
        draw = Draw(seed, disagg=True)
        payload, text = draw.payload()
        if payload["spec"]["engine"]["rank"]["backend"] != backend:
            continue
        (tmp_path / FILE).write_text(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                plain = replay(payload)
                expected = slow_events.waiting_events(payload, plain.workload)
            except (InputError, SimulationError, Endless):
                continue
            seen = replay(payload, observe="kv_events")
        assert seen.requests.equals(plain.requests)
        assert seen.admissions.equals(plain.admissions)
        assert seen.report == plain.report
        check_steps(seen, backend == "sglang")
        check_events(seen.kv_events, expected)
        workload = plain.workload
        waits = workload.sessions is not None or workload.dependencies is not None
        if waits:
            compared += 1
            met.update(seen.kv_events["kind"].cast(pl.String).to_list())
            met.update(seen.kv_events["occasion"].cast(pl.String).to_list())
    assert compared >= 30
    assert met["stored"] > 500
    assert min(met["removed"], met["activate"]) > 50


@pytest.mark.skipif(DISABLED, reason="kernels are not compiled")
def test_every_entry_point_has_one_signature(tmp_path) -> None:
    from vecsim.kernels import entries_sglang, entries_vllm

    private = vecsim.synthesize(2, turns=2, input_tokens=9, output_tokens=3)
    for workload in (turns(tmp_path), private, private.lengths_only()):
        for backend in BACKENDS:
            for rank in ({}, {"enable_prefix_caching": False}):
                replay(fleet(backend, **rank), workload=workload, observe="kv_events")
                replay(pools(backend, **rank), workload=workload, observe="kv_events")
    assert_one_a_combination(entries_vllm.run_fleet, entries_sglang.run_fleet)
