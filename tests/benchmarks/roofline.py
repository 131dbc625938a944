"""Fitting the kernels of the roofline, and its errors elsewhere; by hand, where aisimulate and
scipy are installed.

python -m tests.benchmarks.roofline collect FOLDER   # ask the reference's database, by operator
python -m tests.benchmarks.roofline fit FOLDER       # data/kernels.toml, from FITTED alone
python -m tests.benchmarks.roofline errors FOLDER    # of whole passes, of FITTED and HELD_OUT
python -m tests.benchmarks.roofline record FOLDER    # tests/timing/held_out.json

Each operator of the database is fitted on its own, so that no term makes up for another one.
HELD_OUT is never looked at by the fit.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vecsim.timing.machine.hardware import gpu_of, model_of
from vecsim.timing.machine.kernels import Collective, Kernel, Kernels, Latent
from vecsim.timing.machine.roofline import Parallel, Pass, Roofline

_LLAMA_8B, _LLAMA_70B = "meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B"
_LLAMA_FP8 = "nvidia/Llama-3.1-70B-Instruct-FP8"
_QWEN_32B, _QWEN_FP8 = "Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8"
_235B, _235B_FP8 = "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B-FP8"
_235B_FP4 = "nvidia/Qwen3-235B-A22B-NVFP4"
_V3, _V3_FP4 = "deepseek-ai/DeepSeek-V3", "nvidia/DeepSeek-V3.1-NVFP4"
_KIMI = "nvidia/Kimi-K2.5-NVFP4"
_PER_TENSOR, _MINIMAX = "Qwen/Qwen3-32B-FP8-Static-PerTensor", "MiniMaxAI/MiniMax-M2.7"
_QUANTISED = {
    "": ({}, {}),
    "fp8": (
        {"gemm_quant_mode": "fp8", "moe_quant_mode": "fp8", "kvcache_quant_mode": "fp8"},
        dict.fromkeys(("weight_dtype", "attention_dtype", "expert_dtype", "kv_dtype"), "fp8"),
    ),
    "w4a8": ({"moe_quant_mode": "w4a8_mxfp4_mxfp8"}, {"expert_dtype": "w4a8"}),
}
"""Other data types than the model's: the estimator's fields, and ours."""

_FITTED = [
    (_LLAMA_8B, "a100_sxm", 1, 1, 1, 1),
    (_LLAMA_8B, "h100_sxm", 1, 1, 1, 1),
    (_LLAMA_8B, "b200_sxm", 1, 1, 1, 1),
    (_LLAMA_70B, "h200_sxm", 4, 1, 1, 1),
    (_LLAMA_70B, "h100_sxm", 8, 1, 1, 1),
    (_LLAMA_70B, "b200_sxm", 2, 1, 1, 1),
    (_LLAMA_FP8, "b200_sxm", 4, 1, 1, 1),
    (_QWEN_FP8, "h200_sxm", 1, 1, 1, 1),
    (_QWEN_FP8, "b200_sxm", 1, 1, 1, 1),
    ("Qwen/Qwen3-30B-A3B", "h100_sxm", 1, 1, 1, 1),
    ("Qwen/Qwen3-30B-A3B", "b200_sxm", 2, 1, 2, 1),
    (_235B_FP8, "h200_sxm", 8, 1, 1, 8),
    (_235B_FP8, "h200_sxm", 1, 8, 1, 8),
    (_235B_FP8, "b200_sxm", 4, 1, 1, 4),
    (_235B_FP4, "b200_sxm", 4, 1, 1, 4),
    ("openai/gpt-oss-120b", "h100_sxm", 4, 1, 4, 1),
    ("openai/gpt-oss-120b", "b200_sxm", 2, 1, 2, 1),
    (_V3, "h200_sxm", 8, 1, 1, 8),
    (_V3, "h200_sxm", 1, 8, 1, 8),
    (_V3, "b200_sxm", 8, 1, 1, 8),
    (_V3, "b200_sxm", 1, 8, 1, 8),
    (_V3_FP4, "b200_sxm", 4, 1, 1, 4),
    (_PER_TENSOR, "h200_sxm", 1, 1, 1, 1),
    (_PER_TENSOR, "b200_sxm", 1, 1, 1, 1),
    ("Qwen/Qwen3-8B", "l40s", 1, 1, 1, 1),
    (_MINIMAX, "h200_sxm", 4, 1, 1, 4),
    (_MINIMAX, "b200_sxm", 4, 1, 1, 4),
    ("Qwen/Qwen3-30B-A3B", "h200_sxm", 2, 1, 1, 2),
    ("openai/gpt-oss-120b", "h200_sxm", 1, 1, 1, 1),
    ("openai/gpt-oss-120b", "b200_sxm", 1, 1, 1, 1),
    (_235B_FP8, "b200_sxm", 1, 4, 1, 4),
    (f"{_235B} fp8", "h200_sxm", 8, 1, 1, 8),
    (f"{_235B} fp8", "b200_sxm", 8, 1, 1, 8),
    ("openai/gpt-oss-120b w4a8", "b200_sxm", 1, 1, 1, 1),
    ("openai/gpt-oss-120b w4a8", "b200_sxm", 2, 1, 2, 1),
]
_BACKENDS = ("vllm", "sglang", "trtllm")
FITTED = [(*row[:2], backend, *row[2:]) for backend in _BACKENDS for row in _FITTED]
"""(model, system, backend, tp, attention-DP, moe_tp, moe_ep) that the kernels are fitted to."""

HELD_OUT = [
    ("Qwen/Qwen3-8B", "h200_sxm", "vllm", 2, 1, 1, 1),
    (_QWEN_32B, "h100_sxm", "sglang", 4, 1, 1, 1),
    (_QWEN_32B, "b200_sxm", "trtllm", 1, 1, 1, 1),
    ("meta-llama/Meta-Llama-3.1-405B", "b200_sxm", "vllm", 8, 1, 1, 1),
    (_LLAMA_FP8, "h100_sxm", "trtllm", 2, 1, 1, 1),
    (_LLAMA_8B, "l40s", "vllm", 1, 1, 1, 1),
    (_QWEN_FP8, "gb200", "sglang", 2, 1, 1, 1),
    (_LLAMA_70B, "gb200", "vllm", 4, 1, 1, 1),
    ("Qwen/Qwen3-8B", "a100_sxm", "vllm", 1, 1, 1, 1),
    (_LLAMA_8B, "b300_sxm", "trtllm", 1, 1, 1, 1),
    (_LLAMA_70B, "a100_sxm", "vllm", 4, 1, 1, 1),
    ("Qwen/Qwen3-30B-A3B-FP8", "h200_sxm", "vllm", 1, 1, 1, 1),
    (_235B, "h200_sxm", "sglang", 8, 1, 1, 8),
    (_235B_FP8, "h100_sxm", "trtllm", 1, 8, 1, 8),
    (_235B_FP8, "h200_sxm", "vllm", 2, 4, 1, 8),
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "h200_sxm", "vllm", 8, 1, 8, 1),
    ("openai/gpt-oss-20b", "h200_sxm", "vllm", 1, 1, 1, 1),
    ("openai/gpt-oss-120b", "b200_sxm", "trtllm", 1, 4, 1, 4),
    ("openai/gpt-oss-120b", "h100_sxm", "sglang", 2, 1, 2, 1),
    (_235B_FP8, "gb200", "vllm", 1, 4, 1, 4),
    (_235B_FP4, "gb200", "trtllm", 1, 4, 1, 4),
    (_V3, "h200_sxm", "sglang", 4, 2, 1, 8),
    (_V3, "h200_sxm", "trtllm", 2, 4, 1, 8),
    (_V3, "h200_sxm", "vllm", 4, 2, 1, 8),
    (_V3, "b200_sxm", "vllm", 4, 2, 1, 8),
    (_V3, "gb200", "vllm", 1, 8, 1, 8),
    (_V3, "b300_sxm", "sglang", 8, 1, 1, 8),
    (_V3_FP4, "b200_sxm", "vllm", 1, 4, 1, 4),
    (_KIMI, "b200_sxm", "trtllm", 1, 8, 1, 8),
    (_KIMI, "b200_sxm", "vllm", 8, 1, 1, 8),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "h200_sxm", "vllm", 8, 1, 1, 8),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "b200_sxm", "trtllm", 4, 1, 1, 4),
]

# (requests, tokens after the pass, tokens before it), and (sequences, past tokens)
PREFILLS = [(1, n, 0) for n in (128, 512, 1024, 2048, 4096, 8192, 16384)]
PREFILLS += [(4, 256, 0), (4, 1024, 0), (8, 2048, 0), (16, 300, 0), (1, 2560, 2048)]
PREFILLS += [(1, 8704, 8192), (2, 5120, 4096), (1, 18432, 16384), (4, 1224, 1024)]
DECODES = [
    (batch, context)
    for batch in (1, 4, 8, 16, 32, 64, 96, 128, 256)
    for context in (200, 1000, 2000, 4000, 16000)
    if batch * context <= 600_000
]


# --- asking the database --------------------------------------------------------------------------


def collect(folder: Path) -> None:
    """Write FITTED and HELD_OUT by operator, one JSON line for each deployment."""
    logging.disable(logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    for name, deployments in (("fitted", FITTED), ("held_out", HELD_OUT)):
        path = folder / f"{name}.jsonl"
        there = [deployment for deployment, *_ in read(path)] if path.exists() else []
        with open(path, "a", encoding="utf-8") as out:
            for deployment in deployments:
                if list(deployment) in there:
                    continue
                try:
                    row = [*deployment, asked(*deployment)]
                except Exception as error:
                    print("not in the database:", *deployment, str(error)[:80])
                    continue
                out.write(json.dumps(row) + "\n")


def asked(model: str, system: str, backend: str, tp: int, dp: int, moe_tp: int, moe_ep: int) -> Any:
    """[phase, batch, length, prefix, ms, {operator: ms}] for each pass of PREFILLS and DECODES."""
    from aisimulate_core.sdk import EngineHandle

    sizes: dict[str, Any] = {"tp_size": tp, "attention_dp_size": dp}
    model, _, quantised = model.partition(" ")
    sizes.update(_QUANTISED[quantised][0])
    if model_of(model, "").experts:
        sizes.update(moe_tp_size=moe_tp, moe_ep_size=moe_ep)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        handle = EngineHandle.compile(model, system, backend, **sizes)
    rows = []
    passes = [("prefill", *sizes) for sizes in PREFILLS] + [("decode", *s, 0) for s in DECODES]
    for phase, batch, length, prefix in passes:
        mode = "static_ctx" if phase == "prefill" else "static_gen"
        answers = handle.run_static_per_op(
            batch_size=batch, beam_width=1, isl=length, osl=2, prefix=prefix, mode=mode
        )
        operators: dict[str, float] = defaultdict(float)
        for name, ms, *_ in answers[phase == "decode"]:
            operators[name.partition("_")[2]] += ms
        rows.append([phase, batch, length, prefix, sum(operators.values()), operators])
    return rows


def read(path: Path) -> Iterator[tuple[Any, Roofline, list[Any]]]:
    """(deployment, its roofline, its passes) of each line of a file that `collect` wrote."""
    for line in path.read_text("utf-8").splitlines():
        *deployment, rows = json.loads(line)
        model, system, backend, tp, dp, moe_tp, moe_ep = deployment
        parallel = Parallel(tp, moe_tp, moe_ep, dp)
        name, _, quantised = model.partition(" ")
        facts = replace(model_of(name, ""), **_QUANTISED[quantised][1])
        yield deployment, (facts, gpu_of(system, ""), parallel, backend), rows


def pass_of(row: list[Any]) -> Pass:
    """The pass of a row."""
    phase, batch, length, prefix, *_ = row
    if phase == "prefill":
        return Pass(*(np.array([float(x)]) for x in (batch, length - prefix, prefix)), False)
    return Pass(*(np.array([float(x)]) for x in (batch, 1, length)), True)


# --- fitting --------------------------------------------------------------------------------------


class _Noted(Kernel):
    """A kernel that notes what it is asked, instead of pricing it."""

    asked: ClassVar[list[Any]] = []

    def seconds(self, *asked: Any) -> Any:
        self.asked.append([float(np.squeeze(x)) for x in (*asked, 0.0)[:5]])
        return 0.0


def noted(price: Callable[[], Any]) -> list[list[float]]:
    """What the kernels are asked while a price is worked out."""
    _Noted.asked.clear()
    price()
    return list(_Noted.asked)


class _Noting:
    """Kernels all of which note."""

    narrow_dispatch = False

    def latent(self, _decoding: bool) -> Latent:
        return Latent(_Noted(1.0, 1.0), 1.0)

    def __getattr__(self, name: str) -> Any:
        kernel = _Noted(1.0, 1.0)
        if name in ("query_norm", "all_reduce", "all_gather"):
            return kernel
        return lambda *_, **__: kernel


def measured(folder: Path) -> dict[tuple[str, ...], list[Any]]:
    """What each sort of kernel was asked, and what the database says, in seconds:
    (architecture, sort, ...) -> [([asked, ...], seconds, (facts of the roofline, pass)), ...]."""
    found: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for _, facts, rows in read(folder / "fitted.jsonl"):
        roofline = Roofline(*facts, _Noting())
        for row in rows:
            work = pass_of(row)
            for name, ms in row[-1].items():
                key, price = _operator(name, roofline, facts, work)
                if key is None or ms <= 0.0:
                    continue
                count = 1 if name == "logits_gemm" else facts[0].layers
                key = (facts[1].architecture, *key)
                found[key].append((noted(price), ms * 1e-3 / count, (facts, work)))
    return found


_NOT_FITTED = (None, None)


def _operator(name: str, roofline: Roofline, facts: Any, work: Pass) -> Any:
    """(sort of kernel, what prices one layer) of an operator of the database."""
    model, gpu, cut, backend = facts
    tokens = work.tokens
    shape = _product_of(name, model, cut)
    if shape is not None:
        dtype, rows = shape[2], work.batch if name == "logits_gemm" else tokens
        return ("product", dtype), lambda: roofline._product(rows, *shape)
    if name == "moe":
        key = ("experts", backend, model.expert_dtype)
        return key, lambda: roofline._experts(tokens * cut.attention_dp)
    if name == "attention" and model.kind != "mla":
        return ("attention",), lambda: _attention(roofline, work, model)
    # Latent prefills of SGLang on Blackwell are erratic in the database, and left out.
    if name == "mla_block" and (backend, gpu.architecture) != ("sglang", "blackwell"):
        phase = "decode" if work.decoding else "prefill"
        return ("latent", backend, phase), lambda: roofline._attention(work, None)
    if name in ("ar_1", "moe_pre_dispatch") and cut.tp > 1 and cut.attention_dp == 1:
        return ("all_reduce", backend), lambda: roofline._all_reduce(tokens)
    # TensorRT-LLM on Blackwell sends narrower values.
    narrow = (backend, gpu.architecture) == ("trtllm", "blackwell")
    if name == "moe_pre_dispatch" and cut.tp == 1 and cut.attention_dp > 1 and not narrow:
        return ("all_gather",), lambda: roofline._dispatch(tokens)
    return _NOT_FITTED


def _product_of(name: str, model: Any, cut: Parallel) -> tuple[float, float, str] | None:
    """(outputs, inputs, data type) of a matrix product of the database."""
    own, kv = model.heads // cut.tp, max(model.kv_heads // cut.tp, 1)
    shared = int(model.shared_experts * model.moe_ffn) // cut.tp
    hidden, ffn = model.hidden, model.ffn // cut.tp
    shapes = {
        "gate_ffn1_gemm": (2 * ffn, hidden, model.weight_dtype),
        "ffn2_gemm": (hidden, ffn, model.weight_dtype),
        "shared_gate_up_gemm": (2 * shared, hidden, model.weight_dtype),
        "shared_ffn2_gemm": (hidden, shared, model.weight_dtype),
        "router_gemm": (model.experts, hidden, "bf16"),
        "logits_gemm": (model.vocab / cut.tp, hidden, "bf16"),
    }
    if model.kind != "mla":
        queries_keys = (own + 2 * kv) * model.head_dim
        shapes["qkv_gemm"] = (queries_keys, hidden, model.attention_dtype)
        shapes["proj_gemm"] = (hidden, own * model.head_dim, model.attention_dtype)
    return shapes.get(name)


def _attention(roofline: Roofline, work: Pass, model: Any) -> None:
    """Asks for a layer without a window, and for one with."""
    roofline._attention(work, None)
    if model.window_layers:
        roofline._attention(work, model.window)


def least_squares(price: Callable[[np.ndarray], np.ndarray], truth: np.ndarray, start: Any) -> Any:
    """The constants of the smallest residuals of log price, robustly: start is
    [(first guess, least, most), ...]."""
    from scipy.optimize import least_squares as solve

    guess, least, most = zip(*start, strict=True)
    bounds = least, most
    solved = solve(
        lambda x: np.log(price(x) / truth), guess, bounds=bounds, loss="soft_l1", f_scale=0.15
    )
    errors = np.abs(price(solved.x) / truth - 1.0)
    return solved.x, f"{np.median(errors):.3f} / {np.quantile(errors, 0.9):.3f}"


# Bounds keep the constants physical: even poor kernels read a third of the bandwidth.
_PEAK, _BANDWIDTH = (0.7, 0.02, 1.2), (0.7, 0.3, 1.2)
_LAUNCH, _SHARP = (5.0, 0.0, 100.0), (2.0, 1.0, 6.0)
_FIELDS = ("peak", "bandwidth", "launch_us", "sharp", "fill")


def fit(folder: Path) -> None:
    """Write data/kernels.toml."""
    found = measured(folder)
    tables: dict[str, Any] = defaultdict(dict)
    for (architecture, sort, *rest), rows in sorted(found.items()):
        if sort in ("latent", "attention"):
            continue
        asked_for = np.array([row[0][0] for row in rows]).T
        truth = np.array([row[1] for row in rows])
        if sort in ("all_reduce", "all_gather"):
            start = [(0.8, 0.2, 1.5), (5.0, 0.5, 60.0), (0.6, 0.3, 3.0)]
            x, said = least_squares(
                lambda x, a=asked_for: Collective(*x).seconds(a[0], a[1]), truth, start
            )
            values = dict(zip(("link", "least_us", "sharp"), x, strict=True))
        else:
            fill = (0.2, 0.0, 20.0) if sort == "product" else (0.1, 0.0, 3.0)
            start = [_PEAK, _BANDWIDTH, _LAUNCH, _SHARP, fill]
            x, said = least_squares(lambda x, a=asked_for: Kernel(*x).seconds(*a), truth, start)
            values = dict(zip(_FIELDS, x, strict=True))
        print(architecture, sort, *rest, len(rows), said, np.round(x, 3))
        _put(tables, (architecture, sort, *rest), values)
    for architecture in sorted({key[0] for key in found}):
        if (architecture, "attention") in found:
            _fit_attention(tables, architecture, found[architecture, "attention"])
    for key, rows in sorted(found.items()):
        if key[1] == "latent":
            _fit_latent(tables, key, rows)
    # SGLang's latent attention on Blackwell runs the kernels that vLLM's runs.
    tables["blackwell"]["latent"]["sglang"] = tables["blackwell"]["latent"]["vllm"]
    _write(tables)


def _fit_attention(tables: dict[str, Any], architecture: str, rows: list[Any]) -> None:
    """The four attention kernels of an architecture, and that of query norms, together: a model's
    attention is priced with its norms."""
    names = ["prefill_wide", "prefill_narrow", "decode_wide", "decode_narrow"]
    which, sums, norms, truth = [], [], [], []
    for asked_for, seconds, ((model, *_), work) in rows:
        which.append(2 * work.decoding + (model.kv_dtype == "fp8"))
        step = 2 if model.qk_norm else 1
        layers = asked_for[::step]
        sums.append(layers if len(layers) == 2 else layers * 2)
        norms.append(asked_for[1] if model.qk_norm else [0.0] * 5)
        truth.append(seconds)
    which, truth = np.array(which), np.array(truth)
    used = sorted(set(which.tolist()))
    halves = np.array(sums).transpose(1, 2, 0)
    norms = np.array(norms).T
    normed = norms[2] > 0.0

    def price(x: np.ndarray) -> np.ndarray:
        seconds = np.zeros(len(truth))
        for place, kind in enumerate(used):
            rows = which == kind
            kernel = Kernel(*x[4 * place : 4 * place + 4])
            for half in halves:
                seconds[rows] += 0.5 * kernel.seconds(*half[:4, rows])
        norm = Kernel(1.0, x[-1], x[-2]).seconds(0.0, 1.0, norms[2], np.maximum(norms[3], 1.0))
        return seconds + np.where(normed, norm, 0.0)

    start = [(0.7, 0.4, 1.2), _BANDWIDTH, _LAUNCH, (1.5, 1.0, 6.0)] * len(used)
    x, said = least_squares(price, truth, [*start, (25.0, 0.0, 60.0), (0.5, 0.05, 1.2)])
    print(architecture, "attention", len(rows), said, np.round(x, 3))
    errors = np.abs(price(x) / truth - 1.0)
    for place, kind in enumerate(used):
        print("   ", names[kind], np.round(np.quantile(errors[which == kind], [0.5, 0.9]), 3))
        values = dict(zip(_FIELDS[:4], x[4 * place : 4 * place + 4], strict=True))
        _put(tables, (architecture, "attention", names[kind]), values)
    if normed.any():
        norm = {"peak": 1.0, "bandwidth": x[-1], "launch_us": x[-2]}
        _put(tables, (architecture, "query_norm"), norm)


def _fit_latent(tables: dict[str, Any], key: tuple[str, ...], rows: list[Any]) -> None:
    """Latent attention, with the products around it as they were fitted before."""
    asked_for = np.array([row[0][0] for row in rows]).T
    truth = np.array([row[1] for row in rows])
    products = []
    for _, _, (facts, work) in rows:
        kernels = Kernels(_with_plain_latent(tables), facts[1].architecture, facts[3])
        roofline = Roofline(*facts, kernels)
        products.append(float(np.squeeze(roofline._latent_products(work))))
    products = np.array(products)

    def price(x: np.ndarray) -> np.ndarray:
        return x[4] * products + Kernel(*x[:4]).seconds(*asked_for[:4])

    # SGLang's latent decodes on Hopper are slower than any reading of them.
    start = [_PEAK, (0.6, 0.05, 1.2), _LAUNCH, (1.5, 1.0, 6.0), (1.2, 0.5, 3.0)]
    x, said = least_squares(price, truth, start)
    print(*key, len(rows), said, np.round(x, 3))
    names = (*_FIELDS[:4], "products")
    _put(tables, key, dict(zip(names, x, strict=True)))


def _with_plain_latent(tables: dict[str, Any]) -> dict[str, Any]:
    plain = {"peak": 1.0, "bandwidth": 1.0, "products": 1.0}
    latent = {name: {"prefill": plain, "decode": plain} for name in _BACKENDS}
    norm = {"peak": 1.0, "bandwidth": 1.0}
    return {name: {"query_norm": norm, **t, "latent": latent} for name, t in tables.items()}


def _put(tables: dict[str, Any], path: tuple[str, ...], values: dict[str, float]) -> None:
    table: Any = tables
    for name in path:
        table = table.setdefault(name, {})
    rounded = {name: float(f"{value:.3g}") for name, value in values.items()}
    table.update({name: value if value > 1e-6 else 0.0 for name, value in rounded.items()})


_HEADER = """\
# How near kernels come to the data sheet (`vecsim.timing.machine.kernels`), by architecture and
# sort.  Written by `python -m tests.benchmarks.roofline fit`: each sort of kernel was fitted to
# what the Apache-2.0 performance database of AISimulate 0.13.0 says of that operator, on the
# deployments that FITTED lists there (dense, mixture of experts, latent attention; a100_sxm,
# h100_sxm, h200_sxm, b200_sxm). No whole pass, no deployment of HELD_OUT and no published
# throughput had a part in it. peak, bandwidth, link: shares of the data sheet's. launch_us,
# least_us: microseconds.

