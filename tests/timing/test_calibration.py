"""Fitting a table to measured passes, and the commands under `vecsim timing`."""

import numpy as np
import polars as pl
import pytest

import vecsim
from tests.cli.test_cli import run  # noqa: F401 (a fixture)
from tests.timing import recorded
from vecsim.errors import InputError
from vecsim.timing.machine.hardware import gpu_of, model_of
from vecsim.timing.machine.roofline import Parallel, Roofline
from vecsim.timing.points import COLUMNS, read_points


@pytest.fixture(scope="module")
def table():
    return vecsim.TimingTable(*read_points(recorded.TABLE))


def measured(table, scale=1.0, offset=0.0):
    """Passes that cost scale * price + offset."""
    rows = [("prefill", 1, n + p, p, None) for n in (64, 500, 2000) for p in (0, 3000)]
    rows += [("decode", b, None, None, c) for b in (1, 8, 60) for c in (100, 9000)]
    names = ["role", "batch_size", "isl", "prefix", "context"]
    frame = pl.DataFrame(rows, schema=names, orient="row", infer_schema_length=None)
    prices = [
        table.prefill_ms(row["batch_size"], row["isl"], row["prefix"])
        if row["role"] == "prefill"
        else table.decode_ms(row["batch_size"], row["context"])
        for row in frame.rows(named=True)
    ]
    return frame.with_columns(latency_ms=pl.Series([scale * float(p) + offset for p in prices]))


def test_scale_and_offset_are_found(table):
    fitted = vecsim.calibrate(table, measured(table, 1.2, 0.7))
    for fit in (fitted.prefill, fitted.decode):
        assert (fit.scale, fit.offset_ms) == pytest.approx((1.2, 0.7), rel=1e-6)
        assert (fit.points, fit.after) == (6, pytest.approx(0.0, abs=1e-9))
        assert fit.before > 0.15
    assert fitted.residuals["residual"].abs().max() < 1e-9
    sizes = (7, 5000, 4000)
    expected = 1.2 * table.prefill_ms(*sizes) + 0.7
    assert fitted.timing.prefill_ms(*sizes) == pytest.approx(expected, rel=1e-9)
    assert fitted.timing.decode_ms(17, 3333) == pytest.approx(
        1.2 * table.decode_ms(17, 3333) + 0.7, rel=1e-9
    )
    assert "scale 1.2000, offset +0.700 ms" in repr(fitted)


def test_a_phase_without_measurements_stays(table):
    frame = measured(table, 1.5).filter(pl.col("role") == "decode")
    fitted = vecsim.calibrate(table, frame)
    assert fitted.prefill is None
    assert fitted.timing.prefill_ms(2, 300, 0) == table.prefill_ms(2, 300, 0)
    assert fitted.decode.scale == pytest.approx(1.5)


def test_one_size_fits_the_scale_only(table):
    frame = measured(table, 1.0, 2.0).filter(pl.col("role") == "decode").head(1)
    fitted = vecsim.calibrate(table, frame)
    assert fitted.decode.offset_ms == 0.0
    assert fitted.timing.decode_ms(1, 100) == pytest.approx(frame["latency_ms"][0])


def test_an_offset_never_makes_a_price_negative(table):
    least = table.points.filter(pl.col("role") == "decode")["latency_ms"].min()
    frame = measured(table, 1.5, -1.6 * least).filter(pl.col("latency_ms") > 0.1)
    with pytest.raises(InputError, match="decode: got '3 passes that leave the scale uncertain"):
        vecsim.calibrate(table, frame)
    mild = vecsim.calibrate(table, measured(table, 1.0, -0.1 * least))
    assert mild.decode.offset_ms == pytest.approx(-0.1 * least)
    assert mild.timing.points["latency_ms"].min() > 0


# --- what the measurements can tell ---------------------------------------------------------------


