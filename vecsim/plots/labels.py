"""Axis titles: what a column is, and its unit, from its name."""

from __future__ import annotations

_UNITS = (
    ("_tok_s_per_gpu", "tok/s per GPU"),
    ("_rps_per_gpu", "req/s per GPU"),
    ("_per_gpu", "per GPU"),
    ("_tok_s", "tok/s"),
    ("_rps", "req/s"),
    ("_ms", "ms"),
    ("_seconds", "s"),
    ("_hours", "h"),
    ("_ratio", "share"),
    ("_usage", "share"),
    ("_requests", "requests"),
    ("_tokens", "tokens"),
    ("_blocks", "blocks"),
)
_WORDS = {
    "ttft": "TTFT",
    "ttst": "TTST",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "kv": "KV",
    "gpu": "GPU",
    "gpus": "GPUs",
}
_WHOLE = {
    "gpus": ("GPUs", None),
    "num_requests": ("arrived", "requests"),
    "cost": ("cost", "currency of the price"),
    "cost_per_million_tokens": ("cost", "per million tokens"),
    "cost_per_million_output_tokens": ("cost", "per million output tokens"),
    "output_token_throughput_per_user": ("output per user", "tok/s"),
    "workers": ("workers", "count"),
    "concurrency": ("requests in flight", "count"),
    "arrival_speedup": ("arrival speedup", "times the trace's rate"),
}


def title(column: str) -> str:
    """Title of an axis that shows a column, with its unit in brackets where it has one."""
    if column in _WHOLE:
        words, unit = _WHOLE[column]
        return words if unit is None else f"{words} ({unit})"
    for suffix, unit in _UNITS:
        if column.endswith(suffix):
            return f"{_words(column.removesuffix(suffix))} ({unit})"
    return _words(column)


def _words(name: str) -> str:
    name = name.rpartition(".")[2]
    return " ".join(_WORDS.get(word, word) for word in name.split("_"))
