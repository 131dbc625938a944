"""Bytes of a trace file: decompressed by content, without a byte order mark, as numbered lines."""

from __future__ import annotations

import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from vecsim.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_UTF8_MARK = b"\xef\xbb\xbf"
_PARQUET_MAGIC = b"PAR1"

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class TraceFile:
    """Text of a trace.

    Attributes:
        name: the path as the user gave it; error messages start with it.
        data: UTF-8 text, decompressed, without a byte order mark.
    """

    name: str
    data: bytes

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, text) of every line that is not blank."""
        for number, line in enumerate(io.BytesIO(self.data), 1):
            if line.strip():
                yield number, line.removesuffix(b"\n")

    def row_numbers(self, rows: int) -> np.ndarray | None:
        """int64 [rows] numbers of the lines that are not blank; None unless there are `rows`."""
        unfinished = bool(self.data) and not self.data.endswith(b"\n")
        if self.data.count(b"\n") + unfinished == rows > 0:
            return np.arange(1, rows + 1)
        numbers = np.array([number for number, _ in self.lines()], np.int64)
        return numbers if len(numbers) == rows > 0 else None

    def head(self, rows: int) -> TraceFile:
        """Up to and including the line with the `rows`-th row, a line that is not blank."""
        end = 0
        while rows > 0:
            start, end = end, self.data.find(b"\n", end) + 1
            if end == 0:
                return self
            rows -= bool(self.data[start:end].strip())
        return TraceFile(self.name, self.data[:end])

    def position(self, offset: int) -> str:
        """`name:line:column` of a byte."""
        line = self.data.count(b"\n", 0, offset) + 1
        column = offset - self.data.rfind(b"\n", 0, offset)
        return f"{self.name}:{line}:{column}"


def read_file(path: str | os.PathLike[str]) -> TraceFile:
    """Read a plain, gzip or Zstandard file; the content decides which, not the name.

    Raises:
        InputError: no readable file there, damaged compression, or text that is not UTF-8.
    """
    name = os.fspath(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError("trace file", name, f"a readable file ({error.strerror})") from None
    if data.startswith(_GZIP_MAGIC):
        data = _gunzip(name, data)
    elif data.startswith(_ZSTD_MAGIC):
        data = _unzstd(name, data)
    file = TraceFile(name, data.removeprefix(_UTF8_MARK))
    if not data.startswith(_PARQUET_MAGIC):
        _check_utf8(file)
    return file


def expand(path: Paths) -> list[str]:
    """The files that a path, a glob, a folder or a list of them stands for, sorted within each.

    A folder stands for all files in it and below, hidden ones apart.

    Raises:
        InputError: a glob or folder without files, or no path at all.
    """
    if isinstance(path, str | os.PathLike):
        return _expand_one(os.fspath(path))
    if not isinstance(path, Sequence):
        raise InputError("path", path, "a path, or a list of paths")
    found = [name for one in path for name in expand(one)]
    if not found:
        raise InputError("path", list(path), "at least one file")
    return found


def _expand_one(name: str) -> list[str]:
    path = Path(name)
    if path.is_dir():
        inside = (p for p in path.rglob("*") if p.is_file())
        found = [p for p in inside if not any(part.startswith(".") for part in _below(p, path))]
        if not found:
            raise InputError("trace folder", name, "a folder that holds files")
        return [str(p) for p in sorted(found)]
    if path.exists() or not any(mark in name for mark in "*?["):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    files = [match for match in found if Path(match).is_file()]
    if not files:
        raise InputError("trace files", name, "a pattern that some file matches")
    return files


def _below(path: Path, folder: Path) -> tuple[str, ...]:
    return path.relative_to(folder).parts


def _gunzip(name: str, data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(name, str(error), "a complete gzip stream") from None


def _unzstd(name: str, data: bytes) -> bytes:
    """Decompress through Polars, which brings its own Zstandard."""
    try:
        lines = pl.read_lines(io.BytesIO(data)).to_series()
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).split("\n", 1)[0]
        raise InputError(name, reason, "a complete Zstandard stream of UTF-8 text") from None
    return "\n".join(lines.to_list()).encode()


def _check_utf8(file: TraceFile) -> None:
    if file.data.isascii():
        return
    try:
        file.data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{file.data[error.start]:02x}"
        raise InputError(file.position(error.start), byte, "UTF-8 text") from None
