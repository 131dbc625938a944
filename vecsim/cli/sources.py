"""Telling a trace from a replay spec, by name and by content."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from vecsim.config.documents import parse_json, parse_yaml, read_document
from vecsim.errors import InputError

_TRACE_SUFFIXES = frozenset((".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".gz", ".zst"))
_YAML_SUFFIXES = frozenset((".yaml", ".yml"))
_TRACE_KEYS = frozenset(
    (
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
        "hash_id_scope",
        "num_turns",
        "event",
    )
)
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1")  # gzip, Zstandard, Parquet
_HEAD = 1 << 16


def is_trace(path: Path) -> bool:
    """Whether a file is a trace rather than a replay spec.

    The suffix decides where only one of both uses it; otherwise the content does: compressed data,
    a JSON array, JSON objects with the keys of a trace, and CSV are traces; other JSON objects and
    YAML are specs. A folder and a glob stand for shards of a trace. Raises InputError when the file
    cannot be read.
    """
    if path.is_dir() or (any(mark in str(path) for mark in "*?[") and not path.exists()):
        return True
    if path.exists() and not path.is_file():
        raise InputError(str(path), "a pipe or a device", "a regular file: it is read twice")
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise InputError(str(path), error.strerror, "a readable trace or spec file") from None
    suffix = path.suffix.lower()
    if suffix in _TRACE_SUFFIXES:
        return True
    if suffix in _YAML_SUFFIXES:
        return False
    if head.startswith(_PACKED):
        return True
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if len(head) == _HEAD and text[:1] in ("{", ""):  # where its keys end is not known yet
        text = path.read_text("utf-8-sig", errors="replace").lstrip()
    return _looks_like_trace(text)


def _looks_like_trace(text: str) -> bool:
    if text.startswith("["):
        return True
    first_line = text.partition("\n")[0]
    if not text.startswith("{"):
        return not re.match(r"#|---|[\w\"']+\s*:", first_line)
    for part in (first_line, text):  # rows of a line each, or an object over several lines
        try:
            keys = msgspec.json.decode(part, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            continue
        return not _TRACE_KEYS.isdisjoint(keys)
    return '"hash_id_scope"' in text


def read_spec(path: Path) -> dict[str, Any]:
    """The tree of a spec file; a file with another suffix is read by its content.

    Raises InputError when the file is not JSON or YAML, or does not hold a mapping.
    """
    if path.suffix.lower() in _YAML_SUFFIXES | {".json"}:
        tree = read_document(path)
    else:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(str(path), f"byte {error.start}", "UTF-8 text") from None
        parse = parse_json if text.lstrip().startswith("{") else parse_yaml
        tree = parse(text, path.name)
    if not isinstance(tree, dict):
        raise InputError(str(path), tree, "a replay spec (a mapping) or a trace")
    return tree
