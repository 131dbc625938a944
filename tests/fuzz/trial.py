"""One spec through all sides: what should come out, what came out, and how they differ."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.fuzz.reference import Reference
from tests.models import slow_disaggregated, slow_model
from tests.models.slow_model import Endless, SlowOutcome
from tests.support import answers
from vecsim.errors import InputError, NotSupportedYetError

STANDSTILL = ("effect-free zero-duration pass", "reached a dead end", "time limit")


@dataclass
class Trial:
    """`outcomes`: what the spec met ("completed", "preempted", ...); `lines`: its differences."""

    outcomes: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)


def run(payload: dict, against: str, reference: Reference | None) -> Trial:
    """Compares `against` ("vecsim" or "slow") with the reference.

    Where the reference stands still, and where there is none, the slow model is the measure.
    """
    trial = Trial()
    report = reference.ask(payload) if reference else {}
    error = report.get("error")
    if error and not any(text in error for text in STANDSTILL):
        trial.outcomes.add("refused")
        if against == "vecsim":
            trial.lines += _refusal_differences(payload, error)
        return trial
    try:
        slow = _simulate(payload)
    except Endless:
        return Trial({"endless"}, ["the slow model finds no end"])
    trial.outcomes |= _outcomes(slow)
    got_slow = answers.from_slow(payload, slow)
    if reference is None or slow.settled:
        expected = got_slow
        if reference and not error and not _cut_before_standstill(payload, slow):
            trial.lines.append("the slow model settles a request where the reference goes on")
    elif error:
        trial.lines.append(f"the slow model does not stand still where the reference does: {error}")
        return trial
    else:
        expected = answers.from_reference(report, _ids(payload))
    if against == "slow":
        trial.lines += answers.differences(expected, got_slow)
    else:
        trial.lines += _vecsim_differences(payload, expected)
    return trial


def _simulate(payload: dict) -> SlowOutcome:
    aggregated = payload.get("spec", payload)["topology"]["kind"] == "aggregated"
    return (slow_model if aggregated else slow_disaggregated).simulate(payload)


def _ids(payload: dict) -> list[str]:
    return [r["id"] for r in payload.get("spec", payload)["requests"]]


def _cut_before_standstill(payload: dict, slow: SlowOutcome) -> bool:
    """The reference notices a standstill when no event is left; a time limit may come first."""
    return payload.get("spec", payload).get("max_sim_time_ms") is not None and slow.settled > 0


def _outcomes(slow: SlowOutcome) -> set[str]:
    met = set(slow.status)
    if sum(slow.preemptions):
        met.add("preempted")
    if slow.settled:
        met.add("standstill")
    if slow.evictions:
        met.add("evicted")
    if met & {"preempted", "evicted"}:
        met.add("preempted or evicted")
    met |= {"length", "deadlock"} & set(slow.reason)
    return met


def _replay(payload: dict):
    from vecsim.run.replay import replay  # heavy, and only a comparison with vecsim needs it

    return replay(payload)


def _vecsim_differences(payload: dict, expected: answers.Answer) -> list[str]:
    try:
        got = answers.from_result(_replay(payload))
    except Exception as error:  # whatever escapes is a finding, and the campaign goes on
        return [f"vecsim raised {type(error).__name__}: {error}"]
    return answers.differences(expected, got)


def _refusal_differences(payload: dict, error: str) -> list[str]:
    try:
        _replay(payload)
    except NotSupportedYetError as ours:
        return [f"the reference refuses ({error}), vecsim says: {ours}"]
    except InputError:
        return []
    except Exception as ours:  # as above
        return [f"the reference refuses ({error}), vecsim raised {type(ours).__name__}: {ours}"]
    return [f"the reference refuses ({error}), vecsim runs"]
