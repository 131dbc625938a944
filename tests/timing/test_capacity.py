"""KV blocks against the reference's estimates (timing providers, section 5.3)."""

import msgspec
import pytest

import vecsim
from tests.timing import recorded
from vecsim.config.load import load
from vecsim.config.roles import resolve_role
from vecsim.errors import InputError
from vecsim.timing.machine.hardware import gpu_of, model_of
from vecsim.timing.machine.kv_capacity import estimate
from vecsim.timing.machine.roofline import Parallel

LLAMA_8B = "meta-llama/Meta-Llama-3.1-8B"
LLAMA_70B = "meta-llama/Meta-Llama-3.1-70B"
DEEPSEEK = "deepseek-ai/DeepSeek-V3"
BLOCK = {"vllm": 64, "trtllm": 32, "sglang": 1}

# model, system, backend, (tp, moe_tp, moe_ep, dp), tokens, blocks
ROWS = [
    (LLAMA_8B, "h100_sxm", "vllm", (1, 1, 1, 1), 432992, 6765),
    (LLAMA_8B, "h200_sxm", "vllm", (1, 1, 1, 1), 882732, 13792),
    (LLAMA_8B, "b200_sxm", "vllm", (1, 1, 1, 1), 1170272, 18285),
    (LLAMA_8B, "a100_sxm", "vllm", (1, 1, 1, 1), 432992, 6765),
    (LLAMA_8B, "l40s", "vllm", (1, 1, 1, 1), 174857, 2732),
    (LLAMA_8B, "h100_sxm", "vllm", (2, 1, 1, 1), 987648, 15432),
    (LLAMA_8B, "h100_sxm", "sglang", (1, 1, 1, 1), 423911, 423911),
    (LLAMA_8B, "h100_sxm", "trtllm", (1, 1, 1, 1), 448675, 14021),
    (LLAMA_70B, "h100_sxm", "vllm", (4, 1, 1, 1), 454016, 7094),
    (LLAMA_70B, "h100_sxm", "vllm", (8, 1, 1, 1), 1338649, 20916),
    (LLAMA_70B, "h200_sxm", "vllm", (2, 1, 1, 1), 370583, 5790),
    (LLAMA_70B, "h200_sxm", "vllm", (4, 1, 1, 1), 1173601, 18337),
    (LLAMA_70B, "h200_sxm", "vllm", (8, 1, 1, 1), 2777820, 43403),
    ("nvidia/Llama-3.1-70B-Instruct-FP8", "h200_sxm", "trtllm", (2, 1, 1, 1), 1209392, 37793),
    ("meta-llama/Meta-Llama-3.1-405B", "b200_sxm", "vllm", (8, 1, 1, 1), 1038140, 16220),
    ("Qwen/Qwen3-8B", "h100_sxm", "vllm", (1, 1, 1, 1), 382705, 5979),
    ("Qwen/Qwen3-32B", "h200_sxm", "vllm", (1, 1, 1, 1), 249864, 3904),
    ("Qwen/Qwen3-32B-FP8", "h200_sxm", "vllm", (1, 1, 1, 1), 737808, 11528),
    ("Qwen/Qwen3-30B-A3B", "h100_sxm", "vllm", (1, 1, 1, 1), 118341, 1849),
    ("Qwen/Qwen3-235B-A22B-FP8", "h200_sxm", "vllm", (8, 1, 8, 1), 4206209, 65722),
    ("openai/gpt-oss-120b", "h100_sxm", "vllm", (4, 4, 1, 1), 6221941, 97217),
    ("openai/gpt-oss-20b", "h100_sxm", "vllm", (1, 1, 1, 1), 2444658, 38197),
    (DEEPSEEK, "h200_sxm", "vllm", (8, 1, 8, 1), 1127011, 17609),
    (DEEPSEEK, "h200_sxm", "sglang", (8, 1, 8, 1), 1246077, 1246077),
    (DEEPSEEK, "h200_sxm", "trtllm", (8, 1, 8, 1), 1402111, 43815),
    (DEEPSEEK, "b200_sxm", "trtllm", (1, 1, 8, 8), 2028092, 63377),
]


def capacity(model, system, backend, sizes, tokens=8192, fraction=None):
    return estimate(
        model_of(model, "model"),
        gpu_of(system, "system"),
        Parallel(*sizes),
        backend=backend,
        block_size=BLOCK[backend],
        max_num_tokens=tokens,
        memory_fraction=fraction,
    )


@pytest.mark.parametrize(("model", "system", "backend", "sizes", "tokens", "blocks"), ROWS)
def test_blocks_equal_the_reference(model, system, backend, sizes, tokens, blocks):
    found = capacity(model, system, backend, sizes)
    assert (found.tokens, found.num_gpu_blocks) == (tokens, blocks)


@pytest.mark.parametrize(
    ("fraction", "budget", "activations", "tokens"),
    [
        (0.95, 8192, 738_197_504, 465760),
        (None, 512, 73_400_320, 438064),
        (None, 2048, 184_549_376, 437216),
        (None, 16384, 1_476_395_008, 427360),
    ],
)
def test_fraction_and_token_budget(fraction, budget, activations, tokens):
    found = capacity(LLAMA_8B, "h100_sxm", "vllm", (1, 1, 1, 1), budget, fraction)
    assert found.weights == 16_059_990_016
    assert found.activations == activations
    assert found.tokens == tokens


