"""The page as a text: it holds all it needs, and no name can break out of it."""

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace

import pytest
from some_reports import HOSTILE, a_hostile_report, a_large_report, a_report

from trgp.report import thin
from trgp.report.data import as_json, report_json
from trgp.report.model import Cell, Chart, Report, Row, Series, Table
from trgp.report.page import page


def test_it_asks_for_nothing() -> None:
    text = page(a_report())
    assert not re.search(r"""(?:src|href)\s*=\s*["']?+(?!#|data:)""", _without_scripts(text))
    assert not re.search(r"@import|url\(", text.partition("</style>")[0])
    assert "connect-src 'none'" in text


def test_a_live_one_asks_where_it_came_from() -> None:
    text = page(a_report(), live=True)
    assert "connect-src 'self'" in text
    assert 'data-mode="live"' in text


def test_only_its_own_scripts_may_run() -> None:
    text = page(a_report())
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert len(scripts) == 3
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', text)
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe-eval" not in policy
    (allowed,) = re.findall("script-src(.*?);", policy)
    assert "unsafe-inline" not in allowed


def test_names_stay_text() -> None:
    text = page(a_hostile_report())
    assert "<script>document.title" not in text
    assert "<img" not in text
    (data,) = re.findall(r'id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert json.loads(data)["title"] == HOSTILE
    text.encode()  # no half of a character is left


def test_it_carries_the_licences_of_what_it_carries() -> None:
    text = page(a_report())
    for name in ("@observablehq/plot 0.6.17", "d3 7.9.2", "interval-tree-1d", "isoformat"):
        assert f"== {name}" in text


def test_data_are_short() -> None:
    numbers = Series("s", (1.0, 2.5), (1 / 3, None, float("nan"), float("inf"), 0.0))
    assert json.loads(as_json(numbers)) == {
        "name": "s",
        "x": [1, 2.5],
        "y": [0.3333, None, None, None, 0],
    }
    assert json.loads(as_json(Cell("0", 0.0))) == {"text": "0", "value": 0}
    assert json.loads(report_json(Report("", ()))) == {}


def test_what_many_share_is_said_once() -> None:
    row = Row((Cell("1", 1.0, commands=("a", "b")), Cell("2", 2.0, commands=("b",))))
    chart = Chart("c", "", "heat", "", "", tuple(Series(n, (1, 2), (3.0, 4.0)) for n in "xy"))
    table = Table("t", "", ("x", "y"), (row, row))
    told = json.loads(report_json(Report("", (), (table,), (chart,))))
    assert told["commands"] == ["a", "b"]
    assert [c["commands"] for c in told["tables"][0]["rows"][1]["cells"]] == [[0, 1], [1]]
    assert told["charts"][0]["x"] == [1, 2]
    assert told["charts"][0]["series"] == [{"name": "x", "y": [3, 4]}, {"name": "y", "y": [3, 4]}]


def test_many_runs_make_no_large_page() -> None:
    """Five hundred of a hundred configurations, and of as many as there are runs."""
    for seeds, epochs in ((5, 1000), (1, 200)):
        text = page(a_large_report(500, seeds, epochs))
        assert len(text.encode()) < 3_000_000
    (data,) = re.findall(r'type="application/gzip" id="data">(.*?)</script>', text)
    assert json.loads(gzip.decompress(base64.b64decode(data)))["title"] == "Many runs"


def test_long_curves_keep_the_ends_of_their_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    y = (*map(float, range(10)), None, *map(float, range(10)))
    curve = Series("gpm", tuple(range(21)), y)
    chart = Chart("c", "", "lines", "", "", (curve,), boundaries=((10, "task 1"),), note="A mean.")
    report = Report("", (), (), (chart, replace(chart, boundaries=())))
    assert thin.thinned(report) is report
    monkeypatch.setattr(thin, "ROOM", 7)
    long, other = thin.thinned(report).charts
    assert long.series[0].x == (0, 3, 6, 9, 10, 12, 15, 18, 20)
    assert long.series[0].y[3:5] == (9, None)
    assert long.note == (
        "A mean. Shown: one of 3 epochs and the last of every task; the files have all."
    )
    assert other == report.charts[1]


def _without_scripts(text: str) -> str:
    return re.sub(r"<script.*?</script>|<!--.*?-->", "", text, flags=re.DOTALL)
