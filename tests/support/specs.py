"""Short words for inline specs in tests: `r(t, in, out)` and a fleet with fixed pass times."""

from __future__ import annotations

from typing import Any


def r(at_ms: float, input_tokens: int, output_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "arrival_time_ms": at_ms,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        **more,
    }


def spec(
    *requests: dict[str, Any],
    workers: int = 1,
    dp_size: int = 1,
    policy: str = "lru",
    prefill_ms: float = 10,
    decode_ms: float = 10,
    rank: dict[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """An aggregated vLLM fleet; every pass with prefill work costs `prefill_ms`, with decode work
    `decode_ms`. `rank` adds rank fields, `top` fields of the spec."""
    timing = {"type": "fixed", "prefill_ms": prefill_ms, "decode_ms": decode_ms}
    return {
        "version": 1,
        "topology": {"kind": "aggregated", "workers": {"initial_workers": workers}},
        "engine": {
            "kv_eviction_policy": policy,
            "dp_size": dp_size,
            "rank": {"backend": "vllm", "timing_model": timing, **(rank or {})},
        },
        "requests": [{"id": f"r{k}", **row} for k, row in enumerate(requests)],
        **top,
    }


def cache(blocks: int, size: int, **more: Any) -> dict[str, Any]:
    """Rank fields of a pool of `blocks` blocks of `size` tokens."""
    return {"num_gpu_blocks": blocks, "block_size": size, **more}


def rows(result) -> list[dict[str, Any]]:
    return result.requests.to_dicts()
