"""The columns of sessions and graphs, driven by the slow model, give the reference's answers."""

from __future__ import annotations

import pytest

from tests.models.slow_sessions import simulate
from tests.support.answers import differences, from_case, from_slow
from tests.traces.test_traffic_cases import cases, workload_of

WAITING = {"sessions", "agentic", "weka", "mooncake_delta", "applied_compute"}
MODELLED = {
    *WAITING,
    *("trace", "mooncake", "dynamo_trace", "speedup", "closed_loop", "time_limit"),
    *("synthetic", "poisson", "dp", "disaggregated"),
}
CASES = [
    name
    for name, case in cases().items()
    if case["expect"]["ok"] and set(case["feature"]) <= MODELLED
]


def test_every_kind_of_waiting_takes_part() -> None:
    features = [set(cases()[name]["feature"]) for name in CASES]
    counts = {feature: sum(feature in f for f in features) for feature in sorted(WAITING)}
    assert counts["sessions"] >= 15
    assert counts["agentic"] >= 14
    assert min(counts.values()) >= 2


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, tmp_path, monkeypatch) -> None:
    case = cases()[name]
    _, workload = workload_of(case, tmp_path, monkeypatch)
    outcome = simulate(case["payload"], workload)
    lines = differences(
        from_case(case["expect"], len(workload)), from_slow(case["payload"], outcome)
    )
    # Fields of whole plays and host tiers are not the slow model's business.
    assert [text for text in lines if not text.endswith("got 'absent'")] == []
