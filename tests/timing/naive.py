"""The interpolation of timing tables, slowly: the words of the README in plain Python."""

from bisect import bisect_right

import polars as pl


def along(nodes, values, x):
    """The line through the two nodes around `x`, or through the first two; beyond the last node the
    slope of the octave below it, unless prices fall there."""
    if len(nodes) == 1:
        return values[0]
    if x > nodes[-1]:
        half = max(nodes[0], nodes[-1] / 2)
        slope = (values[-1] - along(nodes, values, half)) / (nodes[-1] - half)
        return values[-1] + max(slope, 0.0) * (x - nodes[-1])
    k = min(max(bisect_right(nodes, x) - 1, 0), len(nodes) - 2)
    slope = (values[k + 1] - values[k]) / (nodes[k + 1] - nodes[k])
    return values[k] + slope * (x - nodes[k])


class Naive:
    """Prices from points whose rows with a prefix fill a grid."""

    def __init__(self, points):
        prefill = points.filter(pl.col("role") == "prefill").rows(named=True)
        self.base = {}
        self.cells = {}
        for row in sorted(prefill, key=lambda row: (row["prefix"], row["isl"])):
            tokens = row["isl"] - row["prefix"]
            if row["prefix"] == 0:
                nodes, values = self.base.setdefault(row["batch_size"], ([], []))
                nodes.append(tokens)
                values.append(row["latency_ms"])
            else:
                key = row["batch_size"], tokens, row["prefix"]
                self.cells[key] = row["latency_ms"] - self.new(row["batch_size"], tokens)
        self.axes = [sorted({key[axis] for key in self.cells}) for axis in range(3)]
        self.axes[2] = [0, *self.axes[2]]
        self.decodes = {}
        for row in points.filter(pl.col("role") == "decode").sort("context").rows(named=True):
            nodes, values = self.decodes.setdefault(row["batch_size"], ([], []))
            nodes.append(row["context"])
            values.append(row["latency_ms"])
        self.lowest = {
            role: points.filter(pl.col("role") == role)["latency_ms"].min()
            for role in ("prefill", "decode")
        }

    def new(self, batch, tokens):
        """A prefill without a prefix; equal tokens in all between batches."""
        batches = sorted(self.base)
        if batch in self.base:
            return along(*self.base[batch], tokens)
        total = batch * tokens
        if batch > batches[-1] or batch < batches[0]:
            nearest = batches[-1] if batch > batches[-1] else batches[0]
            return along(*self.base[nearest], total / nearest)
        above = batches[bisect_right(batches, batch)]
        below = batches[bisect_right(batches, batch) - 1]
        share = (batch - below) / (above - below)
        low, high = (along(*self.base[b], total / b) for b in (below, above))
        return low + share * (high - low)

    def prefill(self, batch, isl, prefix):
        tokens = isl - prefix
        price = self.new(batch, tokens)
        if self.cells:
            price += self.increment(batch, tokens, prefix)
        return max(price, self.lowest["prefill"])

    def increment(self, batch, tokens, prefix):
        places = []
        for axis, x in zip(self.axes, (batch, tokens, prefix), strict=True):
            k = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
            places.append((k, (x - axis[k]) / (axis[k + 1] - axis[k])))
        total = 0.0
        for corner in range(8):
            weight, key = 1.0, []
            for bit, (axis, (k, share)) in enumerate(zip(self.axes, places, strict=True)):
                share = min(max(share, 0.0), 1.0) if bit < 2 else share
                up = corner >> bit & 1
                weight *= share if up else 1.0 - share
                key.append(axis[k + up])
            if weight and key[2]:
                total += weight * self.cells[tuple(key)]
        return total

    def decode(self, batch, context):
        batches = sorted(self.decodes)
        if batch > batches[-1]:
            octave = max([b for b in batches if b <= batches[-1] / 2], default=batches[0])
            high = along(*self.decodes[batches[-1]], context)
            low = along(*self.decodes[octave], context)
            share = (batch - octave) / (batches[-1] - octave) if octave < batches[-1] else 0.0
            return max(low + share * (high - low), high, self.lowest["decode"])
        k = min(max(bisect_right(batches, batch) - 1, 0), max(len(batches) - 2, 0))
        price = along(*self.decodes[batches[k]], context)
        if batch != batches[k] and len(batches) > 1:
            share = (batch - batches[k]) / (batches[k + 1] - batches[k])
            price += share * (along(*self.decodes[batches[k + 1]], context) - price)
        return max(price, self.lowest["decode"])
