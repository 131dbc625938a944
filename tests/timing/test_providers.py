"""Timing models of a spec: refusals in one line, files, Python functions, the missing extra."""

import importlib.metadata
import textwrap

import numpy as np
import polars as pl
import pytest

import vecsim
from tests.timing import recorded
from vecsim.config.schema import AicTiming, RankConfig
from vecsim.config.validate import validate
from vecsim.errors import InputError, NotSupportedYetError
from vecsim.timing import aic
from vecsim.timing.grids import Grid, octaves, sample
from vecsim.timing.points import read_points
from vecsim.timing.providers import grid_of
from vecsim.timing.resolve import TimingWarning
from vecsim.timing.tabulate import tabulate

CONFIG = {"model": "Qwen/Qwen3-32B-FP8", "system": "h200_sxm", "backend": "vllm"}


def refusal(timing, rank=None, engine=None, error=InputError):
    spec = recorded.spec(timing, rank)
    spec["engine"].update(engine or {})
    with pytest.raises(error) as caught:
        vecsim.replay(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def external(**changes):
    return {"type": "external", "provider": "aic", "config": {**CONFIG, **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": 1}, "config.modle: got 1, expected a known key; the nearest is model"),
        ({"tp": "1"}, "config.tp: got '1', expected an integer"),
        ({"tp": 0}, "config.tp: got 0, expected a positive integer"),
        ({"tp": 1, "tp_size": 1}, "config.tp_size: got 1, expected only one of tp and its other"),
        ({"backend": "trtllm"}, "config.backend: got 'trtllm', expected the rank's backend"),
        ({"kv_block_size": 16}, "config.kv_block_size: got 16, expected the rank's block size, 64"),
        ({"nextn": 1}, "config.nextn: got 1, expected the rank's aic_nextn, 0"),
        ({"worker_type": "decode"}, "config.worker_type: got 'decode', expected the role"),
        ({"moe_ep_size": 8}, "config.moe_tp_size: got None, expected moe_tp_size and moe_ep_size"),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization: got 1.2, expected a fraction"),
        ({"type": "aic"}, "config.type: got 'aic', expected no such key"),
    ],
)
def test_the_reference_form_is_checked(changes, message):
    assert message in refusal(external(**changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"estimation_mode": "fpm_interpolation"}, "config.estimation_mode"),
        ({"fpm_profile": "x"}, "config.fpm_profile"),
        ({"cp_size": 2}, "config.cp_size"),
    ],
)
def test_other_estimators_are_not_built(changes, field):
    assert field in refusal(external(**changes), error=NotSupportedYetError)


def test_sizes_that_contradict_the_engine():
    message = refusal(external(tp=2), engine={"tensor_parallel_size": 4})
    assert message == "engine.tensor_parallel_size: got 4, expected 2, the tp of the timing model"
    message = refusal(external(), engine={"tensor_parallel_size": 2})
    assert message == "engine.tensor_parallel_size: got 2, expected 1, the tp of the timing model"
    message = refusal(external(attention_dp=2), engine={"dp_size": 1})
    assert message == "engine.dp_size: got 1, expected 2, the attention_dp of the timing model"


def test_the_short_form_takes_its_sizes_from_the_engine():
    config = aic.complete(AicTiming(**{**CONFIG, "backend": None}), RankConfig(), 4, 2)
    assert (config.backend, config.tp, config.attention_dp) == ("vllm", 4, 2)
    assert (config.moe_tp_size, config.moe_ep_size) == (1, 8)


