"""KV events as users meet them: frame, files, command line, stored hashes, token values."""

import struct

import numpy as np
import polars as pl
import pytest
import xxhash

import vecsim
from tests.support.signatures import assert_one_a_combination
from vecsim import engine
from vecsim.errors import InputError
from vecsim.kernels import entries_vllm
from vecsim.kernels.cache import event_columns
from vecsim.kernels.compile.jit import DISABLED
from vecsim.run.kv_events import KV_EVENTS_SCHEMA

FIXED = {"type": "fixed", "prefill_ms": 100, "decode_ms": 10}


def spec_of(requests, workers=1, **rank):
    rank = {"block_size": 4, "num_gpu_blocks": 64, "timing_model": FIXED, **rank}
    return {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": workers}},
        "engine": {"rank": rank},
        "requests": requests,
    }


def request(name, at_ms, prompt, output=1, **more):
    row = {"id": name, "arrival_time_ms": at_ms, "output_tokens": output, **more}
    if isinstance(prompt, int):
        return {**row, "input_tokens": prompt}
    return {**row, "input_tokens": len(prompt), "input_token_ids": prompt}


def observed(spec, **options):
    return vecsim.replay(spec, observe="kv_events", **options)


def tokens_hash(tokens) -> int:
    return xxhash.xxh3_64_intdigest(np.array(tokens, np.uint32).tobytes(), 1337)


