"""`trgp sweep`: cells side by side, what it skips, survives, refuses and tells."""

import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import Trgp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trgp.cli import sweep_progress
from trgp.cli.run import Running
from trgp.cli.sweep import typed
from trgp.engine import sweep
from trgp.engine.config import configure, defaults
from trgp.engine.sweep import Ended, Place
from trgp.engine.sweeps import SWEEPS, Cell, cells
from trgp.results.store import find, read_result

TRGP = (sys.executable, "-m", "trgp")
SMALL = """
benchmarks = ["split-digits"]
methods = ["gpm", "trgp"]
seeds = 2
[options]
tasks = 2
epochs = 1
[options.trgp]
threshold = [[0.95, 0.97]]
"""
LONG = """
benchmarks = ["permuted-digits"]
methods = ["finetune"]
seeds = 3
[options]
tasks = 2
epochs = 25
"""
WHOLE = """
benchmarks = ["split-digits", "permuted-digits"]
methods = ["gpm", "trgp", "hat"]
presets = ["paper", "official"]
seeds = [1, 2, 37]
[options]
epochs = [5, 10]
evaluate_unseen = true
[options.trgp]
epsilon = [0.2, 0.5]
threshold = [[0.95, 0.97], 0.9]
[[cells]]
benchmark = "permuted-digits"
method = "trgp"
threshold = [0.95, 0.99, 0.99]
"""


