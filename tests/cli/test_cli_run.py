"""`trgp run`: what it shows, writes and records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import SMALL, Trgp

from trgp.engine.config import configure, defaults
from trgp.results.store import read

METHOD = '''
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar

from trgp.methods import About, Method


@dataclass(frozen=True)
class Lazy(Method):
    """Learns less."""

    about: ClassVar[About] = About("own", "nothing", "-", task_id_at_test=False)
    share: float = 1.0
    """How much of a step is taken."""
    names: list[str] = field(default_factory=lambda: ["a"])

    def step(self, params, grads, state, batch, lr):
        return super().step(params, grads, state, batch, lr * self.share)


class Renamed(Lazy):
    pass


@dataclass(frozen=True)
class Clashing(Lazy):
    quiet: int = 3


@dataclass(frozen=True)
class Functional(Lazy):
    key: Callable[..., Any] = len


@dataclass(frozen=True)
class Unknown(Lazy):
    of: Nothing = 3


@dataclass(frozen=True)
class Needy(Lazy):
    wanted: int = field(kw_only=True)


class Broken(Lazy):
    def step(self, params, grads, state, batch, lr):
        return 1 / 0
'''


MOODY = """

@dataclass(frozen=True)
class Moody(Lazy):
    def begin_task(self, ctx):
        worse = 1e30 if ctx.seed == 1 else 1.0
        return {name: p * worse for name, p in ctx.params.items()}, ctx.state