def test_weights_of_latent_attention_to_the_byte():
    assert capacity(DEEPSEEK, "h200_sxm", "vllm", (8, 1, 8, 1)).weights == 90_845_872_128
    assert capacity(DEEPSEEK, "h200_sxm", "sglang", (8, 1, 8, 1)).weights == 85_117_435_904
    assert capacity(DEEPSEEK, "b200_sxm", "trtllm", (1, 1, 8, 8)).weights == 103_996_915_712


def test_a_model_that_does_not_fit_is_told_so():
    with pytest.raises(InputError, match=r"num_gpu_blocks: got 'h100_sxm', .* 80.0 GiB, 131.4 are"):
        capacity(LLAMA_70B, "h100_sxm", "vllm", (1, 1, 1, 1))


# --- in a spec ------------------------------------------------------------------------------------

ROOFLINE = {"type": "roofline", "model": "Qwen/Qwen3-32B-FP8", "system": "h200_sxm"}
AIC = {"model": "Qwen/Qwen3-32B-FP8", "system": "h200_sxm", "backend": "vllm"}


def blocks_of(rank, **engine):
    spec = recorded.spec(rank.pop("timing_model"), rank)
    spec["engine"].update(engine)
    return load(spec).spec.engine.rank.num_gpu_blocks


@pytest.mark.parametrize(
    "timing", [{"type": "external", "provider": "aic", "config": AIC}, {"type": "aic", **AIC}]
)
def test_what_counts_as_an_omitted_block_count(timing):
    assert blocks_of({"timing_model": timing}) == "auto"
    assert blocks_of({"timing_model": timing, "num_gpu_blocks": 100}) == 100
    explicit = {"num_gpu_blocks_is_explicit": False}
    assert blocks_of({"timing_model": timing, "num_gpu_blocks": 100}, **explicit) == "auto"
    assert blocks_of({"timing_model": timing}, num_gpu_blocks_is_explicit=True) == 16384


def test_other_timing_takes_the_default_unless_asked():
    assert blocks_of({"timing_model": {"type": "polynomial"}}) == 16384
    explicit = {"num_gpu_blocks_is_explicit": False}
    assert blocks_of({"timing_model": {"type": "polynomial"}}, **explicit) == 16384
    assert blocks_of({"timing_model": ROOFLINE}) == 16384
    assert blocks_of({"timing_model": ROOFLINE, "num_gpu_blocks": "auto"}) == "auto"


def test_descriptors_built_in_python_leave_out_what_is_default():
    timing = vecsim.config.schema.AicTiming(**AIC)
    rank = vecsim.config.schema.RankConfig(timing_model=timing)
    spec = vecsim.ReplaySpec(
        topology=load(recorded.spec(ROOFLINE)).spec.topology,
        engine=vecsim.config.schema.EngineDescriptor(rank=rank),
        requests=[],
    )
    payload = load(spec)
    assert payload.spec.engine.rank.num_gpu_blocks == "auto"
    assert load(payload) == payload
    assert resolve_role(payload.spec.engine, "aggregated").rank.num_gpu_blocks == "auto"


def test_sizes_left_out_are_those_of_the_timing_model():
    spec = recorded.spec({"type": "aic", **AIC, "tp": 4, "attention_dp": 2})
    engine = load(spec).spec.engine
    assert (engine.tensor_parallel_size, engine.dp_size) == (4, 2)


def test_the_report_shows_blocks_as_derived():
    spec = recorded.spec(ROOFLINE, {"num_gpu_blocks": "auto", "max_num_batched_tokens": 8192})
    spec["requests"] = [{"id": "a", "arrival_time_ms": 0, "input_tokens": 900, "output_tokens": 3}]
    result = vecsim.replay(spec)
    assert result.report["decode_derived_num_gpu_blocks"] == 11528
    assert result.roles[0].total_blocks == 11528
    assert "11,528 derived blocks of 64" in result.headline()
    assert result.effective_config["kv_capacity"]["aggregated"]["weights"] == 34_317_271_040
    assert msgspec.json.decode(msgspec.json.encode(result.effective_config))
    spec["engine"]["rank"]["num_gpu_blocks"] = 500
    assert "decode_derived_num_gpu_blocks" not in vecsim.replay(spec).report


def test_a_table_knows_its_blocks_by_its_metadata():
    timing = {"type": "table", "path": str(recorded.TABLE)}
    result = vecsim.replay(
        recorded.spec(timing, {"num_gpu_blocks": "auto", "max_num_batched_tokens": 8192})
    )
    assert result.report["decode_derived_num_gpu_blocks"] == 11528
    table = result.priced[0].timing
    stated = vecsim.TimingTable(table.points, {"num_gpu_blocks": "77"})
    spec = recorded.spec({"type": "table", "path": "unused"}, {"num_gpu_blocks": "auto"})
    assert vecsim.replay(spec, timing=stated).report["decode_derived_num_gpu_blocks"] == 77
    stated = vecsim.TimingTable(table.points, {"num_gpu_blocks": "77", "block_size": "16"})
    assert vecsim.replay(spec, timing=stated).report["decode_derived_num_gpu_blocks"] == 19
    nameless = vecsim.TimingTable(table.points)
    with pytest.raises(InputError, match="a number of blocks"):
        vecsim.replay(spec, timing=nameless)
