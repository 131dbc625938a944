"""What users of serving simulators asked for in public issue threads, each as a small test.

Overload and silent loss, metric definitions, memory and scale. A name like `vllm_35541` is the
repository and number of the thread. `spec(...)` costs 10 ms a pass unless it says otherwise.
"""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import specs
from tests.support.specs import cache, r, rows, spec
from vecsim.errors import InputError
from vecsim.run.replay import replay
from vecsim.workload.workload import Workload

ROOT = Path(__file__).parents[2]


def only(result) -> dict:
    (row,) = rows(result)
    return row


# --- overload, hang, deadlock, silent loss --------------------------------------------------------


def test_a_cache_of_one_block_rejects_what_does_not_fit__vllm_35541():
    row = only(replay(spec(r(0, 32, 1), rank=cache(1, 16))))
    assert (row["terminal_status"], row["terminal_time_ms"]) == ("rejected", 0.0)
    assert row["terminal_reason"] == "prompt_exceeds_kv_capacity"


@pytest.mark.parametrize("mode", ["lifo", "fifo"])
def test_two_requests_that_fill_the_cache_and_each_need_one_more_block__vllm_15996(mode):
    rank = cache(4, 4, preemption_mode=mode)
    result = replay(spec(r(0, 8, 4), r(0, 8, 4), rank=rank))
    assert result.requests["terminal_status"].to_list() == ["completed"] * 2
    assert result.requests["output_length"].to_list() == [4, 4]
    assert result.report["preemptions"] == 1


def test_the_preempted_goes_first_and_both_end__inference_sim_373():
    result = replay(spec(r(0, 6, 8), r(0, 6, 8), rank=cache(4, 4)))
    assert result.requests["output_length"].to_list() == [8, 8]
    first, second = rows(result)
    assert (first["admission_count"], second["admission_count"]) == (1, 2)


def test_preemptions_are_bounded__inference_sim_349():
    """Each preemption is paid for by a token of somebody, so they cannot run away."""
    for seed in range(2000, 2100):
        payload = specs.make(seed, ("small_pool",), ("refused", "empty_prompt"))
        report = replay(payload).report
        requests = payload.get("spec", payload)["requests"]
        tokens = sum(max(q["output_tokens"], len(q.get("output_token_ids", ()))) for q in requests)
        assert report["preemptions"] <= 2 * (tokens + len(requests))


def test_one_request_that_outgrows_the_cache_alone__inference_sim_293():
    """12 tokens fit: the prompt of 8 and four of the outputs; the fifth came from the fourth."""
    result = replay(spec(r(0, 8, 20), r(200, 4, 2), rank=cache(3, 4)))
    big, later = rows(result)
    assert (big["terminal_status"], big["terminal_reason"]) == ("failed", "kv_capacity_exhausted")
    assert (big["output_length"], big["terminal_time_ms"]) == (5, 50.0)
    assert (later["terminal_status"], later["last_token_ms"]) == ("completed", 220.0)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf])
def test_an_impossible_rate_is_an_argument_error__inference_sim_202(rate):
    workload = Workload.from_columns([0, 10], [5, 5], [1, 1])
    with pytest.raises(InputError):
        workload.speedup(rate)


def test_an_exact_fit_is_admitted__inference_sim_492():
    fits = only(replay(spec(r(0, 7, 1), rank=cache(2, 4))))
    assert (fits["terminal_status"], fits["output_length"]) == ("completed", 1)
    full = only(replay(spec(r(0, 8, 1), rank=cache(2, 4))))
    assert (full["terminal_status"], full["output_length"]) == ("completed", 1)
    outgrows = only(replay(spec(r(0, 8, 2), rank=cache(2, 4))))
    assert (outgrows["terminal_status"], outgrows["output_length"]) == ("failed", 1)
    above = only(replay(spec(r(0, 9, 1), rank=cache(2, 4))))
    assert (above["terminal_status"], above["first_admit_ms"]) == ("rejected", None)


@pytest.mark.parametrize("mode", ["lifo", "fifo"])
def test_caching_under_pressure_is_no_faster_than_room_for_all__inference_sim_1121(mode):
    requests = [r(0, 16, 24) for _ in range(8)]
    tight = replay(spec(*requests, rank=cache(24, 4, preemption_mode=mode))).report
    ample = replay(spec(*requests, rank=cache(4096, 4, preemption_mode=mode))).report
    assert tight["preemptions"] > 0
    assert tight["completed_requests"] == ample["completed_requests"] == 8
    assert tight["output_throughput_tok_s"] < ample["output_throughput_tok_s"]


