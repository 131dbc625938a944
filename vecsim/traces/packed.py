"""Decompression of what fits into memory."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator

import polars as pl

from vecsim.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ENDINGS = (".gz", ".zst")
_STEP = 1 << 24
_ZSTD_BLOCK = 1 << 17  # no block of a Zstandard frame holds more
_ZSTD_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
_UNKNOWN_MEMORY = 8 << 30


def unpacked(name: str, data: bytes) -> bytes:
    """Decompressed bytes of what is gzip or Zstandard by content; anything else as it is.

    Raises:
        InputError: damaged data, or more than half of the machine's memory when decompressed.
    """
    if data.startswith(GZIP_MAGIC):
        return _gunzip(name, data)
    if data.startswith(ZSTD_MAGIC):
        return _unzstd(name, data)
    return data


def most_bytes() -> int:
    """Bytes of text that a reader takes: half of the machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN_MEMORY


def too_large(name: str, size: str) -> InputError:
    """The error of a text that is larger than `most_bytes`."""
    return InputError(name, size, f"at most {most_bytes():,} bytes of text, half of the memory")


def _gunzip(name: str, data: bytes) -> bytes:
    parts, size, most = [], 0, most_bytes()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            while part := stream.read(_STEP):
                parts.append(part)
                size += len(part)
                if size > most:
                    raise too_large(name, f"more than {most:,} bytes when decompressed")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(name, str(error), "a complete gzip stream") from None
    return b"".join(parts)


def _unzstd(name: str, data: bytes) -> bytes:
    """Decompress through Polars, which brings its own Zstandard."""
    size = sum(_zstd_sizes(data))
    if size > most_bytes():
        raise too_large(name, f"up to {size:,} bytes when decompressed")
    try:
        lines = pl.read_lines(io.BytesIO(data)).to_series()
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).split("\n", 1)[0]
        raise InputError(name, reason, "a complete Zstandard stream of UTF-8 text") from None
    return "\n".join(lines.to_list()).encode()


def _zstd_sizes(data: bytes) -> Iterator[int]:
    """The most that each frame, or each block of one without a size, can hold (RFC 8878, 3.1).

    What is damaged ends the walk: decompression will say so.
    """
    position = 0
    while position + 8 <= len(data):
        magic = int.from_bytes(data[position : position + 4], "little")
        position += 4
        if magic in _ZSTD_SKIPPABLE:
            position += 4 + int.from_bytes(data[position : position + 4], "little")
            continue
        if magic != int.from_bytes(ZSTD_MAGIC, "little"):
            return
        descriptor = data[position]
        single = descriptor >> 5 & 1
        position += 1 + (not single) + (0, 1, 2, 4)[descriptor & 3]
        width = (single, 2, 4, 8)[descriptor >> 6]
        known = int.from_bytes(data[position : position + width], "little") + 256 * (width == 2)
        position += width
        if width:
            yield known
        last = 0
        while not last and position + 3 <= len(data):
            header = int.from_bytes(data[position : position + 3], "little")
            last, kind, size = header & 1, header >> 1 & 3, header >> 3
            position += 3 + (1 if kind == 1 else size)
            if not width:
                yield size if kind < 2 else _ZSTD_BLOCK
        position += 4 * (descriptor >> 2 & 1)
