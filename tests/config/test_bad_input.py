"""What is wrong is refused at the door, in one line that names it; what is merely odd is run."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import polars as pl
import pytest

from tests.fuzz.__main__ import arguments
from tests.fuzz.campaign import make
from tests.fuzz.specs import make as draw
from tests.support.outcomes import outcome_of
from tests.support.specs import r, spec
from vecsim.cli import main
from vecsim.config.documents import parse_json, parse_yaml, read_document
from vecsim.config.load import set_path
from vecsim.config.validate import MAX_RANKS
from vecsim.errors import InputError, SimulationError
from vecsim.files import json_text, replace_files
from vecsim.results.metrics import backlog_growing, exact_statistics
from vecsim.run.replay import replay
from vecsim.timing.model import CompiledTiming
from vecsim.traces.times import milliseconds
from vecsim.workload.workload import Workload

W = Workload.from_columns
TWO = W([0.0, 1.0], [3, 4], [2, 2])
MANY_DIGITS = "1" * 5000


def refusal(call) -> InputError:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


# --- workloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "values", "where"),
    [
        ("arrival_ms", np.array([0.0, np.nan]), "arrival_ms[1]"),
        ("arrival_ms", np.array([np.inf, 0.0]), "arrival_ms[0]"),
        ("arrival_ms", np.array([0.0, -1.0]), "arrival_ms[1]"),
        ("input_length", np.array([3, -1], np.int32), "input_length[1]"),
        ("input_length", np.array([3], np.int32), "input_length"),
        ("output_length", np.array([2.5, 1.0]), "output_length[0]"),
        ("dp_rank", np.array([0, -2], np.int32), "dp_rank[1]"),
        ("request_id", ["a"], "request_id"),
        ("metadata", [None, {"a": float("nan")}], "metadata[1]"),
        ("block_tokens", 0, "block_tokens"),
        ("session_cap", 0, "session_cap"),
    ],
)
def test_a_workload_that_was_put_together_by_hand_is_checked(column, values, where):
    by_hand = dataclasses.replace(TWO, **{column: values})
    assert refusal(lambda: replay(spec(), workload=by_hand)).where == f"workload.{where}"


def test_content_out_of_range_is_refused():
    ids = np.array([1, 2], np.uint32)
    outside = dataclasses.replace(TWO, block_offsets=np.array([0, 1, 9]), block_ids=ids)
    assert refusal(outside.checked).where == "block_offsets[2]"
    short = dataclasses.replace(TWO, block_offsets=[0, 1, 2], block_ids=ids, block_tokens=1)
    assert refusal(short.checked).where == "input_length[0]"


def test_columns_of_another_dtype_are_converted():
    arrivals = np.array([0.0, 9.0, 1.0, 9.0])[::2]
    by_hand = dataclasses.replace(
        TWO,
        arrival_ms=arrivals,
        input_length=np.array([3, 4]),
        dp_rank=None,
        request_id=["a", "b"],
        block_offsets=[0, 1, 2],
        block_ids=np.array([7, 7]),
        block_tokens=np.int64(4),
    )
    right = by_hand.checked()
    assert right.arrival_ms.flags.carray
    assert right.input_length.dtype == right.dp_rank.dtype == np.int32
    assert right.dp_rank.tolist() == [-1, -1]
    assert right.request_id.dtype == pl.String
    assert right.block_ids.dtype == np.uint32
    assert type(right.block_tokens) is int
    assert right.checked() is right
    assert replay(spec(), workload=by_hand).report["completed_requests"] == 2


def test_a_workload_in_order_is_used_as_it_is():
    assert TWO.checked() is TWO


@pytest.mark.parametrize(
    ("columns", "where"),
    [
        ({"hash_ids": 5}, "hash_ids"),
        ({"metadata": 5}, "metadata"),
        ({"metadata": [object()]}, "metadata[0]"),
        ({"metadata": [{(1, 2): 3}]}, "metadata[0]"),
        ({"arrival_ms": [[1], [1, 2]]}, "arrival_ms"),
        ({"block_tokens": 2**70}, "block_tokens"),
        ({"request_id": ["\ud800"]}, "request_id"),
    ],
)
def test_columns_that_are_none_are_refused(columns, where):
    given = {"arrival_ms": [0], "input_length": [1], "output_length": [1], **columns}
    assert refusal(lambda: W(**given)).where == where


def test_a_block_beyond_64_bits_is_refused():
    assert refusal(lambda: TWO.prefix_tree(2**70)).where == "engine_block"


# --- arguments ------------------------------------------------------------------------------------


def test_arguments_of_the_wrong_kind_are_refused():
    assert refusal(lambda: replay(spec(), progress="yes")).where == "progress"
    assert refusal(lambda: replay(spec(), threads="2")).where == "threads"
    timing = CompiledTiming(lambda a, b, c: 1.0, lambda a, b, c, d: 1.0)
    for name in ("prefill_timing", "decode_timing"):
        error = refusal(lambda name=name: replay(spec(), **{name: timing}))
        assert error.where == name
        assert error.expected == "none: the pool is aggregated; use timing"


def test_numpy_integers_count_threads_and_paths_must_be_paths():
    result = replay(spec(), workload=TWO, threads=np.int64(2))
    assert result.report["completed_requests"] == 2
    assert refusal(lambda: result.write(5)).where == "folder"
    assert refusal(lambda: TWO.write(5)).where == "path"


def test_an_empty_workload_goes_with_belady():
    result = replay(spec(policy="belady"), workload=W([], [], []))
    assert result.report["workload_requests"] == 0


def test_a_workload_stands_in_for_traffic_that_is_not_built():
    traffic = {"source_type": "synthetic-session", "isl": 3, "osl": 3, "request_count": 3}
    payload = {"spec": spec(), "traffic": {**traffic, "turns_per_session": 3}}
    assert replay(payload, workload=TWO).report["completed_requests"] == 2


def test_records_have_tokenized_ms_only_beside_a_tokenization_stage():
    stage = {"workers": 1, "base_ms": 1.0, "per_input_token_ms": 0.0}
    bare = spec(r(0, 3, 1), record_per_request=True)
    assert "tokenized_ms" not in replay(bare).reference_report()["per_request"][0]
    staged = replay({"spec": bare, "tokenization": stage}).reference_report()["per_request"][0]
    assert staged["tokenized_ms"] == 1.0


# --- specs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "\ud800"),
        ("session_id", "a\udfff"),
        ("metadata", {"a": object()}),
        ("metadata", {(1, 2): 1}),
        ("metadata", {"a": float("nan")}),
    ],
)
def test_what_no_file_can_hold_is_refused(field, value):
    error = refusal(lambda: replay(spec(r(0, 3, 1, **{field: value}))))
    assert error.where == f"requests[0].{field}"


@pytest.mark.parametrize(
    ("fleet", "where"),
    [
        ({"workers": 10**9}, "topology.workers.initial_workers"),
        ({"workers": 2**63}, "topology.workers.initial_workers"),
        ({"workers": MAX_RANKS // 2, "dp_size": 3}, "topology.workers.initial_workers"),
        ({"dp_size": 2**32 - 1}, "engine.dp_size"),
    ],
)
def test_a_fleet_has_a_largest_size(fleet, where):
    assert refusal(lambda: replay(spec(**fleet))).where == where


@pytest.mark.parametrize(
    "stage",
    [
        {"base_ms": 1e308, "per_input_token_ms": 1e308},
        {"base_ms": 0.0, "per_input_token_ms": 1e308},
    ],
)
def test_tokenization_that_never_ends_is_refused(stage):
    payload = {"spec": spec(r(0, 3, 1)), "tokenization": {"workers": 1, **stage}}
    assert refusal(lambda: replay(payload)).where.startswith("tokenization.")


@pytest.mark.parametrize("field", ["block_size", "max_model_len"])
@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("value", [2**63 - 1, 2**63, 2**64 - 1])
def test_limits_beyond_64_bits_bound_nothing(backend, field, value):
    """No request is as long, so that they work as any other that is longer than all of them."""
    requests = [r(k, 50, 5, input_token_ids=[7] * 50) for k in range(3)]
    frames = []
    for limit in (2**40, value):
        changes = {"engine.rank.backend": backend, f"engine.rank.{field}": limit}
        if backend == "sglang" and field == "block_size":
            changes["engine.rank.sglang.chunked_prefill_size"] = limit
        tree = spec(*requests)
        for path, changed in {**changes, "engine.rank.num_gpu_blocks": 100_000}.items():
            tree = set_path(tree, path, changed)
        frames.append(replay(tree).requests.drop("terminal_reason"))
    assert frames[1].equals(frames[0])
    paged = backend == "sglang" and field == "block_size"  # a page is more than a pass may hold
    assert set(frames[1]["terminal_status"]) == {"rejected" if paged else "completed"}


# --- documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "!!int abc",
        "!!int [1]",
        "!!float abc",
        "!!bool abc",
        "!!timestamp abc",
        MANY_DIGITS,
        "&x [*x]",
        "a: &x {b: *x}",
    ],
)
def test_yaml_that_cannot_be_read_is_refused(text):
    assert refusal(lambda: parse_yaml(text)).where.startswith("YAML:1")


def test_anchors_may_be_used_again():
    assert parse_yaml("[&a [1], *a, !!int 7, !!float 1e3]") == [[1], [1], 7, 1000.0]


NESTED = "version: 1\nx0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"x{k}: &x{k} [{', '.join([f'*x{k - 1}'] * 10)}]\n" for k in range(1, 10)
)


@pytest.mark.parametrize(
    "place",
    [
        "adapters: {placement: {provider: round_robin, config: *x9}}",
        "requests: [{id: a, input_token_ids: *x9}]",
        "spec: *x9",
        "axes: {workers: *x9}",
    ],
)
def test_aliases_are_counted_by_what_they_stand_for(place):
    """A text of 500 bytes that stands for ten thousand million numbers."""
    error = refusal(lambda: parse_yaml(NESTED + place))
    assert error.where.startswith("x5[")
    assert "by aliases in all" in str(error)
    doubled = "a: &a {x: 1}\nb: &b [*a, *a]\nc: [*b, *b, *b]\n"
    assert parse_yaml(doubled)["c"] == [[{"x": 1}] * 2] * 3


@pytest.mark.parametrize("depth", [201, 960, 100_000])
def test_documents_nested_too_deeply_are_refused(depth):
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth):
        if depth < 1000 or not text.endswith("["):
            refusal(lambda text=text: parse_json(text))
        refusal(lambda text=text: parse_yaml(text))
    twice = '{"a":' * depth + '{"b": 1, "b": 2}' + "}" * depth
    refusal(lambda: parse_json(twice))
    within = "[" * 200 + "]" * 200
    assert parse_json(within) == parse_yaml(within)


def test_numbers_of_very_many_digits_are_refused():
    assert refusal(lambda: parse_json(f'{{"a": {MANY_DIGITS}}}')).where == "JSON"
    huge = {**spec(), "version": 10**5000}  # too long for repr, too
    assert refusal(lambda: replay(huge)).where == "version"


def test_indices_of_a_path_are_ascii_digits():
    for index in ("²", MANY_DIGITS):
        refusal(lambda index=index: set_path(spec(r(0, 1, 1)), f"requests[{index}].id", "x"))
    assert set_path(spec(r(0, 1, 1)), "requests[0].id", "x")["requests"][0]["id"] == "x"


def test_a_time_beyond_decimals_is_no_time():
    assert milliseconds("1e999999", "s") is None
    assert milliseconds("1e3", "s") == 1e6


# --- reports and files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last"), [(1000.0, 1000.0000000000001), (1e16, 1e16 + 2), (0.0, 5e-324)]
)
def test_arrivals_a_breath_apart_have_a_backlog_answer(first, last):
    waiting = [
        {"arrival_ms": at, "first_admit_ms": at, "first_token_ms": at, "last_token_ms": at,
         "terminal_ms": at, "output_length": 1}
        for at in (first, last)
    ]  # fmt: skip
    assert backlog_growing(outcome_of(waiting)) is False


def test_a_report_holds_finite_numbers_only():
    statistics = exact_statistics(np.array([0.0, 1.5e308]))
    assert statistics["max"] == 1.5e308
    result = replay(spec(workers=4), workload=W([0.0, 1.5e308], [3, 3], [1, 1]))
    json.dumps(result.report, allow_nan=False)
    assert result.report["decode_worker_seconds"] is None
    assert result.report["completed_requests"] == 2


def test_lone_surrogates_are_escaped_in_json():
    text = json_text({"trace_path": "bad\udcff.jsonl"})
    assert text.encode()
    assert json.loads(text) == {"trace_path": "bad\udcff.jsonl"}


def test_nothing_is_replaced_where_a_folder_is_in_the_way(tmp_path):
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "b.txt").mkdir()
    writers = {name: lambda path: path.write_text("new") for name in ("a.txt", "b.txt")}
    error = refusal(
        lambda: replace_files(tmp_path, writers, owned=("a.txt", "b.txt"), overwrite=True)
    )
    assert error.value == str(tmp_path / "b.txt")
    assert (tmp_path / "a.txt").read_text() == "old"


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["replay"], ["trace", "info"], ["trace", "convert"]])
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_a_pipe_is_told_to_be_a_file(tmp_path, monkeypatch, capsys, command, kind):
    source = tmp_path / "t.jsonl" if kind == "pipe" else kind
    if kind == "pipe":
        os.mkfifo(source)
    out = [str(tmp_path / "o.csv")] if command[-1] == "convert" else []
    monkeypatch.setattr(sys, "argv", ["vecsim", *command, str(source), *out])
    with pytest.raises(SystemExit) as exit_:
        main.main()
    assert exit_.value.code == 2
    assert "a regular file" in capsys.readouterr().err


def test_a_spec_or_plan_is_a_regular_file(tmp_path):
    for name in ("plan.yaml", "spec.json"):
        os.mkfifo(tmp_path / name)
        assert "a regular file" in str(refusal(lambda name=name: read_document(tmp_path / name)))


def test_a_trace_may_come_through_a_pipe_of_the_shell():
    row = '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n'
    for text in (row, row * 3):
        done = subprocess.run(
            [sys.executable, "-m", "vecsim", "trace", "info", "/dev/stdin", "--format", "json"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)["requests"] == text.count("\n")


def test_running_out_of_memory_is_one_line(monkeypatch, capsys):
    def starve(*_, **__):
        raise MemoryError("Unable to allocate 8 TiB")

    monkeypatch.setattr("vecsim.config.load.json_schema", starve)
    monkeypatch.setattr(sys, "argv", ["vecsim", "schema"])
    with pytest.raises(SystemExit) as exit_:
        main.main()
    assert exit_.value.code == 1
    assert capsys.readouterr().err == "vecsim: out of memory: Unable to allocate 8 TiB\n"


def test_control_c_during_the_imports_is_exit_130(tmp_path):
    slow = tmp_path / "typer.py"
    slow.write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "vecsim", "schema"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "importing\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == "vecsim: interrupted\n"
    assert process.returncode == 130


def test_the_fuzzer_draws_no_wrong_specs_without_a_reference():
    options = arguments(["--seeds", "0:1", "--feature", "refused"])
    assert make(options, 3) == draw(3, without=("refused",))


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_a_bad_price_is_told_of_the_pool_whose_pass_it_is_for(backend, pool):
    one = {"initial_workers": 2}
    payload = spec(
        topology={"kind": "disaggregated", "prefill": one, "decode": one},
        engine={"rank": {"backend": backend}},
    )
    good = CompiledTiming(lambda b, i, p: 1.0, lambda b, s, m, c: 1.0)
    bad = CompiledTiming(lambda b, i, p: -1.0, lambda b, s, m, c: 1.0 if s < 9 else -1.0)
    timings = {"prefill_timing": good, "decode_timing": good, f"{pool}_timing": bad}
    with pytest.raises(SimulationError, match=f"{pool} pool: timing model"):
        replay(payload, workload=W([0.0, 1.0, 2.0], [3, 4, 5], [9, 9, 9]), **timings)
