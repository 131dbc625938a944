"""Makes a spec small while it keeps failing."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

TRIES = 600
PATIENCE_S = 60.0

DEFAULTS = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "timing_model": {"type": "fixed", "prefill_ms": 10, "decode_ms": 1},
}


def shrink(payload: dict, fails: Callable[[dict], bool]) -> dict:
    """The smallest spec found for which `fails` still holds, trying at most `TRIES` specs."""
    best, left = payload, TRIES
    give_up = time.monotonic() + PATIENCE_S
    improved = True
    while improved and left > 0:
        improved = False
        for candidate in _candidates(best):
            left -= 1
            if fails(candidate):
                best, improved = candidate, True
                break
            if left <= 0 or time.monotonic() > give_up:
                return best
    return best


def _candidates(payload: dict) -> Iterator[dict]:
    """Simpler specs, the boldest first."""
    if "tokenization" in payload:
        yield payload["spec"]
    count = len(payload.get("spec", payload)["requests"])
    size = count // 2
    while size:
        for start in range(0, count, size):
            if size < count:
                yield _edited(payload, lambda s, a=start, n=size: _cut(s["requests"], a, n))
        size //= 2
    yield from _simpler_settings(payload)
    for k in range(count):
        yield from _simpler_request(payload, k)


def _edited(payload: dict, edit: Callable[[dict], None]) -> dict:
    changed = copy.deepcopy(payload)
    edit(changed.get("spec", changed))
    return changed


def _cut(rows: list, start: int, size: int) -> None:
    del rows[start : start + size]


def _simpler_settings(payload: dict) -> Iterator[dict]:
    spec = payload.get("spec", payload)
    engine = spec["engine"]
    for key in ("max_in_flight", "max_sim_time_ms", "sla"):
        if key in spec:
            yield _edited(payload, lambda s, k=key: s.pop(k))
    for name in ("workers", "prefill", "decode"):
        if spec["topology"].get(name, {}).get("initial_workers", 1) > 1:
            yield _edited(payload, lambda s, n=name: s["topology"][n].update(initial_workers=1))
    if spec["topology"].get("handoff_latency_ms"):
        yield _edited(payload, lambda s: s["topology"].pop("handoff_latency_ms"))
    for name in ("prefill", "decode"):
        if name in engine:
            yield _edited(payload, lambda s, n=name: s["engine"].pop(n))
    if "kv_eviction_policy" in engine:
        yield _edited(payload, lambda s: s["engine"].pop("kv_eviction_policy"))
    if engine.get("dp_size", 1) > 1 and not any("dp_rank" in r for r in spec["requests"]):
        yield _edited(payload, lambda s: s["engine"].pop("dp_size"))
    for key, value in engine["rank"].items():
        if key in DEFAULTS:
            if value != DEFAULTS[key]:
                edit = {key: DEFAULTS[key]}
                yield _edited(payload, lambda s, e=edit: s["engine"]["rank"].update(e))
        elif key not in ("backend", "block_size", "num_gpu_blocks", "kv_transfer_bytes_per_token"):
            yield _edited(payload, lambda s, k=key: s["engine"]["rank"].pop(k))


def _simpler_request(payload: dict, k: int) -> Iterator[dict]:
    row = payload.get("spec", payload)["requests"][k]
    for key in ("output_token_ids", "input_token_ids", "dp_rank", "prefill_dp_rank"):
        if key in row:
            yield _edited(payload, lambda s, n=key: s["requests"][k].pop(n))
    for at in {0, round(row["arrival_time_ms"])} - {row["arrival_time_ms"]}:
        yield _edited(payload, lambda s, t=at: s["requests"][k].update(arrival_time_ms=t))
    n = row["input_tokens"]
    for shorter in sorted({n // 2, n - 1} - {n, -1}):
        yield _edited(payload, lambda s, m=shorter: _set_input(s["requests"][k], m))
    if "output_token_ids" not in row:
        n = row["output_tokens"]
        for shorter in sorted({n // 2, n - 1} - {n, -1}):
            edit = {"output_tokens": shorter}
            yield _edited(payload, lambda s, e=edit: s["requests"][k].update(e))


def _set_input(row: dict, length: int) -> None:
    row["input_tokens"] = length
    if "input_token_ids" in row:
        row["input_token_ids"] = row["input_token_ids"][:length]
