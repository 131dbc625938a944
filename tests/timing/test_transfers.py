"""What a prefill/decode transfer costs beside a roofline: the model's bytes over a link."""

import warnings

import pytest

import vecsim
from vecsim.errors import InputError
from vecsim.timing.machine.hardware import gpu_of, link_gb_s
from vecsim.timing.resolve import TimingWarning

ROOFLINE = {"type": "roofline", "model": "meta-llama/Meta-Llama-3.1-70B", "system": "h100_sxm"}


def spec(latency=0.0, tp=4, **rank):
    """One prefill and one decode worker of Llama-3.1-70B."""
    engine = {"tensor_parallel_size": tp, "rank": {"timing_model": ROOFLINE}}
    return {
        "topology": {
            "kind": "disaggregated",
            "prefill": {"initial_workers": 1},
            "decode": {"initial_workers": 1},
            "handoff_latency_ms": latency,
        },
        "engine": {
            "prefill": {**engine, "rank": {**engine["rank"], **rank}},
            "decode": engine,
        },
        "requests": [{"id": "a", "arrival_time_ms": 0, "input_tokens": 4000, "output_tokens": 2}],
    }


def transfer_ms(result):
    rows = result.requests
    return (rows["destination_activated_ms"] - rows["source_held_ms"])[0]


@pytest.mark.parametrize(("tp", "each"), [(4, 81920), (8, 40960)])
def test_bytes_are_those_of_the_model(tp, each):
    free = vecsim.replay(spec(latency=1e-6, tp=tp))
    result = vecsim.replay(spec(tp=tp, kv_transfer_bandwidth=link_gb_s("h100_sxm")))
    expected = 4000 * each / 50e9 * 1e3
    assert transfer_ms(result) - transfer_ms(free) == pytest.approx(expected, abs=1e-3)


def test_given_bytes_count():
    written = vecsim.replay(spec(kv_transfer_bandwidth=50.0, kv_transfer_bytes_per_token=1))
    derived = vecsim.replay(spec(kv_transfer_bandwidth=50.0))
    assert transfer_ms(derived) - transfer_ms(written) == pytest.approx(6.55, abs=0.01)


def test_a_free_transfer_is_noted():
    match = (
        r"transfers are free: engine\.prefill\.rank\.kv_transfer_bandwidth \(GB/s\) is not set; the"
        r" model has 81,920 bytes a token and GPU, a GPU of h100_sxm 450 GB/s to its node and 50"
    )
    with pytest.warns(TimingWarning, match=match):
        vecsim.replay(spec())
    for paid in (spec(latency=1.0), spec(kv_transfer_bandwidth=50.0)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", TimingWarning)
            vecsim.replay(paid)


def test_without_a_model_bytes_are_asked_for():
    fleet = spec(kv_transfer_bandwidth=50.0)
    fleet["engine"]["prefill"]["rank"]["timing_model"] = {"type": "polynomial"}
    with pytest.raises(InputError, match="kv_transfer_bytes_per_token: missing"):
        vecsim.replay(fleet)


def test_links():
    assert link_gb_s("h200_sxm", same_node=True) == gpu_of("h200_sxm", "").link_gb_s == 450
    assert link_gb_s("h200_sxm") == 50
    assert link_gb_s("l4") == 0