@pytest.mark.parametrize("timing", [external(), {"type": "aic", **CONFIG}])
def test_without_the_extra_the_way_out_is_named(timing, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(aic.metadata, "version", absent)
    message = refusal(timing)
    assert message.startswith("engine.rank.timing_model: got 'aic', expected the reference's")
    assert "pip install 'vecsim[aic]'" in message
    assert "vecsim timing build" in message


def test_a_table_in_the_cache_is_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(aic, "cache_parent", lambda: tmp_path)
    monkeypatch.setattr(aic.metadata, "version", lambda _: "1")
    made = []

    def build(config, grid, where):
        made.append(grid)
        return vecsim.TimingTable(*read_points(recorded.TABLE), beyond_batches=True)

    monkeypatch.setattr(aic, "build", build)
    config = aic.complete(AicTiming(**CONFIG), RankConfig(), 1, 1)
    first, second = (aic.table(config, Grid(), "timing") for _ in range(2))
    assert len(made) == 1
    assert first.digest == second.digest
    other = aic.complete(AicTiming(**CONFIG, kvcache_quant_mode="fp8"), RankConfig(), 1, 1)
    aic.table(other, Grid(), "timing")
    monkeypatch.setattr(aic.metadata, "version", lambda _: "2")
    aic.table(config, Grid(), "timing")
    aic.table(config, Grid(batches=512), "timing")
    assert len(made) == 4
    for path in tmp_path.rglob("*.parquet"):
        path.write_bytes(b"damaged")
    aic.table(config, Grid(), "timing")
    assert len(made) == 5


# --- files ----------------------------------------------------------------------------------------


def small_frame():
    return pl.DataFrame(
        {
            "role": ["prefill", "prefill", "decode", "decode"],
            "batch_size": [1, 1, 1, 8],
            "isl": [100, 200, None, None],
            "prefix": [0, 0, None, None],
            "context": [None, None, 100, 100],
            "latency_ms": [10.0, 15.0, 6.0, 7.0],
        }
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop("context"), "t.parquet, context: missing, expected the columns role"),
        (lambda f: f.rename({"latency_ms": "latency_s"}), "latency_s: got 'latency_s', .* in ms"),
        (
            lambda f: f.with_columns(pl.col("latency_ms") / 1000),
            "latency_ms: got 0.01, expected ms: the quickest prefill pass looks like seconds",
        ),
        (
            lambda f: f.with_columns(pl.col("latency_ms") * 1000),
            "latency_ms: got 10000.0, .* looks like microseconds",
        ),
        (
            lambda f: f.with_columns(latency_ms=pl.Series([10.0, float("nan"), 6.0, 7.0])),
            "t.parquet, row 2, latency_ms: got nan, expected a finite number of ms above 0",
        ),
        (
            lambda f: f.with_columns(latency_ms=pl.Series([10.0, 15.0, None, 7.0])),
            "row 3, latency_ms: missing",
        ),
        (
            lambda f: f.with_columns(latency_ms=pl.Series([10.0, 15.0, 6.0, -1.0])),
            "row 4, latency_ms: got -1.0",
        ),
        (
            lambda f: f.with_columns(latency_ms=pl.Series([10.0, float("inf"), 6.0, 7.0])),
            "row 2, latency_ms: got inf",
        ),
        (lambda f: f.with_columns(batch_size=pl.Series([1, 1, 0, 8])), "row 3, batch_size: got 0"),
        (
            lambda f: f.with_columns(batch_size=pl.Series([1.0, 1.5, 1.0, 8.0])),
            "row 2, batch_size: got 1.5, expected a whole number",
        ),
        (lambda f: f.with_columns(prefix=pl.Series([100, 0, None, None])), "row 1, isl: got 100"),
        (
            lambda f: f.with_columns(role=pl.Series(["prefill", "prefil", "decode", "decode"])),
            "row 2, role: got 'prefil', expected 'prefill' or 'decode'",
        ),
        (lambda f: f.filter(pl.col("role") == "prefill"), "t.parquet: got 'no decode rows'"),
        (lambda f: f.clear(), "t.parquet: got 'no rows'"),
        (lambda f: f.with_columns(context=pl.lit(None, pl.Int32)), "row 3, context: missing"),
    ],
)
def test_a_bad_table_is_named_with_row_and_column(tmp_path, change, message):
    path = tmp_path / "t.parquet"
    change(small_frame()).write_parquet(path)
    with pytest.raises(InputError, match=message) as caught:
        read_points(path)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_tables(tmp_path):
    broken = tmp_path / "t.parquet"
    broken.write_bytes(b"PAR1 nothing")
    for path, expected in (
        (tmp_path / "none.csv", "no such file"),
        (broken, "a table in parquet format"),
        (recorded.ANSWERS, "a file name ending in .parquet or .csv"),
    ):
        with pytest.raises(InputError, match=expected):
            read_points(path)
    other = tmp_path / "other.parquet"
    small_frame().write_parquet(other, metadata={"schema": "someone's"})
    with pytest.raises(InputError, match='schema: got "someone\'s", expected vecsim-timing-v1'):
        read_points(other)