def test_nobody_disappears_and_nobody_ends_twice__inference_sim_183__llmservingsim_55():
    for seed in range(3000, 3100):
        payload = specs.make(seed, (), ("refused", "empty_prompt"))
        requests = payload.get("spec", payload)["requests"]
        result = replay(payload)
        assert result.requests["request_id"].to_list() == [q["id"] for q in requests]
        ended = result.requests["terminal_status"].value_counts()
        assert ended["count"].sum() == len(requests)
        for row in rows(result):
            cut = row["terminal_status"] in ("unfinished", "not_arrived")
            assert (row["terminal_time_ms"] is None) == cut


def test_idle_ranks_take_part_without_delay__llmservingsim_65():
    alone = only(replay(spec(r(3, 100, 5))))
    among_four = only(replay(spec(r(3, 100, 5), dp_size=4)))
    assert among_four == alone
    assert alone["last_token_ms"] == 53.0


def test_workers_do_not_share_their_caches__llmservingsim_29():
    prompt = list(range(64))
    requests = [r(t, 64, 1, input_token_ids=prompt) for t in (0, 100, 200)]
    result = replay(spec(*requests, workers=2, rank=cache(64, 16)))
    assert result.requests["decode_worker_id"].to_list() == [0, 1, 0]
    assert result.requests["reused_input_tokens"].to_list() == [0, 0, 48]


# --- metric definitions ---------------------------------------------------------------------------


def test_one_output_ends_with_its_prefill__inference_sim_1099():
    row = only(replay(spec(r(0, 100, 1))))
    assert row["output_length"] == row["requested_output_length"] == 1
    assert row["first_token_ms"] == row["last_token_ms"] == row["terminal_time_ms"] == 10.0


@pytest.mark.parametrize("outputs", [0, 1])
def test_no_gap_without_a_second_token__inference_sim_531__vllm_omni_6693(outputs):
    result = replay(spec(r(0, 100, outputs)))
    assert only(result)["tpot_ms"] is None
    assert result.report["mean_tpot_ms"] is None
    assert result.report["mean_itl_ms"] is None
    assert result.outcome.gaps.count == 0


def test_duration_is_the_last_completion_not_the_last_event__inference_sim_1089():
    late_rejection = r(1000, 100, 1)
    result = replay(spec(r(0, 8, 2), late_rejection, rank=cache(4, 4)))
    assert result.report["duration_ms"] == 20.0
    assert result.report["last_event_ms"] == 1000.0


def test_nothing_completed_still_makes_a_report__inference_sim_927():
    result = replay(spec(r(0, 100, 1), r(5, 100, 1), rank=cache(2, 4)))
    report = result.report
    assert (report["rejected_requests"], report["completed_requests"]) == (2, 0)
    assert report["mean_ttft_ms"] is report["p99_e2e_latency_ms"] is None
    assert result.requests.height == 2
    assert result.requests["ttft_ms"].null_count() == 2


def test_tpot_is_last_minus_first_over_tokens_minus_one__guidellm_1144():
    row = only(replay(spec(r(0, 8, 5))))
    assert (row["first_token_ms"], row["last_token_ms"], row["tpot_ms"]) == (10.0, 50.0, 10.0)


def test_three_tokens_have_two_gaps__vllm_7242():
    result = replay(spec(r(0, 8, 3), prefill_ms=40))
    assert result.outcome.gaps.count == 2
    assert (result.report["min_itl_ms"], result.report["max_itl_ms"]) == (10.0, 10.0)
    assert only(result)["ttft_ms"] == 40.0


def test_throughput_over_the_whole_span__evalscope_585():
    prompt = list(range(128))
    rank = cache(64, 64)
    requests = [r(t, 128, 3, input_token_ids=prompt) for t in (0, 1000)]
    report = replay(spec(*requests, rank=rank)).report
    assert report["makespan_ms"] == report["duration_ms"] == 1030.0
    assert report["output_throughput_tok_s"] == pytest.approx(6 / 1.03, rel=1e-12)
    assert report["total_input_tokens"] == 256
    assert report["committed_prefill_tokens"] == 192  # 64 came from the cache


@pytest.mark.parametrize("count", [1, 2, 10, 100])
def test_percentiles_are_order_statistics_of_the_sorted_values__cs249r_book_1936(count):
    """Requests on workers of their own: the TTFT of the k-th is its prompt's prefill."""
    lengths = np.random.default_rng(count).permutation(count) * 100 + 50
    fleet = spec(workers=count)
    fleet["engine"]["rank"]["timing_model"] = {"type": "polynomial"}
    workload = Workload.from_columns(np.zeros(count), lengths, np.ones(count, int))
    result = replay(fleet, workload=workload)
    values = sorted(result.requests["ttft_ms"].to_list())
    for name, percent in (("median", 50), ("p75", 75), ("p90", 90), ("p95", 95), ("p99", 99)):
        rank = math.floor((count - 1) * percent / 100 + 0.5)
        assert result.report[f"{name}_ttft_ms"] == values[rank]
    assert result.report["min_ttft_ms"] == values[0]
    assert result.report["max_ttft_ms"] == values[-1]


