"""Timing tables: pass prices interpolated between measured points.

A table is one buffer of int64 words in memory, some of which are float64 by their bits; words are
named by their position. A run reads it through a record (see `vecsim.kernels.timing.durations`),
which holds the buffer's address and the run's own counters, so that any number of runs share a
buffer.

Decode: one row of points for each measured batch size, prices by past KV tokens per sequence.
Prefill: one row for each batch size, prices by new tokens per request, and on top of them the
increment that a cached prefix brings, on a grid of batch, new tokens and prefix. All
interpolation is linear in the raw coordinates.
"""

from __future__ import annotations

import ctypes

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from vecsim.kernels.compile.callback import callback
from vecsim.kernels.compile.jit import DISABLED, inner
from vecsim.kernels.timing.durations import DECODE, PREFILL, SERIES

# --- words of a record (0 and 1 are code addresses) -----------------------------------------------
BUFFER = 2  # address of the table
BEYOND_BATCHES = 3  # 1: decode batches beyond the last one are extrapolated; 0: refused
OUTSIDE = 8  # look-ups outside the measured range
REFUSED = 16  # a decode batch that was refused
FARTHEST_BATCH, FARTHEST_SIZE = 17, 18  # the largest batch, and new or past tokens, outside
RECORD_WORDS = 24
"""Counters have cache lines of their own: threads write them while others read the rest."""

# --- words of a buffer: those of a phase (prefill first), then those of the prefix grid -----------
PHASE = 8
PREFILL_AT, DECODE_AT = 0, PHASE
(
    LAST_BATCH,  # 0: the phase has no rows
    LOWER,  # where the row of the nearest measured batch at or below 0 .. last stands
    UPPER,  # the same, at or above
    ROWS,
    ROW_COUNT,
    LOWEST,  # float64: the smallest price
    OCTAVE,  # where the row of the largest batch at or below half of the last one stands
) = range(7)
GRID = 2 * PHASE
GRID_BATCHES, GRID_TOKENS, GRID_PREFIXES, GRID_VALUES = (GRID + 2 * k for k in range(4))
"""Position of an axis, with its length one word on; then that of the increments."""
HEADER_WORDS = 32

# --- words of a row -------------------------------------------------------------------------------
ROW_BATCH, ROW_NODES, ROW_VALUES, ROW_LENGTH, ROW_SLOPE = range(5)
"""ROW_SLOPE, float64: the price of another token beyond the last node, as over the octave below it;
the last two nodes may be one tile step apart. Never negative."""
ROW_WORDS = 5

if DISABLED:

    def read_int(address, index):
        return np.int64(ctypes.c_int64.from_address(int(address) + 8 * int(index)).value)

    def read_float(address, index):
        return np.float64(ctypes.c_double.from_address(int(address) + 8 * int(index)).value)

    def write_float(address, index, value):
        ctypes.c_double.from_address(int(address) + 8 * int(index)).value = float(value)
        return np.int64(0)

    def add_int(address, index, value):
        ctypes.c_int64.from_address(int(address) + 8 * int(index)).value += int(value)
        return np.int64(0)

    def raise_int(address, index, value):
        word = ctypes.c_int64.from_address(int(address) + 8 * int(index))
        word.value = max(word.value, int(value))
        return np.int64(0)

