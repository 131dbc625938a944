"""`python -m tests.fuzz --reference PYTHON --seeds A:B [--feature NAME ...] [--jobs N]`.

`python -m tests.fuzz traffic ...` draws traffic instead of inline requests (`tests.fuzz.traffic`),
`python -m tests.fuzz weka ...` corpora of Weka traces (`tests.fuzz.weka`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.fuzz import shrink, specs, traffic, trial, weka
from tests.fuzz.campaign import Tally, campaign, make
from tests.fuzz.reference import Reference


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=specs.__doc__)
    parser.add_argument("--reference", help="Python that has the reference; none: the slow model")
    parser.add_argument("--seeds", required=True, help="A:B, B excluded", type=specs.span)
    parser.add_argument(
        "--feature", action="append", default=[], choices=specs.FEATURES, help="forced on"
    )
    parser.add_argument(
        "--without", action="append", default=[], choices=specs.FEATURES, help="forced off"
    )
    parser.add_argument("--against", choices=("vecsim", "slow"), default="vecsim")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--show", type=int, default=3, help="differences to shrink and print")
    options = parser.parse_args(argv)
    if not options.reference:
        options.without.append("refused")  # the slow model takes only specs that are right
    return options


def explain(options: argparse.Namespace, tally: Tally) -> None:
    """Prints the first differences, each shrunk to a small spec that still differs."""
    reference = Reference(options.reference) if options.reference else None
    for seed, lines in sorted(tally.failed.items())[: options.show]:
        print(f"\nseed {seed}: {len(lines)} differences")
        payload = make(options, seed)
        if trial.run(payload, options.against, reference).lines:
            payload = shrink.shrink(
                payload, lambda p: bool(trial.run(p, options.against, reference).lines)
            )
            lines = trial.run(payload, options.against, reference).lines
        for line in lines[:12]:
            print("  ", line)
        print(json.dumps(payload))
    if reference:
        reference.close()


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["traffic"]:
        return traffic.main(argv[1:])
    if argv[:1] == ["weka"]:
        return weka.main(argv[1:])
    options = arguments(argv)
    began = time.monotonic()
    tally = campaign(options)
    print(f"{tally.specs} specs, {time.monotonic() - began:.0f} s, against {options.against}")
    for title, counter in (("outcome", tally.outcomes), ("feature", tally.features)):
        for name, count in sorted(counter.items()):
            print(f"  {title} {name}: {count}")
    print(f"  differing specs: {len(tally.failed)}")
    if tally.failed:
        print("  seeds:", *sorted(tally.failed)[:50])
        explain(options, tally)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
