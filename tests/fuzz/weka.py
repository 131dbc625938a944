"""Random corpora of Weka traces: chains, forks, seams, subagents, odd prompts, broken fields.

`python -m tests.fuzz weka --reference PYTHON --seeds A:B` compares vecsim with the reference:
names, sessions, plays, every time and count, on an engine that answers at once and on one that is
slow, or that both refuse the corpus. Same seed, same corpus.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests.fuzz import campaign, specs
from tests.fuzz.reference import Reference
from tests.fuzz.trial import STANDSTILL
from tests.support import answers
from vecsim.errors import InputError
from vecsim.run.replay import replay

FOLDER = "corpus"
ENGINES = {
    "at once": {"type": "fixed", "prefill_ms": 0.001, "decode_ms": 0.001},
    "slow": {"type": "fixed", "prefill_ms": 700.0, "decode_ms": 300.0},
}
NAMES = ("t", "u", "run 7", "é")
_STEPS = (0.0, 0.0, 1e-6, 5e-7, 2e-6, 0.1, 0.25, 0.25, 0.5, 1.0, 1.7, 3.0)
_APIS = (0.0, 0.1, 0.2, 0.25, 0.5, 1.0, 2.5, 4.0)
_BROKEN = {
    "t": (-1, "0", None, 1e999),
    "model": ("", " ", None, 3, "other"),
    "in": (0, -1, 16.0, "16", None),
    "out": (-1, 1.5, None),
    "hash_ids": (None, [-1], [1.0], [2**64], 3),
    "api_time": (-0.5, "1"),
    "type": ("x", None),
    "status": ("failed", None),
    "agent_id": ("", None),
    "subagent_type": (None, 1),
    "duration_ms": (-1, 5.0),
    "requests": (None, [], {}),
    "id": ("", None),
    "block_size": (0, None, 7),
    "hash_id_scope": ("global", None),
    "models": (None, ["z"], ["m", "n", ""]),
}


class Draw:
    """The files of one corpus, and the traffic section that names it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"weka {seed}")
        self.block = self.rng.choice([16, 16, 24, 64])
        self.relative = self.rng.random() < 0.3
        self.many_models = self.rng.random() < 0.3
        self.loose = self.rng.random() < 0.3  # file order is not time order
        self.ids = 0

    def corpus(self) -> tuple[dict[str, str], dict[str, Any]]:
        """(text of each file by its path below the folder, traffic)."""
        names = self.rng.sample(("a.json", "b/x.json", "b-x.JSON", "c.jsonl", "b/é.jsonl"), k=5)
        names = names[: self.rng.choice([1, 1, 2, 3])]
        files = {name: self._file(name) for name in names}
        traffic = {"source_type": "trace", "load_type": "trace_timestamps", "trace_format": "weka"}
        traffic |= {"execution_model": "m", "trace_path": FOLDER}
        if len(names) == 1 and self.rng.random() < 0.5:
            traffic["trace_path"] = f"{FOLDER}/{names[0]}"
        if self.rng.random() < 0.2:
            traffic["weka_nested_timestamp_basis"] = self.rng.choice(["absolute", "relative"])
        if self.rng.random() < 0.2:
            traffic["arrival_speedup_ratio"] = self.rng.choice([0.5, 3.0])
        if self.rng.random() < 0.2:
            traffic["agentic_lanes"] = self.rng.randint(1, 3)
        if self.rng.random() < 0.1:
            traffic["trace_block_size"] = self.rng.choice([self.block, 16])
        return files, traffic

    def _file(self, name: str) -> str:
        if name.lower().endswith(".json"):
            return json.dumps(self._trace(), indent=self.rng.choice([None, None, 1]))
        texts = [
            json.dumps(self._trace(), indent=self.rng.choice([None, None, None, 2]))
            for _ in range(self.rng.randint(1, 3))
        ]
        return self.rng.choice(["\n", "\n\n", " "]).join(texts)

    def _trace(self) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        pool: list[list[int]] = []
        now = self.rng.choice([0.0, 0.0, 3.5])
        for _ in range(self.rng.choice([1, 3, 6, 9, 13])):
            if entries and self.rng.random() < 0.2:
                entries.append(self._subagent(now, pool))
            else:
                entries.append(self._request(now, pool))
            now += self._step()
        if self.loose:
            first, *rest = entries
            self.rng.shuffle(rest)
            entries = [first, *rest]
        trace = {"id": self.rng.choice(NAMES), "block_size": self.block}
        trace |= {"hash_id_scope": "local", "requests": entries}
        if self.rng.random() < 0.3:
            trace["models"] = ["m", "n"]
        if self.rng.random() < 0.08:
            self._break(trace)
        return trace

    def _step(self) -> float:
        return 3600.0 if self.rng.random() < 0.02 else self.rng.choice(_STEPS)

    def _request(self, now: float, pool: list[list[int]]) -> dict[str, Any]:
        ids = self._prompt(pool)
        pool.append(ids)
        entry: dict[str, Any] = {"type": self.rng.choice("ns"), "t": now, "model": "m"}
        if self.many_models:
            entry["model"] = self.rng.choice("mmn")
        entry["in"] = max(1, self.block * len(ids) + self.rng.choice([0, 0, 0, -5, 7, 70, -40]))
        entry["out"] = self.rng.choice([0, 1, 2, 3, 64, 65])
        if ids or self.rng.random() < 0.5:
            entry["hash_ids"] = ids
        if self.rng.random() < 0.9:
            entry["api_time"] = self.rng.choice((*_APIS, None))
        return entry

    def _prompt(self, pool: list[list[int]]) -> list[int]:
        """Ids that extend or leave the path of an earlier prompt, or begin another; or none."""
        if self.rng.random() < 0.05:
            return []
        ids: list[int] = []
        if pool and self.rng.random() < 0.85:
            ids = self.rng.choice(pool[-4:])
            if self.rng.random() < 0.4:
                ids = ids[: self.rng.randint(0, len(ids))]
        fresh = []
        for _ in range(self.rng.randint(0 if ids else 1, 3)):
            self.ids += 1
            fresh.append(self.rng.choice([self.ids, self.ids, self.rng.randint(1, 4)]))
        return ids + fresh

    def _subagent(self, now: float, pool: list[list[int]]) -> dict[str, Any]:
        own = list(pool) if self.rng.random() < 0.2 else []
        start = 0.0 if self.relative else now
        inner = []
        for _ in range(self.rng.choice([0, 1, 2, 3, 5])):
            inner.append(self._request(start, own))
            start += self._step()
        agent: dict[str, Any] = {"type": "subagent", "t": now, "agent_id": self.rng.choice("ab")}
        agent |= {"subagent_type": "x", "status": self.rng.choice(["completed", "async_launched"])}
        if not inner:
            agent["status"] = "async_launched"
        if self.rng.random() < 0.5:
            agent["duration_ms"] = self.rng.choice([0, 250, 1000, 5000, None])
        return agent | {"requests": inner}

    def _break(self, trace: dict[str, Any]) -> None:
        """One field missing, or of another value."""
        objects = [trace, *trace["requests"]]
        objects += [r for entry in trace["requests"] for r in entry.get("requests", ())]
        target = self.rng.choice(objects)
        name = self.rng.choice([name for name in target if name in _BROKEN])
        if self.rng.random() < 0.4:
            del target[name]
        else:
            target[name] = self.rng.choice(_BROKEN[name])