def test_a_sweep_runs_once_and_every_cell_can_be_repeated_alone(
    trgp: Trgp, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "small.toml").write_text(SMALL)
    command = ("sweep", "small.toml", "--jobs", "2", "--device", "cpu", "--out", "my runs")
    code, out, err = trgp(*command, "--dry-run")
    assert (code, err) == (0, "")
    assert "threshold=0.95,0.97  0,1    –" in out
    assert out.endswith("4 cells: 0 finished, 4 left\n")
    assert [path.name for path in here.iterdir()] == ["small.toml"]

    code, out, err = trgp(*command)
    assert code == 0
    lines = err.splitlines()
    assert [line.split()[0] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert all(re.search(r"ACC .* \(0 failed, .* s, about .* s left\)", line) for line in lines)
    first, *rows, last = out.splitlines()
    assert first.startswith("benchmark")
    assert [row.split()[:2] for row in rows] in (
        [["split-digits", "gpm"], ["split-digits", "trgp"]],
        [["split-digits", "trgp"], ["split-digits", "gpm"]],
    )
    assert last == "Results: my runs"

    for results in find("my runs", defaults).results:
        assert [run.seed for run in results] == [0, 1]
        run = results[1]
        words = shlex.split(run.command)
        assert words[:3] == ["trgp", "run", "split-digits"]
        assert trgp(*words[1:], "--out", "alone", "--quiet").code == 0
    for alone in (here / "alone").rglob("result.json"):
        together = read_result(here / "my runs" / alone.relative_to(here / "alone"))
        assert read_result(alone).digest == together.digest

    monkeypatch.setattr("trgp.engine.pool.Worker", None)  # nothing is run any more
    again = trgp(*command)
    assert (again.code, again.out, again.err) == (0, out, "")
    # A part of it shows that part alone.
    code, out, _ = trgp(*command, "--seeds", "1")
    assert code == 0
    assert all(re.search(r"\) +1 ", row) for row in out.splitlines()[1:-1])
    assert trgp(*command, "--dry-run").out.endswith("4 cells: 4 finished, 0 left\n")


def test_what_fails_or_has_no_data_is_told_and_the_rest_runs(trgp: Trgp, here: Path) -> None:
    (here / "some.toml").write_text(
        SMALL.replace("epochs = 1", "epochs = 1\nlr = [0.1, 1e30]").replace("seeds = 2", "")
        + '[[cells]]\nbenchmark = "pmnist"\nmethod = "gpm"\n'
    )
    code, out, err = trgp("sweep", "some.toml", "--jobs", "2", "--quiet")
    assert code == 1
    assert len(out.splitlines()) == 2 + 2
    missing, *failures, unrun, last = err.strip().split("\ntrgp: ")
    assert "mnist.npz; get it with `trgp data prepare mnist`." in missing
    assert len(failures) == 2
    for failure in failures:
        says, again = failure.split("\n      Repeat it with: ")
        assert "lr=1e+30" in says
        assert "seed 0 failed: The training diverged in task" in says
        code, _, err = trgp(*shlex.split(again)[1:], "--quiet")
        assert code == 1
        assert err.strip().removeprefix("trgp: ") in says
    assert unrun.startswith("1 cells of pmnist were not run: There is no file")
    assert last.startswith("Of 5 cells 2 failed and 1 were not run")
    assert len(list(here.rglob("result.json"))) == 2


def test_the_command_of_a_cell_is_that_cell(trgp: Trgp, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("trgp.cli.run.learn", lambda *call: asked.append(call))
    place = Place("cpu", "-my runs", "data")
    for name in ("quirks", "ablation"):
        for cell in cells(SWEEPS[name](), [37]):
            words = shlex.split(typed(cell, place))
            assert trgp(*words[1:]).code == 0, words
            benchmark, running, changes, _ = asked.pop()
            assert benchmark == cell.config.benchmark
            assert changes == cell.changes
            wanted = Running(
                method=cell.config.method_name,
                preset=cell.config.preset,
                seed=37,
                device="cpu",
                out="-my runs",
                data_root="data",
            )
            assert running == wanted


def test_the_file_of_the_page_is_a_sweep(trgp: Trgp, here: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "sweeps.md"
    (content,) = re.findall(r"```toml\n(.*?)```", page.read_text(), flags=re.DOTALL)
    (here / "mine.toml").write_text(content)
    code, out, _ = trgp("sweep", "mine.toml", "--dry-run")
    assert code == 0
    assert out.endswith("35 cells: 0 finished, 35 left\n")  # five seeds of 2 + 2 x 2 + 1


REFUSED = {
    'seeds = "5"': "seeds must be a count, as in 5, or a list",
    "seeds = 0": "seeds must be from 1 to 10000",
    "seeds = [1, 1]": "A seed is given twice",
    'benchmark = ["split-digits"]': "A sweep has no 'benchmark'; did you mean 'benchmarks'?",
    'methods = "gpm"': "methods must be a list of names",
    'methods = ["gpm", "gpm"]': "methods has 'gpm' twice; give each once.",
    'methods = ["gmp"]': "There is no method 'gmp'; did you mean 'gpm'?",
    "methods = []": "There is nothing to combine; list benchmarks and methods.",
    'benchmarks = ["split-digit"]': "There is no benchmark 'split-digit'; did you mean",
    'benchmarks = ["gone.npz"]': "There is no file gone.npz",
    'presets = ["papr"]': "split-digits has no preset 'papr'; did you mean 'paper'?",
    "options = 3": "options must be a table of settings",
    "[options]\nepoch = 3": "There is no setting 'epoch' for gpm on split-digits",
    "[options]\nepochs = []": "epochs has no value",
    "[options]\nepochs = 1.5": "epochs must be a whole number of at least 1, not 1.5.",
    "[options]\nepochs = 2020-01-01": "give a number, a text, or a list of them",
    "[options]\nlr = [0.1, -1]": "lr must be a finite number above 0, not -1.0.",
    "[options]\ntasks = 9": "split-digits has 5 tasks",
    "[options]\npreset = 'paper'": "'preset' is not a setting of gpm",
    "[options]\nthreshold = [0.9, 0.9]": "put a list value in a list, threshold = [[...]].",
    "[options]\nthreshold = [[0.9, 0.9, 0.9]]": "threshold has 3 values for 2 layers",
    "[options.trgp]\nepsilon = 1": "[options.trgp] names none of the methods; known are gpm.",
    "[[cells]]\nbenchmark = 'split-digits'": 'A cell needs a method, as in method = "...".',
    "[[cells]]\nbenchmark = 'pmnist'\nmethod = 'gpm'\npreset = 1": "The preset of a cell must be",
    "[cells]\nbenchmark = 'pmnist'": "cells must be tables, each under [[cells]].",
    "a = " + "[" * 5000: "is not TOML",
    "\x00": "is not TOML",
}


@pytest.mark.parametrize("content", REFUSED)
def test_a_file_that_is_refused(trgp: Trgp, here: Path, content: str) -> None:
    usual = {"benchmarks": '["split-digits"]', "methods": '["gpm"]'}
    given = "".join(f"{k} = {v}\n" for k, v in usual.items() if not content.startswith(k + " "))
    (here / "bad.toml").write_text(given + content)
    code, out, err = trgp("sweep", "bad.toml")
    assert (code, out) == (2, "")
    assert REFUSED[content] in err
    assert [path.name for path in here.iterdir()] == ["bad.toml"]


def test_commands_that_are_refused(trgp: Trgp, here: Path) -> None:
    (here / "small.toml").write_text(SMALL)
    (here / "folder").mkdir()
    for words, says in {
        "": "trgp sweep needs SWEEP",
        "papr": "There is no sweep 'papr'; did you mean 'paper'? One of your own is a TOML file.",
        "gone.toml": "There is no file gone.toml",
        "folder": "folder cannot be read",
        "small.toml --jobs 0": "--jobs must be a whole number of at least 1, not 0.",
        "small.toml --seeds x": "--seeds takes a number of seeds",
        "small.toml --seeds 0": "There is no seed to run",
        "small.toml --device tpu": "There is no device 'tpu'",
        "small.toml --epochs 3": "trgp sweep has no option --epochs",
    }.items():
        code, out, err = trgp("sweep", *words.split())
        assert (code, out) == (2, "")
        assert says in err
    assert sorted(path.name for path in here.iterdir()) == ["folder", "small.toml"]
    for name in SWEEPS:
        assert name in trgp("sweep", "--help").out


@st.composite
def mangled(draw: st.DrawFn) -> str:
    """A file with some of its text replaced by other pieces of such files."""
    text = WHOLE
    words = re.findall(r"\w+|[^\w\s]|\n", WHOLE)
    pieces = st.sampled_from([*words, "-1", "1e400", "nan", "é", ""])
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.integers(0, 12))
        text = text[:start] + draw(pieces) + text[end:]
    return text


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mangled() | st.binary(max_size=20))
def test_any_content_is_a_sweep_or_refused(
    trgp: Trgp, here: Path, monkeypatch: pytest.MonkeyPatch, content: str | bytes
) -> None:
    def nothing(*args: object, **options: object) -> Iterator[Ended]:
        yield from ()

    monkeypatch.setattr("trgp.cli.sweep.carry_out", nothing)
    (here / "any.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    code, _, err = trgp("sweep", "any.toml", "--quiet")
    assert code in (0, 2)
    assert (code == 2) == err.startswith("trgp: ")
    assert [path.name for path in here.iterdir()] == ["any.toml"]


@pytest.fixture
def long(here: Path) -> Iterator["subprocess.Popen[str]"]:
    """A sweep of two processes, one of which has saved something."""
    (here / "long.toml").write_text(LONG)
    command = [*TRGP, "sweep", "long.toml", "--jobs", "2", "--device", "cpu"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    eventually(lambda: list(here.rglob("epoch.safetensors")) and len(workers(process)) == 2)
    yield process
    process.kill()
    process.communicate()


def eventually(holds: Any) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers(process: "subprocess.Popen[str]") -> list[int]:
    """The processes that run cells, not the one that tidies up after them."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return [pid for pid, command in commands.items() if "spawn_main" in command]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids)


def test_ctrl_c_and_the_command_that_goes_on(
    trgp: Trgp, here: Path, long: "subprocess.Popen[str]"
) -> None:
    pids = workers(long)
    assert len(pids) == 2
    os.killpg(long.pid, signal.SIGINT)  # to all of them, as a terminal does
    out, err = long.communicate(timeout=60)
    assert (long.returncode, out) == (130, "")
    says, again = err.split("Resume with: ")
    assert "Traceback" not in says
    assert re.search(r"trgp: Interrupted; \d of 3 cells are finished, and every", says)
    assert gone(pids)
    code, out, err = trgp(*shlex.split(again)[1:])
    assert code == 0
    assert "3/3 finetune on permuted-digits" in err
    assert re.search(r"\) +3 ", out)
    assert len(list(here.rglob("result.json"))) == 3


@pytest.mark.slow
def test_a_worker_that_is_killed_fails_its_cell_alone(
    trgp: Trgp, here: Path, long: "subprocess.Popen[str]"
) -> None:
    os.kill(workers(long)[0], signal.SIGKILL)
    _, err = long.communicate(timeout=120)
    assert long.returncode == 1
    assert "Its process was killed by SIGKILL" in err
    assert "Of 3 cells 1 failed and 0 were not run" in err
    assert len(list(here.rglob("result.json"))) == 2
    (again,) = re.findall("Repeat it with: trgp (.*)", err)
    assert trgp(*shlex.split(again), "--quiet").code == 0
    assert trgp("sweep", "long.toml", "--dry-run").out.endswith("3 finished, 0 left\n")


@pytest.mark.slow
def test_no_worker_outlives_a_sweep_that_is_killed(long: "subprocess.Popen[str]") -> None:
    pids = workers(long)
    long.kill()
    eventually(lambda: gone(pids))


@pytest.mark.slow
def test_a_bar_where_there_is_a_terminal(here: Path) -> None:
    (here / "small.toml").write_text(SMALL.replace("epochs = 1", "epochs = 1\nlr = [0.1, 1e30]"))
    terminal, end = pty.openpty()
    command = [*TRGP, "sweep", "small.toml", "--seeds", "1", "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, text=True)
    os.close(end)
    content = b""
    try:
        while block := os.read(terminal, 1 << 16):
            content += block
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(terminal)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out.startswith("benchmark")
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", content.decode())
    assert re.search(r"[1-3]/4 cells .*1 failed 0:00:\d\d about .* left", shown)
    assert "seed 0: ACC" in shown


def test_now_and_then_the_tasks_are_told_that_runs_in_this_process_have_learnt(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU, where all cells of a company end late."""
    two = [Cell(configure("permuted-digits", "gpm", tasks=3, epochs=1), seed) for seed in (0, 1)]
    place = Place("cpu", here / "runs")
    monkeypatch.setattr("trgp.engine.sweep.resolve", lambda device: torch.device("cuda"))
    learn = sweep.learn
    monkeypatch.setattr(
        sweep,
        "learn",
        lambda asked, device, **options: learn(asked, torch.device("cpu"), **options),
    )
    planned = sweep.plan(two, place)
    for quiet, lines in ((0.0, 6), (1e9, 0)):
        monkeypatch.setattr(sweep_progress, "QUIET", quiet)
        told = sweep_progress.Lines(sweep_progress.Tally(planned))
        ended = list(sweep.carry_out(planned, place, 2, str, told.hear))
        assert all(each.result is not None for each in ended)
        told_of = capsys.readouterr().err.splitlines()
        assert len(told_of) == lines
        if lines:
            assert re.fullmatch(r"0/2 cells, 6 tasks learnt \(.*\)", told_of[-1])
        shutil.rmtree(place.out)
