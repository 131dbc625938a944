"""Specs from dicts and files to descriptors, and back.

Field paths start at the spec: `engine.rank.block_size` in a bare spec and in a wrapped one; what
stands beside `spec` in a wrapped one (`traffic`, `tokenization`, ...) keeps its own name.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from vecsim.config.defaults import derive
from vecsim.config.diagnostics import Inspection, has_default, nearest, plain, structs_of
from vecsim.config.documents import join, read_document
from vecsim.config.schema import ALIASES, Payload, ReplaySpec
from vecsim.errors import MISSING, InputError

Source = dict[str, Any] | Payload | ReplaySpec | str | os.PathLike[str]

_PAYLOAD = inspect.type_info(Payload)
_ENVELOPE = tuple(field.name for field in _PAYLOAD.fields if field.name != "spec")


class IgnoredKeyWarning(UserWarning):
    """Keys of a spec that have no effect, because the reference ignores them."""


def load(source: Source) -> Payload:
    """The payload that a source describes, parsed but not yet validated.

    Args:
        source: a spec as a dict, bare or wrapped with `traffic`, `tokenization` and so on; the path
            of a .json, .yaml or .yml file that holds one; or descriptors built in Python.

    Raises:
        InputError: something is missing, unknown, given twice or of the wrong type. The first
            failure is raised; the others are its notes.

    Warns:
        IgnoredKeyWarning: once, naming all keys that have no effect.
    """
    authored = _wrap(_tree(source))
    envelope, inspection = _inspect(authored)
    payload = None
    if not inspection.problems:
        structs = isinstance(source, Payload | ReplaySpec)
        written = _wrap(_written(source)) if structs else envelope
        derived = {**envelope, "spec": derive(envelope["spec"], written["spec"])}
        with contextlib.suppress(msgspec.ValidationError):
            payload = msgspec.convert(derived, Payload)
    if payload is None:
        payload, envelope = _convert_slowly(authored)
    _require_explicit_blocks(envelope["spec"])
    ignored = inspection.ignored
    if ignored:
        keys = [f"{key} (put it beside `spec`)" if key in _ENVELOPE else key for key in ignored]
        message = f"keys without effect: {', '.join(keys)}"
        warnings.warn(message, IgnoredKeyWarning, stacklevel=2)
    return payload


def to_dict(payload: Payload) -> dict[str, Any]:
    """The payload as builtins, every field written out; `load` gives back an equal payload."""
    return msgspec.to_builtins(payload)


def to_json(payload: Payload) -> str:
    """The payload as indented JSON, every field written out."""
    return msgspec.json.format(msgspec.json.encode(payload), indent=2).decode()


def authored(source: Source) -> dict[str, Any]:
    """The source as a tree of builtins that the caller may change. Raises InputError."""
    return copy.deepcopy(_tree(source))


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a spec, bare or wrapped."""
    from vecsim.synthetic.description import Description

    (wrapped, bare, described), definitions = msgspec.json.schema_components(
        (Payload, ReplaySpec, Description), ref_template="#/$defs/{name}"
    )
    definitions[Payload.__name__]["properties"]["workload"] = {
        "anyOf": [{"type": "null"}, described],
        "default": None,
    }
    for struct, names in ALIASES.items():
        properties = definitions[struct.__name__]["properties"]
        properties.update({alias: properties[name] for alias, name in names.items()})
    spec = definitions[ReplaySpec.__name__]["properties"]
    spec["engine"] = {
        "anyOf": [{"type": "null"}, {"$ref": "#/$defs/EngineDescriptor"}],
        "default": {},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vecsim replay spec",
        "anyOf": [wrapped, bare],
        "$defs": definitions,
    }


def defaulted(source: Source) -> list[str]:
    """Paths of the fields that a source leaves to their default, requests apart.

    An object that is left out counts field by field (`engine.rank.block_size`). In descriptors
    built in Python a field counts as left out when it has its default value. Raises InputError.
    """
    written = isinstance(source, Payload | ReplaySpec)
    envelope, inspection = _inspect(_wrap(_written(source) if written else _tree(source)))
    _raise_first(inspection)
    return list(_left_out(envelope, _PAYLOAD, ""))