def payloads(seed: int) -> tuple[dict[str, str], dict[str, dict]]:
    """(files, payload by engine) of a seed."""
    draw = Draw(seed)
    files, traffic = draw.corpus()
    rank = {"block_size": draw.rng.choice([16, 16, 8]), "num_gpu_blocks": 20_000}
    made = {}
    for name, model in ENGINES.items():
        spec = {"version": 1, "requests": [], "record_per_request": True}
        spec["topology"] = {"kind": "aggregated", "workers": {"initial_workers": 1}}
        spec["engine"] = {"rank": {**rank, "timing_model": model}}
        made[name] = {"spec": spec, "traffic": traffic, "determinism": "canonical_v1"}
    return files, made


def run(seed: int, reference: Reference, folder: Path) -> tuple[str, list[str]]:
    """(outcome, one line per difference) of a seed."""
    files, made = payloads(seed)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    for name, text in files.items():
        path = folder / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    lines = []
    for engine, payload in made.items():
        report = reference.ask(payload)
        error = report.get("error")
        if error and any(part in error for part in (*STANDSTILL, "process ended")):
            return "standstill", []
        try:
            result = replay(payload)
        except InputError as refusal:
            return "refused", [] if error else [f"vecsim refuses: {refusal}"]
        except Exception as raised:  # whatever escapes is a finding, and the campaign goes on
            return "raised", [f"{type(raised).__name__}: {raised}"]
        if error:
            return "refused", [f"the reference refuses ({error}), vecsim reads it"]
        lines += [f"{engine}: {line}" for line in _differences(report, result)]
    return "replayed", lines


def _differences(report: dict, result: Any) -> list[str]:
    workload = result.workload
    ids = workload.request_id.to_list()
    sessions = dict(zip(ids, workload.session_id.to_list(), strict=True))
    strange = [
        row["request_id"] for row in report["per_request"] if row["request_id"] not in sessions
    ]
    if strange:
        return [f"requests of other names: {strange[:3]}"]
    lines = answers.differences(answers.from_reference(report, ids), answers.from_result(result))
    for row in report["per_request"]:
        if sessions[row["request_id"]] != row["session_id"]:
            lines.append(f"session of {row['request_id']}: {row['session_id']}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz weka", description=__doc__)
    parser.add_argument("--reference", required=True, help="Python that has the reference")
    parser.add_argument("--seeds", required=True, help="A:B, B excluded", type=specs.span)
    options = parser.parse_args(argv)
    return campaign.in_one_process("corpora", options, run)
