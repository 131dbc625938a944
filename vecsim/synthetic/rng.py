"""The reference's random numbers: ChaCha with 12 rounds (reference: traffic, section 5.2)."""

from __future__ import annotations

import math

import numpy as np

from vecsim.errors import InputError

_MULTIPLIER, _INCREMENT = 6364136223846793005, 11634580027462260723
_MASK64, _MASK32 = 2**64 - 1, 2**32 - 1
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
_DOUBLE_ROUNDS = 6
_BATCH = 4096  # blocks of 16 words


def check_seed(name: str, seed: object) -> int:
    """A seed: a whole number from 0 to 2**64 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise InputError(name, seed, "a whole number from 0 to 2**64 - 1")
    if not 0 <= seed <= _MASK64:
        raise InputError(name, seed, "a whole number from 0 to 2**64 - 1")
    return int(seed)


class Random:
    """A stream of draws from a 64-bit seed; equal seeds give equal draws anywhere."""

    def __init__(self, seed: int) -> None:
        self._key = _key(check_seed("seed", seed))
        self._counter = 0
        self._words = np.zeros(0, np.uint32)
        self._at = 0

    def words(self, count: int) -> np.ndarray:
        """The next `count` words: uint32 [count]."""
        parts = []
        while count > 0:
            if self._at == len(self._words):
                blocks = min(_BATCH, -(-count // 16))
                self._words = _blocks(self._key, self._counter, blocks)
                self._counter += blocks
                self._at = 0
            part = self._words[self._at : self._at + count]
            self._at += len(part)
            count -= len(part)
            parts.append(part)
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32)

    def uniform(self, count: int) -> np.ndarray:
        """float64 [count] in [0, 1): the upper 53 bits of two words each, the low word first."""
        low, high = self.words(2 * count).astype(np.uint64).reshape(-1, 2).T
        return ((high << np.uint64(32) | low) >> np.uint64(11)) * 2.0**-53

    def below(self, n: int, count: int) -> np.ndarray:
        """int64 [count] of integers below `n` (1 to 2**32 - 1), one or two words each."""
        result = np.empty(count, np.int64)
        limit = (2**32 - n) % 2**32
        for k in range(count):
            product = int(self.words(1)[0]) * n
            value, low = product >> 32, product & _MASK32
            if low > limit:
                value += (low + (int(self.words(1)[0]) * n >> 32)) >> 32
            result[k] = value
        return result

    def exponential(self, mean: float, count: int) -> np.ndarray:
        """float64 [count] of the exponential distribution."""
        u = np.clip(1.0 - self.uniform(count), np.finfo(np.float64).tiny, 1.0)
        # math.log, not NumPy's: the last bit is the reference's.
        return np.array([-mean * math.log(value) for value in u.tolist()])

    def normal(self, count: int) -> np.ndarray:
        """float64 [count] of the standard normal distribution, by Box and Muller."""
        u = self.uniform(2 * count).reshape(-1, 2)
        radius = np.sqrt(-2.0 * np.log(np.maximum(1.0 - u[:, 0], np.finfo(np.float64).tiny)))
        return radius * np.cos(2.0 * np.pi * u[:, 1])

    def gamma(self, shape: float, scale: float, count: int) -> np.ndarray:
        """float64 [count] of the gamma distribution, by Marsaglia and Tsang."""
        boosted = shape if shape >= 1.0 else shape + 1.0
        d = boosted - 1.0 / 3.0
        c = 1.0 / math.sqrt(9.0 * d)
        result = np.empty(0)
        while len(result) < count:
            missing = count - len(result)
            x = self.normal(missing)
            v = (1.0 + c * x) ** 3
            u = np.maximum(self.uniform(missing), np.finfo(np.float64).tiny)
            with np.errstate(invalid="ignore", divide="ignore"):
                taken = (v > 0) & (np.log(u) < 0.5 * x * x + d - d * v + d * np.log(v))
            result = np.concatenate([result, d * v[taken]])
        if shape < 1.0:
            result = result * (1.0 - self.uniform(count)) ** (1.0 / shape)
        return result * scale


def _key(seed: int) -> list[int]:
    words, state = [], seed
    for _ in range(8):
        state = (state * _MULTIPLIER + _INCREMENT) & _MASK64
        x = (((state >> 18) ^ state) >> 27) & _MASK32
        turn = state >> 59
        words.append((x >> turn | x << (32 - turn)) & _MASK32)
    return words


def _blocks(key: list[int], counter: int, count: int) -> np.ndarray:
    """uint32 [count * 16]: the key stream of `count` blocks."""
    numbers = np.arange(counter, counter + count, dtype=np.uint64)
    start = np.zeros((16, count), np.uint32)
    for k, word in enumerate((*_CONSTANTS, *key)):
        start[k] = word
    start[12] = (numbers & np.uint64(_MASK32)).astype(np.uint32)
    start[13] = (numbers >> np.uint64(32)).astype(np.uint32)
    state = start.copy()
    for _ in range(_DOUBLE_ROUNDS):
        for a, b, c, d in (*_COLUMNS, *_DIAGONALS):
            _quarter_round(state, a, b, c, d)
    return (state + start).T.reshape(-1)


def _quarter_round(x: np.ndarray, a: int, b: int, c: int, d: int) -> None:
    for left, right, target, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x[left] += x[right]
        x[target] ^= x[left]
        x[target] = x[target] << np.uint32(turn) | x[target] >> np.uint32(32 - turn)
