"""Applied Compute agentic traces: one row per session (reference: traffic, section 4.1)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import polars as pl

from vecsim.traces.files import TraceFile
from vecsim.traces.json_rows import (
    Place,
    array,
    decode,
    is_array,
    items,
    length,
    not_negative,
    positive_length,
)
from vecsim.traces.table import DEFAULT_BLOCK_SIZE, ReadOptions, TraceTable
from vecsim.traces.times import Times
from vecsim.workload.columns import flatten

_DECODER = msgspec.json.Decoder(dict[str, Any])
_NAME = "applied_compute_agentic_session_"


def looks_like(file: TraceFile) -> bool:
    """Whether the first row has `num_turns` and `input_prompt_length`."""
    return {"num_turns", "input_prompt_length"} <= file.first_object.keys()


def read(file: TraceFile, options: ReadOptions) -> TraceTable:
    """All turns of all sessions, or of the first `options.limit` sessions.

    A session of n rounds has n + 1 turns. Prompts grow by the response and the tool output before;
    content is unique to a session, and a later prompt extends the earlier ones.

    Raises:
        InputError: a malformed row; names file, line and field.
    """
    block = options.block_size or DEFAULT_BLOCK_SIZE
    turns: list[tuple[int, int, int, float]] = []
    ids: list[range] = []
    next_id = 0
    for count, (place, line) in enumerate(items(file)):
        if count == options.limit:
            break
        session = _session(place, decode(place, line, _DECODER))
        turns += session
        ids += [range(next_id, next_id - -turn[1] // block) for turn in session]
        next_id = ids[-1].stop
    number, inputs, outputs, delays = np.array(turns, np.float64).reshape(-1, 4).T
    lines = number.astype(np.int64)
    return TraceTable(
        times=Times(np.full(len(turns), np.nan)),
        input_length=inputs.astype(np.int64),
        output_length=outputs.astype(np.int64),
        numbers=lines,
        unit="none",
        session_id=(_NAME + pl.Series(lines).cast(pl.String)).alias("session_id"),
        delay_ms=delays,
        ids=flatten(ids, np.uint64),
        block_size=block,
        in_items=is_array(file),
    )


def _session(place: Place, row: dict[str, Any]) -> list[tuple[int, int, int, float]]:
    """(line, prompt, output, delay in ms) of each turn."""
    rounds = length(place, "num_turns", row.get("num_turns"))
    columns = {}
    for name in ("assistant_response_length", "tool_call_output_length", "tool_call_latency"):
        columns[name] = array(place, name, row.get(name))
        if len(columns[name]) != rounds:
            expected = f"{rounds} values, as num_turns says"
            raise place.error(name, f"{len(columns[name])} values", expected)
    prompt = positive_length(place, "input_prompt_length", row.get("input_prompt_length"))
    delay, turns = 0.0, []
    for k, (response, tool, latency) in enumerate(zip(*columns.values(), strict=True)):
        output = length(place, f"assistant_response_length[{k}]", response)
        turns.append((place.number, prompt, output, delay))
        prompt += output + length(place, f"tool_call_output_length[{k}]", tool)
        length(place, f"prompt of turn {k + 1}", prompt)
        delay = not_negative(place, f"tool_call_latency[{k}]", latency) * 1000.0
    final = row.get("final_assistant_response_length")
    output = length(place, "final_assistant_response_length", final)
    turns.append((place.number, prompt, output, delay))
    return turns
