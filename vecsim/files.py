"""Output files: JSON text, and sets of files that appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vecsim.errors import InputError


def replace_files(
    folder: Path,
    writers: Mapping[str, Callable[[Path], object]],
    *,
    owned: tuple[str, ...],
    overwrite: bool = False,
) -> None:
    """Write files into `folder` under temporary names, then rename all of them.

    Args:
        folder: created with its parents if absent, and removed again if writing fails.
        writers: file name -> function that writes the file at the path it is given.
        owned: all names the set may use; those not written now are removed when overwriting.
        overwrite: replace existing files of the set.

    Raises:
        InputError: `folder` is not a folder, or holds files of the set and `overwrite` is off.
    """
    check_target(folder, owned, overwrite)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in writers}
    try:
        for name, path in temporary.items():
            writers[name](path)
        for name, path in temporary.items():
            path.replace(folder / name)
    except BaseException:
        for path in temporary.values():
            path.unlink(missing_ok=True)
        for path in created:
            if not any(path.iterdir()):
                path.rmdir()
        raise
    for name in owned:
        if name not in writers:
            (folder / name).unlink(missing_ok=True)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write one file under a temporary name beside `path`, then rename it; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_target(folder: Path, names: tuple[str, ...], overwrite: bool) -> None:
    """Raise InputError unless the named files may be written into `folder`.

    What is not a file is never replaced.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError("output folder", str(folder), "a folder, or a name that is not in use")
    for name in names:
        if (folder / name).is_dir():
            raise InputError("output folder", str(folder / name), "a file or nothing, not a folder")
    taken = sorted(name for name in names if (folder / name).exists())
    if taken and not overwrite:
        raise InputError(
            "output folder", str(folder / taken[0]), "no earlier result, unless told to overwrite"
        )


def json_text(tree: Any) -> str:
    """Indented JSON with a final newline; null stands for NaN and infinities.

    Lone surrogates (of a file name that is not UTF-8) are escaped: UTF-8 has no form for them.
    """
    text = json.dumps(_finite(tree), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _finite(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return None
    return tree
