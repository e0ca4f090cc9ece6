"""`trgp run` of several seeds on a CPU: in processes side by side, as if it were one."""

import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import LONG, SMALL, Trgp, scalars, start, wait_for

from trgp.cli import parallel
from trgp.engine.config import defaults
from trgp.engine.events import EpochFinished, Event, RunStarted
from trgp.engine.pool import watched
from trgp.engine.run import run
from trgp.results.store import find, read_result

OWN = """
import os, signal
from torch import nn
from trgp.methods.finetune import Finetune


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


class Moody(Finetune):
    def begin_task(self, ctx):
        worse = 1.0 if ctx.seed == 1 else 1e30
        return {name: p * worse for name, p in ctx.params.items()}, ctx.state


class Broken(Finetune):
    def step(self, *args):
        raise ValueError("a slip")


class Killed(Finetune):
    def begin_task(self, ctx):
        if ctx.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().begin_task(ctx)
"""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 2)


@pytest.fixture
def own(here: Path) -> Iterator[str]:
    """The name of a module of the user's own, which is in the folder."""
    (here / "own_parts.py").write_text(OWN)
    sys.modules.pop("own_parts", None)
    yield "own_parts"
    sys.modules.pop("own_parts", None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes were asked for, each time some were."""
    found: list[int] = []

    def noted(jobs: Any, count: int, *more: Any) -> Any:
        found.append(count)
        return watched(jobs, count, *more)

    monkeypatch.setattr(parallel, "watched", noted)
    return found


def digests(out: str) -> dict[str, str]:
    paths = Path(out).rglob("result.json")
    return {str(path.relative_to(out)): read_result(path).digest for path in paths}


def events_by_seed(log: str) -> dict[int, list[dict[str, Any]]]:
    """Without what no two runs agree in."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in Path(log).read_text().splitlines():
        event = json.loads(line)
        event.pop("seconds", None)
        event.pop("folder", None)
        found.setdefault(event["seed"], []).append(event)
    return found


def apart_from_time(summary: str) -> list[str]:
    """The words of a summary without times, the memory and the folder, which differ."""
    return re.sub(r"[\d.]+ (s|[KMG]iB)\b|Results: .*", "", summary).split()


@pytest.mark.parametrize(
    ("benchmark", "way"), [("permuted-digits", "fork"), ("split-digits", "spawn")]
)
def test_bits_events_and_summary_are_those_of_one_process(
    trgp: Trgp, started: list[int], monkeypatch: pytest.MonkeyPatch, benchmark: str, way: str
) -> None:
    monkeypatch.setattr(parallel, "quickest_start", lambda: way)
    command = ("run", benchmark, "--tasks", "2", "--epochs", "2", "--seeds", "3", "--device", "cpu")
    said: dict[str, list[str]] = {}
    for name, jobs in {"one": ("--jobs", "1"), "two": ()}.items():
        code, out, err = trgp(*command, *jobs, "--out", name, "--log-json", name + ".log")
        assert (code, err) == (0, "")
        said[name] = apart_from_time(out)
    assert started == [2]
    assert len(digests("one")) == 3
    assert digests("one") == digests("two")
    assert events_by_seed("one.log") == events_by_seed("two.log")
    assert said["one"] == said["two"]
    results = find("two", defaults).results[0]
    assert [run.device for run in results] == [
        run.device for run in find("one", defaults).results[0]
    ]
    assert not multiprocessing.active_children()


def test_ones_own_network_and_method(trgp: Trgp, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "quickest_start", lambda: "spawn")  # which imports them again
    command = (*SMALL, "--method", f"{own}:Finetune", "--model", f"{own}:Net", "--seeds", "2")
    assert trgp("run", *command).code == 0
    assert trgp("run", *command, "--jobs", "1", "--out", "one").code == 0
    assert len(digests("one")) == 2
    assert digests("runs") == digests("one")


def test_stored_seeds_are_read_and_one_that_is_left_needs_no_process(
    trgp: Trgp, here: Path, started: list[int]
) -> None:
    for seeds in ("4,2", "0,1,2,3,4", "0,1,2,5"):
        code, out, _ = trgp("run", *SMALL, "--seeds", seeds, "--log-json", "log")
        assert code == 0
        times = {path: path.stat().st_mtime_ns for path in here.rglob("result.json")}
        if seeds == "0,1,2,3,4":
            assert "not repeated without --fresh: seed 2, 4\n" in out
            before = {path: times[path] for path in times if path.parent.name != "seed-5"}
    assert "not repeated without --fresh: seed 0, 1, 2\n" in out
    assert {path: times[path] for path in before} == before
    assert started == [2, 2]
    finished = [e for e in events_by_seed("log")[2] if e["event"] == "run_finished"]
    assert [event["stored"] for event in finished] == [False, True, True]
    code, out, _ = trgp("run", *SMALL, "--seeds", "3", "--fresh")
    assert code == 0
    assert "not repeated" not in out
    assert len(list(here.rglob("result.previous.json"))) == 3


def test_where_there_is_nothing_to_gain_all_is_done_here(
    trgp: Trgp, own: str, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("run", *SMALL, "--method", "finetune", "--seeds", "2")
    assert trgp(*small, "--out", "a", "--jobs", "1").code == 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # as a run of a large network has
    assert trgp(*small, "--out", "b").code == 0
    assert started == []
    assert trgp(*small, "--out", "c", "--jobs", "5").code == 0  # who asks for it gets it
    assert started == [2]


def test_a_seed_that_diverges_leaves_the_others(trgp: Trgp, own: str, started: list[int]) -> None:
    said = []
    for jobs in ("1", "2"):
        command = (*SMALL, "--method", f"{own}:Moody", "--seeds", "3", "--out", jobs)
        code, out, err = trgp("run", *command, "--jobs", jobs)
        assert code == 1
        assert err.startswith("trgp: Seed 0: The training diverged in task 1, epoch 1")
        assert " Seed 2: The training diverged" in err
        said.append((apart_from_time(out), err))
    assert started == [2]
    assert said[0] == said[1]
    assert list(digests("1")) == list(digests("2"))


def test_a_mistake_in_a_users_method_shows_where(here: Path, own: str) -> None:
    process = start("run", *SMALL, "--method", f"{own}:Broken", "--seeds", "2", "--jobs", "2")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("Traceback")
    assert "own_parts.py" in err
    assert err.endswith("ValueError: a slip\n")


@pytest.mark.slow
def test_a_process_that_is_killed(trgp: Trgp, own: str) -> None:
    code, _, err = trgp("run", *SMALL, "--method", f"{own}:Killed", "--seeds", "3", "--jobs", "2")
    assert code == 1
    assert err.startswith("trgp: Seed 1: Its process was killed by SIGKILL; if memory ran out")
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("words", "says"),
    {
        "--jobs 0": "--jobs must be a whole number of at least 1, not 0.",
        "--jobs 2 --together 3": "need a GPU and captured steps; leave `together` out",
        "--jobs 2 --threshold 0.9,0.8": "threshold has 2 values for 3 layers",
        "--jobs 2 --tasks 11": "permuted-digits has 10 tasks",
        "--jobs 2 --model nowhere:Net": "cannot be imported",
        "--jobs 2 --device gpu": "There is no device 'gpu'",
    }.items(),
)
def test_bad_input_is_found_before_anything_starts(
    trgp: Trgp, here: Path, started: list[int], words: str, says: str
) -> None:
    code, out, err = trgp("run", "permuted-digits", "--seeds", "3", *words.split())
    assert (code, out) == (2, "")
    assert says in err
    assert started == []
    assert not list(here.iterdir())


def test_a_log_that_cannot_be_written_ends_all(trgp: Trgp) -> None:
    code, _, err = trgp("run", *SMALL, "--seeds", "2", "--log-json", "/dev/full")
    assert code == 1
    assert "--log-json /dev/full could not be written" in err
    assert not multiprocessing.active_children()


def test_the_curves_of_every_seed_are_its_own(trgp: Trgp, here: Path) -> None:
    assert trgp("run", *SMALL, "--seeds", "2", "--tensorboard").code == 0
    folders = sorted(here.rglob("tensorboard"))
    assert len(folders) == 2
    for folder in folders:
        result = read_result(folder.parent / "result.json")
        assert scalars(folder)["acc"] == [(1, pytest.approx(result.acc))]


@pytest.mark.slow
def test_ctrl_c_and_the_command_that_goes_on(here: Path) -> None:
    """Nothing that was finished is done again."""
    command = (*LONG, "--seeds", "2", "--jobs", "2", "--device", "cpu", "--log-json", "log")
    process = start(*command, "--fresh", start_new_session=True)
    for seed in range(2):
        wait_for(here / "log", f'"epoch_finished", "seed": {seed}')
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(pids) >= 2
    os.killpg(process.pid, signal.SIGINT)  # to all of them, as a terminal does
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids)
    says, again = err.strip().split("Resume with: ")
    assert says.startswith("trgp: Interrupted; every finished epoch is saved in runs/")
    assert "Traceback" not in says
    assert shlex.split(again) == ["trgp", *command]
    out, err = start(*shlex.split(again)[1:]).communicate(timeout=120)
    assert "ACC" in out
    for seed, events in events_by_seed("log").items():
        first, second = (event for event in events if event["event"] == "run_started")
        assert first["done_epochs"] == 0
        assert second["done_tasks"] or second["done_epochs"], seed
        epochs = [(e["task"], e["epoch"]) for e in events if e["event"] == "epoch_finished"]
        assert epochs == [(task, epoch) for task in range(2) for epoch in range(1, 41)]


@pytest.mark.slow
def test_a_process_that_is_ended_saves_what_is_finished(tmp_path: Path) -> None:
    """Though not every epoch is written when it is finished, which would take too long."""
    job: dict[str, Any] = {
        "benchmark": "permuted-digits",
        "method": "finetune",
        "device": "cpu",
        "out": tmp_path,
        "seeds": [0],
        "epochs": 10**6,
    }
    seen: list[Event] = []

    def pressed_once(event: Event) -> None:
        seen.append(event)
        if len(seen) == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(watched([job], 1, pressed_once, "fork"))
    assert not multiprocessing.active_children()
    last = seen[-1]
    assert isinstance(last, EpochFinished)

    def stop(event: Event) -> None:
        assert isinstance(event, RunStarted)
        assert (event.done_tasks, event.done_epochs) == (0, last.epoch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(**job, observer=stop)
