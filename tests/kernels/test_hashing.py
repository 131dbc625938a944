"""XXH3-64 in Numba, beside the `xxhash` package."""

import numpy as np
import pytest
import xxhash

from vecsim.kernels.cache import hashing
from vecsim.kernels.compile.jit import entry

WORDS = np.random.default_rng(7).integers(0, 2**32, 4096, dtype=np.uint32)


@entry
def hash_words(words, start, count, seed):
    return hashing.xxh3_64(words, start, count, seed)


@entry
def chain(parent, tokens_hash):
    return hashing.chained(parent, tokens_hash)


@entry
def token(number, k):
    return hashing.output_token(number, k)


def digest(count: int, seed: int, start: int = 0) -> int:
    with np.errstate(over="ignore"):
        return int(hash_words(WORDS, np.int64(start), np.int64(count), np.uint64(seed)))


@pytest.mark.parametrize("seed", [0, 1337, 2**32 + 5, 2**64 - 1])
def test_every_length(seed):
    lengths = [*range(300), 511, 512, 513, 768, 1023, 1024, 1025, 2048, 4000]
    wrong = [
        n for n in lengths if digest(n, seed) != xxhash.xxh3_64_intdigest(WORDS[:n].tobytes(), seed)
    ]
    assert wrong == []


def test_anywhere_in_an_array():
    for start, count in ((1, 3), (5, 17), (2, 60), (3, 64), (7, 400)):
        expected = xxhash.xxh3_64_intdigest(WORDS[start : start + count].tobytes(), 1337)
        assert digest(count, 1337, start) == expected


def test_chained_is_the_hash_of_both():
    pairs = np.random.default_rng(8).integers(0, 2**64, (50, 2), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for parent, own in pairs:
            expected = xxhash.xxh3_64_intdigest(np.array([parent, own]).tobytes(), 1337)
            assert int(chain(parent, own)) == expected


def test_output_tokens():
    """The reference's own values for the requests 1 and 2, and the rule itself."""
    with np.errstate(over="ignore"):
        first = [int(token(np.int64(1), np.int64(k))) for k in range(4)]
        assert first == [2515880452, 3600266899, 2716793611, 2249174135]
        assert int(token(np.int64(2), np.int64(0))) == 1927195132
        for number, k in ((1, 2**31), (2**40 + 12345, 99), (255, 7)):
            data = number.to_bytes(16, "big") + k.to_bytes(8, "little")
            expected = xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF
            assert int(token(np.int64(number), np.int64(k))) == expected
