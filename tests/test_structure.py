"""The house: which folder imports from which, no circles, no crowded folders, Numba's inside."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = (
    ("errors", "files"),
    ("config",),
    ("kernels",),
    ("workload", "timing"),
    ("traces", "synthetic"),
    ("run",),
    ("results",),
    ("sweeps",),
    ("plots",),
    ("cli", "engine", "__main__", "__init__"),
)
"""Each folder or module of vecsim imports from its own row and those above."""
KERNELS = ("compile", "state", "timing", "cache", "sched", "fleet")
MOST_MODULES = 14


def modules() -> dict[str, Path]:
    """Dotted name -> file, of vecsim and its kernels."""
    found = {}
    for folder, package in ((ROOT / "vecsim", "vecsim"), (ROOT / "kernels", "vecsim.kernels")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            found[name] = path
    return found


MODULES = modules()


def imports_of(path: Path, at_load: bool) -> Iterator[str]:
    """Modules of vecsim that a file imports: when it is loaded, or also inside functions; what is
    there for type checkers only does not count."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        hidden = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if hidden or (at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            skipped |= {id(inside) for inside in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            name = whole if whole in MODULES else node.module
            if name in MODULES:
                yield name


def graph(at_load: bool) -> dict[str, set[str]]:
    return {name: set(imports_of(path, at_load)) - {name} for name, path in MODULES.items()}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other."""
    reach = {name: set(targets) for name, targets in edges.items()}
    changed = True
    while changed:
        changed = False
        for targets in reach.values():
            more = (
                set().union(*(reach[target] for target in targets)) - targets if targets else set()
            )
            if more:
                targets |= more
                changed = True
    groups = {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in reach
        if name in reach[name]
    }
    return sorted(sorted(group) for group in groups)


def test_no_module_needs_itself_to_be_loaded():
    assert circles(graph(at_load=True)) == []


def place_of(name: str) -> int:
    head = name.split(".")[1] if "." in name else "__init__"
    return next(k for k, row in enumerate(ORDER) if head in row)


def test_nothing_imports_upward():
    upward = {
        f"{name} -> {target}"
        for name, targets in graph(at_load=True).items()
        for target in targets
        if place_of(target) > place_of(name)
    }
    assert upward == set()


def test_kernels_import_kernels_alone_and_in_order():
    def at(name: str) -> int:
        head = name.split(".")[2] if name.count(".") > 1 else "entries"
        return KERNELS.index(head) if head in KERNELS else len(KERNELS)

    for name, targets in graph(at_load=False).items():
        if name.startswith("vecsim.kernels"):
            wrong = [t for t in targets if not t.startswith("vecsim.kernels") or at(t) > at(name)]
            assert wrong == [], name


@pytest.mark.parametrize("top", ["vecsim", "kernels"])
def test_no_folder_is_crowded(top):
    for folder in [ROOT / top, *(p for p in (ROOT / top).rglob("*") if p.is_dir())]:
        own = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(own) <= MOST_MODULES or folder.name == "traces", folder


def test_the_inside_of_numba_is_touched_in_one_folder():
    for name, path in MODULES.items():
        if name.startswith("vecsim.kernels.compile"):
            continue
        text = path.read_text()
        for inside in ("numba.core.", "numba.np.", "numba.cpython"):
            assert inside not in text, (name, inside)
