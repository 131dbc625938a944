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

from vecsim.kernels.compile.callback import c_caller
from vecsim.kernels.compile.jit import DISABLED, inner
from vecsim.kernels.state import rank as R
from vecsim.kernels.state import worker as W

NEAR_TIE = np.float64(0.4999)
"""Beyond this distance from the nearest integer a float64 product may round to the wrong side."""

LONGEST_S = np.float64(1.8446744073709552e19)
"""A duration of 2**64 s or more cannot be represented by the reference."""

FASTEST_VECTOR_RATIO = np.float64(1e-3)
"""Below this speedup a pass may last so long that only the scalar path guards its range."""

INVALID = np.float64(-1.0)
"""Answer of a price that is NaN, negative or too long."""

PREFILL = types.float64(*[types.int64] * 4)
"""What a prefill model is to C: (record, batch, mean isl, mean prefix) -> raw ms."""

DECODE = types.float64(*[types.int64] * 5)
"""The same of a decode model: (record, batch, sum of contexts, mean context, capacity)."""

SERIES = types.int64(*[types.int64] * 5)
"""Many decode prices at once: (record, batch, sum of contexts, count, address of float64 [count]);
the answer is 0 where it does not know. The contexts grow by `batch` from price to price."""

CODE, CODE_OF_SERIES = 0, 1
"""A custom model is a record, int64 words in memory: the address of its function, that of its
series (0: it has none), then whatever they keep there. They are handed the record's address."""

if DISABLED:

    def call_prefill(record, batch, mean_isl, mean_prefix):
        code = ctypes.c_int64.from_address(int(record)).value
        return c_caller(PREFILL)(code)(int(record), int(batch), int(mean_isl), int(mean_prefix))

    def call_decode(record, batch, context_sum, mean_context, capacity):
        code = ctypes.c_int64.from_address(int(record)).value
        arguments = (int(batch), int(context_sum), int(mean_context), int(capacity))
        return c_caller(DECODE)(code)(int(record), *arguments)

    def call_series(record, batch, context_sum, count, out):
        return np.int64(0)

else:

    def _call_through(builder, signature, args, word):
        """Code of a call of the function whose address is in a word of the record args[0]."""
        integer = ir.IntType(64)
        result = ir.DoubleType() if signature.return_type is types.float64 else integer
        function = ir.FunctionType(result, [integer] * len(args))
        words = builder.inttoptr(args[0], integer.as_pointer())
        code = builder.load(builder.gep(words, [ir.Constant(ir.IntType(32), word)]))
        return code, lambda: builder.call(builder.inttoptr(code, function.as_pointer()), args)

    def _call_code(context, builder, signature, args):
        return _call_through(builder, signature, args, CODE)[1]()

    @intrinsic
    def call_prefill(typingctx, record, batch, mean_isl, mean_prefix):
        """Price of the prefill model with that record, in ms."""
        return PREFILL, _call_code

    @intrinsic
    def call_decode(typingctx, record, batch, context_sum, mean_context, capacity):
        """Price of the decode model with that record, in ms."""
        return DECODE, _call_code

    @intrinsic
    def call_series(typingctx, record, batch, context_sum, count, out):
        """Fill the array `out` with prices; 0 where the model has no series, or does not know."""

        def codegen(context, builder, signature, args):
            array = context.make_array(signature.args[-1])(context, builder, args[-1])
            address = builder.ptrtoint(array.data, ir.IntType(64))
            args = [*args[:-1], address]
            code, call = _call_through(builder, signature, args, CODE_OF_SERIES)
            known = builder.icmp_unsigned("!=", code, ir.Constant(ir.IntType(64), 0))
            before = builder.block
            with builder.if_then(known):
                filled = call()
                inside = builder.block
            answer = builder.phi(ir.IntType(64))
            answer.add_incoming(ir.Constant(ir.IntType(64), 0), before)
            answer.add_incoming(filled, inside)
            return answer

        return types.int64(*[types.int64] * 4, out), codegen


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
    if s[R.PREFILL_MODEL] == R.MODEL_FIXED:
        raw = f[R.FIXED_PREFILL_MS]
    elif s[R.PREFILL_MODEL] == R.MODEL_CUSTOM:
        raw = call_prefill(s[R.PREFILL_FUNCTION], batch, mean_isl, mean_prefix)
    else:
        tokens = np.float64(batch * new_tokens)
        raw = (4.209989e-07 * (tokens * tokens) + 1.518344e-02 * tokens) + 1.650142e01
    return duration_ms(raw, f[R.PREFILL_RATIO])


