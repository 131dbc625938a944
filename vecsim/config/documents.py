"""JSON and YAML documents as plain trees, with duplicate keys refused and YAML read as YAML 1.2."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from vecsim.errors import InputError

_DEEPEST = 200
"""Levels of objects and lists in a document; nothing that vecsim reads has a tenth of it."""
_MOST_REPEATED = 1_000_000
"""Values that the aliases of a YAML document may stand for."""
_Base: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_document(path: str | Path) -> Any:
    """The tree in a .json, .yaml or .yml file. Raises InputError naming the file, line or key."""
    path = Path(path)
    parsers = {".json": parse_json, ".yaml": parse_yaml, ".yml": parse_yaml}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise InputError(str(path), path.suffix, "a file name ending in .json, .yaml or .yml")
    if path.exists() and not path.is_file():
        raise InputError(str(path), "no regular file", "a regular file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(str(path), error.strerror, "a readable file") from None
    except UnicodeDecodeError as error:
        raise InputError(str(path), f"byte {error.start}", "UTF-8 text") from None
    return parse(text, path.name)


def join(path: str, part: str | int) -> str:
    """A field path extended by a key or by a list index."""
    if isinstance(part, int):
        return f"{path}[{part}]"
    return f"{path}.{part}" if path else part


# --- JSON -----------------------------------------------------------------------------------------


class _DuplicateKey(Exception):
    """An object of the document being parsed has a key twice."""


class _Pairs(list):
    """The members of one JSON object, duplicates kept."""


def parse_json(text: str, name: str = "JSON") -> Any:
    """The tree of a JSON text; duplicate keys are refused.

    `name` is what errors call the text. Raises InputError.
    """
    try:
        tree = _parse_json(text)
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise InputError(where, _snippet(text, error.pos), f"JSON ({error.msg})") from None
    except ValueError as error:  # more digits than Python turns into an integer
        raise InputError(name, str(error), "numbers of fewer digits") from None
    except RecursionError:
        raise _too_deep(name) from None
    _check_depth(tree, name)
    return tree


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKey:
        _raise_duplicate(json.loads(text, object_pairs_hook=_Pairs), "")


def _check_depth(tree: Any, name: str) -> None:
    """Raise InputError for more than `_DEEPEST` levels of objects and lists."""
    level = [tree] if isinstance(tree, dict | list) else []
    for _ in range(_DEEPEST):
        members = (node.values() if isinstance(node, dict) else node for node in level)
        level = [m for each in members for m in each if isinstance(m, dict | list)]
        if not level:
            return
    raise _too_deep(name)


def _too_deep(name: str) -> InputError:
    return InputError(name, "a document nested too deeply", f"at most {_DEEPEST} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise _DuplicateKey
    return tree


def _raise_duplicate(node: Any, path: str) -> None:
    """Raise for the first key that is twice in one object of a tree made of `_Pairs`."""
    if isinstance(node, _Pairs):
        seen: dict[str, Any] = {}
        for key, value in node:
            if key in seen:
                raise InputError(join(path, key), [seen[key], value], "the key only once")
            seen[key] = value
            _raise_duplicate(value, join(path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            _raise_duplicate(value, join(path, index))


def _snippet(text: str, position: int) -> str:
    return text[position : position + 20] or "the end of the text"


# --- YAML -----------------------------------------------------------------------------------------


class _Loader(_Base):
    """Plain scalars by the core schema of YAML 1.2: `1e3` is a number, `on` is a string."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (filled by add_implicit_resolver)


def _construct_int(loader: Any, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _construct_float(loader: Any, node: yaml.ScalarNode) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


_RESOLVERS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )
_CONSTRUCTORS = {
    "int": _construct_int,
    "float": _construct_float,
    "bool": _Base.construct_yaml_bool,
    "timestamp": _Base.construct_yaml_timestamp,
}


def _checked(kind: str) -> Any:
    """The constructor of a scalar type; a text that is none of it is an error of the document."""

    def construct(loader: Any, node: yaml.Node) -> Any:
        try:
            return _CONSTRUCTORS[kind](loader, node)
        except (ValueError, TypeError, KeyError, AttributeError):
            problem = f"a value that is no {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    return construct


for _kind in _CONSTRUCTORS:
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _checked(_kind))


def parse_yaml(text: str, name: str = "YAML") -> Any:
    """The tree of a YAML text of one document; duplicate keys are refused.

    `name` is what errors call the text. Raises InputError.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _Check(name).node(node, "", 0)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = name if mark is None else f"{name}:{mark.line + 1}:{mark.column + 1}"
        problem = " ".join(str(error.problem or error.context).split())
        raise InputError(where, problem, "one YAML document") from None
    except yaml.YAMLError as error:
        raise InputError(name, " ".join(str(error).split()), "one YAML document") from None
    except RecursionError:
        raise _too_deep(name) from None


class _Check:
    """A walk over the nodes of a document that looks at each of them once.

    It counts what aliases stand for, since whoever goes through the tree later meets all of it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._sizes: dict[int, int | None] = {}  # values by node; None: the walk is inside it
        self._repeated = 0

    def node(self, node: yaml.Node, path: str, depth: int) -> int:
        """The number of values of a node, with those of aliases.

        Raises InputError for a node inside itself, a key that is twice in one mapping, too many
        levels, and aliases that stand for too much.
        """
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in self._sizes:
            return self._alias(node, path)
        if depth >= _DEEPEST:
            raise _too_deep(self._name)
        self._sizes[id(node)] = None
        if isinstance(node, yaml.SequenceNode):
            items = (
                self.node(item, join(path, index), depth + 1)
                for index, item in enumerate(node.value)
            )
        else:
            items = self._members(node, path, depth)
        size = self._sizes[id(node)] = 1 + sum(items)
        return size

    def _alias(self, node: yaml.Node, path: str) -> int:
        size = self._sizes[id(node)]
        if size is None:
            where = f"{self._name}:{node.start_mark.line + 1}"
            raise InputError(where, "a value that holds itself", "a tree")
        self._repeated += size
        if self._repeated > _MOST_REPEATED:
            value = f"an alias of {size:,} values"
            raise InputError(path, value, f"at most {_MOST_REPEATED:,} values by aliases in all")
        return size

    def _members(self, node: yaml.MappingNode, path: str, depth: int) -> Iterator[int]:
        keys: set[str] = set()
        for key, value in node.value:
            where = join(path, str(key.value))
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                where = f"{self._name}:{line}"
                raise InputError(where, "a key that is not a scalar", "a string as key")
            if key.value in keys:
                again = f"the key again in {self._name}:{line}"
                raise InputError(where, again, "the key only once")
            keys.add(key.value)
            yield self.node(value, where, depth + 1)
