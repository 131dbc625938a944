"""The sheet of GPUs, and GPUs of one's own."""

import tomllib
from importlib import resources

import pytest

from vecsim.errors import InputError
from vecsim.timing.machine.hardware import gpu_of, model_of
from vecsim.timing.machine.roofline import Parallel, Roofline

SHEET = tomllib.loads(resources.files("vecsim.data").joinpath("gpus.toml").read_text("utf-8"))

OWN = """
architecture = "hopper"
bf16_tflops = 500
fp8_tflops = 1000
hbm_tb_s = 2.5
link_gb_s = 200
memory_bytes = 68719476736
source = "https://example.com/card"
"""


@pytest.mark.parametrize("name", SHEET)
def test_every_gpu_prices_every_kind_of_model(name):
    gpu = gpu_of(name, "")
    assert gpu.bf16_tflops > 100
    assert gpu.memory_bytes > gpu.reserved_bytes
    assert SHEET[name]["source"]
    for model in ("Qwen/Qwen3-8B", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3"):
        for backend in ("vllm", "sglang", "trtllm"):
            roofline = Roofline(model_of(model, ""), gpu, Parallel(8, 1, 8, 1), backend)
            assert 0.5 < roofline.prefill_ms(1, 1024, 0) < 5e3
            assert 0.5 < roofline.decode_ms(8, 1024) < 500


@pytest.mark.parametrize(
    "name", ["mi300x", "mi355x", "gb300", "h20_sxm", "h100_pcie", "h100_nvl", "l4", "rtx_4090"]
)
def test_gpus_that_people_ask_for(name):
    assert name in SHEET


def test_a_decode_follows_the_bandwidth_and_a_prefill_the_peak():
    model = model_of("meta-llama/Meta-Llama-3.1-8B", "")
    h20, h100 = (Roofline(model, gpu_of(name, ""), Parallel()) for name in ("h20_sxm", "h100_sxm"))
    assert h20.decode_ms(16, 30000) < 1.1 * h100.decode_ms(16, 30000)
    assert h20.prefill_ms(1, 8192, 0) > 4.0 * h100.prefill_ms(1, 8192, 0)


def test_a_gpu_of_ones_own(tmp_path):
    path = tmp_path / "card.toml"
    path.write_text(OWN)
    gpu = gpu_of(str(path), "")
    assert (gpu.name, gpu.hbm_tb_s, gpu.reserved_bytes) == ("card", 2.5, 3758096384)
    path.write_text(OWN + 'name = "mine"\nreserved_bytes = 1\n')
    assert (gpu_of(str(path), "").name, gpu_of(str(path), "").reserved_bytes) == ("mine", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.replace("hbm_tb_s = 2.5\n", ""), "card.toml, hbm_tb_s: missing"),
        (OWN.replace("hbm_tb_s = 2.5", 'hbm_tb_s = "fast"'), "card.toml, hbm_tb_s: got 'fast'"),
        (OWN.replace("hbm_tb_s", "hbm_tbs"), "hbm_tbs: got 2.5, .* near ones: hbm_tb_s"),
        (OWN.replace('"hopper"', "3"), "card.toml, architecture: got 3"),
        ("a = ", "a TOML file of GPU facts"),
    ],
)
def test_a_bad_gpu_is_one_line(tmp_path, text, message):
    path = tmp_path / "card.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        gpu_of(str(path), "")
    assert "\n" not in str(caught.value)


def test_no_such_file():
    with pytest.raises(InputError, match="No such file"):
        gpu_of("/nowhere/card.toml", "")
