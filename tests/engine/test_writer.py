"""Checkpoints that are written beside the run, as on a GPU, are as good as those it waits for."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from companies import company
from small_runs import files_limited_to, measured_apart, result_files, run_case, some_tasks

from trgp.engine import checkpoint, writer
from trgp.engine.errors import Interrupted, RunError
from trgp.engine.events import EpochFinished, Event, TaskFinished
from trgp.engine.writer import Writer
from trgp.files import read_tensors

CPU = torch.device("cpu")
LONG = 60  # seconds, after which a test that would wait for ever fails instead


class StopError(Exception):
    """What ends a run from outside."""


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "pays", lambda device: True)


# ---- the writer ------------------------------------------------------------------------------


def test_it_writes_beside_and_one_thing_after_another() -> None:
    gates, done = [threading.Event(), threading.Event()], []
    mine = Writer(CPU)

    def write(k: int) -> None:
        assert gates[k].wait(LONG)
        done.append(k)

    mine.start(lambda: write(0))
    assert mine.busy
    assert not done
    gates[0].set()
    mine.start(lambda: write(1))  # which waits for the first
    assert done == [0]
    gates[1].set()
    mine.wait()
    assert done == [0, 1]
    assert not mine.busy


def test_an_interrupt_while_it_is_waited_for_ends_nothing() -> None:
    gate, done, mine = threading.Event(), [], Writer(CPU)

    def write(k: int) -> None:
        assert gate.wait(LONG)
        done.append(k)

    mine.start(lambda: write(0))
    me = threading.get_ident()
    threading.Timer(0.2, signal.pthread_kill, (me, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        mine.wait()
    assert mine.busy
    gate.set()
    mine.start(lambda: write(1))
    mine.wait()
    assert done == [0, 1]


def test_what_goes_wrong_is_told_once() -> None:
    mine = Writer(CPU)

    def fail() -> None:
        raise RunError("no room")

    mine.start(fail)
    with pytest.raises(RunError, match="no room"):
        mine.wait()
    mine.wait()
    mine.start(fail)
    with pytest.raises(RunError, match="no room"):
        mine.start(lambda: None)
    mine.wait()


def test_where_it_does_not_pay_it_just_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "pays", lambda device: False)
    threads: list[threading.Thread] = []
    mine = Writer(CPU)
    mine.start(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]


# ---- runs ------------------------------------------------------------------------------------


def test_epochs_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file takes until some epochs are over."""
    write, epochs = checkpoint.write_tensors, threading.Semaphore(0)

    def slowly(*given: Any) -> None:
        if not waited:
            waited.append(all(epochs.acquire(timeout=LONG) for _ in range(3)))
        write(*given)

    waited: list[bool] = []
    monkeypatch.setattr(checkpoint, "write_tensors", slowly)

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished):
            epochs.release()

    run_case("gpm", tmp_path, observer=observer)
    assert waited == [True]


@pytest.mark.parametrize("case", ["gpm", "trgp", "literal", "er"])
def test_stopped_after_every_epoch_and_task_it_ends_the_same(case: str, tmp_path: Path) -> None:
    met: set[object] = set()

    def observer(event: Event) -> None:
        place = type(event), getattr(event, "task", None), getattr(event, "epoch", None)
        if isinstance(event, (EpochFinished, TaskFinished)) and place not in met:
            met.add(place)
            raise StopError

    whole = measured_apart(run_case(case, tmp_path / "whole"))
    for _ in range(60):
        try:
            found = run_case(case, tmp_path / "parts", observer=observer)
        except StopError:
            continue
        break
    assert measured_apart(found) == whole
    assert len(met) > 6
    assert not list((tmp_path / "parts").glob("**/*.safetensors"))


