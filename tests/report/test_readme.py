"""What README and docs show is what the records say, and is drawn the same every time."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "records")


def test_pages_and_figures_are_up_to_date() -> None:
    import readme

    assert readme.out_of_date() == []


def test_a_figure_of_other_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import readme

    (path, name), (other, _) = readme.FIGURES.items()
    same, stale, missing = (tmp_path / f"{name}.svg" for name in ("same", "stale", "missing"))
    same.write_text(path.read_text())
    stale.write_text(other.read_text())
    monkeypatch.setattr(readme, "FIGURES", dict.fromkeys((same, stale, missing), name))
    assert readme.out_of_date() == ["stale.svg", "missing.svg"]


def test_figures_are_drawn_the_same_every_time() -> None:
    import readme

    from trgp.report.draw import drawn

    for _, chart in readme.figures():
        assert drawn(chart)["svg"] == drawn(chart)["svg"]


def test_a_page_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import readme

    monkeypatch.setitem(readme.TABLES, "embedded", lambda: "| other |")
    assert "results.md" in readme.out_of_date()
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    with pytest.raises(SystemExit, match=r"results\.md.*run make readme"):
        readme.main()
