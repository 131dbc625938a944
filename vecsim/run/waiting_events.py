"""Lowering of requests that wait for others and whose KV events are observed.

Rows by which a log names blocks are known ahead: vLLM-style ranks hand out those of their index, of
which there are enough for every block (SINGLE_COPIES); SGLang's pages have rows of their own, those
of the prefix tree first, then for each family one for every page of its longest sequence.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

import numpy as np

from vecsim.kernels.cache import sharing
from vecsim.kernels.state import layout
from vecsim.kernels.state.layout import Pools, Ranks, Requests
from vecsim.run.kv_events import Watched, words_an_instant
from vecsim.run.lower import State, blocks_of_sequences, checked_rows
from vecsim.run.lower_handoff import HandoffState, is_forest, observed_sides
from vecsim.run.waiting import Chains


def watched_blocks(state: State, chains: Chains | None) -> State:
    """The state of vLLM-style ranks that emit KV events."""
    from vecsim.kernels import aggregated_waiting_events

    watched = _watched_blocks(state.requests, state.pools, state.ranks, chains)
    return dataclasses.replace(state, entries=aggregated_waiting_events, watched=watched)


def watched_pages(state: State, chains: Chains | None, paths: sharing.Paths) -> State:
    """The state of SGLang ranks that emit KV events; `paths` are what their trees hold."""
    from vecsim.kernels import aggregated_sglang_waiting_events

    watched = _watched_pages(state.requests, state.ranks, chains, paths)
    return dataclasses.replace(state, entries=aggregated_sglang_waiting_events, watched=watched)


def watched_sides(
    state: HandoffState, chains: Chains | None, paths: list[sharing.Paths]
) -> HandoffState:
    """The state of prefill and decode pools that emit KV events; `paths`: what is known ahead on
    each side."""
    watched = tuple(
        _watched_pages(side.requests, side.ranks, chains, own)
        if is_forest(side)
        else _watched_blocks(side.requests, side.pools, side.ranks, chains)
        for side, own in zip((state.prefill, state.decode), paths, strict=True)
    )
    return observed_sides(state, watched, _entries_of_sides(state))


def _entries_of_sides(state: HandoffState) -> ModuleType:
    if is_forest(state.prefill):
        from vecsim.kernels import disaggregated_sglang_waiting_events

        return disaggregated_sglang_waiting_events
    from vecsim.kernels import disaggregated_waiting_events

    return disaggregated_waiting_events


def _watched_blocks(
    requests: Requests, pools: Pools, ranks: Ranks, chains: Chains | None
) -> Watched:
    """vLLM-style ranks of one pool."""
    blocks = int(_most_blocks(requests, ranks, chains).sum())
    return Watched(requests, pools.index.shape[1], words_an_instant(blocks, ranks))


def _watched_pages(
    requests: Requests, ranks: Ranks, chains: Chains | None, paths: sharing.Paths
) -> Watched:
    """SGLang ranks of one pool."""
    columns = requests.state
    per_node = paths.blocks_per_node[0]
    pages = _most_blocks(requests, ranks, chains)
    family = columns[layout.FAMILY]
    own = np.zeros(len(pages), np.int64)
    np.maximum.at(own, family, pages)
    first = len(paths.marks) * per_node
    rows = 0
    if ranks.fields[0, layout.PREFIX_CACHING]:
        rows = checked_rows(int(first + own.sum()))
    columns[layout.OWN_ROWS] = (first + np.cumsum(own) - own)[family] + columns[layout.OWN_FROM]
    named = requests._replace(path_rows=paths.nodes * np.int32(per_node))
    # A turn is released when the one before has ended, and the log is looked at in between.
    words = words_an_instant(int(pages.sum()), ranks, at_once=int(own.sum()))
    return Watched(named, rows, words)


def _most_blocks(requests: Requests, ranks: Ranks, chains: Chains | None) -> np.ndarray:
    """int64 [n], most full blocks that each request can have, the turns before included."""
    params = ranks.fields[0]
    if chains is None:
        return blocks_of_sequences(requests, params)
    return chains.reach // params[layout.BLOCK_SIZE]
