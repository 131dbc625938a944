"""A walk over a parsed tree beside the descriptor types: what msgspec leaves out.

It knows where a value stands, so it can say which field is wrong and what was expected there, name
the nearest known key, list the keys that are ignored, and report several failures at once.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import NODEFAULT, inspect

from vecsim.config.documents import join
from vecsim.config.schema import (
    ALIASES,
    EngineDescriptor,
    RankConfig,
    ReplayRequest,
    RoleDescriptor,
)
from vecsim.errors import MISSING, InputError

MAX_UINT64 = 2**64 - 1

_EMPTY_IS_DEFAULT = {EngineDescriptor: (None, []), RoleDescriptor: ([],), RankConfig: ([],)}
"""Values that the reference reads as an object without keys."""


class Inspection:
    """One walk; `problems` are errors in document order, `ignored` are notes on ignored keys."""

    def __init__(self, into_requests: bool) -> None:
        self.problems: list[InputError] = []
        self.ignored: list[str] = []
        self._into_requests = into_requests

    def visit(self, node: Any, type_: inspect.Type, path: str) -> Any:
        """Check `node` against a type; returns it, copied only where something had to be rewritten:
        an alias, an empty list that stands for an object, numpy values."""
        node = plain(node)
        if isinstance(type_, inspect.StructType):
            return self._struct(node, type_, path)
        if isinstance(type_, inspect.UnionType):
            return self._union(node, type_, path)
        if isinstance(type_, inspect.ListType | inspect.VarTupleType):
            return self._list(node, type_, path)
        if not _fits(node, type_):
            self._refuse(node, type_, path)
        return node

    def _refuse(self, node: Any, type_: inspect.Type, path: str) -> None:
        self.problems.append(InputError(path or "spec", node, describe(type_)))

    def _union(self, node: Any, type_: inspect.UnionType, path: str) -> Any:
        options = [option for option in type_.types if not isinstance(option, inspect.NoneType)]
        if node is None and len(options) < len(type_.types):
            return node
        if len(options) == 1:
            before = len(self.problems)
            node = self.visit(node, options[0], path)
            if len(self.problems) == before + 1 and self.problems[-1].where == path:
                self.problems.pop()
                self._refuse(node, type_, path)
            return node
        structs = all(isinstance(option, inspect.StructType) for option in options)
        if not isinstance(node, dict) or not structs:
            if structs or not any(_fits(node, option) for option in options):
                self._refuse(node, type_, path)
            return node
        tag_field = options[0].tag_field
        for option in options:
            if node.get(tag_field) == option.tag:
                return self._struct(node, option, path)
        tag = node.get(tag_field, MISSING)
        tags = ", ".join(repr(option.tag) for option in options)
        self.problems.append(InputError(join(path, tag_field), tag, f"one of {tags}"))
        return node

    def _list(self, node: Any, type_: inspect.Type, path: str) -> Any:
        if not isinstance(node, list | tuple):
            self._refuse(node, type_, path)
            return node
        item_type = type_.item_type
        if getattr(item_type, "cls", None) is ReplayRequest and not self._into_requests:
            self._note_request_keys(node, item_type, path)
            return node
        if isinstance(item_type, inspect.IntType) and all(_fits(item, item_type) for item in node):
            return node
        items = [self.visit(item, item_type, join(path, i)) for i, item in enumerate(node)]
        changed = any(new is not old for new, old in zip(items, node, strict=True))
        return items if changed else node

    def _note_request_keys(self, node: list, type_: inspect.StructType, path: str) -> None:
        """Keys of requests that no field has, without looking at the values."""
        known = {field.name for field in type_.fields}
        unknown: dict[str, None] = {}
        for item in node:
            if isinstance(item, dict) and not item.keys() <= known:
                unknown.update((key, None) for key in item if key not in known)
        for key in unknown:
            self.ignored.append(self._unknown(f"{path}[]", key, type_))

    def _struct(self, node: Any, type_: inspect.StructType, path: str) -> Any:
        if any(node == value for value in _EMPTY_IS_DEFAULT.get(type_.cls, ())):
            return {}
        if not isinstance(node, dict):
            self._refuse(node, type_, path)
            return node
        node = self._rename(node, type_, path)
        known = {field.name for field in type_.fields}
        for key in node:
            if key not in known and key != type_.tag_field:
                self._unknown_key(node, key, type_, path)
        changes = {}
        for field in type_.fields:
            where = _field_path(path, field)
            if field.name in node:
                value = self.visit(node[field.name], field.type, where)
                if value is not node[field.name]:
                    changes[field.name] = value
            elif field.required:
                self.problems.append(InputError(where, MISSING, describe(field.type)))
        return {**node, **changes} if changes else node

    def _rename(self, node: dict, type_: inspect.StructType, path: str) -> dict:
        for alias, name in ALIASES.get(type_.cls, {}).items():
            if alias in node and name in node:
                expected = f"only one of {name} and its other name {alias}"
                self.problems.append(InputError(join(path, alias), node[alias], expected))
            if alias in node:
                node = {name if key == alias else key: value for key, value in node.items()}
        return node

    def _unknown_key(self, node: dict, key: Any, type_: inspect.StructType, path: str) -> None:
        if not isinstance(key, str):
            self.problems.append(InputError(path or "spec", key, "string keys"))
        elif type_.forbid_unknown_fields:
            expected = f"a known key; the nearest is {nearest(key, type_)}"
            self.problems.append(InputError(join(path, key), node[key], expected))
        else:
            self.ignored.append(self._unknown(path, key, type_))

    @staticmethod
    def _unknown(path: str, key: str, type_: inspect.StructType) -> str:
        near = nearest(key, type_, cutoff=0.6)
        return join(path, key) + (f" (did you mean {near}?)" if near else "")


def _field_path(path: str, field: inspect.Field) -> str:
    """Paths start below the envelope's `spec`, so that bare and wrapped specs read alike."""
    return path if field.name == "spec" and not path else join(path, field.name)


