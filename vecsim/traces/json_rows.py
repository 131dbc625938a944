"""Rows of JSON: lines of a file or items of an array, with their places in error messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from vecsim.errors import MISSING, InputError
from vecsim.traces.files import TraceFile
from vecsim.traces.table import token_count
from vecsim.traces.times import milliseconds, nanoseconds
from vecsim.workload.columns import LENGTH, is_id_list


class Place(NamedTuple):
    """A row and where it stands: `trace.jsonl:3`, or `trace.json, item 3` of a top-level array."""

    number: int
    where: str

    def error(self, name: str, value: Any, expected: str) -> InputError:
        return InputError(f"{self.where}, {name}", value, expected)


def is_array(file: TraceFile) -> bool:
    """Whether the text is one JSON array."""
    return file.data.startswith(b"[", file.begin)


def items(file: TraceFile) -> Iterator[tuple[Place, bytes]]:
    """The lines of the file, or the items of the array that it is."""
    if not is_array(file):
        for number, line in file.lines():
            yield Place(number, f"{file.name}:{number}"), line
        return
    try:
        rows = msgspec.json.decode(file.data, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise json_error(error, file.data, file.position) from None
    except RecursionError:
        raise InputError(file.name, "deeply nested JSON", "an array of flat objects") from None
    for number, item in enumerate(rows, 1):
        yield Place(number, f"{file.name}, item {number}"), bytes(item)


def decode(place: Place, text: bytes, decoder: msgspec.json.Decoder) -> Any:
    """One row. Raises InputError naming the column where the syntax breaks."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        if "Number out of range" in str(error):
            raise InputError(place.where, text.decode().strip(), "finite numbers") from None
        raise InputError(place.where, text.decode().strip(), "a JSON object") from None
    except RecursionError:
        raise InputError(place.where, "deeply nested JSON", "a flat JSON object") from None
    except msgspec.DecodeError as error:
        raise json_error(error, text, lambda at: f"{place.where}:{at + 1}") from None


def json_error(
    error: msgspec.DecodeError, text: bytes, position: Callable[[int], str]
) -> InputError:
    """What is wrong with the syntax, and where. `position` turns a byte offset into a place."""
    reason = str(error)
    match = re.search(r"(?:: (.*) )?\(byte (\d+)\)", reason)
    if match is None:
        return InputError(position(len(text.rstrip())), "the end of the text", "more JSON")
    at = int(match[2])
    return InputError(position(at), text[at:].decode(errors="replace"), f"JSON ({match[1]})")


# --- fields ---------------------------------------------------------------------------------------


def obj(place: Place, name: str, value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise place.error(name, MISSING if value is None else value, "an object")
    return value


def array(place: Place, name: str, value: Any) -> list[Any]:
    """A JSON array."""
    if not isinstance(value, list):
        raise place.error(name, MISSING if value is None else value, "an array")
    return value


def text(place: Place, name: str, value: Any, *, needed: bool = True) -> str | None:
    """A string that is not blank; None if absent and not `needed`."""
    if value is None and not needed:
        return None
    if not isinstance(value, str) or (needed and not value.strip()):
        raise place.error(name, MISSING if value is None else value, "a string that is not blank")
    return value


def length(place: Place, name: str, value: Any) -> int:
    """A number of tokens."""
    if value is None:
        raise place.error(name, MISSING, LENGTH)
    number = token_count(value)
    if number is None:
        raise place.error(name, value, LENGTH)
    return number


def positive_length(place: Place, name: str, value: Any) -> int:
    """A number of tokens above 0."""
    number = length(place, name, value)
    if number == 0:
        raise place.error(name, value, "a number of tokens above 0")
    return number


def number(place: Place, name: str, value: Any, default: float | None = None) -> float:
    """A finite number as a float; `default` where it is absent, if there is one."""
    if value is None and default is not None:
        return default
    if type(value) not in (int, float) or not abs(value) < float("inf"):
        raise place.error(name, MISSING if value is None else value, "a finite number")
    return float(value)


def not_negative(place: Place, name: str, value: Any, default: float | None = None) -> float:
    """A finite number, 0 or more."""
    result = number(place, name, value, default)
    if result < 0:
        raise place.error(name, value, "a finite number, 0 or more")
    return result


def id_list(place: Place, name: str, ids: Any, bits: int) -> list[int] | None:
    """A list of ids below 2**bits, or None."""
    if ids is None or (isinstance(ids, list) and is_id_list(ids, 2**bits)):
        return ids
    expected = f"whole numbers from 0 to 2**{bits} - 1"
    if not isinstance(ids, list):
        raise place.error(name, ids, f"a list of {expected}")
    k = next(k for k, value in enumerate(ids) if not is_id_list([value], 2**bits))
    raise place.error(f"{name}[{k}]", ids[k], expected)


def planned_output(place: Place, ids: Any, outputs: int) -> list[int] | None:
    """`output_token_ids`: as many as `output_length` says, or None."""
    planned = id_list(place, "output_token_ids", ids, 32)
    if planned is not None and len(planned) != outputs:
        expected = f"{outputs}, as output_length says"
        raise place.error("output_token_ids", f"{len(planned)} ids", expected)
    return planned


def exact_ids(place: Place, name: str, ids: Any, inputs: int, block: int) -> list[int]:
    """Hash ids, exactly one per block of the prompt."""
    found = id_list(place, name, ids, 64)
    if found is None:
        raise place.error(name, MISSING, "a list of hash ids")
    needed = -(-inputs // block)
    if len(found) != needed:
        expected = f"exactly {needed} for {inputs} tokens in blocks of {block}"
        raise place.error(name, f"{len(found)} ids", expected)
    return found


class Clock:
    """Authored times of one file: numbers in one unit, or dates; never both."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._kinds: set[str] = set()

    def read(self, place: Place, name: str, text: str | None) -> float | int | None:
        """Float ms, or int ns of a date; None if there is no time."""
        if text is None:
            time, kind = None, "missing"
        elif (time := milliseconds(text, self._unit)) is not None:
            kind = "number"
        elif (time := nanoseconds(text)) is not None:
            kind = "date"
        else:
            raise place.error(name, text, "a finite number, or an ISO 8601 date and time")
        if self._kinds and ("date" in self._kinds) != (kind == "date"):
            value = MISSING if text is None else text
            raise place.error(name, value, "dates in all rows or in none")
        self._kinds.add(kind)
        return time
