"""The roofline against the worked values of its formulas, and facts from config.json files."""

import json
from dataclasses import replace

import numpy as np
import pytest

import vecsim
from tests.timing import recorded
from vecsim.errors import InputError
from vecsim.timing.machine.configs import read_config
from vecsim.timing.machine.hardware import gpu_of, known_model, model_of
from vecsim.timing.machine.kernels import Kernels
from vecsim.timing.machine.roofline import Parallel, Pass, Roofline

HELD_OUT = json.loads((recorded.FOLDER / "held_out.json").read_text())
"""The reference's prices of deployments that no constant was fitted to, by
`tests.benchmarks.roofline`: [model, system, backend, tp, attention-DP, moe_tp, moe_ep, [[phase,
batch, length, prefix, ms], ...]]."""


def errors_of(deployment):
    """(kind of model, relative errors of its prefills and decodes)."""
    model, system, backend, tp, dp, moe_tp, moe_ep, rows = deployment
    facts = model_of(model, "")
    roofline = Roofline(facts, gpu_of(system, ""), Parallel(tp, moe_tp, moe_ep, dp), backend)
    found = {"prefill": [], "decode": []}
    for phase, batch, length, prefix, ms in rows:
        if phase == "prefill":
            price = roofline.prefill_ms(batch, length, prefix)
        else:
            price = roofline.decode_ms(batch, length)
        found[phase].append(float(price) / ms - 1.0)
    return facts.kind, found


def errors_by_kind():
    """Absolute relative errors by kind of model and phase, over all held-out deployments."""
    pooled = {}
    for deployment in HELD_OUT:
        kind, found = errors_of(deployment)
        for phase, errors in found.items():
            pooled.setdefault((kind, phase), []).extend(np.abs(errors))
    return pooled


def test_held_out_deployments_are_near_the_database():
    assert len(HELD_OUT) >= 12
    assert sum(row[4] > 1 for row in HELD_OUT) >= 8  # attention-DP
    most = {"dense": 0.10, "moe": 0.20, "mla": 0.20}
    for (kind, phase), errors in errors_by_kind().items():
        assert np.median(errors) < most[kind], (kind, phase)


def test_errors_are_those_that_the_readme_states():
    stated = " ".join((recorded.FOLDER.parents[1] / "README.md").read_text().split())
    for (kind, phase), errors in errors_by_kind().items():
        p50, p90, p99 = (100 * np.quantile(errors, p) for p in (0.5, 0.9, 0.99))
        assert f"| {kind}, {phase} | {p50:.0f} % | {p90:.0f} % | {p99:.0f} % |" in stated


def test_experts_see_the_tokens_of_all_attention_ranks():
    model, gpu = model_of("deepseek-ai/DeepSeek-V3", ""), gpu_of("h200_sxm", "")
    work = Pass(*(np.array([x]) for x in (1.0, 4096.0, 0.0)), decoding=False)
    tensor, data = (
        Roofline(model, gpu, Parallel(tp, 1, 8, dp)).operators_ms(work)
        for tp, dp in ((8, 1), (1, 8))
    )
    assert data["experts"] > 7.0 * tensor["experts"]  # eight times the tokens
    assert data["dispatch"] > tensor["all-reduce"] > 0.0
    assert data["all-reduce"] == tensor["dispatch"] == 0.0


def test_attention_ranks_are_not_free():
    """DeepSeek-V3 on eight H200: tokens a second, eight attention ranks against tensor
    parallelism; the database has 2,320 against 1,333."""
    model, gpu = model_of("deepseek-ai/DeepSeek-V3", ""), gpu_of("h200_sxm", "")
    speed = []
    for tp, dp in ((8, 1), (1, 8)):
        roofline = Roofline(model, gpu, Parallel(tp, 1, 8, dp))
        # Each rank: 2,000 tokens of a prompt, and its share of 256 sequences for 200 tokens.
        prefill = roofline.prefill_ms(1, 2000, 0) / (2000.0 * dp)
        decode = roofline.decode_ms(256 / dp, 2100) / 256.0
        speed.append(1.0 / (10.0 * prefill + decode).item())
    assert 1.2 < speed[1] / speed[0] < 2.2


