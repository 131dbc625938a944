"""Trace files as text, for tests."""

from __future__ import annotations

import json
from pathlib import Path

MOONCAKE = (
    '{"timestamp": 300, "input_length": 600, "output_length": 4, "hash_ids": [1000, 1001]}\n'
    '{"timestamp": 100, "input_length": 500, "output_length": 3, "hash_ids": [1000]}\n'
    '{"timestamp": 100.5, "input_length": 0, "output_length": 0, "hash_ids": []}\n'
)
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,8\n"
    "2023-11-16 18:17:03.9799601,110,27\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00+00:00,2162,5\n"
    "2024-05-10 00:00:00.017335+00:00,2399,6\n"
    "2024-05-12 00:00:00.1+00:00,76,15\n"
)


def write(folder: Path, data: str | bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def line(**changes) -> str:
    """One Mooncake row as JSON; None removes a field."""
    row = {"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]} | changes
    return json.dumps({name: value for name, value in row.items() if value is not None}) + "\n"


def zstd_frame(data: bytes) -> bytes:
    """A Zstandard frame of stored blocks (RFC 8878); its window is 1 MiB."""
    out = bytearray(b"\x28\xb5\x2f\xfd\x00\x50")
    chunks = [data[at : at + 100_000] for at in range(0, len(data), 100_000)] or [b""]
    for k, chunk in enumerate(chunks):
        last = k == len(chunks) - 1
        out += (len(chunk) << 3 | last).to_bytes(3, "little") + chunk
    return bytes(out)
