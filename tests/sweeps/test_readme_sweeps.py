"""The README's sweep and capacity example runs as it stands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_sweep_example_runs(monkeypatch, capsys):
    section = (ROOT / "README.md").read_text().partition("## Sweeps and capacity")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    monkeypatch.chdir(ROOT)
    names = {}
    exec(code, names)
    assert names["rows"].height == 25
    assert names["rows"]["status"].unique().to_list() == ["ok"]
    printed = capsys.readouterr().out
    assert "workers = " in printed
    assert "arrival_speedup = " in printed
