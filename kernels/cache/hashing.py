"""XXH3-64 of 32-bit words, and the two hashes of a KV block that are made of it.

`tokens_hash` is the hash of a block's token ids as little-endian u32; `block_hash` chains it to the
block before: the hash of (block_hash of that block, own tokens_hash) as little-endian u64, and for
the first block of a sequence the tokens_hash itself. Both are seeded with 1337 (reference: vLLM
backend, section 5). Everything that is hashed here is whole 32-bit words, so lengths count words.

Above 240 bytes XXH3 keeps eight accumulators, of which only neighbours (0 and 1, 2 and 3, ...) ever
meet: each pair walks the input on its own, and no working memory is needed.
"""

from __future__ import annotations

import numpy as np

from vecsim.kernels.compile.jit import inner

SEED = np.uint64(1337)

_SECRET_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SECRET = np.array(
    [int.from_bytes(_SECRET_BYTES[at : at + 8], "little") for at in range(len(_SECRET_BYTES) - 7)],
    np.uint64,
)
"""The 64-bit words that begin at each byte of XXH3's default secret."""

_LOW_32 = np.uint64(0xFFFFFFFF)
_PRIME32_1 = np.uint64(0x9E3779B1)
_PRIME32_2 = np.uint64(0x85EBCA77)
_PRIME32_3 = np.uint64(0xC2B2AE3D)
_PRIME64_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME64_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME64_3 = np.uint64(0x165667B19E3779F9)
_PRIME64_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME64_5 = np.uint64(0x27D4EB2F165667C5)
_PRIME_MX1 = np.uint64(0x165667919E3779F9)
_PRIME_MX2 = np.uint64(0x9FB21C651E98DF25)

_STRIPE = np.int64(16)  # words that one step of the eight accumulators takes in
_STRIPES_A_BLOCK = np.int64(16)  # the secret's 192 bytes, less one stripe, in steps of 8
_SCRAMBLE_AT = np.int64(128)
_LAST_STRIPE_AT = np.int64(121)
_MERGE_AT = np.int64(11)
_SECRET_END_AT = np.int64(119)
"""Where the last 16 of 129 to 240 bytes meet the secret: 136 bytes less 17."""


@inner
def _word(words, at):
    """The 64-bit word that begins at 32-bit word `at`."""
    return np.uint64(words[at]) | (np.uint64(words[at + 1]) << np.uint64(32))


@inner
def _fold(a, b):
    """Low and high half of the 128-bit product, folded by xor."""
    half = np.uint64(32)
    a_low, a_high = a & _LOW_32, a >> half
    b_low, b_high = b & _LOW_32, b >> half
    low = a_low * b_low
    cross = a_high * b_low + (low >> half)
    other = a_low * b_high + (cross & _LOW_32)
    high = a_high * b_high + (cross >> half) + (other >> half)
    return (a * b) ^ high


@inner
def _xxh64_avalanche(h):
    h = h ^ (h >> np.uint64(33))
    h = h * _PRIME64_2
    h = h ^ (h >> np.uint64(29))
    h = h * _PRIME64_3
    return h ^ (h >> np.uint64(32))


@inner
def _avalanche(h):
    h = h ^ (h >> np.uint64(37))
    h = h * _PRIME_MX1
    return h ^ (h >> np.uint64(32))


@inner
def _mix_16(words, at, secret, seed):
    """16 bytes of input against 16 of the secret, from byte `secret` on."""
    low = _word(words, at) ^ (_SECRET[secret] + seed)
    high = _word(words, at + 2) ^ (_SECRET[secret + 8] - seed)
    return _fold(low, high)


@inner
def _swap_bytes(x):
    """The bytes of a 64-bit word in reverse order."""
    low_bytes = np.uint64(0x00FF00FF00FF00FF)
    low_pairs = np.uint64(0x0000FFFF0000FFFF)
    x = ((x >> np.uint64(8)) & low_bytes) | ((x & low_bytes) << np.uint64(8))
    x = ((x >> np.uint64(16)) & low_pairs) | ((x & low_pairs) << np.uint64(16))
    return (x >> np.uint64(32)) | (x << np.uint64(32))


@inner
def _short(words, start, count, seed):
    """0 to 4 words."""
    if count == 0:
        return _xxh64_avalanche(seed ^ (_SECRET[56] ^ _SECRET[64]))
    length = np.uint64(count) * np.uint64(4)
    if count <= 2:
        low = np.uint64(words[start])
        seed ^= (_swap_bytes(seed & _LOW_32) >> np.uint64(32)) << np.uint64(32)
        flip = (_SECRET[8] ^ _SECRET[16]) - seed
        last = np.uint64(words[start + count - 1])
        h = (last + (low << np.uint64(32))) ^ flip
        h ^= (h << np.uint64(49) | h >> np.uint64(15)) ^ (h << np.uint64(24) | h >> np.uint64(40))
        h = h * _PRIME_MX2
        h ^= (h >> np.uint64(35)) + length
        h = h * _PRIME_MX2
        return h ^ (h >> np.uint64(28))
    low = _word(words, start) ^ ((_SECRET[24] ^ _SECRET[32]) + seed)
    high = _word(words, start + count - 2) ^ ((_SECRET[40] ^ _SECRET[48]) - seed)
    return _avalanche(length + _swap_bytes(low) + high + _fold(low, high))