@pytest.fixture(scope="module")
def wide():
    """A table of Qwen3-8B on one H200, decode batches to 256."""
    roofline = Roofline(model_of("Qwen/Qwen3-8B", ""), gpu_of("h200_sxm", ""), Parallel())
    decodes = [(b, c) for b in (*range(1, 9), 16, 32, 64, 128, 256) for c in (1, 1000, 8000, 32000)]
    prices = roofline.decode_ms(*zip(*decodes, strict=True))
    rows = [
        ("decode", b, None, None, c, float(p)) for (b, c), p in zip(decodes, prices, strict=True)
    ]
    rows += [("prefill", 1, n, 0, None, float(roofline.prefill_ms(1, n, 0))) for n in (64, 2048)]
    return vecsim.TimingTable(pl.DataFrame(rows, schema=list(COLUMNS), orient="row"))


def draws(wide, batches, contexts, scale, offset, noise, wrong=None):
    """Error at batch 256 and the fit (None: refused) of 50 draws of noisy passes."""
    found = []
    for seed in range(50):
        generator = np.random.default_rng(seed)
        batch = generator.choice(batches, contexts)
        context = generator.integers(200, 4000, contexts)
        truth = scale * wide.decode_ms(batch, context) + offset
        ms = truth * (1.0 + noise * generator.standard_normal(contexts))
        if wrong is not None:
            ms[generator.integers(contexts)] *= wrong
        frame = pl.DataFrame(
            {"role": "decode", "batch_size": batch, "isl": None, "prefix": None}
        ).with_columns(context=context, latency_ms=ms)
        fitted = vecsim.calibrate(wide, frame)
        expected = scale * wide.decode_ms(256, 2000) + offset
        found.append((float(fitted.timing.decode_ms(256, 2000) / expected) - 1.0, fitted.decode))
    return [np.array([error for error, _ in found]), [fit for _, fit in found]]


def test_noisy_passes_of_small_batches_fit_a_scale_alone(wide):
    errors, fits = draws(wide, [1, 2, 3, 4], 12, scale=1.5, offset=0.0, noise=0.03)
    assert np.quantile(np.abs(errors), 0.95) < 0.1
    assert np.abs(errors.mean()) < 0.01  # unbiased
    assert sum(fit.offset_ms != 0.0 for fit in fits) <= 2
    within = np.mean([abs(e) <= fit.uncertainty for e, fit in zip(errors, fits, strict=True)])
    assert within >= 0.8  # two standard deviations
    assert "batch 1 to 4" in str(fits[0])
    assert "extrapolated: measure batches of 256 too" in str(fits[0])


@pytest.mark.parametrize("wrong", [0.1, 10.0])
def test_one_wrong_measurement_has_no_part(wide, wrong):
    sizes = list(range(1, 257))
    errors, fits = draws(wide, sizes, 20, scale=1.2, offset=0.0, noise=0.02, wrong=wrong)
    assert np.quantile(np.abs(errors), 0.95) < 0.1
    assert all(fit.outliers >= 1 for fit in fits)
    assert all(0.02 < fit.before < 0.4 for fit in fits)


def test_an_offset_that_the_passes_show_is_found(wide):
    sizes = [2**k for k in range(9)]
    errors, fits = draws(wide, sizes, 20, scale=1.2, offset=3.0, noise=0.01)
    assert np.quantile(np.abs(errors), 0.95) < 0.1
    assert sum(2.0 < fit.offset_ms < 4.0 for fit in fits) >= 45


def test_passes_that_scatter_are_refused(wide):
    rows = [("decode", b, None, None, 1000, ms) for b, ms in ((1, 2.0), (2, 20.0), (3, 7.0))]
    frame = pl.DataFrame(rows, schema=list(COLUMNS), orient="row")
    with pytest.raises(InputError, match="measure each size several times") as caught:
        vecsim.calibrate(wide, frame)
    assert "3 passes that leave the scale uncertain by" in str(caught.value)


