"""The command line, end to end: what it prints, writes, refuses, and how it exits."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import polars as pl
import pytest
import yaml

from vecsim.cli import main
from vecsim.run.replay import replay
from vecsim.traces import read_trace

FIXED = {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0}
SPEC = {
    "topology": {"kind": "aggregated", "workers": {"initial_workers": 2}},
    "engine": {"dp_size": 2, "rank": {"block_size": 16, "timing_model": FIXED}},
    "requests": [
        {"id": f"r{i}", "arrival_time_ms": 5.0 * i, "input_tokens": 40, "output_tokens": 3}
        for i in range(8)
    ],
}


@pytest.fixture
def trace(tmp_path):
    rows = [
        {"timestamp": 20 * i, "input_length": 700, "output_length": 1 + i % 4, "hash_ids": [1, i]}
        for i in range(20)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line; returns (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["vecsim", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main.main()
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return call


def report(run, *arguments):
    code, out, err = run("replay", *arguments, "--format", "json")
    assert code == 0, err
    return json.loads(out)


def config(run, folder, *arguments):
    code, _, err = run("replay", *arguments, "--output", folder)
    assert code == 0, err
    return json.loads((folder / "config.json").read_text())


# --- what it prints -------------------------------------------------------------------------------


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.split()[0] == "vecsim"
    assert out.split()[1][0].isdigit()


def test_schema_is_json_and_names_the_fields(run):
    code, out, _ = run("schema")
    assert code == 0
    rank = json.loads(out)["$defs"]["RankConfig"]["properties"]
    assert rank["num_gpu_blocks"]["default"] == 16384


def test_help_names_every_option(run):
    code, out, _ = run("replay", "--help")
    assert code == 0
    for option in ("--workers", "--dp", "--num-gpu-blocks", "--sla-ttft-ms", "--set", "--format"):
        assert option in out


def test_table_shows_numbers_with_units(run, trace):
    code, out, _ = run("replay", trace, "--workers", 2)
    assert code == 0
    mean = replay(_plain(2), workload=read_trace(trace)).report["mean_ttft_ms"]
    ttft = next(line for line in out.splitlines() if line.strip().startswith("TTFT"))
    assert ttft.split()[:3] == ["TTFT", "ms", f"{mean:,.3f}"]
    assert "reuse ratio" in out
    assert "20 requests on 2 x aggregated vllm" in out


def test_json_is_the_report(run, trace):
    found = report(run, trace, "--workers", 3)
    assert found == replay(_plain(3), workload=read_trace(trace)).report
    assert found["completed_requests"] == 20


def _plain(workers):
    pool = {"initial_workers": workers}
    return {"topology": {"kind": "aggregated", "workers": pool}, "requests": []}


@pytest.mark.skipif("VECSIM_TRACES" not in os.environ, reason="needs the public traces")
def test_the_conversation_trace_gives_the_reference_numbers(run):
    trace = os.path.join(os.environ["VECSIM_TRACES"], "conversation_trace.jsonl")
    code, out, _ = run("replay", trace, "--workers", 16)
    lines = {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}
    assert code == 0
    assert lines["TTFT"][1:3] == ["ms", "241.352"]
    assert lines["reuse ratio"][-1] == "0.07325"
    assert lines["completed"][-1] == "12,031"


# --- options --------------------------------------------------------------------------------------


def test_a_spec_file_runs_as_it_is(run, spec):
    found = report(run, spec)
    assert found == replay(SPEC).report
    assert found["decode_gpus_per_worker"] == 2


def test_flag_beats_file_beats_default(run, spec, tmp_path):
    from_file = config(run, tmp_path / "a", spec)["payload"]["spec"]["engine"]
    assert (from_file["dp_size"], from_file["rank"]["block_size"]) == (2, 16)
    assert from_file["rank"]["num_gpu_blocks"] == 16384
    flags = ("--dp", 1, "--block-size", 32, "--num-gpu-blocks", 500, "--workers", 3)
    effective = config(run, tmp_path / "b", spec, *flags)
    engine = effective["payload"]["spec"]["engine"]
    assert (engine["dp_size"], engine["rank"]["block_size"]) == (1, 32)
    assert engine["rank"]["num_gpu_blocks"] == 500
    assert effective["payload"]["spec"]["topology"]["workers"]["initial_workers"] == 3
    assert "engine.rank.num_gpu_blocks" not in effective["defaulted"]
    assert "engine.rank.max_num_seqs" in effective["defaulted"]


def test_set_comes_last_and_keeps_types(run, spec, tmp_path):
    sets = (
        "engine.rank.max_num_seqs=null",
        "engine.rank.enable_prefix_caching=false",
        "engine.rank.speedup_ratio=2.0",
        "engine.rank.preemption_mode=fifo",
        "engine.dp_size=1",
        'engine.rank.timing_model={"type": "polynomial"}',
        "tokenization.base_ms=4",
    )
    arguments = [part for assignment in sets for part in ("--set", assignment)]
    payload = config(run, tmp_path / "out", spec, "--dp", 2, *arguments)["payload"]
    rank = payload["spec"]["engine"]["rank"]
    assert rank["max_num_seqs"] is None
    assert rank["enable_prefix_caching"] is False
    assert rank["speedup_ratio"] == 2.0
    assert rank["preemption_mode"] == "fifo"
    assert rank["timing_model"]["type"] == "polynomial"
    assert payload["spec"]["engine"]["dp_size"] == 1
    assert payload["tokenization"]["base_ms"] == 4.0


def test_limit_takes_the_first_rows(run, trace):
    assert report(run, trace, "--limit", 7)["workload_requests"] == 7


def test_time_units_agree(run, trace, tmp_path):
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    for row in rows:
        row["timestamp"] /= 1000
    seconds = tmp_path / "seconds.jsonl"
    seconds.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report(run, seconds, "--time-unit", "s") == report(run, trace)


def test_arrival_speedup_divides_the_gaps(run, trace, tmp_path):
    code, _, _ = run("replay", trace, "--arrival-speedup", 2, "--output", tmp_path / "out")
    assert code == 0
    frame = pl.read_parquet(tmp_path / "out" / "requests.parquet")
    assert frame["arrival_time_ms"].to_list() == [10.0 * i for i in range(20)]


def test_trace_block_size_changes_what_is_shared(run, trace):
    assert report(run, trace)["prefix_cache_reused_ratio"] > 0.6
    shared = report(run, trace, "--trace-block-size", 400)["prefix_cache_reused_ratio"]
    assert 0.4 < shared < 0.6


def test_max_in_flight_closes_the_loop(run, trace, spec):
    for source in (trace, spec):
        found = report(run, source, "--max-in-flight", 1, "--workers", 1)
        assert found["backlog_growing"] is None
        assert found["max_queue_time_ms"] == 0.0


def test_sla_bounds_make_goodput(run, spec):
    found = report(run, spec, "--sla-ttft-ms", 10, "--sla-itl-ms", 1)
    assert (
        found["goodput_completed_requests"]
        == replay({**SPEC, "sla": {"ttft_ms": 10.0, "itl_ms": 1.0}}).report[
            "goodput_completed_requests"
        ]
    )
    assert "goodput_ratio" in report(run, spec, "--sla-e2e-ms", 50)


def test_wrapped_spec_with_traffic(run, trace, tmp_path):
    traffic = {
        "source_type": "trace",
        "load_type": "trace_timestamps",
        "trace_path": str(trace),
        "trace_format": "mooncake",
        "trace_block_size": 512,
    }
    path = tmp_path / "wrapped.json"
    path.write_text(json.dumps({"spec": _plain(2), "traffic": traffic}))
    assert report(run, path) == report(run, trace, "--workers", 2)
    faster = report(run, path, "--arrival-speedup", 2, "--workers", 1)
    assert faster == report(run, trace, "--arrival-speedup", 2)
    assert report(run, path, "--max-in-flight", 2)["backlog_growing"] is None


def test_results_do_not_depend_on_threads(run, trace):
    one = report(run, trace, "--workers", 4, "--threads", 1)
    assert one == report(run, trace, "--workers", 4, "--threads", 2)


# --- files ----------------------------------------------------------------------------------------


def test_output_holds_rows_report_and_configuration(run, trace, tmp_path):
    out = tmp_path / "out"
    code, _, _ = run("replay", trace, "--output", out, "--requests-format", "csv")
    assert code == 0
    assert sorted(os.listdir(out)) == ["config.json", "report.json", "requests.csv"]
    assert pl.read_csv(out / "requests.csv").height == 20
    assert json.loads((out / "report.json").read_text())["num_requests"] == 20
    source = json.loads((out / "config.json").read_text())["workload"]
    assert source == {"requests": 20, "trace_path": str(trace)}


def test_an_occupied_folder_is_refused_before_the_run(run, trace, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run("replay", trace, "--output", out)[0] == 0
    before = (out / "report.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("vecsim.run.replay.replay", None)
        code, _, err = run("replay", trace, "--workers", 2, "--output", out)
    assert code == 2
    assert str(out) in err
    assert (out / "report.json").read_bytes() == before
    assert run("replay", trace, "--workers", 2, "--output", out, "--overwrite")[0] == 0
    assert (out / "report.json").read_bytes() != before


def test_nothing_is_written_unless_asked(run, trace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    assert run("replay", trace)[0] == 0
    assert sorted(os.listdir()) == before


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["absent.jsonl"], "absent.jsonl"),
        (["."], "expected a trace in one of the formats"),
        (["{trace}", "--workers", "0"], "topology.workers.initial_workers"),
        (["{trace}", "--workers", "many"], "--workers"),
        (["{trace}", "--backend", "vlm"], "engine.rank.backend"),
        (["{trace}", "--block-size", "1"], "engine.rank.block_size"),
        (["{trace}", "--max-in-flight", "0"], "max_in_flight"),
        (["{trace}", "--sla-ttft-ms", "-1"], "sla.ttft_ms"),
        (["{trace}", "--sla-ttft-ms", "1", "--sla-e2e-ms", "1"], "sla"),
        (["{trace}", "--arrival-speedup", "0"], "arrival_speedup"),
        (["{trace}", "--arrival-speedup", "nan"], "arrival_speedup"),
        (["{trace}", "--time-unit", "minutes"], "time_unit"),
        (["{trace}", "--trace-block-size", "0"], "block_size"),
        (["{trace}", "--limit", "-1"], "limit"),
        (["{trace}", "--threads", "0"], "threads"),
        (["{trace}", "--set", "engine.rank.max_num_seq=1"], "max_num_seqs"),
        (["{trace}", "--set", "engine"], "--set"),
        (["{trace}", "--set", "engine.rank.block_size=[1"], "--set"),
        (["{trace}", "--set", "engine.rank.block_size=2.5"], "engine.rank.block_size"),
        (["{trace}", "--format", "xml"], "--format"),
        (["{trace}", "--wrokers", "1"], "--wrokers"),
        (
            ["{trace}", "--set", "engine.rank.aic_nextn=2"],
            "not supported yet: engine.rank.aic_nextn",
        ),
        (["{spec}", "--limit", "1"], "--limit"),
        (["{spec}", "--time-unit", "s"], "--time-unit"),
        (["{spec}", "--arrival-speedup", "2"], "--arrival-speedup"),
        (["{bad_trace}"], "bad.jsonl:2"),
        (["{bad_spec}"], "topology"),
        ([], "SOURCE"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, trace, spec, tmp_path, arguments, named):
    bad_trace, bad_spec = tmp_path / "bad.jsonl", tmp_path / "bad.json"
    bad_trace.write_text(trace.read_text().splitlines()[0] + '\n{"timestamp": 0, "input_length":')
    bad_spec.write_text(json.dumps({"topologie": SPEC["topology"], "requests": []}))
    places = {"trace": trace, "spec": spec, "bad_trace": bad_trace, "bad_spec": bad_spec}
    code, out, err = run("replay", *(argument.format(**places) for argument in arguments))
    errors = [line for line in err.splitlines() if "warning" not in line]
    assert code == 2
    assert out == ""
    assert len(errors) == 1, err
    assert errors[0].startswith("vecsim: ")
    assert named in errors[0]


def test_workers_of_a_disaggregated_spec_are_ambiguous(run, tmp_path):
    pool = {"initial_workers": 1}
    topology = {"kind": "disaggregated", "prefill": pool, "decode": pool}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"topology": topology, "requests": []}))
    code, _, err = run("replay", path, "--workers", 2)
    assert code == 2
    assert "--workers" in err


def test_two_pools_from_the_command_line(run, trace):
    code, out, err = run(
        *("replay", trace, "--prefill-workers", 2, "--decode-workers", 1),
        *("--handoff-latency-ms", 5, "--format", "json"),
    )
    assert code == 0, err
    report = json.loads(out)
    assert report["completed_requests"] == report["workload_requests"] > 0
    assert report["prefill_gpus_per_worker"] == report["decode_gpus_per_worker"] == 1
    ratio = report["prefill_worker_seconds"] / report["decode_worker_seconds"]
    assert ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prefill-workers", 2), "--prefill-workers: got 2, expected --decode-workers beside it"),
        (("--handoff-latency-ms", 2), "--handoff-latency-ms: got 2.0"),
        (("--prefill-workers", 1, "--decode-workers", 1, "--workers", 2), "--workers: got 2"),
        (("--prefill-workers", 0, "--decode-workers", 1), "topology.prefill.initial_workers"),
    ],
)
def test_impossible_pools(run, trace, arguments, named):
    code, out, err = run("replay", trace, *arguments)
    assert (code, out) == (2, "")
    assert named in err


def test_an_ignored_key_is_one_warning_line(run, tmp_path):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({**SPEC, "comment": "mine"}))
    code, _, err = run("replay", path)
    assert code == 0
    assert err.splitlines() == ["vecsim: warning: keys without effect: comment"]


# --- processes ------------------------------------------------------------------------------------

_PATIENCE_S = 240  # a process may have to compile the kernels

_SLOW = """
    import sys, time
    import vecsim.run.replay as replaying

    real = replaying.replay

    def slow(tree, progress, **options):
        for done in range(40):
            progress(done, 40)
            time.sleep(0.05)
        print("ready", flush=True)
        time.sleep({pause})
        return real(tree, **options)

    replaying.replay = slow
    from vecsim.cli.main import main

    main()
