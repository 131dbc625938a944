"""Output files: JSON text, and sets of files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vecsim.errors import InputError, VecsimError


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
    for name in writers:
        _remove_left_over(folder / name)
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in writers}
    try:
        for name, path in temporary.items():
            with _one_line(folder / name):
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
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    with _one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(path)
        try:
            write(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Try to make a file beside `path`, before a run rather than after it.

    Raises:
        VecsimError: its folder cannot be made or written to.
    """
    replace_file(path.parent / f".{path.name}.try", lambda file: file.write_bytes(b""))
    (path.parent / f".{path.name}.try").unlink()


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turn what the system, Polars or its panics say of a failed write into one line."""
    try:
        yield
    except (VecsimError, KeyboardInterrupt):
        raise
    except BaseException as error:
        written_by_polars = type(error).__module__.startswith(("polars", "pyo3"))
        if not written_by_polars and not isinstance(error, OSError):
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise VecsimError(f"{path}: cannot be written: {reason}") from None


def _remove_left_over(path: Path) -> None:
    """Remove temporary files of `path` whose processes are gone."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = left.name.split(".")[-2]
        if pid.isdigit() and not _runs(int(pid)):
            left.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of somebody else; no such number
        return True
    return True


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
            "output folder", str(folder / taken[0]), "no earlier result, or --overwrite"
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
