"""Loading, round trip, schema, defaults and paths of specs."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import msgspec
import numpy as np
import pytest

from vecsim.config import load as specs
from vecsim.config.documents import parse_json, parse_yaml
from vecsim.config.schema import (
    AggregatedTopology,
    EngineDescriptor,
    FixedTiming,
    Payload,
    PoolDescriptor,
    RankConfig,
    ReplaySpec,
)
from vecsim.errors import InputError

CASES = Path(__file__).parents[1] / "conformance" / "cases"
REQUEST = {"id": "a", "arrival_time_ms": 0.0, "input_tokens": 3, "output_tokens": 2}
BARE = {
    "topology": {"kind": "aggregated", "workers": {"initial_workers": 2}},
    "engine": {"dp_size": 2, "rank": {"block_size": 16}},
    "requests": [REQUEST],
}


def bare(**changes):
    return {**copy.deepcopy(BARE), **changes}


def with_rank(**rank):
    return bare(engine={"rank": rank})


def refusal(source) -> InputError:
    with pytest.raises(InputError) as caught:
        specs.load(source)
    return caught.value


# --- sources --------------------------------------------------------------------------------------


def test_bare_and_wrapped_are_equal():
    wrapped = specs.load({"spec": bare(), "tokenization": {"workers": 2}})
    assert wrapped.spec == specs.load(bare()).spec
    assert wrapped.tokenization.workers == 2
    assert wrapped.spec.engine.rank.block_size == 16
    assert wrapped.spec.topology.workers.initial_workers == 2


def test_files_and_descriptors(tmp_path):
    expected = specs.load(bare())
    json_path = tmp_path / "spec.json"
    json_path.write_text("\ufeff" + json.dumps(bare()), encoding="utf-8")
    assert specs.load(json_path) == expected
    assert specs.load(str(json_path)) == expected
    for name in ("spec.yaml", "spec.yml"):
        path = tmp_path / name
        path.write_text(specs.to_json(expected))
        assert specs.load(path) == expected
    assert specs.load(expected) == expected
    assert specs.load(expected.spec) == expected


def test_yaml_reads_numbers_as_yaml_1_2(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(
        "topology: {kind: aggregated, workers: {initial_workers: 0x10}}\n"
        "max_sim_time_ms: 1e3\n"
        "engine:\n"
        "  rank: {max_num_seqs: null, speedup_ratio: 2}\n"
        "requests:\n"
        "  - {id: on, arrival_time_ms: 1., input_tokens: 010,\n"
        "     output_tokens: 1, session_id: 12:30}\n"
    )
    spec = specs.load(path).spec
    assert spec.topology.workers.initial_workers == 16
    assert spec.max_sim_time_ms == 1000.0
    assert spec.engine.rank.max_num_seqs is None
    assert spec.engine.rank.speedup_ratio == 2.0
    assert spec.requests[0].id == "on"
    assert spec.requests[0].input_tokens == 10
    assert spec.requests[0].session_id == "12:30"


def test_yaml_anchors_merge():
    text = "a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}\n"
    assert parse_yaml(text) == {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}


def test_numpy_values_are_accepted():
    request = {**REQUEST, "input_tokens": np.int64(3), "input_token_ids": np.array([1, 2, 3])}
    source = bare(requests=[request], max_sim_time_ms=np.float32(2.0))
    source["topology"]["workers"]["initial_workers"] = np.int64(4)
    spec = specs.load(source).spec
    assert spec.topology.workers.initial_workers == 4
    assert spec.max_sim_time_ms == 2.0
    assert spec.requests[0].input_token_ids == [1, 2, 3]
    built = ReplaySpec(
        topology=AggregatedTopology(workers=PoolDescriptor(initial_workers=np.int64(4))),
        requests=[],
    )
    assert type(specs.load(built).spec.topology.workers.initial_workers) is int


def test_descriptors_built_in_python_are_checked():
    topology = AggregatedTopology(workers=PoolDescriptor(initial_workers="two"))
    error = refusal(ReplaySpec(topology=topology, requests=[]))
    assert error.where == "topology.workers.initial_workers"
    topology = AggregatedTopology(workers=PoolDescriptor(initial_workers=object()))
    assert "object" in str(refusal(ReplaySpec(topology=topology, requests=[])))


def test_the_source_is_not_changed():
    source = with_rank(kv_bytes_per_token=5)
    before = copy.deepcopy(source)
    assert specs.load(source).spec.engine.rank.kv_transfer_bytes_per_token == 5
    assert source == before


@pytest.mark.parametrize("engine", [None, {}, [], {"rank": []}, {"prefill": None, "rank": {}}])
def test_empty_engines_mean_defaults(engine):
    assert specs.load(bare(engine=engine)).spec.engine == EngineDescriptor()


def test_wrapped_wins_unless_only_the_bare_spec_parses():
    with pytest.warns(specs.IgnoredKeyWarning, match="spec"):
        payload = specs.load(bare(spec={"bad": 1}))
    assert payload.spec.engine.dp_size == 2
    with pytest.warns(specs.IgnoredKeyWarning, match="topology"):
        payload = specs.load(bare(spec=bare(engine={"dp_size": 3})))
    assert payload.spec.engine.dp_size == 3


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            with_rank(blok_size=16),
            "engine.rank.blok_size: got 16, expected a known key; the nearest is block_size",
        ),
        (
            bare(engine={"block_size": 16}),
            "engine.block_size: got 16, expected a known key; the nearest is rank.block_size",
        ),
        (
            with_rank(kv_bytes_per_tokn=16),
            "engine.rank.kv_bytes_per_tokn: got 16, expected a known key; "
            "the nearest is kv_bytes_per_token",
        ),
        (
            with_rank(backend="vLLM"),
            "engine.rank.backend: got 'vLLM', expected one of 'sglang', 'trtllm', 'vllm'",
        ),
        (
            with_rank(max_num_seqs=1.0),
            "engine.rank.max_num_seqs: got 1.0, "
            "expected a non-negative integer of at most 64 bits, or null",
        ),
        (
            with_rank(num_gpu_blocks=True),
            "engine.rank.num_gpu_blocks: got True, "
            "expected a non-negative integer of at most 64 bits, or 'auto'",
        ),
        (
            with_rank(aic_mtp_seed=2**64),
            "engine.rank.aic_mtp_seed: got 18446744073709551616, "
            "expected a non-negative integer of at most 64 bits",
        ),
        (
            with_rank(speedup_ratio=float("inf")),
            "engine.rank.speedup_ratio: got inf, expected a finite number",
        ),
        (
            with_rank(kv_bytes_per_token=1, kv_transfer_bytes_per_token=2),
            "engine.rank.kv_bytes_per_token: got 1, expected only one of "
            "kv_transfer_bytes_per_token and its other name kv_bytes_per_token",
        ),
        (
            with_rank(timing_model={"type": "fixed", "prefill_ms": 1.0}),
            "engine.rank.timing_model.decode_ms: missing, expected a finite number",
        ),
        (
            with_rank(timing_model="fixed"),
            "engine.rank.timing_model: got 'fixed', "
            "expected an object with 'type' one of 'polynomial', 'fixed', 'external', 'table', "
            "'aic', 'roofline', 'python'",
        ),
        (
            with_rank(frontend={"stages": [{"service_ms": "x"}]}),
            "engine.rank.frontend.stages[0].service_ms: got 'x', expected a finite number",
        ),
        (with_rank(**{"7": 1}), None),
        (bare(engine={7: 1}), "engine: got 7, expected string keys"),
        (
            bare(requests=[REQUEST, {**REQUEST, "id": 7}]),
            "requests[1].id: got 7, expected a string",
        ),
        (
            bare(requests=[{**REQUEST, "input_token_ids": [1, 2, -3]}]),
            "requests[0].input_token_ids[2]: got -3, expected an integer from 0 to 4294967295",
        ),
        (bare(requests={}), "requests: got {}, expected a list"),
        (
            bare(topology={"kind": "ring"}),
            "topology.kind: got 'ring', expected one of 'aggregated', 'disaggregated'",
        ),
        (
            {"spec": bare(), "tokenization": {"worker": 1}},
            "tokenization.worker: got 1, expected a known key; the nearest is workers",
        ),
        (
            {"spec": bare(), "determinism": "always"},
            "determinism: got 'always', expected one of 'canonical_v1', 'random'",
        ),
        ({"spec": 3}, "spec: got 3, expected an object"),
        ([], "payload: got [], expected a replay spec: a dict, descriptors, or a file's path"),
    ],
)
def test_refusals_name_path_value_and_expectation(source, message):
    error = refusal(source)
    if message is not None:
        assert str(error) == message
    assert "\n" not in str(error)


def test_all_failures_are_told_at_once_and_the_engine_comes_last():
    source = with_rank(block_size="x", backend="y")
    source["requests"] = [{**REQUEST, "output_tokens": "z"}]
    source["max_in_flight"] = -1
    error = refusal(source)
    assert error.where == "max_in_flight"
    notes = [note.partition(":")[0] for note in error.__notes__]
    assert notes == [
        "also requests[0].output_tokens",
        "also engine.rank.backend",
        "also engine.rank.block_size",
    ]


def test_a_state_cache_needs_explicit_blocks():
    rank = {
        "block_size": 16,
        "kv_cache_bytes_per_token": 8,
        "state_cache": {"bytes_per_request": 9},
    }
    assert refusal(with_rank(**rank)).where == "engine.rank.num_gpu_blocks"
    error = refusal(bare(engine={"decode": {"rank": rank}}))
    assert error.where == "engine.decode.rank.num_gpu_blocks"
    assert specs.load(with_rank(**rank, num_gpu_blocks=9)).spec.engine.rank.state_cache


def test_ignored_keys_warn_once():
    source = bare(requests=[{**REQUEST, "priorty": 1}, {**REQUEST, "id": "b", "priorty": 1}])
    source["topology"]["workers"]["initial_worker"] = 3
    source["traffic"] = {"source_type": "trace"}
    with pytest.warns(specs.IgnoredKeyWarning) as caught:
        specs.load(source)
    assert [str(warning.message) for warning in caught] == [
        "keys without effect: traffic (put it beside `spec`), "
        "topology.workers.initial_worker (did you mean initial_workers?), requests[].priorty"
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.json", '{"engine": {"rank": [{"a": 1, "a": 2}]}}', "engine.rank[0].a: got [1, 2]"),
        ("s.yaml", "engine:\n  rank: {a: 1,\n   a: 2}\n", "the key again in s.yaml:3"),
        ("s.json", '{"a" 1}', "s.json:1:6: got '1}', expected JSON"),
        ("s.json", "[", "s.json:1:2: got 'the end of the text'"),
        ("s.json", '{"a":' + "[" * 100_000, "s.json: got 'a document nested too deeply'"),
        ("s.yaml", "a: [1\nb", "s.yaml:"),
        ("s.yaml", "a: 1\n---\nb: 2\n", "s.yaml:2"),
        ("s.yaml", "? [1, 2]\n: 3\n", "s.yaml:1"),
        ("s.yaml", "a: !!python/object:os.system x\n", "s.yaml:1:4"),
        ("s.yaml", "", "payload: got None"),
        ("s.toml", "", "s.toml: got '.toml'"),
        ("s.json", None, "s.json: got 'No such file or directory'"),
        ("s.json", b"\xff\xfe{}", "s.json: got 'byte 0'"),
    ],
)
def test_broken_documents(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in str(refusal(path))


def test_json_numbers_must_be_finite(tmp_path):
    path = tmp_path / "s.json"
    for number in ("NaN", "Infinity", "1e999"):
        path.write_text(json.dumps(bare(max_sim_time_ms="X")).replace('"X"', number))
        assert refusal(path).where == "max_sim_time_ms"


# --- and back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in CASES.glob("*_cases.json")))
def test_accepted_cases_round_trip(name):
    cases = json.loads((CASES / f"{name}.json").read_text())["cases"]
    count = 0
    for case in cases:
        if case["expect"]["error_kind"] == "validation":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", specs.IgnoredKeyWarning)
            payload = specs.load(case["payload"])
        assert specs.load(specs.to_dict(payload)) == payload, case["name"]
        assert specs.load(parse_json(specs.to_json(payload))) == payload, case["name"]
        count += 1
    assert count > 0


def test_to_dict_writes_every_field():
    tree = specs.to_dict(specs.load(bare()))
    assert tree["spec"]["engine"]["rank"]["max_num_seqs"] == 256
    assert tree["spec"]["engine"]["rank"]["timing_model"] == {"type": "polynomial"}
    assert tree["traffic"] is None
    assert set(tree) == set(Payload.__struct_fields__)


def test_json_schema_knows_every_field():
    schema = specs.json_schema()
    json.dumps(schema)
    rank = schema["$defs"]["RankConfig"]
    assert set(rank["properties"]) == {*RankConfig.__struct_fields__, "kv_bytes_per_token"}
    assert rank["additionalProperties"] is False
    assert rank["properties"]["backend"]["enum"] == ["sglang", "trtllm", "vllm"]
    assert rank["properties"]["num_gpu_blocks"]["default"] == 16384
    assert schema["anyOf"] == [{"$ref": "#/$defs/Payload"}, {"$ref": "#/$defs/ReplaySpec"}]
    assert set(schema["$defs"]["ReplaySpec"]["required"]) == {"topology", "requests"}
    assert {"type": "null"} in schema["$defs"]["ReplaySpec"]["properties"]["engine"]["anyOf"]


# --- defaults and paths ---------------------------------------------------------------------------


def test_defaulted_lists_what_was_left_out():
    left_out = specs.defaulted(bare())
    assert "engine.rank.num_gpu_blocks" in left_out
    assert "engine.rank.sglang.max_prefill_tokens" in left_out
    assert "topology.workers.startup_delay_ms" in left_out
    assert "tokenization" in left_out
    for path in ("engine.rank.block_size", "engine.dp_size", "topology", "requests", "engine.rank"):
        assert path not in left_out
    assert specs.defaulted({"spec": bare()}) == left_out


def test_defaulted_sees_explicit_defaults_and_aliases():
    assert "engine.rank.num_gpu_blocks" not in specs.defaulted(with_rank(num_gpu_blocks=16384))
    left_out = specs.defaulted(with_rank(kv_bytes_per_token=3))
    assert "engine.rank.kv_transfer_bytes_per_token" not in left_out
    left_out = specs.defaulted(with_rank(native_host_offload={"num_host_blocks": 3}))
    assert "engine.rank.native_host_offload.d2h_bandwidth_gbps" in left_out
    assert "engine.rank.native_host_offload.num_host_blocks" not in left_out
    timing = {"type": "external", "provider": "aic"}
    assert "engine.rank.timing_model.config" in specs.defaulted(with_rank(timing_model=timing))


def test_defaulted_of_descriptors_is_what_equals_the_default():
    assert specs.defaulted(specs.load(bare())) == specs.defaulted(bare())
    rank = RankConfig(timing_model=FixedTiming(prefill_ms=1.0, decode_ms=2.0))
    topology = AggregatedTopology(workers=PoolDescriptor(initial_workers=1))
    spec = ReplaySpec(topology=topology, requests=[], engine=EngineDescriptor(rank=rank))
    left_out = specs.defaulted(spec)
    assert "engine.rank.timing_model" not in left_out
    assert "engine.rank.block_size" in left_out


def test_defaulted_refuses_what_does_not_parse():
    with pytest.raises(InputError) as caught:
        specs.defaulted(bare(engine=5))
    assert caught.value.where == "engine"


def test_set_path_in_bare_and_wrapped_trees():
    tree = bare(engine=None)
    assert specs.set_path(tree, "engine.rank.block_size", 32) is tree
    specs.set_path(tree, "spec.engine.dp_size", 2)
    specs.set_path(tree, "requests[0].dp_rank", 1)
    assert tree["engine"] == {"rank": {"block_size": 32}, "dp_size": 2}
    assert tree["requests"][0]["dp_rank"] == 1
    specs.set_path(tree, "tokenization.workers", 3)
    assert set(tree) == {"spec", "tokenization"}
    specs.set_path(tree, "max_in_flight", 4)
    assert tree["spec"]["max_in_flight"] == 4
    assert specs.load(tree).spec.engine.rank.block_size == 32


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("requests[5].dp_rank", "requests[5].dp_rank"),
        ("requests.dp_rank", "requests.dp_rank"),
        ("engine.dp_size.x", "engine.dp_size.x"),
        ("", "path"),
        ("[0].x", "path"),
    ],
)
def test_set_path_refuses_what_does_not_fit(path, where):
    with pytest.raises(InputError) as caught:
        specs.set_path(bare(), path, 1)
    assert caught.value.where == where


# --- speed ----------------------------------------------------------------------------------------


def test_ten_thousand_requests_load(tmp_path):
    requests = [{**REQUEST, "id": f"r{i}", "arrival_time_ms": i * 0.5} for i in range(10_000)]
    source = bare(requests=requests)
    path = tmp_path / "spec.json"
    path.write_bytes(msgspec.json.encode(source))
    for form in (source, path):
        loaded = specs.load(form).spec.requests
        assert [request.id for request in loaded] == [f"r{i}" for i in range(10_000)]
        assert loaded[-1].arrival_time_ms == 4999.5