def set_path(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Set one field of a spec tree, bare or wrapped, in place; returns the tree.

    Objects on the way are made where they are missing or null. `path` is as in error messages:
    `engine.rank.block_size`, `requests[0].dp_rank`, `tokenization.workers`; a bare tree is wrapped
    when the path leads beside the spec. Raises InputError where the path does not fit the tree.
    """
    keys = _split_path(path)
    if keys[0] == "spec" and len(keys) > 1:
        keys = keys[1:]
    node: Any = tree
    if keys[0] in _ENVELOPE:
        if "spec" not in tree:
            spec = dict(tree)
            tree.clear()
            tree["spec"] = spec
    elif "spec" in tree:
        node = tree["spec"]
    for key in keys[:-1]:
        child = _member(node, key, path)
        if child is None:
            child = {}
            _assign(node, key, child, path)
        node = child
    _assign(node, keys[-1], value, path)
    return tree


def ignored_keys(source: Source) -> list[str]:
    """Paths of the keys that have no effect; empty for a spec that does not parse."""
    return _inspect(_wrap(_tree(source)))[1].ignored


def check_path(where: str, path: str) -> None:
    """Raise InputError, named `where`, unless `path` leads to a field that a spec can have.

    Below lists and free-form values (`config`) every path is taken.
    """
    keys = _split_path(path)
    if keys[0] == "spec" and len(keys) > 1:
        keys = keys[1:]
    structs = [_PAYLOAD] if keys[0] in _ENVELOPE else [inspect.type_info(ReplaySpec)]
    for key in keys:
        if not structs or not isinstance(key, str):
            return
        if key in {struct.tag_field for struct in structs} or any(
            key in ALIASES.get(struct.cls, {}) for struct in structs
        ):
            return
        fields = [f for struct in structs for f in struct.fields if f.encode_name == key]
        if not fields:
            near = next(filter(None, (nearest(key, struct) for struct in structs)), "")
            known = f"; the nearest to {key} is {near}" if near else ""
            raise InputError(where, path, f"a field path such as engine.rank.block_size{known}")
        structs = [struct for field in fields for struct in structs_of(field.type)]


# --- reading --------------------------------------------------------------------------------------


def _tree(source: Source) -> dict[str, Any]:
    """The source as a tree of builtins."""
    if isinstance(source, Payload | ReplaySpec):
        try:
            tree = msgspec.to_builtins(source, enc_hook=_encode)
        except (TypeError, ValueError) as error:
            raise InputError("payload", str(error), "descriptors that hold plain values") from None
        return tree if isinstance(source, Payload) else {"spec": tree}
    if isinstance(source, str | os.PathLike):
        source = read_document(os.fspath(source))
    if not isinstance(source, dict):
        raise InputError("payload", source, "a replay spec: a dict, descriptors, or a file's path")
    return source


def _encode(value: Any) -> Any:
    """A value that msgspec does not know: numpy scalars and arrays."""
    builtin = plain(value)
    if builtin is value:
        raise TypeError(f"a value of type {type(value).__name__}")
    return builtin


def _wrap(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with `spec` at its top.

    One that has `spec` beside a whole bare spec counts as wrapped if that parses, else as bare.
    What is wrong inside the engine does not matter here: the engine is parsed after this decision.
    """
    if "spec" not in tree:
        return {"spec": tree}
    if "topology" not in tree:
        return tree
    for candidate in (tree, {"spec": tree}):
        _, inspection = _inspect(candidate, into_requests=True)
        if all(_in_engine(problem) for problem in inspection.problems):
            return candidate
    return tree


def _inspect(
    authored: dict[str, Any], into_requests: bool = False
) -> tuple[dict[str, Any], Inspection]:
    """A wrapped tree with its aliases resolved, and what a walk over it found."""
    inspection = Inspection(into_requests)
    return inspection.visit(authored, _PAYLOAD, ""), inspection


def _in_engine(problem: InputError) -> bool:
    return problem.where.partition(".")[0] == "engine"


def _convert_slowly(authored: dict[str, Any]) -> tuple[Payload, dict[str, Any]]:
    """The payload and its tree after a walk over everything, which explains what is wrong."""
    envelope, inspection = _inspect(authored, into_requests=True)
    _raise_first(inspection)
    try:
        return msgspec.convert(envelope, Payload), envelope
    except msgspec.ValidationError as error:
        raise InputError("payload", str(error), "plain values") from None


def _raise_first(inspection: Inspection) -> None:
    """Raise the first failure, if any, with the others as its notes."""
    if inspection.problems:
        first, *others = sorted(inspection.problems, key=_in_engine)
        for other in others:
            first.add_note(f"also {other}")
        raise first


def _require_explicit_blocks(spec: dict[str, Any]) -> None:
    """A state cache shares the KV pool, so the size of the pool must be written, not defaulted."""
    engine = spec.get("engine") or {}
    blocks = [("engine", engine)]
    blocks += [(f"engine.{stage}", engine.get(stage)) for stage in ("prefill", "decode")]
    for path, block in blocks:
        rank = (block or {}).get("rank") or {}
        if rank.get("state_cache") is not None and "num_gpu_blocks" not in rank:
            raise InputError(
                f"{path}.rank.num_gpu_blocks", MISSING, "an explicit value beside state_cache"
            )


# --- defaults -------------------------------------------------------------------------------------


def _written(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields of a struct that differ from their default, nested structs likewise."""
    type_ = inspect.type_info(type(struct))
    tree = {} if type_.tag_field is None else {type_.tag_field: type_.tag}
    for field in type_.fields:
        value = getattr(struct, field.name)
        if not has_default(field, value):
            tree[field.name] = _written(value) if isinstance(value, msgspec.Struct) else value
    return tree


def _left_out(node: dict[str, Any], type_: inspect.StructType, path: str) -> Iterator[str]:
    for field in type_.fields:
        where = "" if type_.cls is Payload and field.name == "spec" else join(path, field.name)
        inner = _struct_type(field.type, node.get(field.name))
        if field.name not in node and not isinstance(field.type, inspect.StructType):
            yield where
        elif inner is not None:
            yield from _left_out(node.get(field.name, {}), inner, where)


def _struct_type(type_: inspect.Type, node: Any) -> inspect.StructType | None:
    """The struct that a value of this type is; None for values that are not structs."""
    if isinstance(type_, inspect.StructType):
        return type_
    if not isinstance(type_, inspect.UnionType) or not isinstance(node, dict):
        return None
    structs = [option for option in type_.types if isinstance(option, inspect.StructType)]
    tagged = [s for s in structs if s.tag_field is None or node.get(s.tag_field) == s.tag]
    return tagged[0] if tagged else None


# --- paths ----------------------------------------------------------------------------------------

_INDEX = re.compile("[0-9]{1,18}")


def _split_path(path: str) -> list[str | int]:
    parts = [part for part in re.split(r"\.|\[|\]\.?", path) if part]
    keys = [int(part) if _INDEX.fullmatch(part) else part for part in parts]
    if not keys or isinstance(keys[0], int):
        raise InputError("path", path, "a field path such as engine.rank.block_size")
    return keys


def _member(node: Any, key: str | int, path: str) -> Any:
    if isinstance(node, dict) and isinstance(key, str):
        return node.get(key)
    if isinstance(node, list) and isinstance(key, int) and key < len(node):
        return node[key]
    raise InputError(path, node, f"something that holds {key!r}")


def _assign(node: Any, key: str | int, value: Any, path: str) -> None:
    _member(node, key, path)
    node[key] = value