# A pass by hand, Llama-3.1-8B on one H100, one layer without a prefix: FLOPs over peak of each
# product and bytes over bandwidth, with kernels that reach all of both and start at once.
IDEAL = {"peak": 1.0, "bandwidth": 1.0, "launch_us": 0.0, "sharp": 1.0, "fill": 0.0}
LINK = {"link": 1.0, "least_us": 0.0, "sharp": 1.0}
TABLES = {
    "hopper": {
        "product": {"bf16": IDEAL, "fp8": IDEAL},
        "experts": {"vllm": {"bf16": IDEAL, "fp8": IDEAL}},
        "attention": dict.fromkeys(
            ("prefill_wide", "prefill_narrow", "decode_wide", "decode_narrow"), IDEAL
        ),
        "latent": {"vllm": {k: {**IDEAL, "products": 1.0} for k in ("prefill", "decode")}},
        "query_norm": IDEAL,
        "all_reduce": {"vllm": LINK},
        "all_gather": LINK,
    }
}


def ideal(model, parallel=None, gpu="h100_sxm"):
    kernels = Kernels(TABLES, "hopper", "vllm")
    return Roofline(model, gpu_of(gpu, ""), parallel or Parallel(), "vllm", kernels)


def test_operators_by_hand():
    model = model_of("meta-llama/Meta-Llama-3.1-8B", "")
    n = 1000.0
    work = Pass(*(np.array([x]) for x in (2.0, n, 0.0)), decoding=False)
    found = ideal(model).operators_ms(work)
    peak, bandwidth = 989e12, 3.35e12
    tokens = 2.0 * n
    shapes = [(6144, 4096), (4096, 4096)]
    products = sum(
        2 * tokens * a * b / peak + 2 * (a * b + tokens * (a + b)) / bandwidth for a, b in shapes
    )
    assert found["attention products"].item() == pytest.approx(32e3 * products)
    pairs = 2.0 * n * (n + 1.0) / 2.0
    moved = 2 * n * 2 * 8 * 128 * 2 + 2 * tokens * 32 * 128 * 2
    attention = 4 * pairs * 32 * 128 / peak + moved / bandwidth
    assert found["attention"].item() == pytest.approx(32e3 * attention)
    norms = 2 * (4 * tokens * 4096 * 2 / (0.8 * bandwidth) + 3e-6)
    assert found["norms"].item() == pytest.approx(32e3 * norms)
    assert found["all-reduce"] == 0.0
    cut = ideal(model, Parallel(tp=4)).operators_ms(work)
    sent = 2 * 3 / 4 * tokens * 4096 * 2 / 450e9
    assert cut["all-reduce"].item() == pytest.approx(1e3 * 65 * sent)


def test_windows_chunks_and_states_bound_what_attention_reads():
    plain = model_of("meta-llama/Meta-Llama-3.1-8B", "")
    work = Pass(*(np.array([x]) for x in (1.0, 1.0, 9999.0)), decoding=True)
    every = ideal(plain).operators_ms(work)["attention"].item()
    half = replace(plain, window=100, window_layers=16)
    windowed = ideal(half).operators_ms(work)["attention"].item()
    assert windowed / every == pytest.approx(0.5 + 0.5 * 100 / 10000, rel=0.01)
    state = replace(plain, linear_layers=24, linear_params=1000, linear_state_bytes=2**20)
    prices = ideal(state).operators_ms(work)
    assert prices["attention"].item() == pytest.approx(every / 4)
    assert prices["linear attention"].item() > 24e3 * 2 * 2**20 / 3.35e12
    sparse = replace(plain, index_heads=4, index_dim=128, index_topk=100, index_layers=32)
    prices = ideal(sparse).operators_ms(work)
    assert prices["attention"].item() == pytest.approx(every / 100, rel=0.05)
    assert prices["index"].item() > 32e3 * 10000 * 132 / 3.35e12


def test_a_replay_with_the_roofline():
    timing = {"type": "roofline", "model": "Qwen/Qwen3-32B-FP8", "system": "h200_sxm"}
    spec = recorded.spec(timing, {"num_gpu_blocks": "auto"})
    spec["requests"] = [{"id": "a", "arrival_time_ms": 0, "input_tokens": 1024, "output_tokens": 2}]
    result = vecsim.replay(spec)
    roofline = Roofline(model_of("Qwen/Qwen3-32B-FP8", ""), gpu_of("h200_sxm", ""), Parallel())
    expected = roofline.prefill_ms(1, 1024, 0).item() + roofline.decode_ms(1, 1023).item()
    assert result.report["mean_ttft_ms"] == pytest.approx(expected, rel=0.2)
    assert result.report["mean_tpot_ms"] == pytest.approx(
        roofline.decode_ms(1, 1024).item(), rel=1e-3
    )


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
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
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
