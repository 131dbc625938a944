"""Random traffic: what vecsim replays equals the slow model of sessions; the rest is refused."""

from __future__ import annotations

import warnings

import pytest

from tests import answers, slow_sessions
from tests.fuzz.traffic import FILE, KINDS, Draw
from tests.slow_model import Endless
from vecsim.errors import NotSupportedYetError
from vecsim.replaying import replay
from vecsim.spec import load
from vecsim.workload import Workload

SEEDS = range(120)


@pytest.mark.filterwarnings("ignore")
def test_equals_the_slow_model(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    compared, met = 0, set()
    for seed in SEEDS:
        draw = Draw(seed)
        payload, text = draw.payload()
        (tmp_path / FILE).write_text(text)
        parsed = load(payload)
        workload = Workload.from_traffic(parsed.traffic, parsed.spec)
        met.add(draw.kind)
        waits = workload.sessions is not None or workload.dependencies is not None
        if waits:
            with pytest.raises(NotSupportedYetError):
                replay(payload)
            continue
        try:
            slow = slow_sessions.simulate(payload, workload)
        except Endless:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = answers.from_result(replay(payload))
        assert answers.differences(answers.from_slow(payload, slow), got) == [], seed
        compared += 1
    assert met == set(KINDS)
    assert compared >= 20