def block_hashes(tokens, block_size):
    """(block_hash, tokens_hash) of the full blocks of a sequence, as the reference defines them."""
    hashes = []
    for k in range(len(tokens) // block_size):
        own = block = tokens_hash(tokens[k * block_size : (k + 1) * block_size])
        if hashes:
            block = xxhash.xxh3_64_intdigest(struct.pack("<QQ", hashes[-1][0], own), 1337)
        hashes.append((block, own))
    return hashes


def test_the_frame():
    events = observed(spec_of([request("a", 0, list(range(8)), 6)])).kv_events
    assert dict(events.schema) == KV_EVENTS_SCHEMA
    first = events.head(2)
    assert first["tokens_hash"].to_list() == [9143094415614847814, 12124091508212882195]
    assert first["block_hash"].to_list() == [9143094415614847814, 9510318385840434533]
    assert first["parent_hash"].to_list() == [None, 9143094415614847814]
    assert first["observed_at_ms"].to_list() == [100.0, 100.0]
    assert events["event_id"].to_list() == [0, 0, 1]
    # The fourth output token is computed in the pass that ends at 140.
    assert events["observed_at_ms"].to_list() == [100.0, 100.0, 140.0]
    assert events["kind"].to_list() == ["stored"] * 3


def split(requests, latency_ms=0.0, prefill=1, decode=1, **rank):
    spec = spec_of(requests, **rank)
    pools = {"prefill": {"initial_workers": prefill}, "decode": {"initial_workers": decode}}
    latency = {"handoff_latency_ms": latency_ms}
    return {**spec, "topology": {"kind": "disaggregated", **pools, **latency}}


@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
def test_prefill_and_decode_pools(backend):
    """Both prompts are stored in the prefill pool, the shared blocks once in the decode pool."""
    rows = [request("a", 0, list(range(8)), 6), request("b", 7, list(range(10)), 6)]
    frame = observed(split(rows, 5.0, prefill=2, backend=backend)).kv_events
    assert dict(frame.schema) == KV_EVENTS_SCHEMA
    columns = ("pool", "worker", "event_id", "observed_at_ms", "occasion", "kind")
    assert frame.select(columns).rows() == [
        ("prefill", 0, 0, 100.0, "pass_end", "stored"),
        ("prefill", 0, 0, 100.0, "pass_end", "stored"),
        ("prefill", 1, 0, 107.0, "pass_end", "stored"),
        ("prefill", 1, 0, 107.0, "pass_end", "stored"),
        ("decode", 0, 0, 105.0, "activate", "stored"),
        ("decode", 0, 0, 105.0, "activate", "stored"),
        # The second activation brings nothing new; then both complete a block of their own.
        ("decode", 0, 1, 155.0, "pass_end", "stored"),
        ("decode", 0, 2, 155.0, "pass_end", "stored"),
    ]
    prompt = [9143094415614847814, 12124091508212882195]
    assert vecsim.stored_hashes(frame)[:6].tolist() == prompt * 3
    assert frame["parent_hash"][6:].to_list() == [9510318385840434533] * 2
    assert engine.stored_hashes(frame.filter(pool="prefill")).tolist() == prompt * 2


IN_DECODE = ("event_id", "observed_at_ms", "occasion", "kind", "tokens_hash")


def in_decode(spec):
    """What the decode rank announces, `IN_DECODE` of each block, and how the requests ended."""
    result = observed(spec)
    ends = [reason or status for status, reason in result.requests[:, ENDS].rows()]
    return result.kv_events.filter(pool="decode").select(IN_DECODE).rows(), ends


ENDS = ("terminal_status", "terminal_reason")


def test_sglang_pools():
    """As vLLM's, but the pages of both outputs are reported when nothing runs any more."""
    rows = [request("a", 0, list(range(8)), 6), request("b", 7, list(range(10)), 6)]
    frame = observed(split(rows, 5.0, prefill=2, backend="sglang")).kv_events
    columns = ("pool", "worker", "event_id", "observed_at_ms", "occasion", "kind")
    assert frame.select(columns).rows() == [
        *(2 * [("prefill", 0, 0, 100.0, "pass_end", "stored")]),
        *(2 * [("prefill", 1, 0, 107.0, "pass_end", "stored")]),
        *(2 * [("decode", 0, 0, 105.0, "activate", "stored")]),
        ("decode", 0, 1, 175.0, "pass_end", "stored"),
        *(2 * [("decode", 0, 2, 175.0, "pass_end", "stored")]),
    ]
    prompt = [9143094415614847814, 12124091508212882195]
    assert vecsim.stored_hashes(frame)[:6].tolist() == prompt * 3
    parents = frame["parent_hash"][6:].to_list()
    assert parents == [9510318385840434533] * 2 + [frame["block_hash"][7]]


def test_sglang_stores_a_prompt_once():
    """While the prompts wait for a slot, and when they get it: what is stored already is not stored
    again, whether it is in the tree by then or not."""
    x, a = [20, 21, 22, 23], list(range(8))
    b = [*range(8), 9, 9, 9, 9]
    rows = [request("x", 0, x, 3), request("a", 0, a), request("b", 0, b), request("c", 0, a)]
    got, _ = in_decode(split(rows, 150.0, backend="sglang", max_num_seqs=1))
    assert got == [
        (0, 250.0, "activate", "stored", tokens_hash(x)),
        *((1, 350.0, "activate", "stored", own) for _, own in block_hashes(a, 4)),
        (2, 450.0, "activate", "stored", tokens_hash([9] * 4)),
    ]
    spec = split([request("x", 0, x, 40), *rows[1:]], 150.0, backend="sglang", max_num_seqs=1)
    result = observed(spec)
    assert result.requests["destination_activated_ms"].to_list() == [250.0, 350.0, 450.0, 550.0]
    assert result.requests["decode_admit_ms"].to_list() == [250.0, 650.0, 660.0, 670.0]
    frame = result.kv_events.filter(pool="decode")
    assert frame.select(IN_DECODE).rows()[:4] == got
    # What x has generated comes with the first report.
    assert set(frame[4:].select(IN_DECODE[:4]).rows()) == {(3, 650.0, "pass_end", "stored")}
    assert frame[4:].height == 10


def test_a_waiting_prompt_of_sglang_outlives_copies_in_the_tree():
    """At 110 the reservation for c takes the pages that b had, which a still has of its own."""
    prompt = list(range(10))
    rows = [request("b", 0, prompt), request("a", 0, prompt), request("c", 0, list(range(50, 62)))]
    spec = split(rows, backend="sglang")
    spec["engine"]["decode"] = {
        "rank": {**spec["engine"]["rank"], "num_gpu_blocks": 6, "max_num_seqs": 1}
    }
    requests = observed(spec).requests
    assert requests["destination_reserved_ms"].to_list() == [0.0, 0.0, 110.0]
    assert requests["decode_admit_ms"].to_list() == [100.0, 110.0, 210.0]
    assert in_decode(spec)[0] == [
        *((0, 100.0, "activate", "stored", own) for _, own in block_hashes(prompt, 4)),
        *((1, 210.0, "activate", "stored", own) for _, own in block_hashes(range(50, 62), 4)),
    ]


def test_sglang_does_not_store_what_a_waiting_prompt_has():
    """x generates the second page of the prompt of a, which waits for its slot."""
    x = request("x", 0, [1, 2, 3, 4], 5, output_token_ids=[5, 6, 7, 8, 9])
    rows = [x, request("a", 0, list(range(1, 9)))]
    spec = split(rows, backend="sglang")
    spec["engine"]["decode"] = {"rank": {**spec["engine"]["rank"], "max_num_seqs": 1}}
    assert observed(spec).requests["decode_admit_ms"].to_list() == [100.0, 150.0]
    first, second = (own for _, own in block_hashes(range(1, 9), 4))
    assert in_decode(spec)[0] == [
        (0, 100.0, "activate", "stored", first),
        (1, 100.0, "activate", "stored", second),
    ]


def test_sglang_removes_a_waiting_prompt_with_its_last_copy():
    """The pages of a prompt that a deadlock ends while it waits are gone, but for those that the
    tree has as well; the request that runs had waited for them in vain."""
    x, a = [20, 21, 22, 23], [20, 21, 22, 23, *range(8)]
    rows = [request("x", 0, x, 30), request("a", 0, a, 2)]
    spec = split(rows, 5.0, backend="sglang", max_num_seqs=1)
    spec["engine"]["decode"] = {"rank": {**spec["engine"]["rank"], "num_gpu_blocks": 5}}
    own = block_hashes(a, 4)[1:]
    got, ends = in_decode(spec)
    assert ends == ["kv_capacity_exhausted", "deadlock"]
    assert got == [
        (0, 105.0, "activate", "stored", tokens_hash(x)),
        *((1, 205.0, "activate", "stored", tokens) for _, tokens in own),
        *(2 * [(2, 205.0, "release", "removed", None)]),
    ]
    gone = observed(spec).kv_events.filter(kind="removed")["block_hash"].to_list()
    assert gone == [block for block, _ in own]


def test_a_command_hands_over_what_sglang_held_back():
    """A rank does not report after a decode pass, unless it is the 40th; the page that a has
    generated by 135 is seen when the prompt of b is stored behind it."""
    rows = [request("x", 0, [1, 2, 3], 30), request("a", 0, [4, 5, 6], 3)]
    rows.append(request("b", 50, [5, 6, 7, 8], 2))
    got, _ = in_decode(split(rows, 5.0, backend="sglang"))
    assert [row[:4] for row in got[:2]] == [
        (0, 205.0, "pass_end", "stored"),
        (1, 205.0, "activate", "stored"),
    ]
    assert got[1][4] == tokens_hash([5, 6, 7, 8])
    got, _ = in_decode(split(rows[:2], 5.0, backend="sglang"))
    assert got[0][1:4] == (405.0, "pass_end", "stored")
    got, _ = in_decode(split([request("x", 0, [1, 2, 3], 50), rows[1]], 5.0, backend="sglang"))
    assert got[0][1:4] == (505.0, "pass_end", "stored")
    assert got[1][1] == 605.0


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_reservation_evicts(backend):
    """The block of a finished request goes when the next reservation takes its place."""
    rows = [request("a", 0, [1, 2, 3, 4], 2), request("b", 300, [5, 6, 7, 8, 9], 2)]
    spec = split(rows, 50.0, backend=backend)
    spec["engine"]["decode"] = {"rank": {**spec["engine"]["rank"], "num_gpu_blocks": 2}}
    # SGLang asks the destination first.
    reserved_ms = {"vllm": 400.0, "sglang": 300.0}[backend]
    assert in_decode(spec)[0] == [
        (0, 150.0, "activate", "stored", tokens_hash([1, 2, 3, 4])),
        (1, reserved_ms, "reserve", "removed", None),
        (2, 450.0, "activate", "stored", tokens_hash([5, 6, 7, 8])),
    ]


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_time_limit_between_reservation_and_activation(backend):
    spec = split([request("a", 0, 8, 2)], 50.0, backend=backend)
    spec["max_sim_time_ms"] = 149
    assert observed(spec).kv_events["pool"].unique().to_list() == ["prefill"]
    spec["max_sim_time_ms"] = 150
    stored = observed(spec).kv_events.filter(pool="decode")
    assert stored["observed_at_ms"].to_list() == [150.0, 150.0]
    assert stored.select("block_hash", "tokens_hash").rows() == block_hashes(range(8), 4)


def test_workers_and_ranks():
    spec = spec_of([request(f"r{k}", 0, list(range(8))) for k in range(4)], workers=2)
    spec["engine"]["dp_size"] = 2
    events = observed(spec).kv_events
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert events.select("worker", "rank").unique(maintain_order=True).rows() == places
    assert events["event_id"].to_list() == [0, 0] * 4
    assert events["block_hash"].n_unique() == 2


def test_default_tokens_of_prompt_and_output():
    """Prompt token k of request i is i * 1000003 + k; output is drawn from the uuid i + 1."""
    result = observed(spec_of([request("a", 0, 3), request("b", 0, 6, 12)]))
    prompt = [1_000_003 + k for k in range(6)]
    uuid = (2).to_bytes(16, "big")
    output = [xxhash.xxh3_64_intdigest(uuid + struct.pack("<Q", k)) & 0xFFFFFFFF for k in range(12)]
    # The last token is never computed.
    expected = block_hashes(prompt + output[:-1], 4)
    frame = result.kv_events
    assert frame.select("block_hash", "tokens_hash").rows() == expected


def test_hash_ids():
    """A content block is its id, as often as it has tokens; engine blocks may cut across."""
    workload = vecsim.Workload.from_columns(
        [0.0, 1000.0], [14, 12], [1, 1], hash_ids=[[70, 90, 70], [70, 90]], block_tokens=6
    )
    result = observed(spec_of([]), workload=workload)
    # Ids are numbered by first appearance.
    tokens = [0] * 6 + [1] * 6 + [0] * 2
    frame = result.kv_events
    assert frame.select("block_hash", "tokens_hash").rows() == block_hashes(tokens, 4)
    assert result.requests["reused_input_tokens"].to_list() == [0, 8]


def test_prompts_continue_planned_output():
    plan = {"output_token_ids": [7, 8, 9, 10, 11]}
    rows = [request("a", 0, [1, 2, 3, 4, 5], 5, **plan)]
    rows.append(request("b", 500, [1, 2, 3, 4, 5, 7, 8, 9, 6], 1))
    frame = observed(spec_of(rows)).kv_events
    assert frame["event_id"].to_list() == [0, 1]
    expected = block_hashes([1, 2, 3, 4, 5, 7, 8, 9], 4)
    assert frame.select("block_hash", "tokens_hash").rows() == expected


def test_stored_hashes():
    rows = [request("a", 0, list(range(8))), request("b", 200, [9] * 8)]
    frame = observed(spec_of(rows, num_gpu_blocks=2)).kv_events
    assert frame["kind"].to_list() == ["stored"] * 2 + ["removed"] * 2 + ["stored"] * 2
    expected = [9143094415614847814, 12124091508212882195, *2 * [tokens_hash([9] * 4)]]
    got = vecsim.stored_hashes(frame)
    assert got.dtype == np.uint64
    assert got.tolist() == expected
    assert engine.stored_hashes(frame).tolist() == expected
    assert vecsim.stored_hashes(frame.filter(pl.col("kind") == "removed")).tolist() == []
    assert vecsim.stored_hashes(frame.clear()).tolist() == []


@pytest.mark.parametrize("events", [None, [1, 2], pl.DataFrame({"kind": ["stored"]})])
def test_stored_hashes_of_something_else(events):
    with pytest.raises(InputError) as caught:
        vecsim.stored_hashes(events)
    assert caught.value.where == "kv_events"


def test_a_run_that_observed_nothing():
    result = vecsim.replay(spec_of([request("a", 0, 8)]))
    with pytest.raises(InputError, match="observe"):
        _ = result.kv_events


@pytest.mark.parametrize("observe", ["events", "", True, ["kv_events"]])
def test_nothing_else_can_be_observed(observe):
    with pytest.raises(InputError) as caught:
        vecsim.replay(spec_of([request("a", 0, 8)]), observe=observe)
    assert caught.value.where == "observe"


def test_no_requests():
    frame = observed(spec_of([])).kv_events
    assert dict(frame.schema) == KV_EVENTS_SCHEMA
    assert frame.is_empty()


def test_a_time_limit_hides_the_pass_in_flight():
    spec = spec_of([request("a", 0, 8, 30)])
    spec["max_sim_time_ms"] = 139
    assert observed(spec).kv_events["observed_at_ms"].to_list() == [100.0, 100.0]
    spec["max_sim_time_ms"] = 140
    assert observed(spec).kv_events["observed_at_ms"].to_list() == [100.0, 100.0, 140.0]


@pytest.mark.parametrize("backend", ["vllm", "trtllm", "sglang"])
def test_a_timeline_beside_it(backend):
    rows = [request(f"r{k}", 20 * k, list(range(k, k + 30)), 25) for k in range(6)]
    spec = spec_of(rows, num_gpu_blocks=40, backend=backend)
    plain = vecsim.replay(spec, timeline=True)
    both = observed(spec, timeline=True)
    assert both.timeline(10.0).equals(plain.timeline(10.0))


def test_logs_that_run_full():
    """More events than the log has room for at first."""
    workload = vecsim.Workload.from_columns(
        np.arange(400) * 50.0, np.full(400, 2000), np.full(400, 100)
    )
    result = observed(spec_of([], num_gpu_blocks=1500), workload=workload, threads=1)
    stored = result.kv_events.filter(pl.col("kind") == "stored")
    assert stored.height > 200_000
    assert stored.height - 1500 <= result.kv_events.filter(pl.col("kind") == "removed").height
    assert stored["block_hash"].n_unique() >= 400 * (2000 // 4)
    split_events = observed(split([], num_gpu_blocks=1500), workload=workload).kv_events
    in_decode = split_events.filter(pool="decode", kind="stored")
    assert in_decode["block_hash"].n_unique() == stored["block_hash"].n_unique()


def test_files(tmp_path):
    result = observed(spec_of([request("a", 0, 8)]))
    result.write(tmp_path / "out")
    assert pl.read_parquet(tmp_path / "out" / "kv_events.parquet").equals(result.kv_events)
    vecsim.replay(spec_of([request("a", 0, 8)])).write(tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "kv_events.parquet").exists()


@pytest.mark.skipif(DISABLED, reason="kernels are not compiled")
def test_one_signature_each():
    assert observed(spec_of([request("a", 0, 8)])).kv_events.height == 2
    assert observed(split([request("a", 0, 8, 2)])).kv_events.height == 4
    assert_one_a_combination(entries_vllm.run_independent, entries_vllm.run_fleet)
    for kernel in (
        event_columns.hash_rows,
        event_columns.count_visible,
        event_columns.fill_columns,
        event_columns.gather_stored,
    ):
        assert len(kernel.signatures) == 1, kernel


def test_more_blocks_than_rows():
    workload = vecsim.Workload.from_columns([0.0] * 3, [2**30 - 1] * 3, [1] * 3)
    spec = spec_of([], backend="sglang", block_size=1)
    with pytest.raises(InputError) as caught:
        observed(spec, workload=workload)
    assert caught.value.where == "observe"


def test_a_log_that_no_memory_holds_is_refused(monkeypatch):
    """Enough slack for more words than an array can have."""
    monkeypatch.setattr("vecsim.run.kv_events._SLACK_WORDS", 2**59)
    with pytest.raises(InputError, match="observe: got 'kv_events', expected larger blocks"):
        observed(spec_of([request("a", 0, 8)]))
