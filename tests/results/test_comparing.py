"""Two results side by side."""

import json

import pytest

from tests.support.specs import cache, r, spec
from vecsim.errors import InputError
from vecsim.results.compare import compare
from vecsim.run.replay import replay

REQUESTS = [r(7 * i, 20, 4) for i in range(20)]


@pytest.fixture(scope="module")
def results():
    return tuple(replay(spec(*REQUESTS, workers=n, rank=cache(100, 16))) for n in (1, 2))


def test_every_metric_with_difference_and_ratio(results):
    a, b = results
    rows = {row["metric"]: row for row in compare(a, b).iter_rows(named=True)}
    row = rows["mean_ttft_ms"]
    assert (row["a"], row["b"]) == (a.report["mean_ttft_ms"], b.report["mean_ttft_ms"])
    assert row["difference"] == row["b"] - row["a"]
    assert row["ratio"] == row["b"] / row["a"]
    assert rows["rejected_requests"]["ratio"] is None
    assert rows["terminal_reasons.deadlock"]["a"] == 0
    numeric = [name for name, v in a.report.items() if not isinstance(v, str | dict)]
    assert set(numeric) <= set(rows)


def test_results_folders_and_reports_are_the_same(results, tmp_path):
    a, b = results
    a.write(tmp_path / "a")
    (tmp_path / "b.json").write_text(json.dumps(b.report))
    assert compare(tmp_path / "a", tmp_path / "b.json").equals(compare(a, b.report))


def test_a_short_comparison_has_the_main_metrics(results):
    short = compare(*results, all_metrics=False)
    assert 10 < short.height < 25
    assert "p99_ttft_ms" in short["metric"].to_list()


def test_neither_a_result_nor_the_place_of_one(results, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    for wrong in (3, tmp_path / "nothing", tmp_path / "x.json"):
        with pytest.raises(InputError):
            compare(results[0], wrong)