def test_what_failed_unseen_before_an_interrupt_is_written_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write goes on until Ctrl-C comes, and then fails."""
    write, gate, failed = checkpoint.write_tensors, threading.Event(), []

    def once(*given: Any) -> None:
        if not failed:
            failed.append(1)
            assert gate.wait(LONG)
            raise OSError("no room for a moment")
        write(*given)

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished) and event.epoch == 3:
            gate.set()
            raise KeyboardInterrupt

    whole = measured_apart(run_case("gpm", tmp_path / "whole"))
    monkeypatch.setattr(checkpoint, "write_tensors", once)
    with pytest.raises(Interrupted, match="every finished epoch is saved"):
        run_case("gpm", tmp_path / "parts", observer=observer)
    (path,) = tmp_path.glob(f"parts/**/{checkpoint.EPOCH}")
    assert read_tensors(path)[0]["schedule"]["epoch"] == 3
    assert measured_apart(run_case("gpm", tmp_path / "parts")) == whole


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("step", ["start", "wait"])
def test_an_interrupt_in_the_midst_of_writing_loses_nothing(
    step: str, after: bool, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each step that the thread of the runs takes for a checkpoint."""
    whole = measured_apart(run_case("gpm", tmp_path / "whole"))
    usual, calls, ended = getattr(Writer, step), [], []

    def interrupted(self: Writer, *given: Any) -> None:
        calls.append(1)
        if len(calls) == 9 and not after:
            raise KeyboardInterrupt
        usual(self, *given)
        if len(calls) == 9:
            raise KeyboardInterrupt

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished):
            ended.append((event.task, event.epoch))

    monkeypatch.setattr(writer, "pays", lambda device: beside)
    monkeypatch.setattr(checkpoint, "SPARE", 0)
    monkeypatch.setattr(Writer, "busy", False)  # so that every epoch waits for its turn to be saved
    monkeypatch.setattr(Writer, step, interrupted)
    with pytest.raises(Interrupted, match="every finished epoch is saved"):
        run_case("gpm", tmp_path / "parts", observer=observer)
    (path,) = tmp_path.glob(f"parts/**/{checkpoint.EPOCH}")
    saved = read_tensors(path)[0]
    assert (saved["task"], saved["schedule"]["epoch"]) >= ended[-1]
    assert measured_apart(run_case("gpm", tmp_path / "parts")) == whole


def test_one_run_that_cannot_be_saved_leaves_the_others_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.write_tensors

    def not_the_first(path: Path, *given: Any) -> None:
        if path.parent.name == "seed-0":
            raise MemoryError("none left")
        write(path, *given)

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished) and event.epoch == 2:
            monkeypatch.setattr(checkpoint, "write_tensors", not_the_first)
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "SPARE", 1e9)  # so that no epoch is saved before
    with pytest.raises(Interrupted, match=r"not all is saved.*none left"):
        company(some_tasks(2), "gpm", tmp_path, threshold=0.9, epochs=4, observer=observer)
    saved = {path.parent.name for path in tmp_path.glob(f"**/{checkpoint.EPOCH}")}
    assert saved == {"seed-1", "seed-2"}


@pytest.mark.parametrize("task", [0, 1])
def test_a_full_disk_is_a_sentence_and_what_was_saved_is_good(task: int, tmp_path: Path) -> None:
    whole = measured_apart(run_case("gpm", tmp_path / "whole"))
    limit = files_limited_to(100)
    entered = []

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished) and event.task == task and not entered:
            limit.__enter__()
            entered.append(1)

    try:
        with pytest.raises(RunError, match=r"could not be written.*free space"):
            run_case("gpm", tmp_path / "full", observer=observer)
    finally:
        limit.__exit__(None, None, None)
    assert not result_files(tmp_path / "full")
    assert not list((tmp_path / "full").glob("**/.*.safetensors.*"))
    assert measured_apart(run_case("gpm", tmp_path / "full")) == whole


def test_what_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write of a task's beginning leaves it, and the epochs after it, to be saved."""
    write, failed = checkpoint.write_tensors, []

    def once(*given: Any) -> None:
        if not failed:
            failed.append(1)
            raise OSError("no room for a moment")
        write(*given)

    whole = measured_apart(run_case("gpm", tmp_path / "whole"))
    monkeypatch.setattr(checkpoint, "write_tensors", once)
    with pytest.raises(RunError, match="no room for a moment"):
        run_case("gpm", tmp_path / "parts")
    files = {path.name for path in (tmp_path / "parts").glob("**/*.safetensors")}
    assert checkpoint.TASK in files
    assert measured_apart(run_case("gpm", tmp_path / "parts")) == whole
