"""Facts from config.json files: every key that changes memory or time counts, or is refused.

Parameters and KV bytes a token are those of the models' cards and papers.
"""

import json

import pytest

from vecsim.errors import InputError
from vecsim.timing.machine.configs import read_config
from vecsim.timing.machine.hardware import model_of
from vecsim.timing.machine.kv_capacity import kv_bytes_per_token, weight_bytes
from vecsim.timing.machine.roofline import Parallel

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}
MAVERICK = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "no_rope_layers": [],
        "use_qk_norm": False,
        "vocab_size": 202048,
    },
}
SCOUT = {
    **MAVERICK,
    "text_config": {
        **MAVERICK["text_config"],
        "interleave_moe_layer_step": 1,
        "num_local_experts": 16,
        "use_qk_norm": True,
    },
}
QWEN_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 151936,
}
GEMMA2_9B = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 14336,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3_27B = {
    **GEMMA2_9B,
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
DEEPSEEK_V32 = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def read(folder, tree, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**tree, **changes}))
    return read_config(path)


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "billions", "kv_bytes"),
    [
        (LLAMA_70B, 70.6, 327_680),
        (MAVERICK, 400, 196_608),
        (SCOUT, 107.8, 196_608),
        (QWEN_NEXT, 80, 24_576),
        (DEEPSEEK_V32, 671, 61 * (576 + 132)),
    ],
)
def test_parameters_and_kv_bytes_are_the_published_ones(tmp_path, tree, billions, kv_bytes):
    model = read(tmp_path, tree)
    each = 1.0 if "quantization_config" in tree else 2.0
    found = weight_bytes(model, Parallel(), "sglang") / each / 1e9
    assert found == pytest.approx(billions, rel=0.025)
    assert kv_bytes_per_token(model, Parallel()) == kv_bytes


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        (MAVERICK, "meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
        (SCOUT, "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    ],
)
def test_llama_4_is_as_in_the_sheet(tmp_path, tree, name):
    found, expected = read(tmp_path, tree), model_of(name, "")
    names = set(vars(expected)) - {"name", "family", "ffn"}
    assert {k: getattr(found, k) for k in names} == {k: getattr(expected, k) for k in names}


@pytest.mark.parametrize(
    ("tree", "changes", "window", "layers"),
    [
        (GEMMA2_9B, {}, 4096, 21),
        (GEMMA3_27B, {}, 1024, 52),
        (GEMMA3_27B, {"sliding_window_pattern": None}, 1024, 52),
        (GEMMA2_9B, {"layer_types": ["sliding_attention", "full_attention"] * 21}, 4096, 21),
        (MAVERICK["text_config"], {}, 8192, 36),
        (MAVERICK["text_config"], {"no_rope_layers": [1, 1, 1, 0] * 12}, 8192, 36),
        (LLAMA_70B, {"sliding_window": 512}, 512, 80),
        (LLAMA_70B, {"sliding_window": 512, "use_sliding_window": False}, 0, 0),
        (
            LLAMA_70B,
            {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 60},
            512,
            20,
        ),
        (LLAMA_70B, {"sliding_window": 128, "hybrid_layer_pattern": [0, 1] * 40}, 128, 40),
    ],
)
def test_windows_and_chunks(tmp_path, tree, changes, window, layers):
    model = read(tmp_path, tree, **changes)
    assert (model.window, model.window_layers) == (window, layers)


MOE = {**LLAMA_70B, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, 0),
        ({"first_k_dense_replace": 3}, 3),
        ({"interleave_moe_layer_step": 2}, 40),
        ({"decoder_sparse_step": 4}, 60),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 1]}, 2),
        ({"moe_layer_freq": [0] * 5 + [1] * 75}, 5),
        ({"moe_layer_freq": 1, "first_k_dense_replace": 1}, 1),
        ({"moe_layer_freq": 2}, 40),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 77}, 3),
        ({"moe_layers": list(range(1, 80, 2))}, 40),
        ({"moe_layer_start_index": 8}, 8),
    ],
)
def test_layers_without_experts(tmp_path, changes, dense):
    assert read(tmp_path, MOE, **changes).dense_layers == dense


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"n_shared_experts": 2}, 2.0),
        ({"shared_expert_intermediate_size": 512}, 0.5),
        ({"share_expert_dim": 1024}, 1.0),
        ({"shared_intermediate_size": 0}, 0.0),
    ],
)
def test_shared_experts(tmp_path, changes, shared):
    assert read(tmp_path, MOE, **changes).shared_experts == shared


def test_hybrid_and_gated_attention(tmp_path):
    model = read(tmp_path, QWEN_NEXT)
    assert (model.linear_layers, model.attention_layers) == (36, 12)
    assert model.qk_norm
    assert model.attention_gate
    state = 32 * 128 * 128 * 4 + (2 * 2048 + 4096) * 3 * 2
    assert model.linear_state_bytes == state
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    listed = read(tmp_path, {**QWEN_NEXT, "full_attention_interval": None}, layer_types=kinds * 12)
    assert listed.linear_layers == 36


def test_sparse_attention(tmp_path):
    model = read(tmp_path, DEEPSEEK_V32)
    assert (model.index_heads, model.index_dim, model.index_topk) == (64, 128, 2048)
    shared = read(tmp_path, DEEPSEEK_V32, indexer_types=["full"] * 21 + ["shared"] * 40)
    assert shared.index_layers == 21


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern: got 'M-M"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type: got .*mamba"),
        ({"compress_ratios": [0, 4]}, "compress_ratios: got"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers: got"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: got"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads: got 4, expected 8"),
        ({"global_head_dim": 512, "head_dim": 256}, "global_head_dim: got 512, expected 256"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types: got '3 entries'"),
        ({"layer_types": ["full_attention", "conv"] * 40}, "layer_types: got 'conv'"),
    ],
)
def test_layers_that_are_not_modelled_are_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, LLAMA_70B, **changes)
    assert "\n" not in str(caught.value)


