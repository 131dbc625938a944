"""The roofline against published throughputs of TensorRT-LLM; by hand.

python -m tests.benchmarks.published

Output tokens per second and GPU under the highest load, from the performance overview of
TensorRT-LLM, docs/source/developer-guide/perf-overview.md of github.com/NVIDIA/TensorRT-LLM at
03e27c7: NVLink systems, as many requests as it states, all at once, a KV cache of 0.95 of the free
memory. Nothing is fitted to them.
"""

from __future__ import annotations

import warnings

import numpy as np

import vecsim
from vecsim.errors import VecsimError
from vecsim.timing.machine.hardware import model_of
from vecsim.workload.workload import Workload

LENGTHS = {"1/1": (1024, 1024), "1/8": (1024, 8192), "8/1": (8192, 1024), "32/1": (32768, 1024)}
REQUESTS = {"1/1": 3000, "1/8": 1500, "8/1": 1500, "32/1": 1000}

# As its options for Blackwell say: MXFP8 activations, an FP8 KV cache.
_W4A8 = {"expert_dtype": "w4a8", "kv_dtype": "fp8"}

# model, system, tensor- and attention-parallel size, other fields: tokens/s by LENGTHS
PUBLISHED = [
    ("nvidia/DeepSeek-V3.1-NVFP4", "b200_sxm", 1, 4, {}, (6430, 3862, 1168, None)),
    ("nvidia/DeepSeek-V3.1-NVFP4", "gb200", 1, 4, {}, (6924, 4379, 1192, None)),
    ("deepseek-ai/DeepSeek-R1", "h200_sxm", 1, 8, {}, (1620, 1218, None, None)),
    ("openai/gpt-oss-120b", "b200_sxm", 1, 2, _W4A8, (25870, 17289, 6111, 1392)),
    ("openai/gpt-oss-120b", "gb200", 1, 1, _W4A8, (26609, 14800, 6835, 1645)),
    ("openai/gpt-oss-120b", "h200_sxm", 1, 1, {}, (6798, 3543, 1828, 519)),
    ("openai/gpt-oss-120b", "h100_sxm", 1, 4, {}, (4715, None, 1169, 333)),
    ("openai/gpt-oss-20b", "b200_sxm", 1, 1, _W4A8, (53491, 34702, 11904, 2645)),
    ("openai/gpt-oss-20b", "gb200", 1, 1, _W4A8, (56528, 38100, 12941, 2905)),
    ("openai/gpt-oss-20b", "h200_sxm", 1, 1, {}, (13890, 12743, 4015, 915)),
    ("openai/gpt-oss-20b", "h100_sxm", 1, 1, {}, (11403, 8617, 3366, 785)),
    ("nvidia/Llama-3.3-70B-Instruct-FP4", "b200_sxm", 1, 1, {}, (6842, 3242, 1362, 274)),
    ("nvidia/Llama-3.3-70B-Instruct-FP4", "gb200", 1, 1, {}, (7751, 3805, 1491, 302)),
    ("nvidia/Llama-3.1-70B-Instruct-FP8", "h200_sxm", 2, 1, {}, (2582, 2009, 537, 120)),
    ("nvidia/Llama-3.1-70B-Instruct-FP8", "h100_sxm", 2, 1, {}, (2209, None, 398, None)),
    ("nvidia/Qwen3-235B-A22B-FP4", "b200_sxm", 1, 4, {}, (5756, 3389, 1410, 319)),
    ("nvidia/Qwen3-235B-A22B-FP4", "gb200", 1, 4, {}, (5862, 3423, 1464, 333)),
    (
        "Qwen/Qwen3-235B-A22B",
        "h200_sxm",
        1,
        4,
        {"weight_dtype": "fp8", "kv_dtype": "fp8"},
        (3268, 1417, 627, 134),
    ),
    (
        "Qwen/Qwen3-235B-A22B",
        "h100_sxm",
        1,
        8,
        {"weight_dtype": "fp8", "kv_dtype": "fp8"},
        (1935, 873, None, None),
    ),
    ("nvidia/Qwen3-30B-A3B-FP4", "b200_sxm", 1, 1, {}, (26611, 13497, 5735, 1265)),
    ("nvidia/Qwen3-30B-A3B-FP4", "gb200", 1, 1, {}, (22201, 14272, 6201, 1380)),
    (
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        "b200_sxm",
        1,
        4,
        {"weight_dtype": "nvfp4", "kv_dtype": "fp8"},
        (11227, 5174, 3279, 859),
    ),
    (
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        "gb200",
        1,
        4,
        {"weight_dtype": "nvfp4", "kv_dtype": "fp8"},
        (11905, 5508, 3444, 963),
    ),
    (
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        "h200_sxm",
        1,
        8,
        {"weight_dtype": "fp8", "kv_dtype": "fp8"},
        (4180, 1157, 1276, None),
    ),
]


def throughput(model: str, system: str, tp: int, dp: int, fields: dict, lengths: str) -> float:
    """Output tokens per second and GPU that a replay has."""
    prompt, output = LENGTHS[lengths]
    count = REQUESTS[lengths]
    timing = {"type": "roofline", "model": model, "system": system, **fields}
    timing["free_gpu_memory_fraction"] = 0.95
    spec = {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "engine": {
            "tensor_parallel_size": tp,
            "dp_size": dp,
            "rank": {
                "backend": "trtllm",
                "timing_model": timing,
                "num_gpu_blocks": "auto",
                "max_num_seqs": 2048,
                "max_num_batched_tokens": 8192,
                "enable_prefix_caching": False,
            },
        },
        "requests": [],
    }
    lengths_of = np.full(count, prompt), np.full(count, output)
    workload = Workload.from_columns(np.zeros(count), *lengths_of)
    report = vecsim.replay(spec, workload=workload).report
    return report["output_throughput_tok_s"] / (tp * dp)


def main() -> None:
    """Print each throughput, and the errors by kind of model."""
    warnings.simplefilter("ignore")
    found: dict[str, list[float]] = {}
    for model, system, tp, dp, fields, published in PUBLISHED:
        for lengths, measured in zip(LENGTHS, published, strict=True):
            if measured is None:
                continue
            try:
                ours = throughput(model, system, tp, dp, fields, lengths)
            except VecsimError as error:
                print(model, system, lengths, "-", error)
                continue
            off = ours / measured - 1.0
            found.setdefault(model_of(model, "").kind, []).append(off)
            row = f"{model} {system} tp {tp} dp {dp} {lengths}"
            print(f"{row:70s} {measured:7,d} {ours:9,.0f} {off:+7.1%}", flush=True)
    found["all"] = [off for offs in found.values() for off in offs]
    for kind, offs in found.items():
        p50, p90 = np.quantile(np.abs(offs), [0.5, 0.9])
        worst = max(offs, key=abs)
        print(f"{kind}: {len(offs)}, median {p50:.1%}, p90 {p90:.1%}, worst {worst:+.1%}")


if __name__ == "__main__":
    main()
