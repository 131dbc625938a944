"""Mooncake traces: one JSON object per line, with the prompt as a list of block hashes.

Clean files go through Polars as a whole. Anything out of the ordinary (other fields, aliases, blank
lines, other time units, errors) goes through a pass over lines that knows every rule and says what
is wrong where. On what the first one accepts both give the same columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from vecsim.columns import LENGTH, MAX_INT32, flatten, is_id_list, offsets_of
from vecsim.errors import MISSING, InputError, NotSupportedYetError
from vecsim.traces.files import TraceFile
from vecsim.traces.table import ReadOptions, TraceTable, automatic_sessions, token_count
from vecsim.traces.times import Times, milliseconds, nanoseconds

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
_QUOTED = {name: f'"{name}"'.encode() for name in _SIMPLE_FIELDS + _OTHER_FIELDS}
_ANY_FIELD = re.compile(b"|".join(_QUOTED.values()))


def looks_like(file: TraceFile) -> bool:
    """Whether the text starts like JSON."""
    return file.data[:4096].lstrip()[:1] in (b"{", b"[")


def read(file: TraceFile, options: ReadOptions) -> TraceTable:
    """All rows, or the first `options.limit`.

    Raises:
        InputError: a malformed or impossible row; names file, line and field or column.
        NotSupportedYetError: a session of several turns; names the first line that continues one.
    """
    table = _read_whole(file, options)
    return table if table is not None else _read_lines(file, options)


# --- the whole file at once -----------------------------------------------------------------------


def _read_whole(file: TraceFile, options: ReadOptions) -> TraceTable | None:
    """The table of a clean file; None to leave it to the pass over lines."""
    if options.time_unit not in (None, "ms"):
        return None
    if options.limit is not None:
        file = file.head(options.limit)
    data = file.data
    if b"\\" in data or any(_QUOTED[name] in data for name in _OTHER_FIELDS):
        return None
    schema = {
        "timestamp": pl.Float64,
        "input_length": pl.Int64,
        "output_length": pl.Int64,
        "hash_ids": pl.List(pl.UInt64),
    }
    try:
        frame = pl.read_ndjson(data, schema=schema)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return None
    numbers = file.row_numbers(frame.height)
    if numbers is None:
        return None
    for name in _SIMPLE_FIELDS:
        if data.count(_QUOTED[name]) != frame[name].count():
            return None
    return _table_of_frame(frame, numbers, options.block_size)


def _table_of_frame(frame: pl.DataFrame, numbers: np.ndarray, block: int) -> TraceTable | None:
    if frame["output_length"].null_count() or frame["hash_ids"].null_count():
        return None
    counts = frame["hash_ids"].list.len().to_numpy().astype(np.int64)
    ids = frame["hash_ids"].explode()
    if ids.null_count() != np.count_nonzero(counts == 0):
        return None
    outputs = frame["output_length"].to_numpy()
    inputs = frame["input_length"].fill_null(pl.Series(counts * block)).to_numpy()
    times = frame["timestamp"].fill_null(np.nan).to_numpy()
    if (
        not _in_range(inputs)
        or not _in_range(outputs)
        or (inputs > counts * block).any()
        or np.isinf(times).any()
    ):
        return None
    return TraceTable(
        times=Times(times),
        input_length=inputs,
        output_length=outputs,
        session_id=automatic_sessions(numbers),
        ids=(offsets_of(counts), ids.drop_nulls().to_numpy()),
    )


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


class _Place(NamedTuple):
    """A row and where it stands: `trace.jsonl:3`, or `trace.json, item 3` of a top-level array."""

    number: int
    where: str

    def error(self, name: str, value: Any, expected: str) -> InputError:
        return InputError(f"{self.where}, {name}", value, expected)


def _read_lines(file: TraceFile, options: ReadOptions) -> TraceTable:
    reader = _LineReader(options)
    for place, text in _items(file):
        if options.limit is not None and len(reader.numbers) == options.limit:
            break
        reader.add(place, _decode(place, text))
    return reader.table()


def _items(file: TraceFile) -> Iterator[tuple[_Place, bytes]]:
    """The lines of the file, or the items of the array that it is."""
    if not file.data[:4096].lstrip().startswith(b"["):
        for number, line in file.lines():
            yield _Place(number, f"{file.name}:{number}"), line
        return
    try:
        items = msgspec.json.decode(file.data, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise _json_error(error, file.data, file.position) from None
    except RecursionError:
        raise InputError(file.name, "deeply nested JSON", "an array of flat objects") from None
    for number, item in enumerate(items, 1):
        yield _Place(number, f"{file.name}, item {number}"), bytes(item)


def _decode(place: _Place, text: bytes) -> _Row:
    try:
        row = _DECODER.decode(text)
    except msgspec.ValidationError as error:
        if "Number out of range" in str(error):
            raise InputError(place.where, text.decode().strip(), "finite numbers") from None
        raise InputError(place.where, text.decode().strip(), "a JSON object") from None
    except RecursionError:
        raise InputError(place.where, "deeply nested JSON", "a flat JSON object") from None
    except msgspec.DecodeError as error:
        raise _json_error(error, text, lambda at: f"{place.where}:{at + 1}") from None
    names = _ANY_FIELD.findall(text)
    if len(names) > len(set(names)):
        _refuse_duplicates(place, text)
    return row


def _json_error(
    error: msgspec.DecodeError, text: bytes, position: Callable[[int], str]
) -> InputError:
    """What is wrong with the syntax, and where. `position` turns a byte offset into a place."""
    reason = str(error)
    match = re.search(r"(?:: (.*) )?\(byte (\d+)\)", reason)
    if match is None:
        return InputError(position(len(text.rstrip())), "the end of the text", "more JSON")
    at = int(match[2])
    return InputError(position(at), text[at:].decode(errors="replace"), f"JSON ({match[1]})")


def _refuse_duplicates(place: _Place, text: bytes) -> None:
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
        self._unit = options.time_unit or "ms"
        self._block = options.block_size
        self._times: list[float | int | None] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._sessions: list[str] = []
        self._ids: list[list[int] | None] = []
        self._planned: list[list[int] | None] = []
        self._last_time: dict[str, float | int | None] = {}
        self._continued: _Place | None = None
        self._kinds: set[str] = set()

    def add(self, place: _Place, row: _Row) -> None:
        _check_labels(place, row)
        ids = _hash_ids(place, row)
        outputs = _length(place, "output_length", _pick(place, row, "output_length"))
        self._inputs.append(self._input_length(place, row, ids))
        self._outputs.append(outputs)
        self._ids.append(ids)
        self._planned.append(_planned_output(place, row, outputs))
        time = self._time(place, row)
        self._times.append(time)
        self._sessions.append(self._turn(place, row, time))
        self.numbers.append(place.number)

    def table(self) -> TraceTable:
        if self._continued is not None:
            where = f"{self._continued.where}, session_id"
            raise NotSupportedYetError(where, "sessions of several turns")
        if "date" in self._kinds:
            times = np.array(self._times, np.int64)
        else:
            times = np.array([np.nan if t is None else t for t in self._times], np.float64)
        without_ids = sum(ids is None for ids in self._ids)
        return TraceTable(
            times=Times(times),
            input_length=np.array(self._inputs, np.int64),
            output_length=np.array(self._outputs, np.int64),
            session_id=pl.Series("session_id", self._sessions, pl.String),
            ids=flatten(self._ids, np.uint64) if without_ids < len(self._ids) else None,
            planned=flatten(self._planned, np.uint32) if any(self._planned) else None,
            without_ids=without_ids,
        )

    def _input_length(self, place: _Place, row: _Row, ids: list[int] | None) -> int:
        value = _pick(place, row, "input_length")
        if ids is None:
            return _length(place, "input_length", value)
        covered = len(ids) * self._block
        length = _length(place, "input_length", covered if value is None else value)
        if length > covered:
            hashes = f"{len(ids)} hash ids of {self._block} tokens"
            raise place.error("input_length", length, f"at most {covered}, as {hashes} cover")
        return length

    def _time(self, place: _Place, row: _Row) -> float | int | None:
        """The authored time: float ms, or int ns of a date; None if there is none."""
        text = _text_of(_pick(place, row, "timestamp"))
        if text is None:
            time, kind = None, "missing"
        elif (time := milliseconds(text, self._unit)) is not None:
            kind = "number"
        elif (time := nanoseconds(text)) is not None:
            kind = "date"
        else:
            raise place.error("timestamp", text, "a finite number, or an ISO 8601 date and time")
        if self._kinds and ("date" in self._kinds) != (kind == "date"):
            value = MISSING if text is None else text
            raise place.error("timestamp", value, "dates in all rows or in none")
        self._kinds.add(kind)
        return time

    def _turn(self, place: _Place, row: _Row, time: float | int | None) -> str:
        """Check the row as a turn of its session; returns the session's name."""
        name = f"request_{place.number}" if row.session_id is None else row.session_id
        text = _text_of(_pick(place, row, "delay"))
        delay = None if text is None else milliseconds(text, "ms")
        if text is not None and delay is None:
            raise place.error("delay", text, "a finite number")
        if name not in self._last_time:
            if delay:
                raise place.error("delay", delay, f"0 on the first turn of session {name!r}")
            self._last_time[name] = time
            return name
        self._continued = self._continued or place
        last = self._last_time[name]
        if delay is not None:
            if delay < 0:
                raise place.error("delay", delay, "0 or more")
        elif time is not None and last is None:
            expected = f"an earlier timestamp in session {name!r}, or a delay"
            raise place.error("timestamp", time, expected)
        elif time is not None and time < last:
            raise place.error("timestamp", time, f"a time not before {last}, the turn before")
        if time is not None:
            self._last_time[name] = time
        return name