# --- quantisation ---------------------------------------------------------------------------------


def groups(bits, kind, activations=None, **weights):
    group = {"weights": {"num_bits": bits, "type": kind, **weights}, "targets": ["Linear"]}
    return {"config_groups": {"group_0": {**group, "input_activations": activations}}}


EIGHT, FOUR = {"num_bits": 8}, {"num_bits": 4}


@pytest.mark.parametrize(
    ("method", "fields", "dtype"),
    [
        ("compressed-tensors", {"format": "float-quantized"}, "fp8"),
        ("compressed-tensors", {"format": "int-quantized"}, "int8"),
        ("compressed-tensors", {"format": "naive-quantized", **groups(8, "float", EIGHT)}, "fp8"),
        ("compressed-tensors", {"format": "int-quantized", **groups(8, "int", EIGHT)}, "int8"),
        ("compressed-tensors", {"format": "pack-quantized", **groups(8, "int")}, "w8a16"),
        ("compressed-tensors", {"format": "pack-quantized", **groups(4, "int")}, "int4"),
        ("compressed-tensors", groups(8, "float", EIGHT, strategy="block"), "fp8_block"),
        ("compressed-tensors", groups(4, "float", FOUR, group_size=16), "nvfp4"),
        ("compressed-tensors", groups(4, "float", group_size=32), "mxfp4"),
        ("gptq", {"bits": 8}, "w8a16"),
        ("gptq", {"bits": 4}, "int4"),
        ("awq", {"bits": 4}, "int4"),
        ("fp8", {"weight_block_size": [128, 128]}, "fp8_block"),
        ("fp8", {}, "fp8"),
        ("fbgemm_fp8", {}, "fp8"),
        ("modelopt", {"quant_algo": "FP8"}, "fp8"),
        ("modelopt", {"quant_algo": "NVFP4"}, "nvfp4"),
        ("modelopt", {"quant_algo": "W4A16_AWQ"}, "int4"),
        ("bitsandbytes", {"load_in_4bit": True}, "int4"),
        ("bitsandbytes", {"load_in_4bit": False, "load_in_8bit": True}, "w8a16"),
    ],
)
def test_quantisations_are_read_by_their_numbers(tmp_path, method, fields, dtype):
    model = read(tmp_path, LLAMA_70B, quantization_config={"quant_method": method, **fields})
    assert model.weight_dtype == model.attention_dtype == dtype
    size = weight_bytes(model, Parallel(), "vllm") / 2**30
    each = {"int4": 0.5, "mxfp4": 0.5, "nvfp4": 0.5625}.get(dtype, 1.0)
    assert size == pytest.approx(3.91 + 63.75 * each, rel=0.001)  # 67.7 GiB at 8 bits


def test_a_70b_model_in_8_bits_does_not_fit_an_80_gib_gpu(tmp_path):
    import vecsim
    from tests.timing import recorded

    quantised = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    read(tmp_path, LLAMA_70B, quantization_config=quantised)
    timing = {"type": "roofline", "model": str(tmp_path / "config.json"), "system": "h100_sxm"}
    spec = recorded.spec(timing, {"num_gpu_blocks": "auto", "max_num_batched_tokens": 8192})
    with pytest.raises(InputError, match=r"of 80.0 GiB, 67.7 are weights"):
        vecsim.replay(spec)


def test_what_is_not_quantised(tmp_path):
    experts = {**MOE, "n_shared_experts": 1}
    excluded = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    quantised = {"quant_method": "compressed-tensors", "ignore": excluded, **groups(4, "int")}
    model = read(tmp_path, experts, quantization_config=quantised)
    types = (model.weight_dtype, model.attention_dtype, model.expert_dtype)
    assert types == ("bf16", "bf16", "int4")
    few = [f"model.layers.{k}.self_attn" for k in range(5)]
    model = read(tmp_path, experts, quantization_config={**quantised, "ignore": few})
    assert model.attention_dtype == "int4"
    each = [f"model.layers.{k}.self_attn*" for k in range(80)]
    model = read(tmp_path, experts, quantization_config={**quantised, "ignore": each})
    assert model.attention_dtype == "bf16"


def test_quantisation_that_stands_beside_it(tmp_path):
    beside = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    model = read(tmp_path, LLAMA_70B)
    assert (model.weight_dtype, model.kv_dtype) == ("nvfp4", "fp8")


def test_the_type_of_the_kv_cache(tmp_path):
    quantised = {"quant_method": "compressed-tensors", **groups(4, "int")}
    assert read(tmp_path, LLAMA_70B, quantization_config=quantised).kv_dtype == "bf16"
    quantised["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    assert read(tmp_path, LLAMA_70B, quantization_config=quantised).kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "bits: got 3, expected 4 or 8"),
        ({"quant_method": "aqlm"}, "quant_method: got 'aqlm', expected one of fp8"),
        ({"quant_method": "compressed-tensors", **groups(6, "float")}, "bits: got 6"),
    ],
)
def test_unknown_quantisations_are_refused(tmp_path, quantised, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, LLAMA_70B, quantization_config=quantised)
