"""Pass durations: the built-in models, the rounding to nanoseconds, speedups, custom models.

All durations are float64 ms. A raw price is divided by 1000, rounded to whole nanoseconds (nearest,
ties to even, exactly on the float64 value), optionally divided by a speedup and rounded again, and
multiplied by 1000 (reference: configuration and timing, section 4.4).
"""

from __future__ import annotations

import ctypes

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from vecsim.kernels.jit import DISABLED, inner
from vecsim.kernels.layout import (
    CAPACITY_TOKENS,
    COUNTING,
    DECODE_FUNCTION,
    DECODE_MODEL,
    DECODE_RATIO,
    DURATIONS,
    FIXED_DECODE_MS,
    FIXED_PREFILL_MS,
    MODEL_CUSTOM,
    MODEL_FIXED,
    PREFILL_FUNCTION,
    PREFILL_MODEL,
    PREFILL_RATIO,
    PRICES,
)

NEAR_TIE = np.float64(0.4999)
"""Beyond this distance from the nearest integer a float64 product may round to the wrong side."""

LONGEST_S = np.float64(1.8446744073709552e19)
"""A duration of 2**64 s or more cannot be represented by the reference."""

FASTEST_VECTOR_RATIO = np.float64(1e-3)
"""Below this speedup a pass may last so long that only the scalar path guards its range."""

INVALID = np.float64(-1.0)
"""Answer of a price that is NaN, negative or too long."""

if DISABLED:
    _PREFILL_TYPE = ctypes.CFUNCTYPE(
        ctypes.c_double, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
    )
    _DECODE_TYPE = ctypes.CFUNCTYPE(
        ctypes.c_double, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
    )

    def call_prefill(address, batch, mean_isl, mean_prefix):
        return _PREFILL_TYPE(int(address))(int(batch), int(mean_isl), int(mean_prefix))

    def call_decode(address, batch, context_sum, mean_context, capacity):
        arguments = (int(batch), int(context_sum), int(mean_context), int(capacity))
        return _DECODE_TYPE(int(address))(*arguments)

else:

    def _call_through(count):
        """Code generator: call the function at an integer address with `count` int64 arguments."""

        def codegen(context, builder, signature, args):
            integer = ir.IntType(64)
            function = ir.FunctionType(ir.DoubleType(), [integer] * count)
            pointer = builder.inttoptr(args[0], function.as_pointer())
            return builder.call(pointer, args[1:])

        return codegen

    @intrinsic
    def call_prefill(typingctx, address, batch, mean_isl, mean_prefix):
        """Price of the compiled prefill model at `address`, in ms."""
        return types.float64(*[types.int64] * 4), _call_through(3)

    @intrinsic
    def call_decode(typingctx, address, batch, context_sum, mean_context, capacity):
        """Price of the compiled decode model at `address`, in ms."""
        return types.float64(*[types.int64] * 5), _call_through(4)


@inner
def round_ns(fraction):
    """Nearest integer (ties to even) of `fraction` * 1e9, exact for 0 <= fraction < 1."""
    scaled = fraction * 1e9
    nearest = np.rint(scaled)
    if abs(scaled - nearest) <= NEAR_TIE:
        return nearest
    # Veltkamp's split: both partial products with 1e9 (21 significant bits) are exact.
    split = fraction * 2097153.0
    high = split - (split - fraction)
    low = (fraction - high) * 1e9
    below = np.floor(scaled)
    excess = (high * 1e9 - below) - 0.5
    if excess > -low:
        return below + 1.0
    if excess < -low:
        return below
    return below + np.float64(np.int64(below) & 1)


@inner
def whole_ns_seconds(seconds):
    """`seconds` rounded to whole nanoseconds, or INVALID when out of range."""
    if not (seconds >= 0.0 and seconds < LONGEST_S):
        return INVALID
    whole = np.floor(seconds)
    return whole + round_ns(seconds - whole) / 1e9


@inner
def duration_ms(raw_ms, ratio):
    """Duration that a raw price adds to the clock, in ms, or INVALID."""
    seconds = whole_ns_seconds(raw_ms / 1000.0)
    if ratio > 0.0 and seconds > 0.0:
        seconds = whole_ns_seconds(seconds / ratio)
    if seconds < 0.0:
        return INVALID
    return seconds * 1000.0