else:
    _INTEGER = ir.IntType(64)

    def _word(builder, args, kind=_INTEGER):
        """Pointer to word args[1] of what stands at the address args[0]."""
        return builder.gep(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    @intrinsic
    def read_int(typingctx, address, index):
        """The int64 in a word."""

        def codegen(context, builder, signature, args):
            return builder.load(_word(builder, args))

        return types.int64(types.int64, types.int64), codegen

    @intrinsic
    def read_float(typingctx, address, index):
        """The float64 in a word."""

        def codegen(context, builder, signature, args):
            return builder.load(_word(builder, args, ir.DoubleType()))

        return types.float64(types.int64, types.int64), codegen

    @intrinsic
    def write_float(typingctx, address, index, value):
        """Set the float64 in a word."""

        def codegen(context, builder, signature, args):
            builder.store(args[2], _word(builder, args, ir.DoubleType()))
            return ir.Constant(_INTEGER, 0)

        return types.int64(types.int64, types.int64, types.float64), codegen

    def _atomic(operation):
        def codegen(context, builder, signature, args):
            return builder.atomic_rmw(operation, _word(builder, args), args[2], "monotonic")

        return types.int64(types.int64, types.int64, types.int64), codegen

    @intrinsic
    def add_int(typingctx, address, index, value):
        """Add to the int64 in a word, whatever other threads do."""
        return _atomic("add")

    @intrinsic
    def raise_int(typingctx, address, index, value):
        """Raise the int64 in a word to `value` at least, whatever other threads do."""
        return _atomic("max")


@inner
def cell_of(table, nodes, length, x):
    """Number of the cell between ascending nodes that holds `x`; the first or last one outside."""
    first = read_int(table, nodes)
    last = read_int(table, nodes + length - 1)
    if last - first == length - 1:
        k = np.int64(np.floor(x)) - first
    else:
        low = np.int64(0)
        high = length
        while high - low > 1:
            middle = (low + high) // 2
            if np.float64(read_int(table, nodes + middle)) <= x:
                low = middle
            else:
                high = middle
        k = low
    return max(min(k, length - 2), np.int64(0))


@inner
def in_cell(table, nodes, values, k, x):
    """The line through nodes k and k + 1 at `x`."""
    left = np.float64(read_int(table, nodes + k))
    right = np.float64(read_int(table, nodes + k + 1))
    start = read_float(table, values + k)
    return start + (read_float(table, values + k + 1) - start) / (right - left) * (x - left)


@inner
def along(table, row, x):
    """Price of a row at `x`."""
    nodes = read_int(table, row + ROW_NODES)
    values = read_int(table, row + ROW_VALUES)
    length = read_int(table, row + ROW_LENGTH)
    past = x - np.float64(read_int(table, nodes + length - 1))
    if past > 0.0:
        return read_float(table, values + length - 1) + read_float(table, row + ROW_SLOPE) * past
    if length == 1:
        return read_float(table, values)
    return in_cell(table, nodes, values, cell_of(table, nodes, length, x), x)


@inner
def is_outside(table, row, x):
    """Whether `x` lies outside the points of a row."""
    nodes = read_int(table, row + ROW_NODES)
    length = read_int(table, row + ROW_LENGTH)
    return np.int64(
        x < np.float64(read_int(table, nodes))
        or x > np.float64(read_int(table, nodes + length - 1))
    )


@inner
def rows_around(table, phase, batch):
    """(row at or below a batch, row at or above, share of the latter, whether the batch is outside
    the measured ones). Below them, the two nearest rows and a share below 0; above them, the last
    row and the one an octave below it, and a share above 1."""
    last = read_int(table, phase + LAST_BATCH)
    rows = read_int(table, phase + ROWS)
    count = read_int(table, phase + ROW_COUNT)
    outside = np.int64(0)
    if batch > last:
        lower = read_int(table, phase + OCTAVE)
        upper = rows + (count - 1) * ROW_WORDS
        outside = np.int64(1)
    elif batch < read_int(table, rows + ROW_BATCH):
        lower = rows
        upper = rows + min(count - 1, np.int64(1)) * ROW_WORDS
        outside = np.int64(1)
    else:
        lower = read_int(table, read_int(table, phase + LOWER) + batch)
        upper = read_int(table, read_int(table, phase + UPPER) + batch)
    share = 0.0
    if lower != upper:
        below = read_int(table, lower + ROW_BATCH)
        above = read_int(table, upper + ROW_BATCH)
        share = np.float64(batch - below) / np.float64(above - below)
    return lower, upper, share, outside


@inner
def base_at(table, batch, tokens):
    """(price of a prefill of `tokens` new tokens in each of `batch` requests without a prefix,
    whether it is outside the measured range).

    Between measured batches it is that of as many tokens in all: nearly all of the work depends on
    those alone. Beyond them it is that of the last batch.
    """
    lower, upper, share, outside = rows_around(table, np.int64(PREFILL_AT), batch)
    if outside:
        if share > 0.0:
            lower = upper
        upper = lower
    total = np.float64(batch * tokens)
    x = total / np.float64(read_int(table, lower + ROW_BATCH))
    outside = outside | is_outside(table, lower, x)
    price = along(table, lower, x)
    if upper != lower:
        x = total / np.float64(read_int(table, upper + ROW_BATCH))
        outside = outside | is_outside(table, upper, x)
        price = price + share * (along(table, upper, x) - price)
    return price, outside


@inner
def between(low, high, share):
    """A price at a share of the way from one row to another; beyond the last row, which is `high`,
    never below its."""
    price = low + share * (high - low)
    if share > 1.0:
        price = max(price, high)
    return price


@inner
def note_outside(record, batch, size):
    """Counts a look-up outside the measured range, and how far it went."""
    add_int(record, np.int64(OUTSIDE), np.int64(1))
    raise_int(record, np.int64(FARTHEST_BATCH), batch)
    raise_int(record, np.int64(FARTHEST_SIZE), size)


@inner
def share_in(table, axis, x):
    """(cell of an axis, position in it: 0 at its left node, 1 at its right one)."""
    nodes = read_int(table, axis)
    length = read_int(table, axis + 1)
    if length == 1:
        return np.int64(0), 0.0
    k = cell_of(table, nodes, length, x)
    left = np.float64(read_int(table, nodes + k))
    return k, (x - left) / (np.float64(read_int(table, nodes + k + 1)) - left)


@inner
def increment_at(table, batch, tokens, prefix):
    """What a prefix of so many tokens in each request adds to the price of a prefill."""
    b, in_batch = share_in(table, np.int64(GRID_BATCHES), np.float64(batch))
    n, in_tokens = share_in(table, np.int64(GRID_TOKENS), np.float64(tokens))
    p, in_prefix = share_in(table, np.int64(GRID_PREFIXES), np.float64(prefix))
    in_batch = max(min(in_batch, 1.0), 0.0)
    in_tokens = max(min(in_tokens, 1.0), 0.0)
    width = read_int(table, np.int64(GRID_PREFIXES + 1))
    plane = width * read_int(table, np.int64(GRID_TOKENS + 1))
    at = read_int(table, np.int64(GRID_VALUES)) + b * plane + n * width + p
    price = 0.0
    for i in range(2):
        share = in_batch if i else 1.0 - in_batch
        for j in range(2):
            part = share * (in_tokens if j else 1.0 - in_tokens)
            if part != 0.0:
                corner = at + i * plane + j * width
                left = read_float(table, corner)
                price += part * (left + (read_float(table, corner + 1) - left) * in_prefix)
    return price


def _prefill_price(record, batch, mean_isl, mean_prefix):
    table = read_int(record, np.int64(BUFFER))
    tokens = mean_isl - mean_prefix
    price, outside = base_at(table, batch, tokens)
    width = read_int(table, np.int64(GRID_PREFIXES + 1))
    if width > 1:
        nodes = read_int(table, np.int64(GRID_PREFIXES))
        price += increment_at(table, batch, tokens, mean_prefix)
        outside = outside | np.int64(
            mean_prefix < read_int(table, nodes) or mean_prefix > read_int(table, nodes + width - 1)
        )
    if outside:
        note_outside(record, batch, tokens)
    return max(price, read_float(table, np.int64(PREFILL_AT + LOWEST)))


@inner
def refuses(record, table, batch):
    """Whether a decode batch lies beyond the last row, and nobody allowed that; notes it."""
    last = read_int(table, np.int64(DECODE_AT + LAST_BATCH))
    if batch <= last or read_int(record, np.int64(BEYOND_BATCHES)) != 0:
        return False
    raise_int(record, np.int64(REFUSED), batch)
    return True


def _decode_price(record, batch, context_sum, mean_context, capacity):
    table = read_int(record, np.int64(BUFFER))
    if refuses(record, table, batch):
        return np.nan
    x = np.float64(max(mean_context - 1, np.int64(0)))
    lower, upper, share, outside = rows_around(table, np.int64(DECODE_AT), batch)
    outside = outside | is_outside(table, lower, x)
    price = along(table, lower, x)
    if upper != lower:
        outside = outside | is_outside(table, upper, x)
        price = between(price, along(table, upper, x), share)
    if outside:
        note_outside(record, batch, np.int64(x))
    return max(price, read_float(table, np.int64(DECODE_AT + LOWEST)))


@inner
def stay(table, row, k, x):
    """How many whole steps of 1, this one included, `x` stays in cell k of a row; at least 1. The
    cell after the last node has no end."""
    length = read_int(table, row + ROW_LENGTH)
    if k >= length - 1:
        return np.int64(1 << 40)
    right = read_int(table, read_int(table, row + ROW_NODES) + k + 1)
    return max(right - np.int64(x), np.int64(1))


@inner
def first_cell(table, row, x):
    """The cell of a row that holds `x`: its last node's, where it lies at or beyond that."""
    nodes = read_int(table, row + ROW_NODES)
    length = read_int(table, row + ROW_LENGTH)
    if length == 1 or x >= np.float64(read_int(table, nodes + length - 1)):
        return length - 1
    return cell_of(table, nodes, length, x)


@inner
def line(table, row, k):
    """(left node, price there, slope) of cell k of a row."""
    nodes = read_int(table, row + ROW_NODES)
    values = read_int(table, row + ROW_VALUES)
    left = np.float64(read_int(table, nodes + k))
    start = read_float(table, values + k)
    if k == read_int(table, row + ROW_LENGTH) - 1:
        return left, start, read_float(table, row + ROW_SLOPE)
    right = np.float64(read_int(table, nodes + k + 1))
    return left, start, (read_float(table, values + k + 1) - start) / (right - left)


@inner
def within(table, lower, upper, x, count):
    """How many of the `count` whole numbers from `x` on lie among the points of both rows."""
    first = x
    last = x + count - 1
    for k in range(2):
        row = upper if k else lower
        nodes = read_int(table, row + ROW_NODES)
        length = read_int(table, row + ROW_LENGTH)
        first = max(first, read_int(table, nodes))
        last = min(last, read_int(table, nodes + length - 1))
    return max(last - first + 1, np.int64(0))


def _decode_series(record, batch, context_sum, count, out):
    """As `_decode_price` for each of `count` passes, cell by cell: each of them is found once."""
    table = read_int(record, np.int64(BUFFER))
    mean = context_sum // batch
    if mean < 1 or refuses(record, table, batch):
        return np.int64(0)
    lower, upper, share, outside_batch = rows_around(table, np.int64(DECODE_AT), batch)
    lowest = read_float(table, np.int64(DECODE_AT + LOWEST))
    done = np.int64(0)
    low = first_cell(table, lower, np.float64(mean - 1))
    high = first_cell(table, upper, np.float64(mean - 1))
    while done < count:
        x = np.float64(mean - 1 + done)
        steps = min(count - done, stay(table, lower, low, x))
        left, start, slope = line(table, lower, low)
        if upper == lower:
            for j in range(steps):
                price = start + slope * (x + np.float64(j) - left)
                write_float(out, done + j, max(price, lowest))
        else:
            steps = min(steps, stay(table, upper, high, x))
            left2, start2, slope2 = line(table, upper, high)
            for j in range(steps):
                price = start + slope * (x + np.float64(j) - left)
                other = start2 + slope2 * (x + np.float64(j) - left2)
                write_float(out, done + j, max(between(price, other, share), lowest))
        done += steps
        low += np.int64(stay(table, lower, low, x) <= steps)
        high += np.int64(stay(table, upper, high, x) <= steps)
    outside = count
    if not outside_batch:
        outside -= within(table, lower, upper, mean - 1, count)
    if outside > 0:
        note_outside(record, batch, mean - 2 + count)
        add_int(record, np.int64(OUTSIDE), outside - 1)
    return np.int64(1)


prefill_price = callback(PREFILL)(_prefill_price)
decode_price = callback(DECODE)(_decode_price)
decode_series = callback(SERIES)(_decode_series)


def series_address():
    """Address of the series function; 0 where kernels run as plain Python."""
    return 0 if DISABLED else decode_series.address