"""


def test_a_run_shows_its_results_and_where_they_lie(trgp: Trgp, here: Path) -> None:
    code, out, err = trgp("run", *SMALL, "--lr", "0.30000000000000004", "--quiet")
    assert (code, err) == (0, "")
    assert "ACC" in out
    folder = out.splitlines()[-1].removeprefix("Results: ")
    (result,) = read(here / folder, defaults)
    changed = {"tasks": 2, "epochs": 1, "lr": 0.30000000000000004}
    assert result.changed == changed
    assert result.command == "trgp run permuted-digits --tasks 2 --epochs 1 --lr " + (
        "0.30000000000000004 --quiet"
    )
    config = configure("permuted-digits", "trgp", "paper", **changed)
    assert result.config == json.loads(json.dumps(config.settings))


def test_without_a_terminal_there_is_no_progress(trgp: Trgp) -> None:
    code, _, err = trgp("run", *SMALL, "--seed", "7")
    assert (code, err) == (0, "")


def test_a_finished_run_is_shown_not_repeated(trgp: Trgp, here: Path) -> None:
    trgp("run", *SMALL)
    (stored,) = here.rglob("result.json")
    before = stored.stat()
    code, out, err = trgp("run", *SMALL, "--seeds", "2")
    assert code == 0
    assert err == ""
    assert "not repeated without --fresh: seed 0\n" in out
    assert out.splitlines()[-1].endswith(stored.parent.parent.name)
    assert stored.stat().st_mtime_ns == before.st_mtime_ns
    code, out, err = trgp("run", *SMALL, "--fresh")
    assert "not repeated" not in out + err
    assert stored.stat().st_mtime_ns > before.st_mtime_ns


def test_the_log_is_a_line_of_json_an_event(trgp: Trgp, here: Path) -> None:
    command = ("run", *SMALL, "--quiet", "--log-json", "log.jsonl")
    for _ in range(2):  # the second, of a stored result, is appended
        assert trgp(*command).code == 0
    events = [json.loads(line) for line in (here / "log.jsonl").read_text().splitlines()]
    assert [event.pop("event") for event in events] == [
        "run_started",
        "epoch_finished",
        "task_finished",
        "epoch_finished",
        "task_finished",
        "run_finished",
        "run_finished",
    ]
    assert events[0]["tasks"] == 2
    assert events[2]["accuracies"][1] is None
    assert [event["stored"] for event in events[-2:]] == [False, True]


def test_the_log_on_stdout_leaves_the_summary_to_stderr(trgp: Trgp) -> None:
    code, out, err = trgp("run", *SMALL, "--quiet", "--log-json", "-")
    assert code == 0
    assert [json.loads(line)["event"] for line in out.splitlines()][-1] == "run_finished"
    assert "ACC" in err


def test_a_log_that_cannot_be_written(trgp: Trgp, here: Path) -> None:
    (here / "log").symlink_to("/dev/full/no")
    code, _, err = trgp("run", *SMALL, "--quiet", "--log-json", "log")
    assert code == 1
    assert "--log-json log cannot be written" in err


def test_paths_and_names_of_ones_own(trgp: Trgp, here: Path) -> None:
    (here / "lazy_methods.py").write_text(METHOD)
    code, out, _ = trgp("run", "--quiet", *SMALL, "--method", "lazy_methods:Lazy", "--share=0.5")
    assert code == 0
    assert "share=0.5" in out
    code, out, _ = trgp("run", *SMALL, "--method", "lazy_methods:Renamed", "--names", "b,c")
    assert code == 0
    assert "names=b,c" in out
    _, out, _ = trgp("run", *SMALL, "--method", "lazy_methods:Lazy", "--help")
    assert "How much of a step is taken. (default: 1.0)" in out
    for name, says in {
        "Clashing": "has a field 'quiet', which is the name of another option; rename it.",
        "Unknown": "The type Nothing of Unknown.of is not known",
        "Needy": "wanted",
    }.items():
        code, _, err = trgp("run", *SMALL, "--method", f"lazy_methods:{name}")
        assert code == 2
        assert says in err
    code, _, err = trgp("run", *SMALL, "--method", "lazy_methods:Functional", "--key", "abs")
    assert code == 2
    assert "which a result cannot store" in err
    with pytest.raises(ZeroDivisionError):
        trgp("run", *SMALL, "--method", "lazy_methods:Broken")


def test_a_run_that_fails(trgp: Trgp) -> None:
    code, out, err = trgp("run", *SMALL, "--method", "finetune", "--lr", "1e30", "--quiet")
    assert (code, out) == (1, "")
    assert err.startswith("trgp: The training diverged")
    (code, _, err) = trgp("run", *SMALL, "--out", "/dev/null/runs")
    assert code == 1
    assert "give another --out" in err


def test_methods_without_fields_and_tasks_learnt_at_once(trgp: Trgp) -> None:
    for method in ("multitask", "single"):
        code, out, _ = trgp("run", *SMALL, "--method", method)
        assert code == 0
        assert "ACC" in out


def test_a_seed_that_fails_does_not_keep_the_others_from_being_shown(
    trgp: Trgp, here: Path
) -> None:
    (here / "moody_methods.py").write_text(METHOD + MOODY)
    code, out, err = trgp("run", *SMALL, "--method", "moody_methods:Moody", "--seeds", "3")
    assert code == 1
    assert "seed 0, 2" in out
    assert err.startswith("trgp: Seed 1: The training diverged in task 1, epoch 1")


def test_fresh_puts_the_results_of_all_seeds_aside_at_once(trgp: Trgp, here: Path) -> None:
    """What goes on later without --fresh must not find an old one among the new."""
    trgp("run", *SMALL, "--method", "finetune", "--seeds", "2")
    stored = sorted(here.rglob("result.json"))
    assert len(stored) == 2
    code, _, _ = trgp("run", *SMALL, "--method", "finetune", "--seeds", "2", "--fresh")
    assert code == 0
    assert sorted(here.rglob("result.json")) == stored
    assert len(list(here.rglob("result.previous.json"))) == 2


def test_a_full_disk_under_log_and_output_is_a_sentence() -> None:
    base = [sys.executable, "-m", "trgp"]
    for command in ([*base, "list", "methods"],):
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1
        assert done.stderr.startswith("trgp: The output could not be written")
        assert "Traceback" not in done.stderr


def test_a_log_on_a_full_disk_is_a_sentence(trgp: Trgp) -> None:
    code, _, err = trgp("run", *SMALL, "--log-json", "/dev/full")
    assert code == 1
    assert "--log-json /dev/full could not be written" in err


def test_ctrl_c_says_what_is_saved_and_how_to_go_on(
    trgp: Trgp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trgp.cli.run.run_seeds", interrupted)
    code, _, err = trgp("run", "split-digits", "--fresh", "--out", "my runs")
    assert code == 130
    assert err == "trgp: Interrupted. Resume with: trgp run split-digits --out 'my runs'\n"
