"""Mooncake traces: one JSON object per line, with the prompt as a list of block hashes.

Clean files are decoded as a whole, their ids at one go. Anything out of the ordinary (other
fields, aliases, other time units, errors) goes through a pass over lines that knows every rule and
says what is wrong where. On what the first one accepts both give the same columns.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import polars as pl

from vecsim.traces.files import TraceFile
from vecsim.traces.json_rows import (
    Clock,
    Place,
    decode,
    id_list,
    is_array,
    items,
    length,
    planned_output,
)
from vecsim.traces.table import DEFAULT_BLOCK_SIZE, ReadOptions, TraceTable
from vecsim.traces.times import Times, milliseconds
from vecsim.workload.columns import MAX_INT32, flatten, offsets_of, optional

BAILIAN_BLOCK_SIZE = 16
ALIASES = {
    "input_length": "input_tokens",
    "output_length": "output_tokens",
    "timestamp": "created_time",
    "delay": "delay_ms",
}
_SIMPLE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_OTHER_FIELDS = (
    *ALIASES.values(),
    "delay",
    "request_id",
    "session_id",
    "output_token_ids",
    "priority",
    "strict_priority",
    "policy_class",
)
_KNOWN = frozenset(("input_length", "input_tokens", "output_length", "output_tokens", "hash_ids"))
_LARGEST_ID = np.uint64(2**64 - 1)
_QUOTED = {name: f'"{name}"'.encode() for name in _SIMPLE_FIELDS + _OTHER_FIELDS}
_ANY_FIELD = re.compile(b"|".join(_QUOTED.values()))


def looks_like(file: TraceFile) -> bool:
    """Whether the first object has a field of these rows, or cannot be read and is JSON."""
    return file.is_json and not (file.first_object and _KNOWN.isdisjoint(file.first_object))


def looks_like_bailian(file: TraceFile) -> bool:
    """Whether the first row has a `chat_id` and a `turn` beside `hash_ids`."""
    return {"chat_id", "turn", "hash_ids"} <= file.first_object.keys()


def read(file: TraceFile, options: ReadOptions) -> TraceTable:
    """All rows, or the first `options.limit`.

    Raises:
        InputError: a malformed or impossible row; names file, line and field or column.
    """
    table = _read_whole(file, options)
    return table if table is not None else _read_lines(file, options)


def read_delta(file: TraceFile, options: ReadOptions) -> TraceTable:
    """The same rows, where a later turn only has the tokens that are new (section 3)."""
    return replace(read(file, options), accumulate=True)


def read_bailian(file: TraceFile, options: ReadOptions) -> TraceTable:
    """The same rows, with times in seconds and one id for 16 tokens.

    Chats and turns are not read: every row has its own time and its whole prompt.
    """
    unit, block = options.time_unit or "s", options.block_size or BAILIAN_BLOCK_SIZE
    return read(file, replace(options, time_unit=unit, block_size=block))


# --- the whole file at once -----------------------------------------------------------------------


class _CleanRow(msgspec.Struct, gc=False):
    """A line with these four fields; its ids stay text."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: msgspec.Raw


_CLEAN = msgspec.json.Decoder(_CleanRow)


def _read_whole(file: TraceFile, options: ReadOptions) -> TraceTable | None:
    """The table of a clean file; None to leave it to the pass over lines."""
    if options.time_unit not in (None, "ms"):
        return None
    if options.limit is not None:
        file = file.head(options.limit)
    try:
        rows = _CLEAN.decode_lines(file.data)
    except (msgspec.DecodeError, RecursionError):
        return None
    numbers = file.row_numbers(len(rows))
    # One more colon is a field that is there twice, or one that is not known here.
    if numbers is None or file.data.count(b":") != len(_SIMPLE_FIELDS) * len(rows):
        return None
    ids = _clean_ids([row.hash_ids for row in rows])
    if ids is None:
        return None
    try:
        inputs = np.array([row.input_length for row in rows], np.int64)
        outputs = np.array([row.output_length for row in rows], np.int64)
    except OverflowError:
        return None
    block = options.block_size or DEFAULT_BLOCK_SIZE
    if not _in_range(inputs) or not _in_range(outputs) or not _are_covered(inputs, ids[0], block):
        return None
    return TraceTable(
        times=Times(np.array([row.timestamp for row in rows], np.float64)),
        input_length=inputs,
        output_length=outputs,
        numbers=numbers,
        ids=ids,
        block_size=block,
    )


