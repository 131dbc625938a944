"""The roofline against the worked values of its formulas, and facts from config.json files."""

import json

import numpy as np
import polars as pl
import pytest

import vecsim
from tests.timing import recorded
from vecsim.errors import InputError
from vecsim.timing.hardware import gpu_of, known_model, model_of, read_config
from vecsim.timing.roofline import Parallel, Roofline

# model, system, sizes, prices of prefill (1,1024,0), (1,8192,0), 512 new at prefix 8192, and of
# decode (1,1000), (32,2048), (128,4096): timing providers, section 6.3
WORKED = [
    (
        "meta-llama/Meta-Llama-3.1-8B",
        "h100_sxm",
        (1, 1, 1),
        (24.182, 203.202, 17.408, 7.407, 10.279, 30.419),
    ),
    (
        "meta-llama/Meta-Llama-3.1-70B",
        "h200_sxm",
        (4, 1, 1),
        (65.354, 528.987, 39.685, 12.837, 14.611, 25.738),
    ),
    (
        "Qwen/Qwen3-32B-FP8",
        "h200_sxm",
        (1, 1, 1),
        (64.033, 591.057, 48.069, 11.734, 15.619, 43.019),
    ),
    (
        "Qwen/Qwen3-235B-A22B-FP8",
        "h200_sxm",
        (8, 1, 8),
        (44.037, 255.422, 32.665, 9.961, 16.379, 25.255),
    ),
    (
        "deepseek-ai/DeepSeek-V3",
        "h200_sxm",
        (8, 1, 8),
        (69.382, 394.358, 51.593, 11.344, 24.316, 39.871),
    ),
]


@pytest.mark.parametrize(("model", "system", "sizes", "expected"), WORKED)
def test_worked_values(model, system, sizes, expected):
    roofline = Roofline(model_of(model, ""), gpu_of(system, ""), Parallel(*sizes))
    prefill = roofline.prefill_ms(1, [1024, 8192, 8704], [0, 0, 8192])
    decode = roofline.decode_ms([1, 32, 128], [1000, 2048, 4096])
    assert [*prefill, *decode] == pytest.approx(expected, abs=5e-4)


def roofline_errors():
    """Relative errors at the points of aic_points.json: float64, prefills and decodes."""
    keys = ["model", "system", "tp", "moe_tp", "moe_ep"]
    errors = {"prefill": [], "decode": []}
    for (model, system, tp, moe_tp, moe_ep), rows in recorded.aic_points().group_by(keys):
        parallel = Parallel(tp, moe_tp or 1, moe_ep or 1)
        roofline = Roofline(model_of(model, ""), gpu_of(system, ""), parallel)
        for role, found in errors.items():
            chosen = rows.filter(pl.col("role") == role)
            if role == "prefill":
                price = roofline.prefill_ms(chosen["batch_size"], chosen["isl"], chosen["prefix"])
            else:
                price = roofline.decode_ms(chosen["batch_size"], chosen["context"])
            found.append(price / chosen["latency_ms"].to_numpy() - 1.0)
    return {role: np.abs(np.concatenate(found)) for role, found in errors.items()}


def test_errors_are_those_that_the_readme_states():
    errors = roofline_errors()
    stated = (recorded.FOLDER.parents[1] / "README.md").read_text()
    for role, found in errors.items():
        p50, p90, p99 = (100 * np.quantile(found, p) for p in (0.5, 0.9, 0.99))
        assert f"{role}: {p50:.0f} / {p90:.0f} / {p99:.0f} %" in stated


def test_a_replay_with_the_roofline():
    timing = {"type": "roofline", "model": "Qwen/Qwen3-32B-FP8", "system": "h200_sxm"}
    spec = recorded.spec(timing, {"num_gpu_blocks": "auto"})
    spec["requests"] = [{"id": "a", "arrival_time_ms": 0, "input_tokens": 1024, "output_tokens": 2}]
    result = vecsim.replay(spec)
    assert result.report["mean_ttft_ms"] == pytest.approx(64.033, abs=1e-3)
    assert result.report["mean_tpot_ms"] == pytest.approx(11.735, abs=2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "qwen3-32b"}, "model: got 'qwen3-32b', .* near ones: Qwen/Qwen3-32B"),
        ({"system": "h200"}, "system: got 'h200', .* near ones: h200_sxm"),
        ({"system": "mainframe"}, "system: got 'mainframe', expected a GPU"),
        ({"tp": 3}, "tp: got 3, expected a divisor of the 64 attention heads"),
        ({"moe_tp": 2}, "moe_tp x moe_ep = 2', expected 1 in all"),
        ({"tp": 0}, "tp: got 0, expected a positive integer"),
        ({"mem_fraction_static": 1.5}, "mem_fraction_static: got 1.5"),
        ({"model": "/nowhere/config.json"}, "got 'No such file"),
    ],
)
def test_bad_input_is_one_line(changes, message):
    timing = {"type": "roofline", "model": "Qwen/Qwen3-32B", "system": "h200_sxm", **changes}
    with pytest.raises(InputError, match=message) as caught:
        vecsim.replay(recorded.spec(timing))
    assert "\n" not in str(caught.value)


# --- config.json ----------------------------------------------------------------------------------

DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "use_sliding_window": False,
    "sliding_window": None,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
MOE = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {"quant_method": "mxfp4"},
}
MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"},
}
SHEET = {
    "Qwen/Qwen3-32B-FP8": DENSE,
    "openai/gpt-oss-120b": MOE,
    "deepseek-ai/DeepSeek-V3": MLA,
}


@pytest.mark.parametrize("name", SHEET)
def test_a_config_json_gives_the_facts_of_the_sheet(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHEET[name]))
    expected = known_model(name)
    for source in (path, tmp_path):
        found = model_of(str(source), "model")
        differing = {
            field for field in vars(expected) if getattr(found, field) != getattr(expected, field)
        }
        # The family of gpt-oss plays no part; ffn of a model without dense layers neither.
        assert differing - {"name"} <= ({"family", "ffn"} if "gpt-oss" in name else set())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json, hidden_size: missing"),
        ({"vocab_size": "many"}, "config.json, vocab_size: got 'many'"),
        ({"quantization_config": {"quant_method": "new"}}, "quant_method: got 'new'"),
    ],
)
def test_bad_config_json(tmp_path, changes, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**DENSE, **changes}))
    with pytest.raises(InputError, match=message):
        read_config(path)
