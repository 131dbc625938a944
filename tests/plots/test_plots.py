"""Charts and HTML reports: data, units, and nothing from outside."""

import json
import re
from html.parser import HTMLParser

import polars as pl
import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from tests.support.specs import cache, r, spec
from vecsim.errors import InputError
from vecsim.plots.charts import ResultPlots, SweepPlots, save, to_svg
from vecsim.plots.html_report import write_report
from vecsim.plots.labels import title
from vecsim.run.replay import replay
from vecsim.sweeps.frame import SweepFrame
from vecsim.sweeps.pareto import pareto_front
from vecsim.sweeps.run import sweep

REQUESTS = [r(7 * i, 20 + i % 9, 3 + i % 4) for i in range(50)]


@pytest.fixture(scope="module")
def result():
    return replay(spec(*REQUESTS, rank=cache(100, 16)), timeline=True)


@pytest.fixture(scope="module")
def frame():
    return sweep(
        spec(*REQUESTS, rank=cache(100, 16)),
        {"workers": [0, 1, 2, 3], "engine.rank.max_num_seqs": [2, 8]},
        slo={"p99_ttft_ms": 60.0},
        gpu_hour_price=2.0,
    )


class Page(HTMLParser):
    """Collects the specs, the attributes that could load something, and the script types."""

    def __init__(self, text):
        super().__init__()
        self.specs, self.loads, self.scripts, self._id = {}, [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.loads += [value for name, value in attrs.items() if name in ("src", "href")]
        if tag == "script":
            self.scripts.append(attrs.get("type"))
            self._id = attrs["id"]

    def handle_data(self, data):
        if self._id:
            self.specs[self._id.removesuffix("-spec")] = json.loads(data)
            self._id = None


def read(path):
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def values_of(chart_spec):
    return chart_spec["datasets"][chart_spec["data"]["name"]]


def test_the_report_of_a_run_is_self_contained_and_holds_the_frames(result, tmp_path):
    text, page = read(write_report(result, tmp_path / "run.html"))
    assert "://" not in text
    assert page.loads == []
    assert set(page.scripts) == {"application/json"}
    assert set(page.specs) == {"latency_cdf", "latency_over_time", "load", "kv_usage"}
    plots = result.plot
    for name, data in (
        ("latency_cdf", plots.latency_cdf_data()),
        ("latency_over_time", plots.latency_over_time_data()),
        ("load", plots.load_data()),
        ("kv_usage", plots.kv_usage_data()),
    ):
        assert values_of(page.specs[name]) == data.to_dicts()
    series = result.timeline()
    usage = [row["kv_usage"] for row in values_of(page.specs["kv_usage"])]
    assert usage == series["kv_usage"].to_list()
    assert f"{result.report['mean_ttft_ms']:,.3f}" in text


def test_the_report_of_a_sweep_is_self_contained_and_holds_the_frame(frame, tmp_path):
    text, page = read(write_report(frame, tmp_path / "sweep.html"))
    assert "://" not in text
    assert page.loads == []
    assert set(page.specs) == {"pareto", "lines", "slo_heatmap"}
    ran = frame.filter(pl.col("status") == "ok")
    heat = pl.DataFrame(values_of(page.specs["slo_heatmap"]))
    columns = ["workers", "engine.rank.max_num_seqs", "p99_ttft_ms", "feasible"]
    assert heat.select(columns).equals(pl.DataFrame(ran.select(columns)))
    pareto = pl.DataFrame(values_of(page.specs["pareto"]))
    front = pareto_front(ran, {"output_throughput_tok_s_per_gpu": "max", "p99_ttft_ms": "min"})
    assert pareto.filter("on_front")["point"].to_list() == front["point"].to_list()
    assert "6 of 8 points ran" in text
    assert "expected a positive integer" in text


def test_reports_of_files_equal_those_of_objects(result, frame, tmp_path):
    result.write(tmp_path / "out")
    frame.write_parquet(tmp_path / "sweep.parquet")
    for source, live in (("out", result), ("sweep.parquet", frame)):
        stored = write_report(tmp_path / source, tmp_path / f"{source}.html")
        direct = write_report(live, tmp_path / f"{source}-direct.html")
        assert stored.read_bytes() == direct.read_bytes()


def test_every_axis_has_a_title_and_latencies_have_their_unit__dynamo_2444(result, frame):
    charts = {**result.plot.all(), **frame.plot.all()}
    assert len(charts) == 7
    for chart in charts.values():
        chart_spec = chart.to_dict()
        layers = chart_spec.get("layer", [chart_spec])
        for layer in layers:
            for channel in ("x", "y"):
                assert layer["encoding"][channel]["title"]
    assert "latency (ms)" in to_svg(result.plot.latency_cdf())
    assert "KV blocks in use (share)" in to_svg(result.plot.kv_usage())
    assert "p99 TTFT (ms)" in to_svg(frame.plot.pareto())
    assert "output throughput (tok/s per GPU)" in to_svg(frame.plot.pareto())


def test_whole_numbers_have_whole_ticks__guidellm_1032(frame):
    axis = frame.plot.lines().to_dict()["encoding"]["x"]["axis"]
    assert (axis["format"], axis["tickMinStep"]) == ("d", 1)
    ticks = re.findall(r">(\d+\.\d+)<", to_svg(frame.plot.lines(metric="gpus")))
    assert [tick for tick in ticks if not tick.endswith(".0")] == []


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("p99_ttft_ms", "p99 TTFT (ms)"),
        ("output_throughput_tok_s", "output throughput (tok/s)"),
        ("request_throughput_rps_per_gpu", "request throughput (req/s per GPU)"),
        ("gpu_hours", "GPU (h)"),
        ("prefix_cache_reused_ratio", "prefix cache reused (share)"),
        ("engine.rank.num_gpu_blocks", "num GPU (blocks)"),
        ("cost_per_million_tokens", "cost (per million tokens)"),
        ("shape", "shape"),
    ],
)
def test_titles(column, expected):
    assert title(column) == expected


