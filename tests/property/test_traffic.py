"""Random traffic on every backend: what vecsim replays equals the slow model of sessions."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest

from tests.fuzz.traffic import BACKENDS, FILE, KINDS, Draw
from tests.models import slow_sessions
from tests.models.slow_model import Endless
from tests.support import answers
from vecsim.config.load import load
from vecsim.config.validate import validate
from vecsim.errors import InputError
from vecsim.run.replay import replay
from vecsim.workload.workload import Workload

SEEDS = range(900_000, 900_400)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("disagg", [False, True], ids=["aggregated", "disaggregated"])
def test_equals_the_slow_model(disagg, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    kinds, backends, statuses, waited = Counter(), Counter(), Counter(), 0
    differing = {}
    for seed in SEEDS:
        draw = Draw(seed, disagg)
        payload, text = draw.payload()
        (tmp_path / FILE).write_text(text)
        try:
            parsed = load(payload)
            validate(parsed)
            workload = Workload.from_traffic(parsed.traffic, parsed.spec)
            slow = slow_sessions.simulate(payload, workload)
        except (InputError, Endless):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = answers.from_result(replay(payload))
        lines = answers.differences(answers.from_slow(payload, slow), got)
        if lines:
            differing[seed] = lines
        kinds[draw.kind] += 1
        statuses.update(slow.status)
        backends[payload["spec"]["engine"]["rank"]["backend"]] += 1
        waited += workload.sessions is not None or workload.dependencies is not None
    assert differing == {}
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 10
    assert set(backends) == set(BACKENDS)
    assert min(statuses[name] for name in ("completed", "rejected", "failed")) >= 5
    assert waited >= 150
