"""Streams of a Weka scope: which requests continued one another, by the rules of AISimulate.

The parent requests of a trace are one scope, the requests of each subagent another. Times are
seconds from the start of the recording.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from vecsim.traces.json_rows import Place

EPSILON_S = 1e-6
"""Times that differ by less count as equal where one request ends and another starts."""

_PREAMBLE_OUTPUT = 64
_LONG_GAP_S = 3600.0
_LONG_GAP_SHARE = 0.5


@dataclass(eq=False)
class Request:
    """One recorded request; `position` is that in its list, `name` holds those of all levels."""

    place: Place
    name: str
    position: int
    model: str
    start: float
    api: float
    input_length: int
    output_length: int
    hashes: list[int]

    @property
    def end(self) -> float:
        return self.start + self.api

    @property
    def key(self) -> tuple[float, int, str]:
        return self.start, self.position, self.name


@dataclass(eq=False)
class Stream:
    """Requests that follow one another; the first one was begun by `source`, if there is one."""

    requests: list[Request]
    source: Request | None


@dataclass(eq=False)
class _Chain:
    """A stream in the making.

    `tail` is its last request with ids. A fork shares `depth` ids with its `source`, the tail of
    another chain, and may be absorbed into that chain later.
    """

    number: int
    requests: list[Request] = field(default_factory=list)
    tail: Request | None = None
    source: Request | None = None
    depth: int = 0
    absorbed_by: _Chain | None = None

    def append(self, request: Request) -> None:
        self.requests.append(request)
        if request.hashes:
            self.tail = request

    @property
    def first(self) -> Request:
        return self.requests[0]


def streams_of(scope: Sequence[Request]) -> list[Stream]:
    """The streams of a scope, the main one first, the others by their first request."""
    ordered = sorted(scope, key=lambda r: r.key)
    count = _preamble(ordered)
    chains, owner = _walk(ordered[count:])
    _close_seams(chains, owner)
    main, *side = [chain for chain in chains if chain.absorbed_by is None]
    main.requests = sorted(ordered[:count] + main.requests, key=lambda r: r.key)
    side.sort(key=lambda chain: chain.first.key)
    return [Stream(chain.requests, chain.source) for chain in (main, *side)]


def _preamble(ordered: Sequence[Request]) -> int:
    """1 where the first request shares no prefix with any other and is short, or shares no id at
    all: the session title and the like, which no chain goes on from. Else 0."""
    if len(ordered) < 2 or not ordered[0].hashes:
        return 0
    first, *others = ordered
    if any(common_ids(first.hashes, other.hashes) for other in others):
        return 0
    if first.output_length <= _PREAMBLE_OUTPUT:
        return 1
    own = set(first.hashes)
    return int(all(own.isdisjoint(other.hashes) for other in others))


def common_ids(one: list[int], other: list[int]) -> int:
    """Number of leading ids that two lists have in common."""
    equal, differing = 0, min(len(one), len(other))
    if one[:differing] == other[:differing]:
        return differing
    while differing - equal > 1:
        middle = (equal + differing) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            differing = middle
    return equal


def _begins_with(ids: list[int], start: list[int]) -> bool:
    """Whether `start`, which is not empty, is a prefix of `ids`."""
    count = len(start)
    return count <= len(ids) and ids[count - 1] == start[-1] and ids[:count] == start


# --- the walk -------------------------------------------------------------------------------------


def _walk(ordered: Sequence[Request]) -> tuple[list[_Chain], dict[str, _Chain]]:
    """(chains in order of creation, chain of each request by name)."""
    chains: list[_Chain] = []
    owner: dict[str, _Chain] = {}
    for request in ordered:
        chain = _continued(request, chains)
        if chain is None:
            chain = _fork(request, chains)
            chains.append(chain)
        chain.append(request)
        owner[request.name] = chain
    return chains, owner


def _continued(request: Request, chains: list[_Chain]) -> _Chain | None:
    """The chain that a request continues; None where it begins one."""
    if not chains:
        return None
    if not request.hashes:
        return chains[0]
    best, longest = None, 0
    for chain in chains:
        tail = chain.tail
        if (
            tail is not None
            and len(tail.hashes) > longest
            and tail.model == request.model
            and tail.end <= request.start + EPSILON_S
            and _begins_with(request.hashes, tail.hashes)
        ):
            best, longest = chain, len(tail.hashes)
    if best is None and all(chain.tail is None for chain in chains):
        return chains[0]
    return best


def _fork(request: Request, chains: list[_Chain]) -> _Chain:
    """A new chain, whose source is the tail with the most ids in common, ended or not."""
    chain = _Chain(len(chains))
    length = 0
    for other in chains:
        tail = other.tail
        if tail is None or tail.hashes[0] != request.hashes[0]:
            continue
        depth = common_ids(tail.hashes, request.hashes)
        if (depth, len(tail.hashes)) > (chain.depth, length):
            chain.source, chain.depth, length = tail, depth, len(tail.hashes)
    return chain


# --- seams ----------------------------------------------------------------------------------------


def _close_seams(chains: list[_Chain], owner: dict[str, _Chain]) -> None:
    """Absorb the forks that turn out to be the way in which their source's chain went on.

    Sources are looked at in text order of their names, and again when forks come to hang on them.
    """
    forks: dict[str, list[_Chain]] = {}
    sources: dict[str, Request] = {}
    for chain in chains:
        if chain.source is not None:
            forks.setdefault(chain.source.name, []).append(chain)
            sources[chain.source.name] = chain.source
    waiting = list(forks)
    heapq.heapify(waiting)
    while waiting:
        name = heapq.heappop(waiting)
        while waiting and waiting[0] == name:
            heapq.heappop(waiting)
        source = sources[name]
        chain = _final(owner[name])
        if chain.tail is not source:
            continue
        listed = [fork for fork in forks[name] if fork.absorbed_by is None]
        going_on = [fork for fork in listed if _goes_on(fork, source)]
        if not going_on:
            continue
        winner = min(going_on, key=lambda fork: (-fork.depth, fork.first.start, fork.number))
        chain.requests += winner.requests
        chain.tail = winner.tail
        winner.absorbed_by = chain
        tail = chain.tail
        for fork in listed:
            if fork is not winner and _hang_on(fork, tail):
                forks.setdefault(tail.name, []).append(fork)
                sources[tail.name] = tail
                heapq.heappush(waiting, tail.name)


def _final(chain: _Chain) -> _Chain:
    """The chain that has absorbed this one, at last; itself if none has."""
    while chain.absorbed_by is not None:
        chain = chain.absorbed_by
    return chain


def _goes_on(fork: _Chain, source: Request) -> bool:
    """Whether a fork may be the continuation of the chain that ended with `source`."""
    first = fork.first
    if source.end > first.start + EPSILON_S or first.model != source.model:
        return False
    long_ago = first.start - source.end > _LONG_GAP_S
    return not (long_ago and fork.depth / len(source.hashes) < _LONG_GAP_SHARE)


def _hang_on(fork: _Chain, tail: Request) -> bool:
    """Make `tail` the source of a fork that began after it and shares ids with it."""
    if tail.start > fork.first.start + EPSILON_S:
        return False
    depth = common_ids(tail.hashes, fork.first.hashes)
    if depth == 0:
        return False
    fork.source, fork.depth = tail, depth
    return True


# --- what had ended before ------------------------------------------------------------------------


def ended_before(streams: Sequence[Stream]) -> dict[str, list[Request]]:
    """By name of a request, what it waits for in the other streams of its scope.

    Of each other stream that is the request that ended last of those that began before and had
    ended; of these, only such as no other one began after.
    """
    everything = [(k, r) for k, stream in enumerate(streams) for r in stream.requests]
    by_end = sorted(everything, key=lambda item: item[1].end)
    latest: dict[int, Request] = {}
    ended: list[tuple[int, Request]] = []  # not begun before the request at hand
    result = {}
    position = 0
    for k, request in sorted(everything, key=lambda item: item[1].start):
        until = request.start + EPSILON_S
        while position < len(by_end) and by_end[position][1].end <= until:
            ended.append(by_end[position])
            position += 1
        for item in [item for item in ended if item[1].start < request.start]:
            ended.remove(item)
            _keep_latest(latest, *item)
        others = [r for stream, r in latest.items() if stream != k]
        begun = max((r.start for r in others), default=-math.inf)
        result[request.name] = [
            r for r in others if not (r.start < begun and r.end <= begun + EPSILON_S)
        ]
    return result


def _keep_latest(latest: dict[int, Request], stream: int, request: Request) -> None:
    known = latest.get(stream)
    if known is None or _finish(request) > _finish(known):
        latest[stream] = request


def _finish(request: Request) -> tuple[float, float, str]:
    return request.end, request.start, request.name