@inner
def _medium(words, start, count, seed):
    """5 to 60 words."""
    h = np.uint64(count) * np.uint64(4) * _PRIME64_1
    end = start + count
    if count <= 32:
        for back in range((count - 1) // 8 + 1):
            h += _mix_16(words, start + 4 * back, 32 * back, seed)
            h += _mix_16(words, end - 4 - 4 * back, 32 * back + 16, seed)
        return _avalanche(h)
    for step in range(8):
        h += _mix_16(words, start + 4 * step, 16 * step, seed)
    h = _avalanche(h)
    for step in range(8, count // 4):
        h += _mix_16(words, start + 4 * step, 16 * (step - 8) + 3, seed)
    return _avalanche(h + _mix_16(words, end - 4, _SECRET_END_AT, seed))


@inner
def _seeded_word(at, seed):
    """The secret, its words made up with the seed in turn, at a multiple of 8 bytes."""
    if at & np.int64(8) == 0:
        return _SECRET[at] + seed
    return _SECRET[at] - seed


@inner
def _seeded(at, seed):
    """The secret made up with the seed, at any byte."""
    inside = np.uint64((at & np.int64(7)) * np.int64(8))
    word = _seeded_word(at & np.int64(-8), seed)
    if inside == np.uint64(0):
        return word
    following = _seeded_word((at & np.int64(-8)) + np.int64(8), seed)
    return (word >> inside) | (following << (np.uint64(64) - inside))


@inner
def _accumulate(words, at, secret, seed, even, odd):
    """Take two 64-bit words of a stripe into a pair of accumulators."""
    one, other = _word(words, at), _word(words, at + 2)
    half = np.uint64(32)
    key = one ^ _seeded(secret, seed)
    other_key = other ^ _seeded(secret + 8, seed)
    even += other + (key & _LOW_32) * (key >> half)
    odd += one + (other_key & _LOW_32) * (other_key >> half)
    return even, odd


@inner
def _scramble(accumulator, secret, seed):
    mixed = accumulator ^ (accumulator >> np.uint64(47)) ^ _seeded(secret, seed)
    return mixed * _PRIME32_1


@inner
def _walk_pair(words, start, count, seed, pair, even, odd):
    """What a pair of accumulators (`pair` 0 to 3, from their initial values) adds to the hash."""
    at = start + 4 * pair
    inside = 16 * pair
    stripe = np.int64(0)
    for _ in range((count - 1) // _STRIPE):
        secret = 8 * stripe + inside
        even, odd = _accumulate(words, at, secret, seed, even, odd)
        at += _STRIPE
        stripe += 1
        if stripe == _STRIPES_A_BLOCK:
            even = _scramble(even, _SCRAMBLE_AT + inside, seed)
            odd = _scramble(odd, _SCRAMBLE_AT + inside + 8, seed)
            stripe = np.int64(0)
    last = start + count - _STRIPE + 4 * pair
    even, odd = _accumulate(words, last, _LAST_STRIPE_AT + inside, seed, even, odd)
    merge = _MERGE_AT + inside
    return _fold(even ^ _seeded(merge, seed), odd ^ _seeded(merge + 8, seed))


@inner
def _long(words, start, count, seed):
    """More than 60 words."""
    h = np.uint64(count) * np.uint64(4) * _PRIME64_1
    h += _walk_pair(words, start, count, seed, np.int64(0), _PRIME32_3, _PRIME64_1)
    h += _walk_pair(words, start, count, seed, np.int64(1), _PRIME64_2, _PRIME64_3)
    h += _walk_pair(words, start, count, seed, np.int64(2), _PRIME64_4, _PRIME32_2)
    h += _walk_pair(words, start, count, seed, np.int64(3), _PRIME64_5, _PRIME32_1)
    return _avalanche(h)


@inner
def xxh3_64(words, start, count, seed):
    """XXH3-64 (uint64) of `count` little-endian 32-bit words from `words[start]` on.

    Args:
        words: uint32 [k].
        start, count: int64.
        seed: uint64.
    """
    if count <= 4:
        return _short(words, start, count, seed)
    if count <= 60:
        return _medium(words, start, count, seed)
    return _long(words, start, count, seed)


@inner
def chained(parent, tokens_hash):
    """block_hash of a block behind one with the block_hash `parent`: XXH3-64 of both, 16 bytes."""
    low = parent ^ ((_SECRET[24] ^ _SECRET[32]) + SEED)
    high = tokens_hash ^ ((_SECRET[40] ^ _SECRET[48]) - SEED)
    return _avalanche(np.uint64(16) + _swap_bytes(low) + high + _fold(low, high))


@inner
def output_token(number, k):
    """Token `k` (int64) of a request whose uuid is the 128-bit `number` (int64, >= 0): the low half
    of XXH3-64, unseeded, of the uuid's 16 bytes, the highest first, and k as little-endian u64."""
    uuid_end = _swap_bytes(np.uint64(number))
    h = np.uint64(24) * _PRIME64_1
    h += _fold(_SECRET[0], uuid_end ^ _SECRET[8])
    h += _fold(uuid_end ^ _SECRET[16], np.uint64(k) ^ _SECRET[24])
    return np.int64(_avalanche(h) & _LOW_32)
