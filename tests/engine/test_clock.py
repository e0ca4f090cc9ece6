"""What runs count of their time: every phase, nothing twice, and the rest is nobody's."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from companies import CPU, company, one_head
from small_runs import Conv, Make, run_case, some_tasks

from trgp.engine import checkpoint, clock
from trgp.engine.clock import Clock, Spent
from trgp.engine.errors import Interrupted
from trgp.engine.evaluate import Evaluation
from trgp.engine.events import EpochFinished, Event, RunStarted, TaskFinished
from trgp.files import read_tensors
from trgp.results.phases import PHASES


class Time:
    """What a clock reads, which passes only when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def passes(self, seconds: float) -> None:
        self.now += seconds


def epoch(clock: Clock, spent: Spent) -> Iterator[None]:
    """A run's, which pauses after its steps, after its validation and when it is over."""
    with clock.shared(spent, "training"):
        yield
        with clock.validation():
            yield
        yield
    yield


def test_a_run_of_its_own_counts_all_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passing, clock, spent = Time(monkeypatch), Clock(CPU), Spent()
    for _ in range(2):  # clocks are added to
        with clock.alone(spent, "bases"):
            passing.passes(2)
        run = epoch(clock, spent)
        for seconds in (5, 3, 1):  # steps, validation, reading what came of it
            next(run)
            passing.passes(seconds)
        next(run)
    assert spent == {"bases": 4, "training": 12, "validation": 6}


def test_runs_that_take_turns_share_the_time_of_their_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each validates for 3 seconds, while the others wait: 3 of every run's share are of that."""
    passing, clock = Time(monkeypatch), Clock(CPU)
    counted = [Spent() for _ in range(3)]
    clock.among(3)
    runs = [epoch(clock, spent) for spent in counted]
    for run in runs:
        next(run)
    passing.passes(12)
    for run in runs:
        next(run)
        passing.passes(3)
        next(run)
    for run in runs:
        next(run)
    assert counted == [{"training": 4, "validation": 3}] * 3


def test_what_others_wait_for_is_counted_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    passing, clock = Time(monkeypatch), Clock(CPU)
    waiting, working = Spent(), Spent()
    clock.among(2)
    run = epoch(clock, waiting)
    next(run)
    passing.passes(4)
    with clock.alone(working, "checkpoints"):
        passing.passes(10)
    next(run)
    passing.passes(2)
    next(run)
    with clock.alone(working, "bases"):
        passing.passes(20)
    next(run)
    assert working == {"checkpoints": 10, "bases": 20}
    assert waiting == {"training": 2, "validation": 1}


def test_a_run_that_ends_leaves_its_share_of_what_comes_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passing, clock = Time(monkeypatch), Clock(CPU)
    counted = [Spent(), Spent()]
    clock.among(2)
    first, second = (epoch(clock, spent) for spent in counted)
    next(first)
    next(second)
    passing.passes(10)
    for _ in range(3):
        next(first)
    clock.among(1)
    passing.passes(1)
    for _ in range(3):
        next(second)
    assert counted == [{"training": 5, "validation": 0}, {"training": 6, "validation": 0}]


