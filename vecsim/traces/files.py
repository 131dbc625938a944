"""Bytes of a trace file: decompressed by content, without a byte order mark, as numbered lines."""

from __future__ import annotations

import glob
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vecsim.errors import InputError
from vecsim.traces.packed import ENDINGS, most_bytes, too_large, unpacked

_UTF8_MARK = b"\xef\xbb\xbf"
_PARQUET_MAGIC = b"PAR1"
_JSON = json.JSONDecoder()
_PART = 1 << 24
_BLANK = re.compile(rb"\s*")
_SHELL_PIPES = re.compile(r"/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+")
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
)

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class TraceFile:
    """Text of a trace.

    Attributes:
        name: the path as the user gave it; error messages start with it.
        data: UTF-8 text, decompressed, without a byte order mark.
        source: name within its corpus, for formats that name their rows by it.
    """

    name: str
    data: bytes
    source: str = ""

    @cached_property
    def begin(self) -> int:
        """Position of the first byte that is not blank; the size of the text if there is none."""
        return _BLANK.match(self.data).end()

    @property
    def is_parquet(self) -> bool:
        """Whether it is no text but a Parquet file."""
        return self.data.startswith(_PARQUET_MAGIC)

    @property
    def is_json(self) -> bool:
        """Whether the text begins like JSON."""
        return self.data[self.begin : self.begin + 1] in (b"{", b"[")

    @cached_property
    def first_object(self) -> dict[str, Any]:
        """The first JSON object of the text, or of the array that it is; empty if there is none."""
        begin = self.begin
        if self.data.startswith(b"[", begin):
            begin = _BLANK.match(self.data, begin + 1).end()
        if not self.data.startswith(b"{", begin):
            return {}
        end = self.data.find(b"\n", begin)
        value = _first_value(self.data[begin : None if end < 0 else end])
        if value is None and end >= 0:  # it goes on on the next line
            value = _first_value(self.data[begin:])
        return value if isinstance(value, dict) else {}

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, text) of every line that is not blank."""
        data, end, number = self.data, 0, 1
        while (begin := _BLANK.match(data, end).end()) < len(data):
            number += data.count(b"\n", end, begin)
            start = max(end, data.rfind(b"\n", end, begin) + 1)
            end = data.find(b"\n", begin)
            if end < 0:
                end = len(data)
            yield number, data[start:end]

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


def _first_value(text: bytes) -> Any:
    """The JSON value that a text begins with; None if there is none."""
    try:
        return _JSON.raw_decode(text.decode(errors="replace"))[0]
    except (ValueError, RecursionError):
        return None


def read_file(path: str | os.PathLike[str], source: str = "") -> TraceFile:
    """Read a plain, gzip or Zstandard file; the content decides which, not the name.

    Raises:
        InputError: no readable file there, damaged compression, or text that is not UTF-8.
    """
    name = os.fspath(path)
    data = unpacked(name, _read_bytes(name))
    file = TraceFile(name, data.removeprefix(_UTF8_MARK), source)
    if not file.is_parquet:
        _check_utf8(file)
    return file


def _read_bytes(name: str) -> bytes:
    """The bytes of a regular file, or of a pipe that the shell made."""
    most = most_bytes()
    try:
        mode = os.stat(name).st_mode
        kind = next((kind for test, kind in _KINDS if test(mode)), None)
        if kind is not None and not (stat.S_ISFIFO(mode) and _SHELL_PIPES.fullmatch(name)):
            raise InputError("trace file", name, f"a regular file, not {kind}")
        with open(name, "rb") as file:
            data = file.read() if kind is None else b"".join(_parts(file, most))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError("trace file", name, f"a readable file ({reason})") from None
    if len(data) > most:
        raise too_large(name, f"more than {most:,} bytes")
    return data


def _parts(file: BinaryIO, most: int) -> Iterator[bytes]:
    """What a pipe gives, up to a part more than `most` bytes."""
    size = 0
    while size <= most and (part := file.read(_PART)):
        size += len(part)
        yield part


def expand(path: Paths, endings: tuple[str, ...] = ()) -> list[str]:
    """The files that a path, a glob, a folder or a list of them stands for, sorted within each.

    A folder stands for all files in it and below, hidden ones apart; with `endings`, for those
    that end so, compressed or not, in any case.

    Raises:
        InputError: a glob or folder without files, or no path at all.
    """
    if isinstance(path, str | os.PathLike):
        return _expand_one(os.fspath(path), endings)
    if not isinstance(path, Sequence):
        raise InputError("path", path, "a path, or a list of paths")
    found = [name for one in path for name in expand(one, endings)]
    if not found:
        raise InputError("path", list(path), "at least one file")
    return found


def _expand_one(name: str, endings: tuple[str, ...]) -> list[str]:
    path = Path(name)
    if path.is_dir():
        inside = [p for p in path.rglob("*") if p.is_file()]
        if endings:
            found = [p for p in inside if without_packing(p.name).lower().endswith(endings)]
        else:
            found = [p for p in inside if not any(s.startswith(".") for s in _below(p, path))]
        if not found:
            kinds = f" {' or '.join(endings)}" if endings else ""
            raise InputError("trace folder", name, f"a folder that holds{kinds} files")
        return [str(p) for p in sorted(found, key=lambda p: os.fsencode(_inside(p, path)))]
    if path.exists() or not any(mark in name for mark in "*?["):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    files = [match for match in found if Path(match).is_file()]
    if not files:
        raise InputError("trace files", name, "a pattern that some file matches")
    return files


def corpus_names(path: Paths, files: Sequence[str]) -> list[str]:
    """The name of each file within its corpus: below the folder that holds them all.

    A compressed file is called as what it holds.
    """
    while not isinstance(path, str | os.PathLike) and len(path) == 1:
        path = path[0]
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        folder = Path(path)
    else:
        folder = Path(os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in files]))
        files = [os.path.abspath(file) for file in files]
    return [without_packing(_inside(Path(file), folder)) for file in files]


def without_packing(name: str) -> str:
    """A file name without the ending of a compressed file."""
    stem, ending = os.path.splitext(name)
    return stem if ending.lower() in ENDINGS else name


def _inside(path: Path, folder: Path) -> str:
    return "/".join(_below(path, folder))


def _below(path: Path, folder: Path) -> tuple[str, ...]:
    return path.relative_to(folder).parts


def _check_utf8(file: TraceFile) -> None:
    if file.data.isascii():
        return
    try:
        file.data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{file.data[error.start]:02x}"
        raise InputError(file.position(error.start), byte, "UTF-8 text") from None
