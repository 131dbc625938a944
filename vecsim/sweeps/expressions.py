"""Small arithmetic and logical expressions over named values, evaluated without `eval`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vecsim.errors import InputError

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
_FUNCTIONS = {"min": min, "max": max, "abs": abs}
_LONGEST = 2000  # characters
_DEEPEST = 100
_MOST_BITS = 1024  # of a whole number
_EXPECTED = (
    "names, numbers and strings under + - * / // %, comparisons, and, or, not, min, max, abs"
)


@dataclass(frozen=True)
class Expression:
    """A parsed expression.

    Attributes:
        where: what errors call it, e.g. `constraints[0]`.
        text: as written.
    """

    where: str
    text: str
    _tree: ast.expr

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """The value of the expression; `holds` wants a condition.

        Args:
            values: by name; a name may be a dotted path, of which the last part suffices where
                only one path ends in it.

        Raises:
            InputError: an unknown or ambiguous name, or values that do not fit together.
        """
        try:
            return self._visit(self._tree, values)
        except (TypeError, ArithmeticError, ValueError) as error:
            raise InputError(self.where, self.text, f"values that fit ({error})") from None

    def holds(self, values: Mapping[str, Any]) -> bool:
        """The truth of the expression. Raises InputError as `evaluate`, and when it is no
        condition."""
        value = self.evaluate(values)
        if not isinstance(value, bool):
            raise InputError(self.where, self.text, "a condition such as 'workers * tp <= 64'")
        return value

    def _visit(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name | ast.Attribute):
            return self._look_up(_dotted(node), values)
        if isinstance(node, ast.UnaryOp):
            operand = self._visit(node.operand, values)
            negates = isinstance(node.op, ast.Not)
            return not operand if negates else _UNARY[type(node.op)](_number(operand))
        if isinstance(node, ast.BinOp):
            left, right = self._visit(node.left, values), self._visit(node.right, values)
            return _number(_BINARY[type(node.op)](_number(left), _number(right)))
        if isinstance(node, ast.BoolOp):
            wanted = isinstance(node.op, ast.Or)
            return (
                any(self._visit(v, values) for v in node.values)
                if wanted
                else all(self._visit(v, values) for v in node.values)
            )
        if isinstance(node, ast.Compare):
            return self._compare(node, values)
        arguments = [self._visit(argument, values) for argument in node.args]
        return _FUNCTIONS[node.func.id](*arguments)

    def _compare(self, node: ast.Compare, values: Mapping[str, Any]) -> bool:
        left = self._visit(node.left, values)
        for op, other in zip(node.ops, node.comparators, strict=True):
            right = self._visit(other, values)
            if not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _look_up(self, name: str, values: Mapping[str, Any]) -> Any:
        if name in values:
            return values[name]
        found = [path for path in values if path.rpartition(".")[2] == name]
        if len(found) == 1:
            return values[found[0]]
        wanted = " or ".join(found) if found else f"one of {', '.join(values)}"
        raise InputError(self.where, name, wanted)


def _number(value: Any) -> int | float:
    """The value, if it is a number that is not too long to compute with."""
    if not isinstance(value, int | float):
        raise TypeError(f"{type(value).__name__} is no number")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"a whole number of more than {_MOST_BITS} bits")
    return value


def parse_expression(where: str, text: str) -> Expression:
    """Parse one expression. Raises InputError when it is more than arithmetic and logic."""
    if not isinstance(text, str):
        raise InputError(where, text, "an expression such as 'workers * tp <= 64'")
    if len(text) > _LONGEST:
        raise InputError(where, text, f"at most {_LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        depth = _depth(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(where, text, _EXPECTED) from None
    if depth > _DEEPEST:
        raise InputError(where, text, f"at most {_DEEPEST} operators in one another")
    _check(where, text, tree)
    return Expression(where, text, tree)


def _depth(tree: ast.expr) -> int:
    """Levels of nodes in one another, counted without recursion."""
    depth, level = 0, [tree]
    while level:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return depth


def _check(where: str, text: str, node: ast.expr) -> None:
    children: list[ast.expr] = []
    allowed = True
    if isinstance(node, ast.Constant):
        allowed = isinstance(node.value, int | float | str | None)
    elif isinstance(node, ast.Name | ast.Attribute):
        allowed = _dotted(node) is not None
    elif isinstance(node, ast.UnaryOp):
        allowed, children = type(node.op) in _UNARY, [node.operand]
    elif isinstance(node, ast.BinOp):
        allowed, children = type(node.op) in _BINARY, [node.left, node.right]
    elif isinstance(node, ast.BoolOp):
        children = node.values
    elif isinstance(node, ast.Compare):
        allowed = all(type(op) in _COMPARE for op in node.ops)
        children = [node.left, *node.comparators]
    elif isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        allowed, children = known and bool(node.args) and not node.keywords, node.args
    else:
        allowed = False
    if not allowed:
        raise InputError(where, text, _EXPECTED)
    for child in children:
        _check(where, text, child)


def _dotted(node: ast.expr) -> str | None:
    """`a.b.c` of nested attributes; None for attributes of anything but names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    return None
