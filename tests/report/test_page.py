"""The page as a text: it holds all it needs, and no name can break out of it."""

import base64
import hashlib
import json
import re

from some_reports import HOSTILE, a_hostile_report, a_large_report, a_report

from trgp.report.model import Cell, Report, Series
from trgp.report.page import as_json, page


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
        "y": [0.333333, None, None, None, 0],
    }
    assert json.loads(as_json(Cell("0", 0.0))) == {"text": "0", "value": 0}
    assert json.loads(as_json(Report("", ()))) == {}


def test_many_runs_make_no_large_page() -> None:
    assert len(page(a_large_report(500)).encode()) < 3_000_000


def _without_scripts(text: str) -> str:
    return re.sub(r"<script.*?</script>|<!--.*?-->", "", text, flags=re.DOTALL)