@inner
def decode_ms(s, f, batch, context_sum):
    """Duration (ms) of the decode part of a pass; context_sum in tokens, before the pass."""
    if s[R.DECODE_MODEL] == R.MODEL_FIXED:
        raw = f[R.FIXED_DECODE_MS]
    elif s[R.DECODE_MODEL] == R.MODEL_CUSTOM:
        mean = context_sum // batch
        raw = call_decode(s[R.DECODE_FUNCTION], batch, context_sum, mean, s[R.CAPACITY_TOKENS])
    else:
        raw = polynomial_decode_ms(context_sum, s[R.CAPACITY_TOKENS])
    return duration_ms(raw, f[R.DECODE_RATIO])


@inner
def decode_series(s, f, batch, context_sum, count, chunk):
    """Raise DURATIONS of the chunk to those of `count` pure decode passes; returns how many of them
    come before the first bad price.

    The context grows by `batch` tokens a pass. Element for element equal to `decode_ms`.
    """
    out = chunk[W.DURATIONS]
    if s[R.DECODE_MODEL] == R.MODEL_FIXED:
        one = decode_ms(s, f, batch, context_sum)
        for k in range(count):
            out[k] = max(out[k], one)
        return count if one >= 0.0 else np.int64(0)
    raw = chunk[W.RAW]
    smooth = _raw_series(s, batch, context_sum, count, chunk)
    ratio = f[R.DECODE_RATIO]
    if smooth and (ratio <= 0.0 or ratio >= FASTEST_VECTOR_RATIO):
        prices = chunk[W.PRICES]
        if _round_series(raw, prices, ratio, count):
            for k in range(count):
                out[k] = max(out[k], prices[k])
            return count
    for k in range(count):
        one = duration_ms(raw[k], ratio)
        if one < 0.0:
            return np.int64(k)
        out[k] = max(out[k], one)
    return count


@inner
def _raw_series(s, batch, context_sum, count, chunk):
    """RAW of the chunk: prices before rounding. Returns whether they are all known to be usable.
    Token counts stay exact in float64."""
    raw = chunk[W.RAW]
    if s[R.DECODE_MODEL] == R.MODEL_CUSTOM:
        record = s[R.DECODE_FUNCTION]
        if call_series(record, batch, context_sum, count, raw) != 0:
            return np.int64(1)
        for k in range(count):
            total = context_sum + k * batch
            raw[k] = call_decode(record, batch, total, total // batch, s[R.CAPACITY_TOKENS])
        return np.int64(0)
    counting = chunk[W.COUNTING]
    step = np.float64(batch)
    context = np.float64(context_sum)
    tokens = np.float64(s[R.CAPACITY_TOKENS])
    for k in range(count):
        load = min((context + counting[k] * step) / tokens, 1.0)
        raw[k] = max((-25.74 * (load * load) + 54.01 * load) + 5.74, 1.0)
    return np.int64(1)


@inner
def _round_series(raw, out, ratio, count):
    """Durations of raw prices without a branch; 0 when one so near a tie needs more care."""
    near_ties = np.int64(0)
    for k in range(count):
        seconds = raw[k] / 1000.0
        whole = np.floor(seconds)
        ns = (seconds - whole) * 1e9
        nearest = np.rint(ns)
        near_ties += np.int64(abs(ns - nearest) > NEAR_TIE)
        out[k] = whole + nearest / 1e9
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
