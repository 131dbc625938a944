"""KV events of random specs, beside those of the reference.

    python -m tests.fuzz.kv_events --reference PYTHON --seeds A:B [--feature NAME ... | --traffic]

The reference records them for one worker with one rank. It names requests 1, 2, 3, ... when it is
asked to be deterministic, as vecsim does, so that generated tokens can be compared too. Runs that
stand still in the reference, or in which vecsim settles a standstill, are passed over.

With `--traffic` it is random traffic. There the reference draws generated tokens in another way,
and puts common tokens in front of every new part of a synthetic prompt: blocks are compared by
their place in the chains, whatever their hashes. What SGLang stores for several requests of a pass
is one event there or more; where events begin is not compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from tests.fuzz import specs, traffic
from tests.fuzz.reference import Reference
from tests.models import slow_sessions
from tests.models.slow_model import Endless, simulate
from tests.support import kv_events
from vecsim.config.load import load
from vecsim.errors import InputError
from vecsim.run.replay import replay
from vecsim.workload.workload import Workload

WITHOUT = ("dp", "prefill_schedule_interval", "refused", "workers")


def make(seed: int, features: tuple[str, ...]) -> dict:
    """The spec of a seed, with one worker of one rank."""
    return specs.make(seed, features, WITHOUT)


def settles(payload: dict) -> bool:
    """Whether vecsim has to settle a standstill in this run, so that the two go apart."""
    try:
        return simulate(payload).settled > 0
    except Endless:
        return True


def difference(payload: dict, reference: Reference) -> tuple[str, int]:
    """("same", "passed over" or what differs, number of blocks)."""
    wrapped = payload if "spec" in payload else {"spec": payload}
    answer = reference.ask({**wrapped, "determinism": "canonical_v1"})
    if "error" in answer or settles(payload):
        return "passed over", 0
    return compared(payload, answer)


def compared(payload: dict, answer: dict, form=lambda blocks: blocks) -> tuple[str, int]:
    """As `difference`; `form` says what of the blocks is compared."""
    expected = form(kv_events.of_reference(answer["artifacts"]))
    observed = replay(payload, observe="kv_events")
    plain = replay(payload)
    if not observed.requests.equals(plain.requests) or observed.report != plain.report:
        return "the run differs from one without observation", 0
    got = form(kv_events.of_result(observed))
    if got == expected:
        return "same", len(got)
    pairs = zip(got, expected, strict=False)
    first = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    there = f"{len(got)} of {len(expected)} blocks, from the {first}th on"
    return f"{there}: {got[first : first + 1]}, expected {expected[first : first + 1]}", 0


def traffic_payload(seed: int, folder: Path) -> dict:
    """The traffic of a seed, for one worker with one rank."""
    draw = traffic.Draw(seed)
    draw.spec["topology"]["workers"]["initial_workers"] = 1
    draw.spec["engine"]["dp_size"] = 1
    draw.spec["engine"]["rank"].pop("prefill_schedule_interval", None)
    payload, text = draw.payload()
    (folder / traffic.FILE).write_text(text)
    return payload


def traffic_difference(payload: dict, reference: Reference) -> tuple[str, int]:
    """As `difference`, for traffic."""
    answer = reference.ask(payload)
    if "error" in answer:
        return "passed over", 0
    try:
        parsed = load(payload)
        workload = Workload.from_traffic(parsed.traffic, parsed.spec)
        if slow_sessions.simulate(payload, workload).settled:
            return "passed over", 0
    except (InputError, Endless):
        return "passed over", 0
    sglang = payload["spec"]["engine"]["rank"]["backend"] == "sglang"
    return compared(payload, answer, lambda blocks: chains(blocks, event_ids=not sglang))


def chains(blocks: list[kv_events.Block], event_ids: bool) -> list[tuple]:
    """The blocks with block hashes numbered as they are first met."""
    numbers = {None: None}
    for block in blocks:
        numbers.setdefault(block[4], len(numbers))
    return [
        (event_id if event_ids else None, at_ms, kind, numbers[parent], numbers[own])
        for event_id, at_ms, kind, parent, own, _ in blocks
    ]


def main() -> int:
    """Print what came out."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kv_events")
    parser.add_argument("--reference", required=True, help="Python that has the reference")
    parser.add_argument("--seeds", required=True, help="A:B, B excluded")
    parser.add_argument("--feature", action="append", default=[], choices=specs.FEATURES)
    parser.add_argument("--traffic", action="store_true", help="random traffic")
    options = parser.parse_args()
    begin, end = map(int, options.seeds.split(":"))
    warnings.simplefilter("ignore")
    reference = Reference(options.reference, function="run_replay_with_artifacts_json")
    outcomes: Counter = Counter()
    blocks = 0
    folder = tempfile.TemporaryDirectory()
    if options.traffic:
        os.chdir(folder.name)
    for seed in range(begin, end):
        if options.traffic:
            payload = traffic_payload(seed, Path(folder.name))
            outcome, count = traffic_difference(payload, reference)
        else:
            outcome, count = difference(make(seed, tuple(options.feature)), reference)
        if outcome not in ("same", "passed over"):
            print(f"seed {seed}: {outcome}", flush=True)
            outcome = "different"
        outcomes[outcome] += 1
        blocks += count
    reference.close()
    print(dict(outcomes), f"{blocks} blocks compared")
    return 1 if outcomes["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
