"""Sample data that ships with vecsim."""

from __future__ import annotations

from pathlib import Path


def sample_path() -> Path:
    """Path of `sample.jsonl`, 1,000 requests of multi-turn chats in Mooncake form.

    Hash ids stand for blocks of 512 prompt tokens. `vecsim.data.sample` made the file.
    """
    return Path(__file__).with_name("sample.jsonl")
