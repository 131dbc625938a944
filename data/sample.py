"""Generator of the sample trace: chats whose turns share their history as a prefix.

    python -m vecsim.data.sample [PATH]

writes the trace, by default over the copy that ships with vecsim. Equal seeds give equal bytes.

A chat opens with one of a few system prompts, which all chats of its kind share. Every turn sends
the whole conversation so far plus a new message, so its prompt repeats the full blocks of the turn
before. Chats start at random (Poisson), users think before they go on.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from vecsim.data import sample_path

BLOCK = 512
SEED = 20240601
ROWS = 1000
CHATS_PER_SECOND = 0.6
SYSTEM_PROMPT_BLOCKS = (1, 2, 4)
CHANCE_OF_ANOTHER_TURN = 0.7
MEAN_THINK_MS = 20_000.0
MAX_PROMPT = 24_000


def rows(count: int = ROWS, seed: int = SEED) -> list[dict]:
    """`count` Mooncake rows in order of arrival (timestamps in ms)."""
    random = Random(seed)
    turns: list[tuple[int, int, int, list[tuple]]] = []
    start = 0.0
    chat = 0
    while len(turns) < 2 * count:
        turns.extend(_chat(random, chat, start))
        start += _exponential(random, 1000.0 / CHATS_PER_SECOND)
        chat += 1
    turns.sort(key=lambda turn: turn[0])
    numbers: dict[tuple, int] = {}
    return [
        {
            "timestamp": timestamp,
            "input_length": prompt,
            "output_length": output,
            "hash_ids": [numbers.setdefault(block, len(numbers)) for block in blocks],
        }
        for timestamp, prompt, output, blocks in turns[:count]
    ]


def text(trace: list[dict]) -> str:
    """The rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in trace)


def _chat(random: Random, chat: int, start: float) -> Iterator[tuple[int, int, int, list[tuple]]]:
    """(timestamp, prompt tokens, output tokens, blocks) of every turn of one chat."""
    kind = int(random.random() * len(SYSTEM_PROMPT_BLOCKS))
    shared = [("system", kind, k) for k in range(SYSTEM_PROMPT_BLOCKS[kind])]
    prompt = len(shared) * BLOCK + _lognormal(random, 400.0, 1.2)
    time, turn = start, 0
    while prompt <= MAX_PROMPT:
        output = _lognormal(random, 150.0, 0.9)
        own = range(len(shared), prompt // BLOCK)
        blocks = shared + [("chat", chat, k) for k in own]
        if prompt % BLOCK:
            blocks.append(("open", chat, turn))
        yield round(time), prompt, output, blocks
        if random.random() >= CHANCE_OF_ANOTHER_TURN:
            return
        prompt += output + _lognormal(random, 120.0, 1.0)
        time += 25.0 * output + _exponential(random, MEAN_THINK_MS)
        turn += 1


def _exponential(random: Random, mean: float) -> float:
    return -mean * math.log(1.0 - random.random())


def _lognormal(random: Random, median: float, sigma: float) -> int:
    """A number of tokens, at least 1 (Box-Muller)."""
    radius = math.sqrt(-2.0 * math.log(1.0 - random.random()))
    normal = radius * math.cos(2.0 * math.pi * random.random())
    return max(1, round(median * math.exp(sigma * normal)))


def main(arguments: list[str]) -> None:
    path = Path(arguments[0]) if arguments else sample_path()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text(rows()), encoding="utf-8", newline="\n")
    temporary.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