def _clean_ids(lists: list[msgspec.Raw]) -> tuple[np.ndarray, np.ndarray] | None:
    """(int64 [n + 1] offsets, uint64 ids) of the JSON text of n lists, read at one go; None unless
    they are flat lists of digits."""
    text = b"".join(lists)
    if text.translate(None, b"0123456789,[] "):
        return None
    if b"[ " in text:  # perhaps an empty list
        text = text.translate(None, b" ")
    marks = np.frombuffer(bytearray(text), np.uint8)
    opens, closes = np.flatnonzero(marks == ord("[")), np.flatnonzero(marks == ord("]"))
    if len(opens) != len(lists) or len(closes) != len(lists):
        return None
    if opens[0] != 0 or closes[-1] != len(text) - 1 or (opens[1:] != closes[:-1] + 1).any():
        return None  # not one list after another: a number among them, or lists in lists
    filled = closes > opens + 1
    counts = np.diff(np.searchsorted(np.flatnonzero(marks == ord(",")), closes), prepend=0) + filled
    marks[opens] = marks[closes] = ord(" ")
    marks[closes[filled][:-1]] = ord(",")
    ids = np.zeros(0, np.uint64)
    if filled.any():
        ids = np.fromstring(marks.tobytes(), np.uint64, sep=",")
    if len(ids) != counts.sum() or ids.max(initial=0) == _LARGEST_ID:  # or larger: it saturates
        return None
    return offsets_of(counts), ids


