"""Prompt content of synthetic requests: which blocks are common, which are unique."""

from __future__ import annotations

import numpy as np

from vecsim.errors import InputError
from vecsim.workload.columns import offsets_of

_MOST_IDS = 2**32


def prompt_blocks(
    input_length: np.ndarray,
    block: int,
    ratio: float,
    group: np.ndarray,
    cached_tokens: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [n + 1] offsets, uint32 ids): ceil(length / block) content blocks per prompt.

    Of a prompt of n blocks the first round(n * ratio) (halves up) are those of its group, block by
    block; of these the first cached_tokens // block are common to all. All others are unique
    (reference: traffic, section 5.3).

    Args:
        input_length: int64 [n], tokens.
        block: tokens of a block.
        ratio: shared part, 0 to 1.
        group: int64 [n], group of each row.
        cached_tokens: int64 [n], tokens at the start that are common to all rows.

    Raises:
        InputError: more than 2**32 distinct blocks.
    """
    counts = -(-input_length // block)
    shared = np.minimum(np.floor(counts * ratio + 0.5).astype(np.int64), counts)
    common = np.minimum(cached_tokens // block, counts)
    offsets = offsets_of(counts)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    is_common = position < np.repeat(common, counts)
    is_shared = ~is_common & (position < np.repeat(shared, counts))
    width = int(counts.max(initial=0))
    groups = int(group.max(initial=0)) + 1
    unique = ~is_common & ~is_shared
    first_unique = width * (1 + groups)
    total = first_unique + int(np.count_nonzero(unique))
    if total > _MOST_IDS:
        raise InputError("requests", len(counts), f"at most {_MOST_IDS} blocks of prompt content")
    ids = np.where(is_common, position, width * (1 + np.repeat(group, counts)) + position)
    ids[unique] = first_unique + np.arange(np.count_nonzero(unique))
    return offsets, ids.astype(np.uint32)
