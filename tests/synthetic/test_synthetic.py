"""Synthetic workloads: the reference's draws, distributions, shared content, spec files."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import yaml

import vecsim
from tests.support.trace_text import write
from tests.traces.test_formats import assert_equal
from vecsim.errors import InputError
from vecsim.synthetic.rng import Random

POISSON = {"kind": "poisson", "rate": 10.0}
FLEET = {"topology": {"kind": "aggregated", "workers": {"initial_workers": 2}}, "requests": []}


def synthesize(requests: int = 1000, **more) -> vecsim.Workload:
    return vecsim.synthesize(requests, **{"input_tokens": 100, "output_tokens": 3, **more})


# --- draws ----------------------------------------------------------------------------------------


def test_poisson_arrivals_are_the_references() -> None:
    """Check values of the reference: traffic, section 5.2."""
    expected = {
        42: [
            *(0.0, 74.77246176406965, 153.01953951913882),
            *(254.207536844964, 306.2785951560703, 309.7732343327897),
        ],
        7: [
            *(0.0, 3.0786437168091014, 39.76362317455055),
            *(55.153612583970286, 133.35520869913557, 165.16896241890325),
        ],
    }
    for seed, arrivals in expected.items():
        assert synthesize(6, arrivals=POISSON, seed=seed).arrival_ms.tolist() == arrivals


def test_groups_are_the_references() -> None:
    assert Random(0).below(4, 12).tolist() == [3, 2, 2, 3, 3, 0, 2, 2, 3, 1, 0, 3]


def test_draws_do_not_depend_on_how_many_are_asked_for() -> None:
    whole = Random(5).words(200_000)
    random = Random(5)
    parts = [random.words(n) for n in (1, 15, 16, 17, 65_535, 65_536, 68_880)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert len(whole) == 200_000


def test_integers_below_are_even() -> None:
    counts = np.bincount(Random(9).below(3, 30_000))
    assert abs(counts - 10_000).max() < 300
    assert Random(9).below(1, 5).tolist() == [0] * 5
    assert Random(9).below(2**32 - 1, 100).max() > 2**31


@pytest.mark.parametrize("shape", [0.5, 1.0, 4.0])
def test_gamma_has_its_moments(shape) -> None:
    draws = Random(1).gamma(shape, 100.0 / shape, 200_000)
    assert draws.min() >= 0
    assert draws.mean() == pytest.approx(100.0, rel=0.02)
    assert draws.std() == pytest.approx(100.0 / shape**0.5, rel=0.02)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "7", None])
def test_bad_seeds(seed) -> None:
    with pytest.raises(InputError, match="seed"):
        synthesize(2, seed=seed)


# --- arrivals -------------------------------------------------------------------------------------


def test_bursts_and_constant_rates() -> None:
    assert synthesize(3).arrival_ms.tolist() == [0.0, 0.0, 0.0]
    constant = synthesize(4, arrivals={"kind": "constant", "rate": 3.0}).arrival_ms
    gap = 1000.0 / 3.0
    assert constant.tolist() == [0.0, gap, gap + gap, gap + gap + gap]


def test_gamma_arrivals() -> None:
    arrivals = {"kind": "gamma", "rate": 20.0, "shape": 0.25}
    gaps = np.diff(synthesize(100_000, arrivals=arrivals).arrival_ms)
    assert gaps.mean() == pytest.approx(50.0, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.03)


def test_piecewise_rates() -> None:
    segments = [{"duration_s": 10.0, "rate": 100.0}, {"duration_s": 5.0, "rate": 0.0}]
    segments.append({"duration_s": 10.0, "rate": 300.0})
    arrivals = {"kind": "piecewise", "segments": segments}
    seconds = synthesize(40_000, arrivals=arrivals).arrival_ms / 1000.0
    assert (np.diff(seconds) >= 0).all()
    within = seconds % 25.0
    assert np.count_nonzero((within > 10.0) & (within < 15.0)) == 0
    rounds = seconds[-1] / 25.0
    assert np.count_nonzero(within < 10.0) / rounds == pytest.approx(1000.0, rel=0.05)
    assert np.count_nonzero(within > 15.0) / rounds == pytest.approx(3000.0, rel=0.05)


def test_diurnal_rates() -> None:
    arrivals = {"kind": "diurnal", "rate": 10.0, "amplitude": 0.8, "period_s": 1000.0}
    arrivals["peak_s"] = 250.0
    seconds = synthesize(100_000, arrivals=arrivals).arrival_ms / 1000.0
    assert (np.diff(seconds) >= 0).all()
    phase = seconds % 1000.0
    peak = np.count_nonzero(abs(phase - 250.0) < 50.0) / 10.0
    low = np.count_nonzero(abs(phase - 750.0) < 50.0) / 10.0
    assert peak / 100.0 == pytest.approx(18.0, rel=0.06)
    assert low / 100.0 == pytest.approx(2.0, rel=0.12)
    assert seconds[-1] == pytest.approx(10_000.0, rel=0.02)


# --- lengths and content --------------------------------------------------------------------------


def test_lengths() -> None:
    uniform = synthesize(50_000, input_tokens={"kind": "uniform", "low": 3, "high": 6})
    assert np.bincount(uniform.input_length)[3:].min() > 12_000
    assert (uniform.input_length.min(), uniform.input_length.max()) == (3, 6)
    shape = {"kind": "lognormal", "median": 500.0, "sigma": 0.5, "low": 100, "high": 2000}
    drawn = synthesize(50_000, output_tokens=shape).output_length
    assert np.median(drawn) == pytest.approx(500, rel=0.02)
    assert np.log(drawn[(drawn > 100) & (drawn < 2000)]).std() == pytest.approx(0.5, rel=0.05)
    assert (drawn.min(), drawn.max()) == (100, 2000)


def test_lengths_resampled_from_a_trace(tmp_path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,1\n1,20,2\n2,30,3\n"
    path = str(write(tmp_path, text, "t.csv"))
    workload = vecsim.synthesize(3000, resample={"path": path})
    assert (workload.input_length == 10 * workload.output_length).all()
    assert np.bincount(workload.output_length)[1:].min() > 900


def test_shared_prefixes_by_group() -> None:
    """ISL 640 in blocks of 64, ratio 0.45: 5 shared blocks (reference: traffic, section 5.3)."""
    workload = synthesize(
        40, input_tokens=640, shared_prefix={"ratio": 0.45, "groups": 2}, block_tokens=64
    )
    blocks = workload.block_ids.reshape(40, 10)
    assert len(np.unique(blocks[:, :5], axis=0)) == 2
    assert len(np.unique(blocks[:, 5:])) == 200
    assert len(np.unique(blocks)) == 210


def test_cached_prefix_is_common_to_all() -> None:
    workload = synthesize(
        6, input_tokens=640, cached_prefix_tokens=128, shared_prefix={"ratio": 0.5, "groups": 3}
    )
    blocks = workload.block_ids.reshape(6, 10)
    assert len(np.unique(blocks[:, :2], axis=0)) == 1
    assert 1 < len(np.unique(blocks[:, 2:5], axis=0)) <= 3
    with pytest.raises(InputError, match="cached_prefix_tokens: got 101, expected at most"):
        synthesize(2, cached_prefix_tokens=101)


def test_lengths_alone_carry_no_content() -> None:
    assert synthesize(5).block_ids is None


def test_sessions_of_several_turns() -> None:
    workload = synthesize(3, turns=2, think_time_ms=25.0, arrivals={"kind": "constant", "rate": 1})
    assert workload.sessions.accumulate
    assert workload.sessions.turn.tolist() == [0, 1] * 3
    assert workload.sessions.delay_ms.tolist() == [0.0, 25.0] * 3
    assert workload.arrival_ms.tolist() == [0.0, 0.0, 1000.0, 1000.0, 2000.0, 2000.0]
    assert workload.session_id.to_list() == [f"session_{k // 2}" for k in range(6)]
    result = vecsim.replay(FLEET, workload=workload)
    assert result.report["completed_requests"] == 6
    first, second = result.requests.to_dicts()[:2]
    assert second["arrival_time_ms"] == first["terminal_time_ms"] + 25.0
    assert second["input_length"] == first["input_length"] * 2 + first["output_length"]


# --- descriptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"requests": 0}, "synthesize.requests: got 0"),
        ({"input_tokens": None}, "synthesize.input_tokens: got None"),
        ({"input_tokens": -1}, "synthesize.input_tokens.tokens: got -1"),
        ({"input_tokens": {"kind": "zipf"}}, "synthesize.input_tokens.kind: got 'zipf'"),
        ({"input_tokens": {"kind": "uniform", "low": 5, "high": 4}}, ".input_tokens.high: got 4"),
        (
            {"input_tokens": {"kind": "lognormal", "median": 0.0, "sigma": 1.0}},
            "synthesize.input_tokens.median: got 0.0",
        ),
        ({"arrivals": "sometimes"}, "synthesize.arrivals.kind: got 'sometimes'"),
        ({"arrivals": {"kind": "poisson"}}, "synthesize.arrivals.rate: missing"),
        ({"arrivals": {"kind": "poisson", "rate": 0.0}}, "synthesize.arrivals.rate: got 0.0"),
        ({"arrivals": {"kind": "poisson", "rate": -1.0}}, "synthesize.arrivals.rate: got -1.0"),
        ({"arrivals": {"kind": "constant", "rate": float("nan")}}, "synthesize.arrivals.rate: "),
        ({"arrivals": {"kind": "constant", "rate": 1e-310}}, "leaves arrivals finite"),
        ({"arrivals": {"kind": "gamma", "rate": 1, "shape": 0}}, "synthesize.arrivals.shape: got"),
        ({"arrivals": {"kind": "piecewise", "segments": []}}, "synthesize.arrivals.segments: got"),
        ({"arrivals": {"kind": "diurnal", "rate": 1, "amplitude": 2}}, ".arrivals.amplitude: got"),
        ({"concurrency": 0}, "synthesize.concurrency: got 0"),
        ({"turns": 0}, "synthesize.turns: got 0"),
        ({"block_tokens": 0}, "synthesize.block_tokens: got 0"),
        ({"think_time_ms": -1.0}, "synthesize.think_time_ms: got -1.0"),
        ({"shared_prefix": {"ratio": 1.5}}, "synthesize.shared_prefix.ratio: got 1.5"),
        ({"shared_prefix": {"ratio": 0.5, "groups": 0}}, "synthesize.shared_prefix.groups: got 0"),
        ({"resample": {"path": "t"}}, "synthesize.input_tokens: got"),
        ({"thnik_time_ms": 1}, "synthesize.thnik_time_ms: got 1"),
    ],
)
def test_bad_descriptions_name_the_field(more, message) -> None:
    with pytest.raises(InputError) as caught:
        synthesize(**{"requests": 4, **more})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- replays --------------------------------------------------------------------------------------

DESCRIPTION = {
    "requests": 60,
    "arrivals": {"kind": "poisson", "rate": 40.0},
    "input_tokens": {"kind": "uniform", "low": 100, "high": 900},
    "output_tokens": 5,
    "shared_prefix": {"ratio": 0.5, "groups": 3},
}


def test_workload_of_a_spec_file(tmp_path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump({"spec": FLEET, "workload": DESCRIPTION}))
    result = vecsim.replay(str(path))
    same = vecsim.replay(FLEET, workload=vecsim.synthesize(**DESCRIPTION))
    assert result.report == same.report
    assert result.report["completed_requests"] == 60
    with pytest.raises(InputError, match=r"workload.requests: missing"):
        vecsim.replay({"spec": FLEET, "workload": {"input_tokens": 1}})
    traffic = {"source_type": "synthetic", "isl": 1, "osl": 1, "request_count": 1}
    with pytest.raises(InputError, match=r"workload: got .* expected nothing beside traffic"):
        vecsim.replay({"spec": FLEET, "workload": DESCRIPTION, "traffic": traffic})


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_a_workload_read_back_replays_identically(tmp_path, suffix) -> None:
    workload = vecsim.synthesize(**DESCRIPTION, concurrency=7)
    path = tmp_path / f"w{suffix}"
    workload.write(path)
    again = vecsim.read_trace(path)
    assert_equal(again, workload)
    one, other = (vecsim.replay(FLEET, workload=w) for w in (workload, again))
    assert one.report == other.report
    assert one.requests.equals(other.requests)


def test_lengths_of_zero_count_as_one_in_traffic() -> None:
    """Read off the reference's answers."""
    traffic = {"source_type": "synthetic", "isl": 0, "osl": 0, "request_count": 2}
    requests = vecsim.replay({"spec": FLEET, "traffic": traffic}).requests
    assert requests["input_length"].to_list() == [1, 1]
    assert requests["output_length"].to_list() == [1, 1]


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    workload = synthesize(20, concurrency=3, arrivals=POISSON)
    requests = vecsim.replay(FLEET, workload=workload).requests
    starts = requests["arrival_time_ms"].to_list()
    ends = requests["terminal_time_ms"].to_list()
    assert starts[:4] == [0.0, 0.0, 0.0, min(ends[:3])]
    assert all(sum(s <= t < e for s, e in zip(starts, ends, strict=True)) <= 3 for t in starts)


def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path) -> None:
    script = (
        "import json, sys, vecsim\n"
        "vecsim.synthesize(**json.loads(sys.argv[1])).write(sys.argv[2])\n"
    )
    files = []
    for threads in ("1", "2"):
        files.append(tmp_path / f"{threads}.parquet")
        command = [sys.executable, "-c", script, json.dumps(DESCRIPTION), str(files[-1])]
        subprocess.run(command, check=True, env={"POLARS_MAX_THREADS": threads, **_environment()})
    assert files[0].read_bytes() == files[1].read_bytes()
    assert_equal(vecsim.read_trace(files[0]), vecsim.synthesize(**DESCRIPTION))


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "POLARS_MAX_THREADS"}