"""


def _slow(pause, *arguments, **options):
    program = textwrap.dedent(_SLOW).format(pause=pause)
    command = [sys.executable, "-c", program, "replay", *map(str, arguments)]
    return subprocess.Popen(command, text=True, **options)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_exits_130_and_leaves_nothing(trace, tmp_path):
    out = tmp_path / "out"
    process = _slow(600, trace, "--output", out, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "vecsim: interrupted"
    assert not out.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_long_run_shows_a_bar_on_a_terminal(trace):
    main_end, terminal = os.openpty()
    process = _slow(0, trace, stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    seen = b""
    try:
        while chunk := os.read(main_end, 4096):
            seen += chunk
    except OSError:  # the terminal closed with the process
        pass
    os.close(main_end)
    assert process.wait(timeout=_PATIENCE_S) == 0
    assert b"/40" in seen


def test_a_bar_is_not_printed_into_a_file(trace):
    process = _slow(0, trace, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 0
    assert "/40" not in err


def test_module_and_version_start_without_heavy_imports():
    program = (
        "import sys, vecsim.cli.main; print([m for m in ('numba', 'polars') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
    done = subprocess.run(
        [sys.executable, "-m", "vecsim", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("vecsim ")


@pytest.mark.skipif(sys.platform == "win32", reason="closes a pipe")
def test_a_closed_pipe_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "vecsim", "schema"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ""


def test_the_notice_of_compilation_comes_once(capsys):
    progress = main._Progress()
    progress.announce_compilation("a")
    progress.announce_compilation("b")
    assert capsys.readouterr().err.count("compiling") == 1


def test_kv_events(run, trace, tmp_path):
    out = tmp_path / "out"
    code, _, _ = run("replay", trace, "--kv-events", "--output", out)
    assert code == 0
    events = pl.read_parquet(out / "kv_events.parquet")
    tree = {
        "topology": {"kind": "aggregated", "workers": {"initial_workers": 1}},
        "requests": [],
    }
    same = replay(tree, workload=read_trace(trace), observe="kv_events")
    assert events.equals(same.kv_events)
