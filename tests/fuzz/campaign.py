"""Many seeds on several processes."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path

from tests.fuzz import specs, trial
from tests.fuzz.reference import Reference

CHUNK = 50  # seeds per message
SILENCE_S = 300.0  # a job that says nothing for so long hangs


def make(options: argparse.Namespace, seed: int) -> dict:
    return specs.make(seed, tuple(options.feature), tuple(options.without))


def job(pipe, options: argparse.Namespace) -> None:
    """Serves chunks of seeds until None comes: before each seed it says which one."""
    reference = Reference(options.reference) if options.reference else None
    while (seeds := pipe.recv()) is not None:
        for seed in seeds:
            pipe.send(("at", seed, None, None))
            payload = make(options, seed)
            done = trial.run(payload, options.against, reference)
            pipe.send(("done", seed, sorted(done.outcomes), done.lines))
        pipe.send(("idle", None, None, None))
    if reference:
        reference.close()


@dataclass
class Tally:
    specs: int = 0
    outcomes: Counter = field(default_factory=Counter)
    features: Counter = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)


@dataclass
class Job:
    process: multiprocessing.Process
    pipe: connection.Connection
    chunk: range = range(0)
    at: int | None = None
    heard: float = 0.0


def campaign(options: argparse.Namespace) -> Tally:
    """Runs all seeds on `options.jobs` processes; a job that hangs or dies is replaced."""
    seeds = options.seeds
    chunks = [seeds[k : k + CHUNK] for k in range(0, len(seeds), CHUNK)][::-1]
    tally = Tally()
    jobs = [_start(options, chunks.pop()) for _ in range(min(options.jobs, len(chunks)))]
    while jobs:
        ready = connection.wait([j.pipe for j in jobs], timeout=SILENCE_S / 10)
        for j in [j for j in jobs if j.pipe in ready]:
            try:
                message = j.pipe.recv()
            except (EOFError, OSError):
                _abandon(j, "the process died", tally, chunks)
                jobs = _replace(jobs, j, options, chunks)
                continue
            j.heard = time.monotonic()
            _listen(j, message, options, tally)
            if message[0] == "idle":
                j.chunk = chunks.pop() if chunks else range(0)
                j.pipe.send(j.chunk if len(j.chunk) else None)
                if not len(j.chunk):
                    j.process.join()
                    jobs.remove(j)
        for j in [j for j in jobs if time.monotonic() - j.heard > SILENCE_S]:
            _abandon(j, f"no answer within {SILENCE_S:g} s", tally, chunks)
            jobs = _replace(jobs, j, options, chunks)
    return tally


def _start(options: argparse.Namespace, chunk: range) -> Job:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=job, args=(theirs, options), daemon=True)
    process.start()
    theirs.close()
    ours.send(chunk)
    return Job(process, ours, chunk, None, time.monotonic())


def _listen(j: Job, message: tuple, options: argparse.Namespace, tally: Tally) -> None:
    kind, seed, outcomes, lines = message
    if kind == "at":
        j.at = seed
    elif kind == "done":
        tally.specs += 1
        tally.outcomes.update(outcomes)
        tally.features.update(specs.features_of(make(options, seed)))
        if lines:
            tally.failed[seed] = lines


def _abandon(j: Job, why: str, tally: Tally, chunks: list[range]) -> None:
    j.process.kill()
    j.process.join()
    at = j.chunk.start if j.at is None else j.at
    tally.specs += 1
    tally.failed[at] = [why]
    rest = range(at + 1, j.chunk.stop)
    if len(rest):
        chunks.append(rest)


def _replace(jobs: list[Job], j: Job, options: argparse.Namespace, chunks: list[range]) -> list:
    others = [other for other in jobs if other is not j]
    return [*others, _start(options, chunks.pop())] if chunks else others


def in_one_process(
    what: str,
    options: argparse.Namespace,
    run: Callable[[int, Reference, Path], tuple[str, list[str]]],
) -> int:
    """Runs `run(seed, reference, folder)` for every seed and prints the tally of its outcomes and
    the lines of what differs. The exit status: 1 where anything does."""
    warnings.simplefilter("ignore")
    began = time.monotonic()
    outcomes: Counter[str] = Counter()
    failed: dict[int, list[str]] = {}
    reference = Reference(options.reference)
    with tempfile.TemporaryDirectory() as folder:
        home = Path.cwd()
        os.chdir(folder)  # the reference's process starts, and stays, here
        for seed in options.seeds:
            outcome, lines = run(seed, reference, Path(folder))
            outcomes[outcome] += 1
            if lines:
                failed[seed] = lines
        os.chdir(home)
    reference.close()
    print(f"{len(options.seeds)} {what}, {time.monotonic() - began:.0f} s")
    for name, count in sorted(outcomes.items()):
        print(f"  {name}: {count}")
    print(f"  differing {what}: {len(failed)}")
    for seed, lines in list(failed.items())[:10]:
        print(f"seed {seed}:", *lines[:6], sep="\n    ")
    return 1 if failed else 0
