"""The compiled replay equals the slow model on random specs, feature by feature."""

import pytest

from tests.fuzz import specs, trial

SEEDS_PER_FEATURE = 60


@pytest.mark.parametrize("feature", [f for f in specs.FEATURES if f not in ("refused", "sglang")])
def test_equals_the_slow_model(feature):
    start = 10_000 * (1 + specs.FEATURES.index(feature))
    differing = {}
    met = 0
    for seed in range(start, start + SEEDS_PER_FEATURE):
        payload = specs.make(seed, (feature,), ("refused",))
        met += feature in specs.features_of(payload)
        lines = trial.run(payload, "vecsim", None).lines
        if lines:
            differing[seed] = lines
    assert differing == {}
    assert met >= SEEDS_PER_FEATURE // 3


def test_random_specs_meet_the_edges():
    """Otherwise the test above would show little."""
    met = {"preempted": 0, "rejected": 0, "standstill": 0, "length": 0, "unfinished": 0}
    for seed in range(1000):
        outcomes = trial.run(specs.make(seed, (), ("refused",)), "slow", None).outcomes
        for outcome in met:
            met[outcome] += outcome in outcomes
    assert met["preempted"] >= 100
    assert met["rejected"] >= 50
    assert met["standstill"] >= 10
    assert met["length"] >= 10
    assert met["unfinished"] >= 10