"""


def _write(tables: dict[str, Any]) -> None:
    lines: list[str] = []

    def write(path: list[str], table: dict[str, Any]) -> None:
        plain = {k: v for k, v in table.items() if not isinstance(v, dict)}
        if plain:
            lines.append(f"[{'.'.join(path)}]")
            lines.extend(f"{name} = {value}" for name, value in plain.items())
            lines.append("")
        for name, inner in table.items():
            if isinstance(inner, dict):
                write([*path, name], inner)

    write([], tables)
    path = Path(__file__).parents[2] / "data" / "kernels.toml"
    path.write_text(_HEADER + "\n".join(lines).rstrip() + "\n", encoding="utf-8")


# --- errors ---------------------------------------------------------------------------------------


def errors(folder: Path) -> None:
    """Print the errors of whole passes, by deployment and by kind of model."""
    for name in ("fitted", "held_out"):
        by_kind: dict[tuple[str, str], list[float]] = defaultdict(list)
        for deployment, facts, rows in read(folder / f"{name}.jsonl"):
            said = []
            for phase in ("prefill", "decode"):
                found = [
                    float(np.squeeze(Roofline(*facts)._price(pass_of(row)))) / row[4] - 1.0
                    for row in rows
                    if row[0] == phase
                ]
                by_kind[facts[0].kind, phase].extend(found)
                said.append(f"{np.median(np.abs(found)):6.1%} ({np.median(found):+6.1%})")
            print(f"{name} {' '.join(map(str, deployment)):70s}", *said)
        for (kind, phase), found in sorted(by_kind.items()):
            p50, p90, p99 = np.quantile(np.abs(found), [0.5, 0.9, 0.99])
            print(f"{name} {kind} {phase}: {p50:.1%} / {p90:.1%} / {p99:.1%}, {len(found)} passes")


def record(folder: Path) -> None:
    """Write the prices of HELD_OUT for tests."""
    path = Path(__file__).parents[1] / "pricing" / "held_out.json"
    rows = []
    for deployment, _, passes in read(folder / "held_out.jsonl"):
        rows.append([*deployment, [[*row[:4], float(f"{row[4]:.6g}")] for row in passes]])
    text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    commands = {"collect": collect, "fit": fit, "errors": errors, "record": record}
    commands[sys.argv[1]](Path(sys.argv[2]))