@inner
def polynomial_decode_ms(context_sum, capacity):
    """Built-in decode price: context_sum tokens resident in a pool of `capacity` tokens."""
    load = min(np.float64(context_sum) / np.float64(capacity), 1.0)
    return max((-25.74 * (load * load) + 54.01 * load) + 5.74, 1.0)


@inner
def prefill_ms(s, f, batch, isl_sum, prefix_sum):
    """Duration (ms) of the prefill part of a pass; the two means are floored separately."""
    mean_isl = isl_sum // batch
    mean_prefix = prefix_sum // batch
    new_tokens = max(mean_isl - mean_prefix, np.int64(0))
    if new_tokens == 0:
        return 0.0
    if s[PREFILL_MODEL] == MODEL_FIXED:
        raw = f[FIXED_PREFILL_MS]
    elif s[PREFILL_MODEL] == MODEL_CUSTOM:
        raw = call_prefill(s[PREFILL_FUNCTION], batch, mean_isl, mean_prefix)
    else:
        tokens = np.float64(batch * new_tokens)
        raw = (4.209989e-07 * (tokens * tokens) + 1.518344e-02 * tokens) + 1.650142e01
    return duration_ms(raw, f[PREFILL_RATIO])


@inner
def decode_ms(s, f, batch, context_sum):
    """Duration (ms) of the decode part of a pass; context_sum in tokens, before the pass."""
    if s[DECODE_MODEL] == MODEL_FIXED:
        raw = f[FIXED_DECODE_MS]
    elif s[DECODE_MODEL] == MODEL_CUSTOM:
        mean = context_sum // batch
        raw = call_decode(s[DECODE_FUNCTION], batch, context_sum, mean, s[CAPACITY_TOKENS])
    else:
        raw = polynomial_decode_ms(context_sum, s[CAPACITY_TOKENS])
    return duration_ms(raw, f[DECODE_RATIO])


@inner
def decode_series(s, f, batch, context_sum, count, chunk):
    """Raise DURATIONS of the chunk to those of `count` pure decode passes; returns how many of them
    come before the first bad price.

    The context grows by `batch` tokens a pass. Element for element equal to `decode_ms`.
    """
    out = chunk[DURATIONS]
    if s[DECODE_MODEL] == MODEL_FIXED:
        one = decode_ms(s, f, batch, context_sum)
        for k in range(count):
            out[k] = max(out[k], one)
        return count if one >= 0.0 else np.int64(0)
    ratio = f[DECODE_RATIO]
    vector = s[DECODE_MODEL] != MODEL_CUSTOM and (ratio <= 0.0 or ratio >= FASTEST_VECTOR_RATIO)
    if vector and _series_vector(s[CAPACITY_TOKENS], ratio, batch, context_sum, count, chunk):
        prices = chunk[PRICES]
        for k in range(count):
            out[k] = max(out[k], prices[k])
        return count
    for k in range(count):
        one = decode_ms(s, f, batch, context_sum + k * batch)
        if one < 0.0:
            return np.int64(k)
        out[k] = max(out[k], one)
    return count


@inner
def _series_vector(capacity, ratio, batch, context_sum, count, chunk):
    """Polynomial PRICES of the chunk without a branch; 0 when one lies so near a tie that it needs
    care. Token counts stay exact in float64."""
    near_ties = np.int64(0)
    out = chunk[PRICES]
    counting = chunk[COUNTING]
    step = np.float64(batch)
    context = np.float64(context_sum)
    tokens = np.float64(capacity)
    for k in range(count):
        load = min((context + counting[k] * step) / tokens, 1.0)
        raw = max((-25.74 * (load * load) + 54.01 * load) + 5.74, 1.0)
        ns = (raw / 1000.0) * 1e9
        nearest = np.rint(ns)
        near_ties += np.int64(abs(ns - nearest) > NEAR_TIE)
        out[k] = nearest / 1e9
    if ratio > 0.0 and ratio != 1.0:
        for k in range(count):
            seconds = out[k] / ratio
            whole = np.floor(seconds)
            ns = (seconds - whole) * 1e9
            nearest = np.rint(ns)
            near_ties += np.int64(abs(ns - nearest) > NEAR_TIE)
            out[k] = whole + nearest / 1e9
    for k in range(count):
        out[k] = out[k] * 1000.0
    return np.int64(near_ties == 0)
