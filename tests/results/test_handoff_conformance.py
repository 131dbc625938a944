"""The handoff conformance fixture: passes for every backend, fails where a rule is broken."""

import os
import subprocess
import sys

import msgspec
import pytest

from vecsim.config.schema import FixedTiming, RankConfig, ReplayRequest
from vecsim.engine import (
    ReplayEngineConfig,
    ReplayEngineFactory,
    ReplayRoleConfig,
    run_engine_handoff_conformance,
)
from vecsim.errors import ConformanceError, InputError
from vecsim.results import handoff_conformance
from vecsim.results.handoff_conformance import DestinationStored, HandoffConformance

SOURCE_FIRST = (
    "SourceHeld",
    "DestinationAccepted",
    "DestinationReserved",
    "DestinationActivated",
    "SourceReleased",
    "Completed",
)
DESTINATION_FIRST = (*SOURCE_FIRST[1:3], SOURCE_FIRST[0], *SOURCE_FIRST[3:])
BACKENDS = {
    "vllm": ("SourceFirst", SOURCE_FIRST),
    "trtllm": ("SourceFirst", SOURCE_FIRST),
    "sglang": ("DestinationFirst", DESTINATION_FIRST),
}
FIXED = FixedTiming(prefill_ms=100.0, decode_ms=10.0)


def config_of(backend="vllm", **rank):
    rank = {"block_size": 4, "num_gpu_blocks": 64, "timing_model": FIXED, **rank}
    return ReplayEngineConfig(rank=RankConfig(backend=backend, **rank))


def request_of(prompt=10, output=2):
    return ReplayRequest(id="a", arrival_time_ms=0.0, input_tokens=prompt, output_tokens=output)


def expected(backend):
    order, lifecycle = BACKENDS[backend]
    return HandoffConformance(
        engine_type=backend,
        order=order,
        lifecycle=lifecycle,
        source_output_tokens=1,
        destination_output_tokens=2,
        completed_requests=1,
        destination_stored=DestinationStored(
            before_activation=0,
            on_activation=2,
            repeated_activation_hashes_after_activation=0,
        ),
        source_drained=True,
        destination_drained=True,
        driver_drained=True,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_record(backend):
    record = run_engine_handoff_conformance(config_of(backend), request_of())
    assert record == expected(backend)
    assert msgspec.json.decode(msgspec.json.encode(record), type=HandoffConformance) == record


@pytest.mark.parametrize("backend", BACKENDS)
def test_roles_of_their_own(backend):
    """A block completed while decoding is no repetition; attention-DP ranks drain as well."""
    decode = ReplayRoleConfig(dp_size=2, rank=config_of(backend, block_size=8).rank)
    config = msgspec.structs.replace(config_of(backend), decode=decode)
    request = {"id": "a", "arrival_time_ms": 3, "input_tokens": 15, "output_tokens": 2}
    record = run_engine_handoff_conformance(config, request, ReplayEngineFactory(timing=None))
    stored = DestinationStored(
        before_activation=0, on_activation=1, repeated_activation_hashes_after_activation=0
    )
    assert record == msgspec.structs.replace(expected(backend), destination_stored=stored)


def stored(**numbers):
    return {
        "destination_stored": msgspec.structs.replace(
            expected("vllm").destination_stored, **numbers
        )
    }


def breaches(backend):
    """(group, what the record says in place of what is required)."""
    order, steps = BACKENDS[backend]
    (other,) = {"SourceFirst", "DestinationFirst"} - {order}
    return [
        ("order", {"order": other}),
        ("lifecycle", {"lifecycle": steps[:-1]}),
        ("lifecycle", {"lifecycle": (*steps[:4], "Completed", "SourceReleased")}),
        ("lifecycle", {"lifecycle": (*steps, "Completed")}),
        ("lifecycle", {"lifecycle": (steps[1], steps[0], *steps[2:])}),
        ("counts", {"source_output_tokens": 0}),
        ("counts", {"destination_output_tokens": 3}),
        ("counts", {"completed_requests": 0}),
        ("KV visibility", stored(before_activation=1)),
        ("KV visibility", stored(on_activation=0)),
        ("KV visibility", stored(repeated_activation_hashes_after_activation=1)),
        ("drain", {"source_drained": False}),
        ("drain", {"destination_drained": False}),
        ("drain", {"driver_drained": False}),
    ]


@pytest.mark.parametrize(
    ("backend", "group", "broken"),
    [(backend, *breach) for backend in BACKENDS for breach in breaches(backend)],
)
def test_a_broken_record(monkeypatch, backend, group, broken):
    """Every required value, on its own, makes the fixture fail and is named with its group."""
    record_of = handoff_conformance.record_of
    monkeypatch.setattr(
        handoff_conformance,
        "record_of",
        lambda result: msgspec.structs.replace(record_of(result), **broken),
    )
    with pytest.raises(ConformanceError) as caught:
        run_engine_handoff_conformance(config_of(backend), request_of())
    assert caught.value.group == group
    assert caught.value.where.split(".")[0] in broken
    assert str(caught.value).startswith(f"handoff conformance, {group}: {caught.value.where}: got ")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("group", "where", "request_", "rank"),
    [
        ("counts", "destination_output_tokens", request_of(output=3), {}),
        ("KV visibility", "destination_stored.on_activation", request_of(prompt=3), {}),
        (
            "KV visibility",
            "destination_stored.on_activation",
            request_of(),
            {"enable_prefix_caching": False},
        ),
    ],
)
def test_what_is_no_fixture(backend, group, where, request_, rank):
    with pytest.raises(ConformanceError) as caught:
        run_engine_handoff_conformance(config_of(backend, **rank), request_)
    assert (caught.value.group, caught.value.where) == (group, where)


@pytest.mark.parametrize(("backend", "group"), [("vllm", "lifecycle"), ("sglang", "order")])
def test_a_prompt_that_no_pool_holds(backend, group):
    """Nobody gets to the destination, or the other way round."""
    with pytest.raises(ConformanceError) as caught:
        run_engine_handoff_conformance(config_of(backend), request_of(prompt=1000))
    assert (caught.value.group, caught.value.where) == (group, group)


def test_malformed_input():
    with pytest.raises(InputError) as caught:
        run_engine_handoff_conformance(config_of(), {"id": "a", "input_tokens": 4})
    assert caught.value.where.startswith("requests[0]")


VERDICTS = {
    "as they are": "conforms",
    "published when reserved": "KV visibility, destination_stored.before_activation",
    "never published": "KV visibility, destination_stored.on_activation",
    "published anew": "KV visibility,"
    " destination_stored.repeated_activation_hashes_after_activation",
    "blocks of the source kept": "drain, source_drained",
    "source never released": "lifecycle, lifecycle",
    "the other side asked first": "order, order",
    "two tokens from the source": "counts, source_output_tokens",
}


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_broken_ranks(backend):
    """Rules broken where they are kept: in the kernels of the ranks, run as plain Python."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.broken_handoffs", backend],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert dict(line.split(": ", 1) for line in done.stdout.splitlines()) == VERDICTS