def test_png_svg_and_json_export(result, tmp_path):
    chart = result.plot.load()
    png = save(chart, tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert save(chart, tmp_path / "a.svg").read_text().startswith("<svg")
    assert json.loads(save(chart, tmp_path / "a.json").read_text())["mark"]
    with pytest.raises(InputError):
        save(chart, tmp_path / "a.gif")


def test_what_was_not_recorded_is_not_drawn():
    result = replay(spec(*REQUESTS))
    assert set(result.plot.all()) == {"latency_cdf", "latency_over_time"}
    with pytest.raises(InputError, match="timeline=True"):
        result.plot.load()
    nothing = replay(spec(r(0, 90, 1), rank=cache(1, 16)))
    assert nothing.plot.latency_cdf_data().height == 0
    assert to_svg(nothing.plot.latency_cdf())


def test_charts_of_plain_frames_and_of_nothing(frame):
    filtered = frame.filter(pl.col("workers") > 1)
    assert type(filtered) is pl.DataFrame
    assert SweepFrame(filtered).plot.slo_heatmap_data().height == 4
    assert SweepPlots(frame.head(2)).all() == {}
    one = frame.select("point", "workers", *frame.columns[3:])
    with pytest.raises(InputError, match="two axes"):
        SweepPlots(one).slo_heatmap()


def test_an_existing_report_is_left_alone(result, tmp_path):
    path = tmp_path / "a.html"
    path.write_text("mine")
    with pytest.raises(InputError, match="not in use"):
        write_report(result, path)
    write_report(result, path, overwrite=True)
    for wrong in (tmp_path / "nothing", tmp_path, path):
        with pytest.raises(InputError):
            write_report(wrong, tmp_path / "b.html")


def test_labels_from_outside_are_escaped(tmp_path):
    bundles = {"<script>x</script>": {"workers": 1}, "b": {"workers": 2}}
    frame = sweep(spec(*REQUESTS), {"shape": bundles})
    text, page = read(write_report(frame, tmp_path / "a.html"))
    assert "<script>x" not in text.replace("\\/", "/").replace('"<script>x</script>"', "")
    assert set(page.scripts) == {"application/json"}


def test_result_plots_of_rows_alone(result):
    assert set(ResultPlots(result.requests, None).all()) == {"latency_cdf", "latency_over_time"}


def test_names_with_markup_leave_the_page_whole(tmp_path):
    axes = {"<!--<script>": {"</script>": {"workers": 1}, "b": {"workers": 2}}}
    rows = sweep(spec(*REQUESTS, rank=cache(100, 16)), axes)
    text = write_report(rows, tmp_path / "r.html").read_text()
    page = Page(text)
    assert page.specs["lines"]
    assert text.rstrip().endswith("</html>")
    for block in re.findall(r"<script[^>]*>(.*?)</script>", text, re.S):
        assert "<" not in block
        assert json.loads(block)


def test_a_heat_map_has_a_picture_for_each_value_of_further_axes():
    axes = {"workers": [1, 2], "engine.rank.max_num_seqs": [2, 8], "arrival_speedup": [1, 2, 4]}
    rows = sweep(spec(*REQUESTS, rank=cache(100, 16)), axes)
    data = rows.plot.slo_heatmap_data()
    assert data["others"].unique().sort().to_list() == [f"arrival_speedup={x}" for x in (1, 2, 4)]
    assert data.group_by("workers", "engine.rank.max_num_seqs", "others").len()["len"].max() == 1
    chart = rows.plot.slo_heatmap().to_dict()
    assert chart["facet"]["field"] == "others"
    assert "<svg" in to_svg(rows.plot.slo_heatmap())