def test_calibration_refuses_other_things(table):
    with pytest.raises(InputError, match="timing: got"):
        vecsim.calibrate(None, measured(table))
    with pytest.raises(InputError, match=r"measurements, row 1, latency_ms: got -1\.0"):
        vecsim.calibrate(table, measured(table, -0.0, -1.0))


# --- commands -------------------------------------------------------------------------------------


def test_check_a_good_and_a_doubtful_table(run, tmp_path):  # noqa: F811
    code, out, err = run("timing", "check", recorded.TABLE)
    assert (code, err) == (0, "")
    assert "model Qwen/Qwen3-32B-FP8" in out
    assert "decode: 6,784 points, batch 1 to 64, context 1 to 16,384" in out
    path = tmp_path / "odd.csv"
    path.write_text(
        "role,batch_size,isl,prefix,context,latency_ms\n"
        "prefill,1,100,0,,20\nprefill,1,2000,0,,15\ndecode,1,,,100,6\ndecode,1,,,9000,7\n"
        "decode,64,,,100,5\n"
    )
    code, out, err = run("timing", "check", path)
    assert (code, err) == (1, "")
    problems = [line for line in out.splitlines() if line.startswith("problem: ")]
    assert "prefill: nothing between tokens 100 and 2000" in out
    assert "prefill: 1 prices fall as tokens grows, the worst by 25 % at batch_size 1" in out
    assert "decode: 1 prices fall as batch_size grows, the worst by 17 %" in out
    assert "decode: nothing between batch size 1 and 64" in out
    assert len(problems) == 7


def test_check_an_unusable_table(run, tmp_path):  # noqa: F811
    path = tmp_path / "t.csv"
    path.write_text("role,batch_size\nprefill,1\n")
    code, out, err = run("timing", "check", path)
    assert (code, out) == (2, "")
    assert err.startswith("vecsim: t.csv, isl: missing")
    assert err.count("\n") == 1


def test_build_a_table_and_replay_with_it(run, tmp_path):  # noqa: F811
    path = tmp_path / "qwen.parquet"
    build = ("timing", "build", "--source", "roofline", "--model", "Qwen/Qwen3-32B")
    build += ("--system", "h200_sxm", "--tp", "2", "--max-num-batched-tokens", "512")
    code, out, err = run(*build, "--output", path)
    assert (code, err) == (0, "")
    assert "points, vecsim roofline" in out
    assert "blocks of 64" in out
    assert "num_gpu_blocks" not in read_points(path)[1]  # model and GPU are known
    code, _, err = run(*build, "--output", path)
    assert code == 2
    assert "a name that is not in use" in err
    timing = f"engine.rank.timing_model={{type: table, path: {path}}}"
    trace = recorded.WORKLOADS[0]
    code, out, err = run(
        *(
            "replay",
            trace,
            "--limit",
            "5",
            "--set",
            timing,
            "--set",
            "engine.rank.num_gpu_blocks=auto",
        ),
        *("--set", "engine.tensor_parallel_size=2", "--format", "json"),
    )
    assert code == 0
    assert '"decode_derived_num_gpu_blocks": ' in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "qwen3-32", "--system", "h200_sxm"), "--model: got 'qwen3-32', .*near ones"),
        (("--model", "Qwen/Qwen3-32B", "--system", "h200"), "--system: got 'h200', .*near ones"),
        (
            ("--model", "Qwen/Qwen3-32B", "--system", "h200_sxm", "--set", "tpp=3"),
            "timing_model.tpp: got 3, expected a known key; the nearest is tp",
        ),
        (
            ("--model", "Qwen/Qwen3-32B", "--system", "h200_sxm", "--source", "oracle"),
            "--source: got 'oracle', expected 'aic' or 'roofline'",
        ),
    ],
)
def test_build_refuses_in_one_line(run, tmp_path, arguments, message):  # noqa: F811
    source = () if "--source" in arguments else ("--source", "roofline")
    code, out, err = run("timing", "build", *source, *arguments, "-o", tmp_path / "t.parquet")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    import re

    assert re.search(message, err)


