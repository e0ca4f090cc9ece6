"""What the command line says about itself."""

import pytest
from cli_calls import Trgp

import trgp as package
from trgp.benchmarks import NAMES
from trgp.methods import METHODS


@pytest.mark.parametrize(
    "command", ["list", "table", "report", "watch", "show", "compare", "data", "data list"]
)
def test_every_command_has_help(trgp: Trgp, command: str) -> None:
    for flag in ("--help", "-h"):
        code, out, err = trgp(*command.split(), flag)
        assert (code, err) == (0, "")
        assert out.startswith(f"usage: trgp {command}")


def test_the_whole(trgp: Trgp) -> None:
    code, out, _ = trgp("--help")
    assert code == 0
    for command in ("run", "sweep", "list", "table", "report", "watch", "show", "compare", "data"):
        assert f"\n  {command} " in out
    assert trgp("--version") == (0, f"trgp {package.__version__}\n", "")


def test_run_says_what_can_be_chosen(trgp: Trgp) -> None:
    code, out, _ = trgp("run", "--help")
    assert code == 0
    for name in (*NAMES, *METHODS, "official", "--seeds", "--log-json"):
        assert name in out
    assert "trgp run pmnist --method gpm --help" in out


def test_the_fields_with_the_defaults_of_the_preset(trgp: Trgp) -> None:
    code, out, _ = trgp("run", "pmnist", "--method", "gpm", "--help")
    words = " ".join(out.replace("│", " ").split())
    assert code == 0
    assert "--lr FLOAT Learning rate of plain SGD. (default: 0.01)" in words
    assert "(default: 0.95 0.99 0.99)" in words
    assert "--no-first-task-short" in words
    assert "--epsilon" not in words
    _, official, _ = trgp("run", "--help", "--preset", "official", "pmnist")
    assert "--epsilon" in official
    assert "(default: 0.2)" in " ".join(official.replace("│", " ").split())


def test_help_on_what_does_not_exist(trgp: Trgp) -> None:
    assert trgp("run", "pmnits", "--help").code == 2
