"""The trace formats by name. A new format is one module and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from vecsim.errors import InputError
from vecsim.traces import azure, mooncake
from vecsim.traces.files import TraceFile
from vecsim.traces.table import ReadOptions, TraceTable


class Format(NamedTuple):
    """`looks_like(file)` recognises a file by its content, `read(file, options)` reads it."""

    looks_like: Callable[[TraceFile], bool]
    read: Callable[[TraceFile, ReadOptions], TraceTable]


FORMATS = {
    "mooncake": Format(mooncake.looks_like, mooncake.read),
    "azure": Format(azure.looks_like, azure.read),
}
"""In the order in which "auto" tries them."""


def check_format(where: str, name: str) -> None:
    """Raise InputError unless `name` is "auto" or a format."""
    if name == "auto" or name in FORMATS:
        return
    near = difflib.get_close_matches(str(name), FORMATS, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise InputError(where, name, f"one of auto, {', '.join(FORMATS)}{hint}")


def format_of(file: TraceFile, name: str) -> Format:
    """The format of that name, or for "auto" the one that the content looks like."""
    if name != "auto":
        return FORMATS[name]
    if not file.data.strip():
        raise InputError(file.name, "an empty file", "at least one request")
    for form in FORMATS.values():
        if form.looks_like(file):
            return form
    start = file.data[:60].split(b"\n")[0].decode(errors="replace")
    raise InputError(f"{file.name}:1", start, f"a trace in one of the formats {', '.join(FORMATS)}")
