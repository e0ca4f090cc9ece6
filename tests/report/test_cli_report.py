"""`trgp report` on stored runs, whole ones and broken ones."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trgp.cli import main

RECORDS = Path(__file__).parent.parent.parent / "records" / "runs"


class Said(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


Trgp = Callable[..., Said]


@pytest.fixture
def trgp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Trgp:
    """Runs a command in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> Said:
        capsys.readouterr()
        code = main(argv)
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """GPM and TRGP on the smaller benchmark."""
    for method in ("gpm", "trgp"):
        source = RECORDS / "split-digits" / method
        shutil.copytree(source, tmp_path / "runs" / "split-digits" / method)
    return tmp_path / "runs"


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )


def test_a_report_of_real_runs(trgp: Trgp, runs: Path, tmp_path: Path) -> None:
    code, out, err = trgp("report")
    assert (code, err) == (0, "")
    figures = list((tmp_path / "report" / "figures").glob("*.svg"))
    assert out == f"Report: report/index.html (6 tables, {len(figures)} figures)\n"
    main_table = (tmp_path / "report" / "tables" / "main.md").read_text()
    assert "| split-digits | trgp | paper | 5 | **98.22 ± 0.97** |" in main_table
    names = {path.stem for path in figures}
    assert names >= {
        "final-accuracy-split-digits-paper",
        "matrix-split-digits-gpm-paper",
        "curves-split-digits-gpm-paper",
        "selection-split-digits-trgp-paper",
        "ranks-split-digits-trgp-paper",
        "time-split-digits-trgp-paper",
        "accuracy-memory-split-digits-paper",
    }
    assert {path.stem for path in (tmp_path / "report" / "figures").glob("*.png")} == names
    page = (tmp_path / "report" / "index.html").read_text()
    assert "split-digits" in page


@pytest.mark.usefixtures("no_matplotlib")
def test_broken_results_are_told_and_the_rest_is_shown(
    trgp: Trgp, runs: Path, tmp_path: Path
) -> None:
    gpm = runs / "split-digits" / "gpm" / "paper"
    whole = (gpm / "seed-0" / "result.json").read_text()
    (gpm / "seed-0" / "result.json").write_text(whole[: len(whole) // 2])  # half-written
    (gpm / "seed-1" / "result.json").unlink()  # missing
    (gpm / "seed-2" / "result.json").write_text("[]")  # no result
    old = json.loads((gpm / "seed-3" / "result.json").read_text()) | {"schema_version": 0}
    (gpm / "seed-3" / "result.json").write_text(json.dumps(old))
    code, _, err = trgp("report")
    assert code == 0
    for seed, said in enumerate(
        ["is not JSON", "has no result.json", "holds no fields", "schema_version 0"]
    ):
        (line,) = [line for line in err.splitlines() if f"seed-{seed}" in line]
        assert said in line
        assert line.startswith("trgp: ")
    table = (tmp_path / "report" / "tables" / "main.md").read_text()
    assert "| split-digits | gpm | paper | 1 |" in table
    assert "| split-digits | trgp | paper | 5 |" in table
    assert "was cut short" in (tmp_path / "report" / "index.html").read_text()


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_there_are_tables_and_a_page(
    trgp: Trgp, runs: Path, tmp_path: Path
) -> None:
    code, out, err = trgp("report")
    assert code == 0
    assert out == "Report: report/index.html (6 tables, 0 figures)\n"
    assert "pip install 'trgp[report]'" in err
    assert len(err.splitlines()) == 1
    assert not list((tmp_path / "report" / "figures").iterdir())


@pytest.mark.usefixtures("no_matplotlib")
def test_several_folders_are_put_together(trgp: Trgp, runs: Path, tmp_path: Path) -> None:
    """Seeds of one configuration from two of them; one that both have counts once."""
    seeds = runs / "split-digits" / "gpm" / "paper"
    other = tmp_path / "more" / "split-digits" / "gpm" / "paper"
    other.mkdir(parents=True)
    shutil.move(str(seeds / "seed-4"), str(other / "seed-4"))
    shutil.copytree(seeds / "seed-0", other / "seed-0")
    code, _, err = trgp("report", "runs", "more", "runs", "--out", "out")
    assert code == 0
    table = (tmp_path / "out" / "tables" / "main.md").read_text()
    assert "| split-digits | gpm | paper | 5 |" in table
    assert [line for line in err.splitlines() if "several folders" in line] == [
        "trgp: Seed 0 of gpm on split-digits, preset paper, is in several folders; the first is "
        "shown. Leave out the others."
    ]


def test_what_is_not_there(trgp: Trgp, tmp_path: Path) -> None:
    code, out, err = trgp("report", "nowhere")
    assert (code, out) == (2, "")
    assert err == "trgp: There is no folder nowhere; give the --out folder of the runs.\n"
    (tmp_path / "runs").mkdir()
    code, out, err = trgp("report")
    assert (code, out) == (2, "")
    assert err.startswith("trgp: There is no finished run in runs; begin with")
    assert not (tmp_path / "report").exists()


def test_what_would_be_overwritten_is_refused(trgp: Trgp, runs: Path, tmp_path: Path) -> None:
    code, out, err = trgp("report", "--out", "runs")
    assert (code, out) == (2, "")
    assert err == "trgp: runs holds files but no report; give --out a new or an empty folder.\n"
    (tmp_path / "file").write_text("")
    assert trgp("report", "--out", "file").err == "trgp: file is a file; give another --out.\n"


@pytest.mark.usefixtures("no_matplotlib", "runs")
def test_what_cannot_be_written_is_said(trgp: Trgp, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = trgp("report", "--out", "file/report")
    assert code == 1
    assert err == "trgp: file/report cannot be written to: Not a directory; give another --out.\n"


def test_help(trgp: Trgp) -> None:
    code, out, err = trgp("report", "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: trgp report")
    assert "\n  report " in trgp("--help").out
