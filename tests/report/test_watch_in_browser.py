"""`trgp watch` as a process, and its page while results come in."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from page_driver import PageDriver
from some_reports import HOSTILE

from trgp.cli import main
from trgp.results.store import read_result, run_folder, write_result

pytestmark = pytest.mark.slow

TRGP = (sys.executable, "-m", "trgp")
RECORDS = Path(__file__).parent.parent.parent / "records" / "runs"
FIRST = Path("split-digits", "gpm", "paper", "seed-0", "result.json")
SECOND = Path("split-digits", "trgp", "paper", "seed-0", "result.json")


@contextmanager
def watching(out: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """The page's address, and the process that serves it."""
    command = [*TRGP, "watch", str(out), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    try:
        line = process.stdout.readline()
        assert line.startswith(f"{out} is shown at http://127.0.0.1:")
        yield line.split()[-3], process
    finally:
        process.kill()
        process.communicate()


def add(out: Path, run: Path, **changes: str) -> None:
    """A real result, put in whole, as a run does."""
    result = replace(read_result(RECORDS / run), **changes)
    folder = run_folder(
        out, result.benchmark, result.method, result.preset, result.changed, result.seed
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_result(folder, result)


def methods(page: PageDriver) -> set[str]:
    """Those with results in the main table."""
    script = (
        "return [...document.querySelectorAll('[aria-labelledby=\"table-main\"] tbody tr')]"
        ".filter(row => !row.innerText.includes('not run'))"
        ".map(row => row.cells[1].innerText)"
    )
    return set(page.js(script))


def test_the_page_follows_what_happens(browser: PageDriver, tmp_path: Path) -> None:
    add(tmp_path, FIRST)
    with watching(tmp_path) as (address, process):
        browser.open(address)
        browser.until(lambda: methods(browser) == {"gpm"}, "the first result")
        browser.until(lambda: "No run is in progress." in browser.text("#progress"), "no run")

        # What the reader has chosen stays when data change.
        browser.choose("select[name=benchmark]", "split-digits")
        browser.focus('[data-key="main by 4"]').click()
        browser.js("scrollTo(0, 120)")
        add(tmp_path, SECOND)
        browser.until(lambda: methods(browser) == {"gpm", "trgp"}, "the second result")
        assert browser.one("select[name=benchmark]").get_attribute("value") == "split-digits"
        assert set(browser.column("main", 0)) == {"split-digits"}
        sort = browser.one('th:has([data-key="main by 4"])').get_attribute("aria-sort")
        assert sort == "descending"
        assert browser.focused().get_attribute("data-key") == "main by 4"
        assert browser.js("return scrollY") == 120

        # A name that would like to be more than that.
        hostile = SECOND.parent.parent / "seed-1" / "result.json"
        shutil.rmtree(tmp_path / SECOND.parent)
        add(tmp_path, hostile, method=HOSTILE)
        browser.until(lambda: methods(browser) == {"gpm", HOSTILE}, "the hostile name")
        assert browser.driver.title not in ("taken", "t")
        assert browser.all("img") == []
        assert browser.complaints() == []

        # The server goes, and the page says so.
        browser.gone_expected = True
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0
        banner = "#connection:not([hidden])"
        assert "The server has not answered since" in browser.text(banner)
        assert methods(browser) == {"gpm", HOSTILE}


def test_a_run_that_goes_on(browser: PageDriver, tmp_path: Path) -> None:
    settings = ("--method", "finetune", "--tasks", "3", "--epochs", "5000", "--device", "cpu")
    command = [*TRGP, "run", "permuted-digits", *settings, "--out", str(tmp_path), "--quiet"]
    with watching(tmp_path) as (address, _), subprocess.Popen(command) as run:
        try:
            browser.open(address)
            cell = "#progress tbody td:nth-child({})"
            browser.until(lambda: browser.text(cell.format(6)) not in ("", "0 of 5000"), "epochs")
            assert browser.text(cell.format(2)) == "finetune"
            assert browser.text(cell.format(5)) == "1 of 3"
            before = browser.text(cell.format(6))
            browser.until(lambda: browser.text(cell.format(6)) != before, "more epochs")
            figure = browser.figure("Validation accuracy while learning permuted-digits")
            assert figure.find_elements("css selector", "[aria-label=line] path")
        finally:
            run.kill()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("missing",), "trgp: There is no folder missing; give the --out folder of the runs.\n"),
        ((".", "--port", "70000"), "trgp: --port must be from 0 to 65535, not 70000.\n"),
    ],
)
def test_what_cannot_be_watched(
    argv: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *argv]) == 2
    assert capsys.readouterr() == ("", says)
