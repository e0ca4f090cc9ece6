"""`trgp table`, `trgp show` and `trgp compare` on runs that are there."""

from pathlib import Path

import pytest
from cli_calls import SMALL, Trgp


@pytest.fixture
def runs(trgp: Trgp, here: Path) -> Path:
    for method in ("gpm", "finetune"):
        assert trgp("run", *SMALL, "--method", method, "--seeds", "2", "--quiet").code == 0
    return here / "runs"


def folder(runs: Path, method: str) -> str:
    (found,) = (runs / "permuted-digits" / method).iterdir()
    return str(found)


@pytest.mark.usefixtures("runs")
def test_the_table(trgp: Trgp) -> None:
    code, out, err = trgp("table")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["benchmark", "method", "preset"]
    assert len(lines) == 3
    assert trgp("table", "runs").out == out


def test_unreadable_results_are_told_beside_the_table(trgp: Trgp, runs: Path) -> None:
    damaged = Path(folder(runs, "gpm")) / "seed-1" / "result.json"
    damaged.write_text("{")
    code, out, err = trgp("table")
    assert code == 0
    assert "gpm" in out
    assert err.startswith("trgp: ")
    assert "is not JSON or was cut short" in err
    for command in (("show", str(damaged)), ("compare", str(damaged), str(damaged))):
        code, out, err = trgp(*command)
        assert (code, out) == (2, "")
        assert "is not JSON or was cut short" in err
    # Nothing but damage is bad input.
    (damaged.parent.parent / "seed-0" / "result.json").write_text("[]")
    for path in Path(folder(runs, "finetune")).glob("*/result.json"):
        path.unlink()
    code, out, err = trgp("table")
    assert (code, out) == (2, "")
    assert err.count("trgp: ") == 2


@pytest.mark.parametrize("command", ["table", "report", "show"])
def test_a_folders_name_is_no_command_to_the_terminal(trgp: Trgp, runs: Path, command: str) -> None:
    title = "\x1b]0;x\x07"
    damaged = runs / title / "m" / "paper" / "seed-0" / "result.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    _, _, err = trgp(command, str(damaged if command == "show" else runs))
    assert "trgp: " in err
    assert "\\x1b]0;x\\x07" in err
    assert not set(err) & set("\x1b\x07")


def test_one_run_and_all_seeds_of_one(trgp: Trgp, runs: Path) -> None:
    both = folder(runs, "gpm")
    code, out, _ = trgp("show", both)
    assert code == 0
    assert out.count("trgp run permuted-digits") == 2
    for path in (f"{both}/seed-1", f"{both}/seed-1/result.json"):
        code, one, _ = trgp("show", path)
        assert code == 0
        assert out.endswith(one)


def test_two_runs_against_each_other(trgp: Trgp, runs: Path) -> None:
    code, out, _ = trgp("compare", folder(runs, "gpm"), folder(runs, "finetune"))
    assert code == 0
    assert "B - A" in out
    assert "finetune" in out
