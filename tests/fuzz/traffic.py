"""Small random traffic: sessions, growing prompts, graphs, lanes, caps, synthetic load.

`python -m tests.fuzz traffic --reference PYTHON --seeds A:B [--disagg] [--against slow|vecsim]`
compares vecsim (or the slow model of sessions) with the reference. Same seed, same traffic.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

from tests.fuzz import campaign, specs
from tests.fuzz.reference import Reference
from tests.fuzz.trial import STANDSTILL
from tests.models import slow_sessions
from tests.models.slow_model import Endless
from tests.support import answers
from vecsim.config.load import load
from vecsim.config.validate import validate
from vecsim.errors import InputError
from vecsim.run.replay import replay
from vecsim.workload.workload import Workload

FILE = "trace.jsonl"
KINDS = (
    "mooncake",
    "mooncake-delta",
    "applied_compute_agentic",
    "agentic_mooncake",
    "legacy",
    "dynamo",
    "weka",
    "synthetic",
    "synthetic-session",
)
BACKENDS = ("vllm", "sglang", "trtllm")
_WITHOUT = ("belady", "empty_prompt", "planned", "refused")


class Draw:
    """One payload with its trace file; with `disagg` that of a prefill/decode fleet."""

    def __init__(self, seed: int, disagg: bool = False) -> None:
        self.rng = random.Random(f"traffic {seed}")
        backend = self.rng.choice(BACKENDS)
        forced = () if backend == "vllm" else (backend,)
        forced += ("disagg",) if disagg else ()
        made = specs.make(seed, forced, (*_WITHOUT, "closed_loop", "sla"))
        self.spec = {**made.get("spec", made), "requests": [], "record_per_request": True}
        self.beside = {"tokenization": made["tokenization"]} if "tokenization" in made else {}
        engine = self.spec["engine"]
        roles = [engine, *(engine[name] for name in ("prefill", "decode") if name in engine)]
        if self.rng.random() < 0.5:
            # Memory is short, but not for a single request.
            for rank in (role["rank"] for role in roles):
                rank["num_gpu_blocks"] = self.rng.randint(90, 300) // rank["block_size"] + 1
        self.block = self.rng.choice([4, 8, 16, 24])
        self.kind = self.rng.choice(KINDS)
        self.planned = self.rng.choice([0.0, 0.0, 0.3, 1.0])
        self.ids = 0

    def payload(self) -> tuple[dict, str]:
        """(payload, text of the trace; empty for synthetic load)."""
        if self.kind.startswith("synthetic"):
            traffic, text = self._synthetic(), ""
        else:
            traffic = {"source_type": "trace", "trace_path": FILE, "trace_format": self.kind}
            traffic |= {"trace_block_size": self.block, "load_type": "trace_timestamps"}
            if self.rng.random() < 0.3:
                traffic["arrival_speedup_ratio"] = self.rng.choice([0.5, 2.0, 3.0])
            if self.kind in ("dynamo", "weka"):
                del traffic["trace_block_size"]
            text = getattr(self, "_" + self.kind.replace("-", "_"))(traffic)
        graph = "execution_model" in traffic
        if graph and "agentic_lanes" not in traffic and self.rng.random() < 0.3:
            traffic["agentic_lanes"] = self.rng.randint(1, 3)
        if not graph and self.rng.random() < 0.4:
            cap = "concurrency" if self.kind.startswith("synthetic") else "replay_concurrency"
            traffic[cap] = self.rng.randint(1, 4)
        payload = {"spec": self.spec, "traffic": traffic, **self.beside}
        return payload | {"determinism": "canonical_v1"}, text

    def _time(self) -> float:
        return self.rng.choice([0, 0, 1, 5, 20, 100, 250]) * self.rng.choice([1, 1, 0.5, 1.25])

    def _prompt(self, known: list[list[int]]) -> tuple[int, list[int]]:
        """(length, ids), perhaps continuing a known prompt."""
        length = self.rng.randint(1, 60)
        need = -(-length // self.block)
        start = self.rng.choice(known)[: self.rng.randint(0, need)] if known else []
        ids = start[:need]
        while len(ids) < need:
            self.ids += 1
            ids.append(self.ids)
        known.append(ids)
        return length, ids

    def _plan(self, row: dict, name: str) -> None:
        """Perhaps author the output, out of few tokens, which prompts hold as well."""
        if self.rng.random() < self.planned:
            tokens = [self.rng.randrange(3) for _ in range(row["output_length"])]
            row |= {"request_id": name, "output_token_ids": tokens}

    def _mooncake(self, traffic: dict) -> str:
        rows, known, last = [], [], {}
        for k in range(self.rng.randint(1, 9)):
            length, ids = self._prompt(known)
            row = {"input_length": length, "output_length": self.rng.randint(0, 9), "hash_ids": ids}
            self._plan(row, f"r{k}")
            name = self.rng.choice([None, "a", "b", "c"])
            if name is not None:
                row["session_id"] = name
            if name in last and self.rng.random() < 0.4:
                row["delay"] = self._time()
            else:
                row["timestamp"] = last.get(name, 0) + self._time()
                if name is not None:
                    last[name] = row["timestamp"]
            rows.append(json.dumps(row))
        return "\n".join(rows)

    _mooncake_delta = _mooncake

    def _applied_compute_agentic(self, traffic: dict) -> str:
        rows = []
        for _ in range(self.rng.randint(1, 4)):
            n = self.rng.randint(0, 3)
            row = {
                "num_turns": n,
                "input_prompt_length": self.rng.randint(1, 50),
                "assistant_response_length": [self.rng.randint(0, 8) for _ in range(n)],
                "tool_call_output_length": [self.rng.randint(0, 20) for _ in range(n)],
                "tool_call_latency": [self.rng.choice([0.0, 0.01, 0.125]) for _ in range(n)],
                "final_assistant_response_length": self.rng.randint(1, 8),
            }
            rows.append(json.dumps(row))
        return "\n".join(rows)

    def _agentic_mooncake(self, traffic: dict) -> str:
        traffic["execution_model"] = "m"
        if self.rng.random() < 0.5:
            traffic["agentic_lanes"] = self.rng.randint(1, 3)
        header = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": self.block}
        header |= {"hash_id_scope": "local", "source": {"format": "f", "digest": "d"}}
        rows, known = [json.dumps(header)], []
        names = self.rng.sample("abcdefghijklmnop", self.rng.randint(1, 10))
        plays: dict[str, list[str]] = {}
        for name in names:
            play = self.rng.choice("xyz")
            length, ids = self._prompt(known)
            sources = plays.setdefault(play, [])
            chosen = self.rng.sample(sources, min(len(sources), self.rng.randint(0, 2)))
            edges = [self._edge(source) for source in chosen]
            row = {"request_id": name, "play_id": play, "session_id": play, "model": "m"}
            row |= {"input_length": length, "output_length": self.rng.randint(0, 9)}
            row |= {"hash_ids": ids, "not_before_ms": self._time(), "dependencies": edges}
            self._plan(row, name)
            rows.append(json.dumps(row))
            sources.append(name)
        return "\n".join(rows)

    def _edge(self, source: str) -> dict:
        relation = self.rng.choice(["sequence", "join", "replay_barrier", "spawn"])
        trigger = self.rng.choice(["dispatch", "completion"]) if relation == "spawn" else None
        edge = {"request_id": source, "relation": relation, "delay_ms": self._time()}
        return edge | {"trigger": trigger or "completion"}

    def _legacy(self, traffic: dict) -> str:
        traffic |= {"trace_format": "agentic_mooncake", "execution_model": "m"}
        rows, known, names = [], [], []
        for k in range(self.rng.randint(1, 8)):
            length, ids = self._prompt(known)
            row = {"request_id": f"r{k}", "timestamp": self._time(), "input_length": length}
            row |= {"output_length": self.rng.randint(0, 9), "hash_ids": ids}
            self._plan(row, f"r{k}")
            sources = self.rng.sample(names, min(len(names), self.rng.randint(0, 2)))
            if sources:
                row |= {"wait_for": sources, "tool_wait_ms": self._time()}
                if self.rng.random() < 0.5:
                    row["delay"] = self._time()
            rows.append(json.dumps(row))
            names.append(row["request_id"])
        return "\n".join(rows)

    def _dynamo(self, traffic: dict) -> str:
        """Plain records, or those of agents whose sessions do not overlap themselves."""
        agents = self.rng.random() < 0.6 and self.spec["engine"]["rank"]["backend"] != "trtllm"
        if agents:
            traffic["execution_model"] = "m"
        rows, known, ends, sessions = [], [], {}, []
        for k in range(self.rng.randint(1, 8)):
            length, ids = self._prompt(known)
            name = self.rng.choice(["s", "t", "u"]) if agents else None
            start = 1000 + ends.get(name, 0) + self._time()
            total = self.rng.choice([0, 5, 40])
            ends[name] = start + total - 1000 if agents else 0
            request = {"request_id": f"r{k}", "output_tokens": self.rng.randint(0, 9)}
            request |= {"model": "m", "request_received_ms": int(start), "total_time_ms": total}
            ends[name] = int(start) + total - 1000 if agents else 0
            replay = {"trace_block_size": self.block, "input_length": length}
            request["replay"] = replay | {"input_sequence_hashes": ids}
            row = {"schema": "dynamo.request.trace.v1", "event_type": "request_end"}
            row |= {"event_time_unix_ms": int(start) + total, "request": request}
            if agents:
                row["agent_context"] = {"session_id": name}
                if name != "s" and "s" in sessions:
                    row["agent_context"]["parent_session_id"] = "s"
                sessions.append(name)
            rows.append(json.dumps(row))
        return "\n".join(rows)

    def _weka(self, traffic: dict) -> str:
        """One chain of growing prompts and a subagent or two."""
        traffic["execution_model"] = "m"
        entries, ids, now = [], [], 0.0
        for _ in range(self.rng.randint(1, 6)):
            self.ids += 1
            ids = [*ids, self.ids]
            entry = self._weka_request(now, ids)
            now = entry["t"] + entry["api_time"] + self.rng.choice([0.25, 0.5])
            entries.append(entry)
            if self.rng.random() < 0.3:
                entries.append(self._weka_agent(now))
                now += self.rng.choice([0.0, 1.5])
        trace = {"id": "t", "models": ["m"], "block_size": self.block, "hash_id_scope": "local"}
        return json.dumps({**trace, "requests": entries})

    def _weka_request(self, t: float, ids: list[int]) -> dict:
        entry = {"type": "n", "t": t, "model": "m", "in": self.block * len(ids)}
        entry |= {"out": self.rng.randint(1, 9), "hash_ids": ids}
        return entry | {"api_time": self.rng.choice([0.0625, 0.125])}

    def _weka_agent(self, t: float) -> dict:
        inner, ids, now = [], [], 0.0
        for _ in range(self.rng.randint(1, 3)):
            self.ids += 1
            ids = [*ids, self.ids]
            inner.append(self._weka_request(now, ids))
            now += 0.25
        agent = {"type": "subagent", "t": t, "agent_id": f"g{self.ids}", "subagent_type": "x"}
        if self.rng.random() < 0.5:
            agent["duration_ms"] = 1000
        status = self.rng.choice(["completed", "async_launched"])
        return agent | {"status": status, "requests": inner}

    def _synthetic(self) -> dict:
        traffic = {"source_type": self.kind, "isl": self.rng.randint(0, 60)}
        traffic |= {"osl": self.rng.randint(0, 9), "request_count": self.rng.randint(1, 8)}
        load = self.rng.choice(["concurrency", "poisson", "constant_rate"])
        traffic["load_type"] = load
        if load != "concurrency":
            traffic["request_rate"] = self.rng.choice([5.0, 30.0, 77.7])
            traffic["arrival_seed"] = self.rng.randrange(2**64)
        if self.kind == "synthetic-session":
            traffic["turns_per_session"] = self.rng.randint(1, 3)
            traffic["inter_turn_delay_ms"] = self._time()
        if self.rng.random() < 0.4:
            traffic["shared_prefix_ratio"] = self.rng.choice([0.3, 0.5, 1.0])
            traffic["num_prefix_groups"] = self.rng.randint(1, 3)
        elif self.rng.random() < 0.4:
            traffic["cached_prefix_tokens"] = self.rng.randint(0, traffic["isl"])
        return traffic


def run(
    seed: int, against: str, reference: Reference, folder: Path, disagg: bool = False
) -> tuple[str, list[str]]:
    """(outcome, one line per difference) of a seed."""
    draw = Draw(seed, disagg)
    payload, text = draw.payload()
    (folder / FILE).write_text(text)
    os.chdir(folder)
    report = reference.ask(payload)
    error = report.get("error")
    if error and any(part in error for part in (*STANDSTILL, "process ended")):
        return "standstill", []
    try:
        parsed = load(payload)
        validate(parsed)
        workload = Workload.from_traffic(parsed.traffic, parsed.spec)
    except InputError as refusal:
        return "refused", [] if error else [f"vecsim refuses: {refusal}"]
    if error:
        return "refused", [f"the reference refuses ({error}), vecsim reads it"]
    try:
        got = _answer(payload, workload, against)
    except Endless:
        return "endless", []
    except Exception as error:  # whatever escapes is a finding, and the campaign goes on
        return "raised", [f"{type(error).__name__}: {error}"]
    if got is None:
        return "standstill", []
    lines = answers.differences(_expected(report, workload), got)
    if against == "slow":  # it does not know plays as a whole
        lines = [line for line in lines if not line.endswith("got 'absent'")]
    return draw.kind, lines


def _answer(payload: dict, workload: Workload, against: str) -> answers.Answer | None:
    """None where the reference would stand still, had it gone on."""
    outcome = slow_sessions.simulate(payload, workload)
    if outcome.settled:
        return None
    if against == "vecsim":
        return answers.from_result(replay(payload))
    return answers.from_slow(payload, outcome)


def _expected(report: dict, workload: Workload) -> answers.Answer:
    """The reference's answer with its requests in workload order."""
    if workload.dependencies is not None:
        keys, named = workload.request_id.to_list(), report["per_request"]
    else:
        turns = workload.turn_index.tolist()
        keys = [f"{s} {t}" for s, t in zip(workload.session_id.to_list(), turns, strict=True)]
        named = [
            {**row, "request_id": f"{row['session_id']} {row['turn_index']}"}
            for row in report["per_request"]
        ]
    return answers.from_reference({**report, "per_request": named}, keys)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz traffic", description=__doc__)
    parser.add_argument("--reference", required=True, help="Python that has the reference")
    parser.add_argument("--seeds", required=True, help="A:B, B excluded", type=specs.span)
    parser.add_argument("--against", choices=("vecsim", "slow"), default="vecsim")
    parser.add_argument("--disagg", action="store_true", help="prefill/decode fleets")
    options = parser.parse_args(argv)

    def compare(seed: int, reference: Reference, folder: Path) -> tuple[str, list[str]]:
        return run(seed, options.against, reference, folder, options.disagg)

    return campaign.in_one_process("seeds", options, compare)