# --- types ----------------------------------------------------------------------------------------


def plain(node: Any) -> Any:
    """A numpy scalar or array as Python builtins; anything else as it is."""
    return node.tolist() if isinstance(node, np.generic | np.ndarray) else node


def _fits(node: Any, type_: inspect.Type) -> bool:
    if isinstance(type_, inspect.IntType):
        most = MAX_UINT64 if type_.le is None else type_.le
        return type(node) is int and (type_.ge is None or node >= type_.ge) and node <= most
    if isinstance(type_, inspect.FloatType):
        if type(node) is int:
            return -(2**1023) < node < 2**1023
        return isinstance(node, float) and math.isfinite(node)
    if isinstance(type_, inspect.BoolType):
        return isinstance(node, bool)
    if isinstance(type_, inspect.StrType):
        return isinstance(node, str)
    if isinstance(type_, inspect.LiteralType):
        return isinstance(node, str) and node in type_.values
    if isinstance(type_, inspect.DictType):
        return isinstance(node, dict) and all(isinstance(key, str) for key in node)
    return True


def describe(type_: inspect.Type) -> str:
    """What a field of this type accepts, in words."""
    if isinstance(type_, inspect.UnionType):
        options = [option for option in type_.types if not isinstance(option, inspect.NoneType)]
        if len(options) > 1 and not isinstance(options[0], inspect.StructType):
            text = ", or ".join(describe(option) for option in options)
        elif len(options) > 1:
            tags = ", ".join(repr(option.tag) for option in options)
            text = f"an object with {options[0].tag_field!r} one of {tags}"
        else:
            text = describe(options[0])
        return f"{text}, or null" if len(options) < len(type_.types) else text
    if isinstance(type_, inspect.IntType):
        if type_.le is None:
            return "a non-negative integer of at most 64 bits"
        return f"an integer from {type_.ge} to {type_.le}"
    if isinstance(type_, inspect.LiteralType):
        names = ", ".join(repr(value) for value in sorted(type_.values))
        return f"one of {names}" if len(type_.values) > 1 else names
    if isinstance(type_, inspect.ListType | inspect.VarTupleType):
        return "a list"
    words = {
        inspect.FloatType: "a finite number",
        inspect.BoolType: "true or false",
        inspect.StrType: "a string",
        inspect.StructType: "an object",
        inspect.DictType: "an object",
    }
    return words.get(type(type_), "a value")


def structs_of(type_: inspect.Type) -> Iterator[inspect.StructType]:
    """The structs that a value of this type may be."""
    if isinstance(type_, inspect.StructType):
        yield type_
    elif isinstance(type_, inspect.UnionType):
        for option in type_.types:
            yield from structs_of(option)


def _names(type_: inspect.StructType, prefix: str, depth: int) -> Iterator[str]:
    """Paths, relative to a struct, of its fields and of those of the structs inside it."""
    for field in type_.fields:
        yield prefix + field.name
        if depth:
            for inner in structs_of(field.type):
                yield from _names(inner, f"{prefix}{field.name}.", depth - 1)


def nearest(key: str, type_: inspect.StructType, cutoff: float = 0.0) -> str:
    """The field that was probably meant: the same name further inside, else the most similar."""
    for name in _names(type_, "", 3):
        if name.rpartition(".")[2] == key:
            return name
    own = [field.name for field in type_.fields] + list(ALIASES.get(type_.cls, ()))
    return next(iter(difflib.get_close_matches(key, own, n=1, cutoff=cutoff)), "")


def has_default(field: inspect.Field, value: Any) -> bool:
    """Whether a field's value is the one it has when it is not given."""
    if field.default is not NODEFAULT:
        return bool(value == field.default)
    return field.default_factory is not NODEFAULT and bool(value == field.default_factory())