def test_validation_that_went_on_while_another_worked_takes_no_more_than_there_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, which validates while another run has the thread."""
    passing, clock, spent = Time(monkeypatch), Clock(CPU), Spent()
    run = epoch(clock, spent)
    next(run)
    passing.passes(1)
    next(run)
    passing.passes(2)
    with clock.alone(Spent(), "bases"):
        passing.passes(10)
    next(run)
    next(run)
    assert spent == {"training": 0, "validation": 3}


# ---- whole runs ------------------------------------------------------------------------------


def everything(seconds: list[dict[str, float]]) -> float:
    return sum(sum(task.values()) for task in seconds)


@pytest.mark.parametrize("case", ["trgp", "multitask"])
def test_the_phases_of_a_run_are_most_of_its_time_and_no_more(case: str, tmp_path: Path) -> None:
    seen: dict[type[Event], float] = {}

    def observer(event: Event) -> None:
        seen[type(event)] = time.perf_counter()

    result = run_case(case, tmp_path, observer=observer)
    passed = seen[TaskFinished] - seen[RunStarted]  # of the last: reading and storing are apart
    for task in result.seconds:
        assert {*task} == {*PHASES}
        assert all(spent >= 0 for spent in task.values())
        assert task["validation"] > 0
        assert task["checkpoints"] > 0
    assert passed / 2 < everything(result.seconds) <= passed


def test_validation_and_checkpoints_are_told_apart_from_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever takes time is found in its own phase, epoch by epoch."""
    passing = Time(monkeypatch)
    evaluated, written = Evaluation.__call__, checkpoint.write_tensors

    def evaluate(self: Evaluation, *given: Any) -> Any:
        passing.passes(5 if "valid" in given else 0)
        return evaluated(self, *given)

    def write(*given: Any) -> None:
        passing.passes(2)
        written(*given)

    monkeypatch.setattr(Evaluation, "__call__", evaluate)
    monkeypatch.setattr(checkpoint, "write_tensors", write)
    monkeypatch.setattr(checkpoint, "SPARE", 0)
    result = run_case("gpm", tmp_path, epochs=3, patience=0)
    for task in result.seconds:
        assert {phase: seconds for phase, seconds in task.items() if seconds} == {
            "validation": 3 * 5,
            "checkpoints": 4 * 2,
        }


@pytest.mark.parametrize("make", [one_head, Conv], ids=["stacked", "side by side"])
def test_what_a_company_waits_for_is_counted_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing, written = Time(monkeypatch), checkpoint.write_tensors

    def write(*given: Any) -> None:
        passing.passes(1)
        written(*given)

    monkeypatch.setattr(checkpoint, "write_tensors", write)
    monkeypatch.setattr(checkpoint, "SPARE", 0)
    tasks = some_tasks(2, 4, 4, 4) if make is Conv else some_tasks(2)
    results = company(tasks, "gpm", tmp_path, make, threshold=0.9, epochs=4)
    seconds = [run.seconds for run in results.values()]
    assert passing.now == 3 * 2 * 5
    assert sum(map(everything, seconds)) == passing.now
    assert sum(task["checkpoints"] for tasks in seconds for task in tasks) == passing.now


@pytest.mark.parametrize("make", [one_head, Conv], ids=["stacked", "side by side"])
def test_evaluation_is_shared_where_it_takes_turns(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side the first run evaluates while the others train, in a stack while they wait."""
    passing, evaluated = Time(monkeypatch), Evaluation.__call__

    def evaluate(self: Evaluation, *given: Any) -> Any:
        passing.passes(6 if "test" in given else 0)
        return evaluated(self, *given)

    monkeypatch.setattr(Evaluation, "__call__", evaluate)
    tasks = some_tasks(1, 4, 4, 4) if make is Conv else some_tasks(1)
    results = company(tasks, "gpm", tmp_path, make, threshold=0.9)
    counted = [task["evaluation"] for run in results.values() for task in run.seconds]
    assert passing.now == 3 * 6
    # Of what one evaluates by itself the others' share is training, until they evaluate too.
    assert counted == ([2 + 2 + 2, 2 + 2, 2] if make is Conv else [6, 6, 6])


def test_a_run_that_goes_on_adds_to_its_clocks(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, EpochFinished) and (event.task, event.epoch) == (1, 2):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run_case("trgp", tmp_path, observer=stop)
    (path,) = tmp_path.glob(f"**/{checkpoint.EPOCH}")
    begun = read_tensors(path)[0]["record"]["seconds"]
    ended = run_case("trgp", tmp_path).seconds
    assert ended[0] == begun[0]
    assert {"training", "validation", "checkpoints"} <= {*begun[1]}
    for phase in ("training", "validation", "checkpoints"):
        assert ended[1][phase] > begun[1][phase] > 0
