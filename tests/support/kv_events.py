"""KV events in a form in which both sides can be compared: one tuple a block."""

from __future__ import annotations

from typing import Any

from vecsim.results.result import Result

Block = tuple[int, float, str, int | None, int, int | None]
"""(event_id, observed_at_ms, kind, parent_hash, block_hash, tokens_hash)."""


def of_reference(artifacts: dict[str, Any]) -> list[Block]:
    """From the artifacts of `run_replay_with_artifacts_json`."""
    blocks = []
    for entry in artifacts["kv_events"]:
        event, at_ms = entry["event"], entry["observed_at_ms"]
        if "removed" in event["data"]:
            for block_hash in event["data"]["removed"]["block_hashes"]:
                blocks.append((event["event_id"], at_ms, "removed", None, block_hash, None))
            continue
        stored = event["data"]["stored"]
        parent = stored["parent_hash"]
        for block in stored["blocks"]:
            own = (block["block_hash"], block["tokens_hash"])
            blocks.append((event["event_id"], at_ms, "stored", parent, *own))
            parent = own[0]
    return blocks


def of_result(result: Result) -> list[Block]:
    """From a run of one worker with one rank."""
    frame = result.kv_events
    assert frame.select("pool", "worker", "rank").unique().rows() in ([], [("agg", 0, 0)])
    columns = ("event_id", "observed_at_ms", "kind", "parent_hash", "block_hash", "tokens_hash")
    return frame.select(columns).rows()
