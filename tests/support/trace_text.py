"""Trace files as text, for tests."""

from __future__ import annotations

import json
from pathlib import Path

MOONCAKE = (
    '{"timestamp": 300, "input_length": 600, "output_length": 4, "hash_ids": [1000, 1001]}\n'
    '{"timestamp": 100, "input_length": 500, "output_length": 3, "hash_ids": [1000]}\n'
    '{"timestamp": 100.5, "input_length": 0, "output_length": 0, "hash_ids": []}\n'
)
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,8\n"
    "2023-11-16 18:17:03.9799601,110,27\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00+00:00,2162,5\n"
    "2024-05-10 00:00:00.017335+00:00,2399,6\n"
    "2024-05-12 00:00:00.1+00:00,76,15\n"
)


def write(folder: Path, data: str | bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def line(**changes) -> str:
    """One Mooncake row as JSON; None removes a field."""
    row = {"timestamp": 0, "input_length": 100, "output_length": 3, "hash_ids": [1]} | changes
    return json.dumps({name: value for name, value in row.items() if value is not None}) + "\n"


def zstd_frame(data: bytes) -> bytes:
    """A Zstandard frame of stored blocks (RFC 8878); its window is 1 MiB."""
    out = bytearray(b"\x28\xb5\x2f\xfd\x00\x50")
    chunks = [data[at : at + 100_000] for at in range(0, len(data), 100_000)] or [b""]
    for k, chunk in enumerate(chunks):
        last = k == len(chunks) - 1
        out += (len(chunk) << 3 | last).to_bytes(3, "little") + chunk
    return bytes(out)


# One small sample of every format: name -> (file name, text, arguments of read_trace).
_HEADER = (
    '{"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, '
    '"hash_id_scope": "local", "source": {"format": "made-up", "digest": "d"}}\n'
)


def agentic(**changes) -> str:
    """One row of an agentic trace as JSON; None removes a field."""
    row = {
        "request_id": "a",
        "play_id": "p",
        "session_id": "s",
        "model": "m",
        "input_length": 100,
        "output_length": 3,
        "hash_ids": [1, 2],
        "not_before_ms": 0,
        "dependencies": [],
    } | changes
    return json.dumps({name: value for name, value in row.items() if value is not None}) + "\n"


def edge(source: str = "a", **changes) -> dict:
    one = {"request_id": source, "trigger": "completion", "delay_ms": 5, "relation": "sequence"}
    return one | changes


def dynamo(request_id: str = "a", start: float = 1000, end: float = 1010, **changes) -> str:
    """One record of a Dynamo trace; `session` and `parent` make it an agent's, `None` removes."""
    replay = {"trace_block_size": 64, "input_length": 100, "input_sequence_hashes": [1, 2]}
    context = {"session_id": changes.pop("session", None)}
    if (parent := changes.pop("parent", None)) is not None:
        context["parent_session_id"] = parent
    request = {
        "request_id": request_id,
        "output_tokens": 3,
        "request_received_ms": start,
        "total_time_ms": float(end - start),
        "replay": {**replay, **changes.pop("replay", {})},
    }
    record = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": end,
        "request": {**request, **changes.pop("request", {})},
        **changes,
    }
    if context["session_id"] is not None:
        record["agent_context"] = context
    return json.dumps(record) + "\n"


def weka(*requests: dict, **changes) -> str:
    trace = {"id": "t", "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    return json.dumps({**trace, "requests": list(requests), **changes}) + "\n"


def weka_request(t: float, tokens: int, hashes: list[int], **changes) -> dict:
    entry = {"type": "n", "t": t, "model": "m", "in": tokens, "out": 3, "hash_ids": hashes}
    return {**entry, "api_time": 0.2, **changes}


ROUNDS = {
    "num_turns": 1,
    "input_prompt_length": 700,
    "assistant_response_length": [20],
    "tool_call_output_length": [100],
    "tool_call_latency": [0.05],
    "final_assistant_response_length": 10,
}
AGENTIC_HEADER = _HEADER
SAMPLES: dict[str, tuple[str, str, dict]] = {
    "mooncake": ("t.jsonl", MOONCAKE + line(session_id="s") + line(session_id="s", delay=7), {}),
    "mooncake-delta": (
        "t.jsonl",
        line(session_id="s") + line(session_id="s", timestamp=9),
        {"format": "mooncake-delta"},
    ),
    "agentic_mooncake": (
        "t.jsonl",
        _HEADER + agentic(not_before_ms=1000) + agentic(request_id="b", dependencies=[edge()]),
        {},
    ),
    "legacy agentic": (
        "t.jsonl",
        line(request_id="a", timestamp=100)
        + line(request_id="b", timestamp=None, wait_for=["a"], tool_wait_ms=40, delay=2),
        {},
    ),
    "applied_compute_agentic": ("t.jsonl", json.dumps(ROUNDS) + "\n" + json.dumps(ROUNDS), {}),
    "dynamo": ("t.jsonl", dynamo("a") + dynamo("b", 990.5, 1002), {}),
    "dynamo agents": (
        "t.jsonl",
        dynamo("a", session="s") + dynamo("b", 1200, 1210, session="s"),
        {},
    ),
    "weka": (
        "t.jsonl",
        weka(weka_request(10.0, 128, [1, 2]), weka_request(11.5, 192, [1, 2, 3])),
        {},
    ),
    "azure": ("t.csv", AZURE_2023, {}),
    "azure 2024": ("t.csv", AZURE_2024, {}),
    "burstgpt": (
        "t.csv",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,ChatGPT,1087,230,1317,Conversation log\n"
        "118,GPT-4,417,276,693,API log\n",
        {},
    ),
    "vidur": (
        "t.csv",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,100,5\n0.001,200,6\n1.5,300,7\n",
        {},
    ),
    "splitwise": (
        "t.csv",
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,"
        "token_size\n0,0,0,0.25,1,2048,128\n1,0,0,1.25,1,512,64\n",
        {},
    ),
    "vecsim csv": (
        "t.csv",
        "arrival_ms,input_length,output_length,session_id,delay_ms\n"
        "5.5,100,3,a,\n6.5,120,4,a,2.5\n7.5,140,5,b,\n",
        {},
    ),
    "tokens and ns": (
        "t.jsonl",
        '{"arrival_ns": 1500000, "input_length": 3, "output_length": 2, '
        '"input_token_ids": [7, 8, 9], "output_token_ids": [1, 4294967295]}\n'
        '{"arrival_ns": 1500001, "input_length": 3, "output_length": 1, '
        '"input_token_ids": [7, 8, 10]}\n',
        {},
    ),
    "table": (
        "t.csv",
        "when_us,in,out,chat\n10,100,3,a\n1010,120,4,a\n",
        {
            "columns": {
                "arrival": "when_us",
                "input_length": "in",
                "output_length": "out",
                "session_id": "chat",
            }
        },
    ),
    "json table": (
        "t.jsonl",
        '{"at": "2024-01-01T00:00:00.5Z", "in": 10, "out": 2, "ids": [1]}\n'
        '{"at": "2024-01-01T00:00:01Z", "in": 20.0, "out": "3", "ids": [9, 2]}\n',
        {
            "columns": {
                "arrival": "at",
                "input_length": "in",
                "output_length": "out",
                "hash_ids": "ids",
            },
            "block_size": 16,
        },
    ),
}