def test_calibrate_a_file(run, tmp_path, table):  # noqa: F811
    measured(table, 0.8, 1.0).write_csv(tmp_path / "measured.csv")
    out_path = tmp_path / "calibrated.parquet"
    code, out, err = run(
        "timing", "calibrate", recorded.TABLE, tmp_path / "measured.csv", "-o", out_path
    )
    assert (code, err) == (0, "")
    assert "prefill: scale 0.8000, offset +1.000 ms from 6 passes" in out
    points, metadata = read_points(out_path)
    assert metadata["source"].endswith("calibrated")
    assert points.height == table.points.height


def test_check_against_measured_passes(run, tmp_path, table):  # noqa: F811
    measured(table, 1.4).write_csv(tmp_path / "measured.csv")
    arguments = ("timing", "check", recorded.TABLE, "--against", tmp_path / "measured.csv")
    code, out, err = run(*arguments)
    assert (code, err) == (1, "")
    assert "measured decode: scale 1.4000, no offset from 6 passes" in out
    assert "problem: decode: 28.6 % off the measured passes; vecsim timing calibrate" in out
    measured(table, 1.02).write_csv(tmp_path / "measured.csv")
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")


def test_a_plan_finds_tables_beside_it(tmp_path):
    from vecsim.sweeps.plan_files import SWEEP_KEYS, read_plan

    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "spec:\n  topology: {kind: aggregated, workers: {initial_workers: 1}}\n"
        "  engine: {rank: {timing_model: {type: table, path: t.parquet}}}\n  requests: []\n"
        "axes:\n  engine.rank.timing_model.path: [a.parquet, /b.parquet]\n"
        "  shape:\n    one: {engine.rank.timing_model: {type: table, path: c.parquet}}\n"
    )
    arguments = read_plan(plan, SWEEP_KEYS)
    timing = arguments["base"]["engine"]["rank"]["timing_model"]
    assert timing["path"] == str(tmp_path / "t.parquet")
    axes = arguments["axes"]
    paths = [str(tmp_path / "a.parquet"), "/b.parquet"]
    assert axes["engine.rank.timing_model.path"] == paths
    bundle = axes["shape"]["one"]["engine.rank.timing_model"]
    assert bundle["path"] == str(tmp_path / "c.parquet")


def test_a_sweep_over_tp_changes_prices_blocks_and_gpus(table):
    spec = recorded.spec(
        {"type": "roofline", "model": "Qwen/Qwen3-32B", "system": "h200_sxm"},
        {"num_gpu_blocks": "auto"},
    )
    workload = vecsim.read_trace(recorded.WORKLOADS[0], limit=20)
    rows = vecsim.sweep(spec, {"tp": [1, 2, 4, 3]}, workload=workload)
    assert rows["status"].to_list() == ["ok", "ok", "ok", "invalid"]
    blocks = rows["decode_derived_num_gpu_blocks"].to_list()
    assert blocks[0] < blocks[1] < blocks[2]
    assert rows["gpus"].to_list()[:3] == [1, 2, 4]
    ttft = rows["median_ttft_ms"].to_list()
    assert ttft[0] > ttft[1] > ttft[2]
    both = vecsim.sweep(
        recorded.spec({"type": "polynomial"}),
        [{"timing": table}, {"engine.rank.max_num_seqs": 8}],
        workload=workload,
    )
    assert both["outside_table_decode_lookups"].to_list() == [0, None]


def test_the_plan_that_the_readme_runs(run):  # noqa: F811
    from vecsim.data import sample_path

    code, out, err = run("capacity", sample_path().parent / "plan.yaml")
    assert (code, err) == (0, "")
    assert "workers = 2, tp = 2, 4 GPUs" in out
