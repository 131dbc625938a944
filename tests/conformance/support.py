"""The reference's stored answers: finding a case, running it, comparing it.

`cases/*.json` were recorded once from the reference (`"reference"` in each file names the version).
A case has the payload that the reference got, the features it needs beyond a plain aggregated vLLM
run, and what came out: a report and a record per request, or an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import answers
from vecsim.config.schema import DisaggregatedTopology
from vecsim.config.validate import _BUILT_PAYLOAD, _BUILT_RANK, _BUILT_SPEC
from vecsim.run.replay import replay

FOLDER = Path(__file__).parent / "cases"
TRACES = os.environ.get("VECSIM_TRACES")

BUILT = {
    "agentic",
    "applied_compute",
    "belady",
    "closed_loop",
    "disaggregated",
    "dp",
    "dynamo_trace",
    "mooncake",
    "mooncake_delta",
    "poisson",
    "sessions",
    "sla",
    "speedup",
    "synthetic",
    "time_limit",
    "tokenization",
    "trace",
    "weka",
}

# The field that the answer names (a part of its path) while a feature is not built, and the value
# that `vecsim.config.validate` will list as built once it is; None: when its row is gone.
FIELDS = {
    "disaggregated": ("topology", DisaggregatedTopology),
    "encoder": ("encoder", None),
    "external_timing": ("rank.timing_model", None),
    "frontend": ("rank.frontend", None),
    "g3": ("rank.native_host_offload", None),
    "host_loop": ("rank.sglang.host_loop", None),
    "host_offload": ("rank.native_host_offload", None),
    "kv_groups": ("rank.kv_cache_groups", None),
    "kv_router": ("adapters.placement.provider", "kv_router"),
    "kvcr": ("rank.native_host_offload", None),
    "mtp": ("rank.aic_nextn", None),
    "scaling": ("adapters.scaling.provider", "planner"),
    "sglang": ("rank.backend", "sglang"),
    "state_cache": ("rank.state_cache", None),
    "trtllm": ("rank.backend", "trtllm"),
    "vision": ("rank.vision", None),
}

# Cases that mention a feature where it has no effect.
UNUSED = {
    "config/extra_external_on_unused_prefill_role": "external_timing",
    "config/extra_external_shared_unused_in_disagg": "external_timing",
}

Case = dict[str, Any]


@cache
def all_cases() -> tuple[Case, ...]:
    """Every stored case, with the name of its file under "file"."""
    cases = []
    for path in sorted(FOLDER.glob("*_cases.json")):
        group = path.name.removesuffix("_cases.json")
        cases += [{"file": group, **case} for case in json.loads(path.read_text())["cases"]]
    return tuple(cases)


def unbuilt(case: Case) -> list[str]:
    known = BUILT | {UNUSED.get(name(case))}
    return [f for f in case["feature"] if f not in known and not _is_built(f)]


def _is_built(feature: str) -> bool:
    if feature not in FIELDS:
        return False
    field, value = FIELDS[feature]
    tables = {**_BUILT_SPEC, **_BUILT_PAYLOAD, **{f"rank.{k}": v for k, v in _BUILT_RANK.items()}}
    return field not in tables or (value is not None and value in tables[field])


def name(case: Case) -> str:
    return f"{case['file']}/{case['name']}"


@contextmanager
def files_of(case: Case, folder: Path) -> Iterator[dict]:
    """Enters `folder` with the case's trace files in it and yields the payload to run."""
    for file_name, text in case.get("files", {}).items():
        path = folder / file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="")
    if case.get("rows") and TRACES:
        trace = case["payload"]["traffic"]["trace_path"]
        with (Path(TRACES) / trace).open() as lines:
            kept = [line for line, _ in zip(lines, range(case["rows"]), strict=False)]
        (folder / trace).write_text("".join(kept))
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield case["payload"]
    finally:
        os.chdir(before)


def differences(case: Case, folder: Path, **options) -> list[str]:
    """Runs a case and compares it with the stored answer: one line per differing field."""
    with files_of(case, folder) as payload:
        result = replay(payload, **options)
        got = answers.from_result(result)
    expected = answers.from_case(case["expect"], len(result.workload))
    if case["expect"]["requests"] is None:  # recording was off: only the report is known
        expected = answers.Answer(got.requests, expected.report, False)
    return answers.differences(expected, got)