def _pick(place: _Place, row: _Row, name: str) -> Any:
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


def _length(place: _Place, name: str, value: Any) -> int:
    if value is None:
        raise place.error(name, MISSING, LENGTH)
    number = token_count(value)
    if number is None:
        raise place.error(name, value, LENGTH)
    return number


def _hash_ids(place: _Place, row: _Row) -> list[int] | None:
    return _id_list(place, "hash_ids", row.hash_ids, 64)


def _planned_output(place: _Place, row: _Row, outputs: int) -> list[int] | None:
    ids = _id_list(place, "output_token_ids", row.output_token_ids, 32)
    if ids is not None and len(ids) != outputs:
        expected = f"{outputs}, as output_length says"
        raise place.error("output_token_ids", f"{len(ids)} ids", expected)
    return ids


def _id_list(place: _Place, name: str, ids: Any, bits: int) -> list[int] | None:
    if ids is None or is_id_list(ids, 2**bits):
        return ids
    expected = f"whole numbers from 0 to 2**{bits} - 1"
    if not isinstance(ids, list):
        raise place.error(name, ids, f"a list of {expected}")
    k = next(k for k, value in enumerate(ids) if not is_id_list([value], 2**bits))
    raise place.error(f"{name}[{k}]", ids[k], expected)


def _check_labels(place: _Place, row: _Row) -> None:
    for name in ("request_id", "session_id", "policy_class"):
        value = getattr(row, name)
        if value is not None and not isinstance(value, str):
            raise place.error(name, value, "a string")
    for name, low, high in (("priority", -(2**31), 2**31), ("strict_priority", 0, 2**32)):
        value = getattr(row, name)
        if value is not None and not (type(value) is int and low <= value < high):
            raise place.error(name, value, f"a whole number from {low} to {high - 1}")
