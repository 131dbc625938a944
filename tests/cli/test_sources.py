"""Telling traces from specs."""

import gzip
import json

import pytest

from vecsim.cli.sources import is_trace, read_spec
from vecsim.errors import InputError

ROW = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}
SPEC = {"topology": {"kind": "aggregated", "workers": {"initial_workers": 1}}, "requests": []}


@pytest.mark.parametrize(
    ("name", "text", "trace"),
    [
        ("a.jsonl", json.dumps(ROW), True),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", True),
        ("a.yaml", "topology: {}\n", False),
        ("a.yml", "- 1\n", False),
        ("a.json", json.dumps(SPEC), False),
        ("a.json", json.dumps({"spec": SPEC}), False),
        ("a.json", json.dumps(SPEC, indent=2), False),
        ("a.json", json.dumps(ROW) + "\n" + json.dumps(ROW), True),
        ("a.json", json.dumps([ROW]), True),
        ("a.json", "\ufeff" + json.dumps([ROW], indent=1), True),
        ("trace", json.dumps(ROW), True),
        ("trace", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n", True),
        ("trace", "2023-11-16 18:15:46.6805900,1,2\n", True),
        ("spec", json.dumps(SPEC), False),
        ("spec", "# a fleet\ntopology:\n  kind: aggregated\n", False),
        ("spec", "topology:\n  kind: aggregated\n", False),
        ("spec.txt", '"topology": {}\n', False),
    ],
)
def test_name_and_content_decide(tmp_path, name, text, trace):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert is_trace(path) is trace


@pytest.mark.parametrize("name", ["a.json", "a", "a.gz", "a.jsonl.gz"])
def test_compressed_data_is_a_trace(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(json.dumps(ROW).encode()))
    assert is_trace(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"absent.jsonl"):
        is_trace(tmp_path / "absent.jsonl")


def test_folders_and_patterns_are_shards_of_a_trace(tmp_path):
    assert is_trace(tmp_path)
    assert is_trace(tmp_path / "*.jsonl")
    nested = tmp_path / "weka.json"
    nested.write_text('{\n "id": "t",\n "hash_id_scope": "local"}')
    assert is_trace(nested)


def test_large_files_are_told_by_all_their_keys(tmp_path):
    """What tells comes after more than is read at first, on one line or on many."""
    path = tmp_path / "a.json"
    long = list(range(30_000))
    recording = {"requests": [{"hash_ids": long}], "hash_id_scope": "local"}
    for tree, trace in ((recording, True), ({"hash_ids": long, **ROW}, True), (SPEC, False)):
        for indent in (None, 1):
            path.write_text(json.dumps({"x": long, **tree}, indent=indent))
            assert is_trace(path) is trace
    path.write_text("\n" * 100_000 + json.dumps(ROW))
    assert is_trace(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(SPEC)),
        ("a.yaml", "topology: {kind: aggregated, workers: {initial_workers: 1}}\nrequests: []\n"),
        ("plain", "\ufeff" + json.dumps(SPEC)),
        ("plain", "topology: {kind: aggregated, workers: {initial_workers: 1}}\nrequests: []\n"),
    ],
)
def test_specs_are_read_whatever_their_suffix(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert read_spec(path) == SPEC


def test_a_spec_is_a_mapping(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(InputError, match=r"list\.yaml: got \[1\], expected a replay spec"):
        read_spec(path)
    path = tmp_path / "latin"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(InputError, match="UTF-8"):
        read_spec(path)
