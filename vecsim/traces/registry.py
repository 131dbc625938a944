"""The trace formats by name. A new format is one module and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

from vecsim.errors import InputError
from vecsim.traces import agentic, applied_compute, delimited, dynamo, mooncake, own, weka
from vecsim.traces.files import TraceFile
from vecsim.traces.table import ReadOptions, TraceTable


class Format(NamedTuple):
    """A trace format.

    Attributes:
        looks_like: recognises a file by its content; None = never tried by "auto".
        read: (file, options) -> table; (files, options) where `corpus` holds.
        corpus: whether several files are one recording, to be read together.
        times: where times come from, for people.
        waits: what requests may wait for, for people.
        endings: of a folder, only files that end so belong to it; () = all that are not hidden.
    """

    looks_like: Callable[[TraceFile], bool] | None
    read: Callable[[Any, ReadOptions], TraceTable]
    corpus: bool = False
    times: str = "ms"
    waits: str = "nothing"
    endings: tuple[str, ...] = ()


def _csv(layout: delimited.Layout, times: str) -> Format:
    return Format(delimited.looks_like(layout), delimited.reader(layout), times=times)


_SHOWN = 60
FORMATS = {
    "agentic_mooncake": Format(agentic.looks_like, agentic.read, waits="a graph"),
    "dynamo": Format(dynamo.looks_like, dynamo.read, corpus=True, waits="nothing, or a graph"),
    "weka": Format(
        weka.looks_like,
        weka.read,
        corpus=True,
        times="s",
        waits="a graph",
        endings=weka.ENDINGS,
    ),
    "applied_compute_agentic": Format(
        applied_compute.looks_like, applied_compute.read, times="none", waits="turns"
    ),
    "vecsim": Format(own.looks_like, own.read, times="in the name", waits="turns, or a graph"),
    "qwen_bailian": Format(mooncake.looks_like_bailian, mooncake.read_bailian, times="s"),
    "mooncake": Format(mooncake.looks_like, mooncake.read, waits="turns"),
    "mooncake-delta": Format(None, mooncake.read_delta, waits="turns"),
    "azure": _csv(delimited.AZURE, "ISO 8601"),
    "burstgpt": _csv(delimited.BURSTGPT, "s"),
    "vidur": _csv(delimited.VIDUR, "s"),
    "splitwise": _csv(delimited.SPLITWISE, "s"),
    "table": Format(None, delimited.read_table, times="ISO 8601 or given", waits="turns"),
}
"""In the order in which "auto" tries them."""


def check_format(where: str, name: str) -> None:
    """Raise InputError unless `name` is "auto" or a format."""
    if name == "auto" or name in FORMATS:
        return
    near = difflib.get_close_matches(str(name), FORMATS, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise InputError(where, name, f"one of auto, {', '.join(FORMATS)}{hint}")


def format_of(file: TraceFile, name: str) -> str:
    """That name, or for "auto" the name of the format that the content looks like."""
    if name != "auto":
        return name
    if file.begin == len(file.data):
        raise InputError(file.name, "an empty file", "at least one request")
    for known, form in FORMATS.items():
        if form.looks_like is not None and form.looks_like(file):
            return known
    raise _unknown(file)


def _unknown(file: TraceFile) -> InputError:
    """The error of a file that looks like no format: what it holds, and what could be done."""
    line, text = next(file.lines())
    found = text[:_SHOWN].decode(errors="replace").strip()
    if file.first_object:
        found = f"the keys {', '.join(file.first_object)}"
    names = ", ".join(FORMATS)
    expected = f"a trace in one of the formats {names}; or --column NAME=COLUMN (columns={{...}})"
    return InputError(f"{file.name}:{line}", found, expected)
