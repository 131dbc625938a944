"""Tables of one tensor-parallel shard, measured without communication."""

import pytest

import vecsim
from tests.timing import recorded
from vecsim.errors import InputError
from vecsim.timing.resolve import TimingWarning

HEADER = "role,batch_size,isl,prefix,context,latency_ms\n"
ROWS = (
    "prefill,1,100,0,,10\nprefill,1,4100,0,,90\nprefill,1,3000,2000,,35\n"
    "decode,1,,,1,5\ndecode,1,,,9000,6\ndecode,64,,,1,8\ndecode,64,,,9000,9\n"
)


def replay(tmp_path, tp, allreduce=None):
    path = tmp_path / "shard.csv"
    path.write_text(HEADER + ROWS)
    timing = {"type": "table", "path": str(path)}
    if allreduce is not None:
        timing["allreduce"] = allreduce
    spec = recorded.spec(timing, {"max_num_batched_tokens": 8192})
    spec["engine"]["tensor_parallel_size"] = tp
    spec["requests"] = [{"id": "a", "arrival_time_ms": 0, "input_tokens": 2000, "output_tokens": 3}]
    return vecsim.replay(spec).report


@pytest.mark.parametrize("tp", [2, 4])
def test_each_pass_pays_two_a_layer(tmp_path, tp):
    alone = replay(tmp_path, tp)
    link = {"gb_s": 100.0, "latency_us": 10.0, "layers": 32, "hidden": 4096}
    both = replay(tmp_path, tp, link)

    def ms(tokens):
        return 64 * (0.01 + 2 * (tp - 1) / tp * tokens * 4096 * 2 / 100e9 * 1e3)

    added = both["mean_ttft_ms"] - alone["mean_ttft_ms"]
    assert added == pytest.approx(ms(2000), rel=1e-5)
    assert both["mean_tpot_ms"] - alone["mean_tpot_ms"] == pytest.approx(ms(1), rel=1e-4)


def test_one_gpu_sends_nothing(tmp_path):
    link = {"gb_s": 100.0, "latency_us": 10.0, "layers": 32, "hidden": 4096}
    assert replay(tmp_path, 1, link)["mean_ttft_ms"] == replay(tmp_path, 1)["mean_ttft_ms"]


def test_the_model_of_the_table_is_known():
    timing = {"type": "table", "path": str(recorded.TABLE), "allreduce": {"gb_s": 450.0}}
    spec = recorded.spec(timing)
    spec["engine"]["tensor_parallel_size"] = 2
    spec["requests"] = [{"id": "a", "arrival_time_ms": 0, "input_tokens": 1000, "output_tokens": 1}]
    alone = {**timing}
    del alone["allreduce"]
    ttft = []
    for chosen in (timing, alone):
        spec["engine"]["rank"]["timing_model"] = chosen
        with pytest.warns(TimingWarning, match="is for tp 1"):
            ttft.append(vecsim.replay(spec).report["mean_ttft_ms"])
    expected = 2 * 64 * 1000 * 5120 * 2 / 450e9 * 1e3
    assert ttft[0] - ttft[1] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ({"gb_s": 0.0}, "allreduce.gb_s: got 0.0"),
        ({"gb_s": 1.0, "latency_us": -1.0}, "allreduce.latency_us: got -1.0"),
        ({"gb_s": 1.0, "hidden": 0}, "allreduce.hidden: got 0"),
        ({"gb_s": 1.0, "layers": 3}, "allreduce.hidden: missing, expected a number"),
    ],
)
def test_bad_links_are_refused(tmp_path, link, message):
    with pytest.raises(InputError, match=message):
        replay(tmp_path, 2, link)