def test_the_machine_leaves_no_trace_in_the_result__sglang_39042(tmp_path):
    """Same bytes on a busy machine: results hold no clock but the virtual one."""
    payload = spec(*(r(3 * k, 40 + k, 9) for k in range(30)), workers=2, rank=cache(24, 8))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        replay(payload).write(tmp_path / "busy")
    finally:
        busy.kill()
        busy.wait()
    replay(payload).write(tmp_path / "quiet")
    names = sorted(path.name for path in (tmp_path / "busy").iterdir())
    assert "report.json" in names
    for name in names:
        assert (tmp_path / "busy" / name).read_bytes() == (tmp_path / "quiet" / name).read_bytes()


# --- memory and scale -----------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
import numpy as np
from vecsim.run.replay import replay
from vecsim.workload.workload import Workload
from tests.support.specs import spec
kind, n = sys.argv[1], int(sys.argv[2])
def kilobytes(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
if kind == "rows":
    lengths = np.full(n, 200), np.full(n, 20)
    fleet = spec(workers=64)
else:
    lengths = np.full(n, 100_000), np.full(n, 2)
    fleet = spec(workers=4)
replay(fleet, workload=Workload.from_columns(np.zeros(10), np.full(10, 9), np.full(10, 3)))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
before = kilobytes("VmRSS")
workload = Workload.from_columns(np.arange(n) * 0.5, *lengths)
result = replay(fleet, workload=workload, threads=1)
result.report, result.requests
print(1024 * (kilobytes("VmHWM") - before))
"""

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measures memory through /proc"
)


def peak_bytes(kind: str, count: int) -> int:
    run = subprocess.run(
        [sys.executable, "-c", PEAK, kind, str(count)],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(run.stdout)


@needs_proc
def test_memory_per_request_does_not_grow_with_the_trace__dynamo_12049():
    small, large = 100_000, 400_000
    assert peak_bytes("rows", large) / large <= 1.3 * peak_bytes("rows", small) / small


@needs_proc
def test_long_prompts_are_not_materialised__dynamo_14679():
    """100 million prompt tokens; a list of them would take 400 MB or more."""
    assert peak_bytes("prompts", 1000) < 24e6


def _seconds(fleet: dict, workload: Workload) -> float:
    best = math.inf
    for _ in range(3):
        began = time.process_time()
        replay(fleet, workload=workload, threads=1)
        best = min(best, time.process_time() - began)
    return best


def _one_at_a_time(count: int) -> Workload:
    return Workload.from_columns(np.zeros(count), np.full(count, 64), np.full(count, 50))


def test_a_pass_costs_the_same_however_many_wait__aisimulate_321():
    fleet = spec(rank={"max_num_seqs": 4})
    base = _seconds(fleet, _one_at_a_time(1))
    few = (_seconds(fleet, _one_at_a_time(1000)) - base) / 1000
    many = (_seconds(fleet, _one_at_a_time(30_000)) - base) / 30_000
    assert many < 3 * few + 2e-6


def test_an_eviction_costs_the_same_in_a_large_cache__inference_sim_485():
    """Distinct prompts of 16 blocks run through caches that hold 60 or 6,000 of them."""
    count = 20_000
    ids = np.arange(16 * count, dtype=np.uint32)
    workload = Workload.from_columns(
        np.zeros(count),
        np.full(count, 256),
        np.ones(count, int),
        block_offsets=np.arange(count + 1) * 16,
        block_ids=ids,
        block_tokens=16,
    )
    workload.prefix_tree(16)
    few = _seconds(spec(rank=cache(1_000, 16)), workload)
    many = _seconds(spec(rank=cache(100_000, 16)), workload)
    assert many < 3 * few + 0.05


def test_results_of_many_rows_stay_small_on_disk__guidellm_591(tmp_path):
    """100 MB for a million rows."""
    count = 50_000
    generator = np.random.default_rng(1)
    workload = Workload.from_columns(
        np.cumsum(generator.exponential(2.0, count)),
        generator.integers(1, 2000, count),
        generator.integers(1, 20, count),
    )
    replay(spec(workers=16), workload=workload).write(tmp_path / "out")
    written = (tmp_path / "out" / "requests.parquet").stat().st_size
    assert written < 100 * count


def test_a_replay_leaves_no_files__llmservingsim_51(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.chdir(tmp_path)
    result = replay(spec(*(r(k, 30, 5) for k in range(50))))
    assert result.report["completed_requests"] == 50
    assert result.requests.height == 50
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]