def _are_covered(inputs: np.ndarray, offsets: np.ndarray, block: int) -> bool:
    """Whether every prompt is within the blocks of its ids."""
    return bool((-(-inputs // block) <= np.diff(offsets)).all())


def _in_range(lengths: np.ndarray) -> bool:
    return bool(lengths.min() >= 0 and lengths.max() <= MAX_INT32)


# --- line by line ---------------------------------------------------------------------------------


class _Row(msgspec.Struct, gc=False):
    """One line as authored; names and aliases stay apart, times stay text."""

    request_id: Any = None
    session_id: Any = None
    input_length: Any = msgspec.UNSET
    input_tokens: Any = msgspec.UNSET
    output_length: Any = msgspec.UNSET
    output_tokens: Any = msgspec.UNSET
    output_token_ids: Any = None
    hash_ids: Any = None
    timestamp: msgspec.Raw = msgspec.UNSET
    created_time: msgspec.Raw = msgspec.UNSET
    delay: msgspec.Raw = msgspec.UNSET
    delay_ms: msgspec.Raw = msgspec.UNSET
    priority: Any = None
    strict_priority: Any = None
    policy_class: Any = None


_DECODER = msgspec.json.Decoder(_Row)


def _read_lines(file: TraceFile, options: ReadOptions) -> TraceTable:
    reader = _LineReader(options)
    for place, text in items(file):
        if options.limit is not None and len(reader.numbers) == options.limit:
            break
        reader.add(place, _decode(place, text))
    return replace(reader.table(), in_items=is_array(file))


def _decode(place: Place, text: bytes) -> _Row:
    row = decode(place, text, _DECODER)
    names = _ANY_FIELD.findall(text)
    if len(names) > len(set(names)):
        _refuse_duplicates(place, text)
    return row


def _refuse_duplicates(place: Place, text: bytes) -> None:
    pairs: list[tuple[str, Any]] = []

    def keep(found: list[tuple[str, Any]]) -> None:
        pairs[:] = found

    json.loads(text, object_pairs_hook=keep)
    seen = set()
    for name, value in pairs:
        if name in seen and name in _QUOTED:
            raise place.error(name, value, "the field only once")
        seen.add(name)


class _LineReader:
    """Collects rows one by one and checks each."""

    def __init__(self, options: ReadOptions) -> None:
        self.numbers: list[int] = []
        self._block = options.block_size or DEFAULT_BLOCK_SIZE
        self._unit = options.time_unit or "ms"
        self._clock = Clock(self._unit)
        self._times: list[float | int | None] = []
        self._delays: list[float | None] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._sessions: list[str | None] = []
        self._ids: list[list[int] | None] = []
        self._planned: list[list[int] | None] = []

    def add(self, place: Place, row: _Row) -> None:
        _check_labels(place, row)
        ids = id_list(place, "hash_ids", row.hash_ids, 64)
        outputs = length(place, "output_length", _pick(place, row, "output_length"))
        self._inputs.append(self._input_length(place, row, ids))
        self._outputs.append(outputs)
        self._ids.append(ids)
        self._planned.append(planned_output(place, row.output_token_ids, outputs))
        stamp = _text_of(_pick(place, row, "timestamp"))
        self._times.append(self._clock.read(place, "timestamp", stamp))
        self._delays.append(self._delay(place, row))
        self._sessions.append(row.session_id)
        self.numbers.append(place.number)

    def table(self) -> TraceTable:
        without_ids = sum(ids is None for ids in self._ids)
        return TraceTable(
            times=Times.of(self._times),
            input_length=np.array(self._inputs, np.int64),
            output_length=np.array(self._outputs, np.int64),
            numbers=np.array(self.numbers, np.int64),
            unit=self._unit,
            session_id=optional(self._sessions, lambda v: pl.Series("session_id", v, pl.String)),
            delay_ms=optional(self._delays, lambda values: np.array(values, np.float64)),
            ids=flatten(self._ids, np.uint64) if without_ids < len(self._ids) else None,
            block_size=self._block,
            planned=flatten(self._planned, np.uint32) if any(self._planned) else None,
            without_ids=without_ids,
        )

    def _input_length(self, place: Place, row: _Row, ids: list[int] | None) -> int:
        value = _pick(place, row, "input_length")
        if ids is None:
            return length(place, "input_length", value)
        covered = len(ids) * self._block
        tokens = length(place, "input_length", covered if value is None else value)
        if tokens > covered:
            hashes = f"{len(ids)} hash ids of {self._block} tokens"
            raise place.error("input_length", tokens, f"at most {covered}, as {hashes} cover")
        return tokens

    def _delay(self, place: Place, row: _Row) -> float | None:
        text = _text_of(_pick(place, row, "delay"))
        unit = self._unit if row.delay_ms is msgspec.UNSET else "ms"
        delay = None if text is None else milliseconds(text, unit)
        if text is not None and delay is None:
            raise place.error("delay", text, "a finite number")
        if delay is not None and delay < 0:
            raise place.error("delay", delay, "0 or more")
        return delay


def _pick(place: Place, row: _Row, name: str) -> Any:
    """Value of a field under its name or its alias; None if absent or null."""
    alias = ALIASES[name]
    value, other = getattr(row, name), getattr(row, alias)
    if value is not msgspec.UNSET and other is not msgspec.UNSET:
        raise place.error(alias, other, f"only one of {name} and {alias}")
    picked = other if value is msgspec.UNSET else value
    return None if picked is msgspec.UNSET else picked


def _text_of(value: msgspec.Raw | None) -> str | None:
    """The text of a number or string; None if absent or null. Other JSON stays as it is."""
    if value is None:
        return None
    text = bytes(value).decode()
    if text.startswith('"'):
        return msgspec.json.decode(text)
    return None if text == "null" else text


def _check_labels(place: Place, row: _Row) -> None:
    for name in ("request_id", "session_id", "policy_class"):
        value = getattr(row, name)
        if value is not None and not isinstance(value, str):
            raise place.error(name, value, "a string")
    for name, low, high in (("priority", -(2**31), 2**31), ("strict_priority", 0, 2**32)):
        value = getattr(row, name)
        if value is not None and not (type(value) is int and low <= value < high):
            raise place.error(name, value, f"a whole number from {low} to {high - 1}")
