"""KV events of random specs, beside those of the reference.

    python -m tests.fuzz.kv_events --reference PYTHON --seeds A:B [--feature NAME ...]

The reference records them for one worker with one rank. It names requests 1, 2, 3, ... when it is
asked to be deterministic, as vecsim does, so that generated tokens can be compared too. Runs that
stand still in the reference, or in which vecsim settles a standstill, are passed over.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests import kv_events
from tests.fuzz import specs
from tests.fuzz.reference import Reference
from tests.slow_model import Endless, simulate
from vecsim.replaying import replay

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
    expected = kv_events.of_reference(answer["artifacts"])
    observed = replay(payload, observe="kv_events")
    plain = replay(payload)
    if not observed.requests.equals(plain.requests) or observed.report != plain.report:
        return "the run differs from one without observation", 0
    got = kv_events.of_result(observed)
    if got == expected:
        return "same", len(got)
    pairs = zip(got, expected, strict=False)
    first = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    there = f"{len(got)} of {len(expected)} blocks, from the {first}th on"
    return f"{there}: {got[first : first + 1]}, expected {expected[first : first + 1]}", 0


def main() -> int:
    """Print what came out."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kv_events")
    parser.add_argument("--reference", required=True, help="Python that has the reference")
    parser.add_argument("--seeds", required=True, help="A:B, B excluded")
    parser.add_argument("--feature", action="append", default=[], choices=specs.FEATURES)
    options = parser.parse_args()
    begin, end = map(int, options.seeds.split(":"))
    reference = Reference(options.reference, function="run_replay_with_artifacts_json")
    outcomes: Counter = Counter()
    blocks = 0
    for seed in range(begin, end):
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