def test_a_csv_equals_its_parquet(tmp_path):
    small_frame().write_csv(tmp_path / "t.csv")
    small_frame().write_parquet(tmp_path / "t.parquet")
    assert read_points(tmp_path / "t.csv")[0].equals(read_points(tmp_path / "t.parquet")[0])


def test_one_deployment_of_several_is_chosen(tmp_path):
    path = tmp_path / "points.parquet"
    recorded.aic_points().write_parquet(path)
    with pytest.raises(InputError, match="15 deployments"):
        read_points(path)
    with pytest.raises(InputError, match=r"deployment\.modle"):
        read_points(path, {"modle": "x"})
    with pytest.raises(InputError, match="a deployment that the file has"):
        read_points(path, {"model": "x"})
    chosen = {"model": "openai/gpt-oss-120b"}
    points, metadata = read_points(path, chosen)
    assert points.height == 23
    assert (metadata["tp"], metadata["moe_tp"], metadata["system"]) == ("4", "4", "h100_sxm")
    timing = {"type": "table", "path": str(path), "deployment": chosen, "extrapolate_batch": True}
    spec = recorded.spec(timing)
    spec["requests"] = [{"id": "a", "arrival_time_ms": 0, "input_tokens": 1024, "output_tokens": 1}]
    with pytest.warns(TimingWarning):
        result = vecsim.replay(spec)
    row = points.filter((pl.col("isl") == 1024) & (pl.col("prefix") == 0))
    assert result.report["mean_ttft_ms"] == pytest.approx(row["latency_ms"][0], abs=1e-6)


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "t.parquet"
    spec = recorded.spec({"type": "table", "path": str(path), "extrapolate_batch": True})
    spec["requests"] = [{"id": "a", "arrival_time_ms": 0, "input_tokens": 100, "output_tokens": 1}]
    found = []
    for factor in (1.0, 2.0):
        frame = small_frame().with_columns(pl.col("latency_ms") * factor)
        frame.write_parquet(path, compression_level=int(factor))
        with pytest.warns(TimingWarning):
            found.append(vecsim.replay(spec).report["mean_ttft_ms"])
    assert found == [10.0, 20.0]


# --- grids ----------------------------------------------------------------------------------------


def test_octaves():
    assert octaves(20, 4).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    assert octaves(9, 1).tolist() == [1, 2, 4, 8, 9]
    assert len(octaves(131072, 8)) == 120


def test_a_grid_follows_the_rank():
    assert grid_of(RankConfig()) == Grid()
    large = grid_of(RankConfig(max_num_seqs=700, max_num_batched_tokens=20_000))
    assert (large.batches, large.tokens, large.most_tokens) == (1024, 16384, 32768)
    unlimited = grid_of(RankConfig(max_num_seqs=None, max_num_batched_tokens=None))
    assert (unlimited.batches, unlimited.most_seqs) == (1024, 16384)
    assert grid_of(RankConfig(backend="sglang")).most_tokens == 16384


def test_the_points_of_a_grid():
    grid = Grid(batches=4, most_seqs=4, tokens=16, most_tokens=16, prefill_batches=4, context=16)
    frame = sample(grid, lambda b, i, p: 1.0 * b * i + p, lambda b, c, _: 1.0 * b + c)
    base = frame.filter((pl.col("role") == "prefill") & (pl.col("prefix") == 0))
    assert base.filter(pl.col("batch_size") == 3)["isl"].to_list() == [1, 2, 3, 4, 5, 6, 7]
    decode = frame.filter(pl.col("role") == "decode")
    assert decode.height == 4 * 16
    assert not vecsim.TimingTable(frame).notes


# --- Python functions -----------------------------------------------------------------------------

MODULE = textwrap.dedent(
    """
    import math

    TABLE = {"base": 4.0}

    def prefill(batch, isl, prefix):
        return 2.0 + 0.01 * batch * (isl - prefix)

    def decode(batch, context_sum, mean_context, capacity):
        return 5.0 + 1e-5 * context_sum

    def looked_up(batch, context_sum, mean_context, capacity):
        return TABLE["base"] + 1.0 + 1e-5 * context_sum + 0.001 * math.sin(batch)
    """
)


def python_spec(path, **fields):
    spec = recorded.spec({"type": "python", "module": str(path), **fields})
    spec["requests"] = [{"id": "a", "arrival_time_ms": 0, "input_tokens": 100, "output_tokens": 3}]
    return spec


def test_functions_of_a_file_are_compiled_or_tabulated(tmp_path):
    path = tmp_path / "prices.py"
    path.write_text(MODULE)
    compiled = vecsim.replay(python_spec(path))
    assert compiled.report["mean_ttft_ms"] == 3.0
    assert compiled.report["mean_tpot_ms"] == pytest.approx(5.001015, abs=1e-9)
    assert "outside_table_decode_lookups" not in compiled.report
    tabulated = vecsim.replay(python_spec(path, mode="tabulate"))
    assert tabulated.report["mean_ttft_ms"] == 3.0
    assert tabulated.report["mean_tpot_ms"] == pytest.approx(5.001015, abs=2e-6)
    stated = tabulated.effective_config["timing"]["aggregated"]
    assert float(stated["error_bound"]) < 1e-6
    uncompiled = vecsim.replay(python_spec(path, decode="looked_up"))
    assert "error_bound" in uncompiled.effective_config["timing"]["aggregated"]
    assert uncompiled.report["mean_tpot_ms"] == pytest.approx(5.001015 + 0.00084, abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill": "none"}, "timing_model.none: got 'none', expected a function of prices.py"),
        ({"module": "no_such_module_at_all"}, "module: got 'no_such_module_at_all', expected"),
        ({"decode": "looked_up", "mode": "compile"}, "timing.decode: got"),
        ({"mode": "interpret"}, "mode: got 'interpret'"),
    ],
)
def test_functions_that_cannot_be_used(tmp_path, fields, message):
    path = tmp_path / "prices.py"
    path.write_text(MODULE)
    with pytest.raises(InputError, match=message):
        vecsim.replay(python_spec(path, **fields))


COARSE = Grid(
    batches=8, most_seqs=8, tokens=64, most_tokens=64, prefill_batches=4, context=1024, per_octave=2
)


def test_tabulating_states_its_error():
    table = tabulate(
        lambda b, i, p: 3.0 + 0.01 * b * (i - p) + 1e-6 * p * (i - p),
        lambda b, s, m, c: 5.0 + 1e-4 * s + 0.01 * np.sin(m),
        grid=COARSE,
    )
    assert 1e-4 < float(table.metadata["error_bound"]) < 0.005
    found = table.decode_ms([3, 8], [700, 1000])
    expected = [5.0 + 1e-4 * 3 * 701 + 0.01 * np.sin(701), 5.0 + 1e-4 * 8008 + 0.01 * np.sin(1001)]
    assert found == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(
    ("answer", "message"),
    [(-1.0, "got -1.0"), (float("nan"), "got nan"), ("text", "no failure"), (None, "got nan")],
)
def test_tabulating_refuses_odd_answers(answer, message):
    with pytest.raises(InputError, match=f"timing.decode: .*{message}"):
        tabulate(lambda b, i, p: 1.0, lambda b, s, m, c: answer, grid=COARSE)


def test_validation_needs_no_files():
    """What a file holds is looked at when a run needs it, not when a spec is checked."""
    from vecsim.config.load import load

    validate(load(recorded.spec({"type": "table", "path": "not there.parquet"})))
    assert "timing_model.path: got 'not there" in refusal(
        {"type": "table", "path": "not there.parquet"}
    )
