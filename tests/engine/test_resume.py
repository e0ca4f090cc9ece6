"""A run killed at any moment goes on to the same bits."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from companies import LITERAL, STACKABLE, company, digests, network_for, one_head
from helpers import mlp
from safetensors.torch import save_file
from small_runs import (
    CASES,
    CLASSES,
    Conv,
    Make,
    files_limited_to,
    in_a_new_process,
    measured_apart,
    result_files,
    run,
    run_case,
    some_tasks,
)
from torch import Tensor

import trgp
from trgp.engine import checkpoint
from trgp.engine.errors import InputError, Interrupted, RunError
from trgp.engine.events import (
    EpochFinished,
    Event,
    Observer,
    RunFinished,
    RunStarted,
    TaskFinished,
    nobody,
)
from trgp.engine.position import Record
from trgp.files import checksum, read_tensors, write_tensors
from trgp.methods import Method
from trgp.methods.finetune import Finetune
from trgp.results import store
from trgp.results.result import Result


class StopError(Exception):
    """What ends a run from outside."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The uninterrupted run of a case, made once."""
    found: dict[str, Result] = {}

    def make(case: str) -> Result:
        if case not in found:
            found[case] = run_case(case, tmp_path_factory.mktemp(case))
        return found[case]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("cases", [list(CASES)[k::4] for k in range(4)], ids=" ".join)
def test_killed_at_random_moments_it_ends_the_same(
    cases: list[str], whole: Callable[[str], Result], tmp_path: Path
) -> None:
    """Also the same as in this process, whose hashes of texts are others."""
    program = str(Path(__file__).with_name("killing.py"))
    done = in_a_new_process(program, str(tmp_path), "4", *cases)
    assert done.returncode == 0, done.stderr
    for case, line in zip(cases, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"{case} ")
        assert int(line.split()[-1]) > 0
        for part in ("whole", "killed"):
            (found,) = result_files(tmp_path / case / part)
            assert measured_apart(store.read_result(found)) == measured_apart(whole(case)), part


@pytest.mark.parametrize("case", CASES)
def test_the_cases_restore_weights_that_are_not_the_last(
    case: str, whole: Callable[[str], Result]
) -> None:
    """Else the tests of this file would not see whether they are kept."""
    losses = [curve["valid_loss"] for curve in whole(case).curves]
    assert any(min(task) < task[-1] for task in losses)
    if case in ("trgp", "literal"):
        assert whole(case).selected[2]
        assert whole(case).form == {"trgp": "native", "literal": "literal"}[case]


@pytest.mark.parametrize("case", CASES)
def test_stopped_after_every_event_it_ends_the_same(
    case: str, whole: Callable[[str], Result], tmp_path: Path
) -> None:
    """The first time an event happens it ends the run, which goes on in the next attempt."""
    met: set[object] = set()
    started: list[tuple[int, int]] = []

    def observer(event: Event) -> None:
        if isinstance(event, RunStarted):
            started.append((event.done_tasks, event.done_epochs))
        place = getattr(event, "task", None), getattr(event, "epoch", None)
        if (type(event), place) not in met:
            met.add((type(event), place))
            raise StopError

    result = None
    for _ in range(60):
        with suppress(StopError):
            result = run_case(case, tmp_path, observer=observer)
            break
    assert result is not None
    assert measured_apart(result) == measured_apart(whole(case))
    kinds = {kind for kind, _ in met}  # type: ignore[misc]
    assert kinds == {RunStarted, EpochFinished, TaskFinished, RunFinished}
    assert started == sorted(started)
    assert started[-1][0] == len(result.curves) - 1
    epochs = sum(len(curve["loss"]) for curve in result.curves)
    assert len([1 for kind, _ in met if kind is EpochFinished]) == epochs  # type: ignore[misc]


@pytest.mark.parametrize("method", ["finetune", "gpm", "trgp"])
def test_every_bit_is_the_same_also_in_wide_layers(method: str, tmp_path: Path) -> None:
    """There the last bits of a product depend on how its factors lie in memory."""
    met: set[tuple[int, int]] = set()

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished) and (event.task, event.epoch) not in met:
            met.add((event.task, event.epoch))
            raise StopError

    def go(out: str, **options: Any) -> Result:
        return run(
            some_tasks(3, 100, rank=20),
            method,
            tmp_path / out,
            lambda: mlp(100, 200, 150, CLASSES),
            **({"epsilon": 0.0} if method == "trgp" else {}),
            **options,
        )

    whole = go("whole")
    for _ in range(6):
        with pytest.raises(StopError):
            go("parts", observer=observer)
    assert measured_apart(go("parts", observer=observer)) == measured_apart(whole)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("case", CASES)
def test_stopped_at_every_write_it_ends_the_same(
    case: str,
    when: str,
    whole: Callable[[str], Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Ctrl-C, right before or right after a file takes its place; an attempt writes one."""
    expected = whole(case)  # before anything is stopped
    monkeypatch.setattr(checkpoint, "SPARE", 0)  # every epoch is written
    replace = os.replace
    writes = [0]

    def stopping(source: Any, target: Any) -> None:
        if writes[0] == 1 and when == "before":
            raise KeyboardInterrupt
        replace(source, target)
        writes[0] += 1
        if when == "after":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopping)
    attempts = 0
    result = None
    while result is None and attempts < 60:
        attempts += 1
        writes[0] = 0
        with suppress(KeyboardInterrupt):
            result = run_case(case, tmp_path)
    assert result is not None
    epochs = sum(len(curve["loss"]) for curve in result.curves)
    assert attempts == epochs + len(result.curves) + (2 if when == "after" else 1)
    assert measured_apart(result) == measured_apart(expected)


@pytest.mark.parametrize("count", [1, 3, 6, 23])
def test_ctrl_c_says_what_is_saved_and_loses_one_epoch_at_most(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody types it in the middle of an epoch."""
    run = partial(run_case, "finetune", engine="eager")  # where every step is called
    expected = run(tmp_path / "whole")
    left = [count]

    def step(self: Method, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return Method.step(self, *arguments)

    monkeypatch.setattr(Finetune, "step", step)
    seen: list[Event] = []
    with pytest.raises(Interrupted, match="every finished epoch is saved in") as caught:
        run(tmp_path / "parts", observer=seen.append)
    folder = Path(str(caught.value).partition(" saved in ")[2].removesuffix("."))
    assert (folder / "task.safetensors").is_file()
    epochs = [event for event in seen if isinstance(event, EpochFinished)]
    again: list[Event] = []
    result = run(tmp_path / "parts", observer=again.append)
    assert measured_apart(result) == measured_apart(expected)
    begun = again[0]
    assert isinstance(begun, RunStarted)
    later = [event for event in again if isinstance(event, EpochFinished)]
    assert [(e.task, e.epoch) for e in epochs + later] == [
        (t, k + 1) for t, curve in enumerate(result.curves) for k in range(len(curve["loss"]))
    ]
    assert (begun.done_tasks, begun.done_epochs) == (later[0].task, later[0].epoch - 1)


# ---- several runs at once --------------------------------------------------------------------

# Three that are stacked, one of them with a first epoch that counts, and two side by side. In two
# of the stacks some end a task before others, which then go on without them.
EARLY = {"lr_min": 0.2}
TOGETHER: dict[str, tuple[str, Make, tuple[int, ...], dict[str, Any]]] = {
    "trgp": ("trgp", one_head, (8,), {**STACKABLE["trgp"], **EARLY}),
    "er": ("er", one_head, (8,), {**STACKABLE["er"], **EARLY}),
    "hat": ("hat", network_for("hat"), (8,), STACKABLE["hat"]),
    "agem": ("agem", one_head, (8,), {"memory_size": 20}),
    "convolutions": ("gpm", Conv, (4, 4, 4), {}),
}


def run_together(case: str, out: Path, seeds: Any = (0, 1, 2), **options: Any) -> dict[int, Result]:
    method, make, shape, settings = TOGETHER[case]
    usual = {"epochs": 3, "patience": 1, "lr": 0.3, "lr_min": 0.1, **settings}
    return company(some_tasks(2, *shape), method, out, make, seeds, **(usual | options))


@pytest.fixture(scope="module")
def whole_together(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[int, str]]:
    """The digests of an uninterrupted company, made once."""
    found: dict[str, dict[int, Result]] = {}

    def make(case: str) -> dict[int, str]:
        if case not in found:
            found[case] = run_together(case, tmp_path_factory.mktemp(case))
            curves = [curve["valid_loss"] for run in found[case].values() for curve in run.curves]
            assert any(min(losses) < losses[-1] for losses in curves)
            if TOGETHER[case][3].items() >= EARLY.items():
                assert len({tuple(map(len, curves[k : k + 2])) for k in (0, 2, 4)}) > 1
        return digests(found[case])

    return make


def begun_at(events: list[Event]) -> dict[int, tuple[int, int]]:
    """By seed the tasks and epochs that were done when it went on."""
    started = [event for event in events if isinstance(event, RunStarted)]
    return {event.seed: (event.done_tasks, event.done_epochs) for event in started}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stop"),
    [(case, (KeyboardInterrupt, StopError)[k % 2]) for k, case in enumerate(TOGETHER)],
)
def test_a_company_stopped_after_every_event_ends_the_same(
    case: str,
    stop: type[BaseException],
    whole_together: Callable[[str], dict[int, str]],
    tmp_path: Path,
) -> None:
    """The first time an event happens it ends the company, whose runs are then apart."""
    met: set[object] = set()
    places: list[set[tuple[int, int]]] = []

    def observer(event: Event) -> None:
        place = getattr(event, "task", None), getattr(event, "epoch", None)
        if (type(event), event.seed, place) not in met:
            met.add((type(event), event.seed, place))
            raise stop

    found = None
    for _ in range(90):
        seen: list[Event] = []

        def watch(event: Event, seen: list[Event] = seen) -> None:
            seen.append(event)
            observer(event)

        with suppress(stop):
            found = digests(run_together(case, tmp_path, observer=watch))
        places.append(set(begun_at(seen).values()))
        if found is not None:
            break
    assert found == whole_together(case)
    assert any(len(each) > 1 for each in places)
    assert {kind for kind, *_ in met} == {RunStarted, EpochFinished, TaskFinished, RunFinished}  # type: ignore[misc, has-type]


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, 1e9])
@pytest.mark.parametrize("case", TOGETHER)
def test_a_company_killed_at_any_moment_ends_the_same(
    case: str,
    spare: float,
    whole_together: Callable[[str], dict[int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who is killed leaves what lies on the disk: every epoch, or nearly nothing."""
    expected = whole_together(case)
    monkeypatch.setattr(checkpoint, "SPARE", spare)
    copies: list[Path] = []
    moments = [(0, 1, 0), (0, 2, 1), (1, 1, 0), (1, 2, 1)]

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished) and (event.task, event.epoch, event.seed) in moments:
            copies.append(tmp_path / f"killed {len(copies)}")
            shutil.copytree(tmp_path / "whole", copies[-1])

    assert digests(run_together(case, tmp_path / "whole", observer=observer)) == expected
    assert len(copies) == len(moments)
    begun = []
    for copy in copies:
        seen: list[Event] = []
        assert digests(run_together(case, copy, observer=seen.append)) == expected
        begun.append(begun_at(seen))
    assert spare or any(len(set(each.values())) > 1 for each in begun)


@pytest.mark.slow
@pytest.mark.parametrize("way", LITERAL)
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_stack_in_the_literal_form_goes_on_to_the_bit(
    way: str, epoch: int, tmp_path: Path
) -> None:
    """Within a task whose scalings a stack holds in another form than a checkpoint."""
    options: dict[str, Any] = {**STACKABLE["trgp"], **LITERAL[way], "epochs": 3}

    def go(out: str, observer: Observer = nobody) -> dict[int, Result]:
        return company(some_tasks(3), "trgp", tmp_path / out, observer=observer, **options)

    def stop(event: Event) -> None:
        if isinstance(event, EpochFinished) and (event.task, event.epoch) == (2, epoch):
            raise KeyboardInterrupt

    expected = go("whole")
    assert all(result.selected[2] for result in expected.values())
    with pytest.raises(Interrupted):
        go("parts", stop)
    seen: list[Event] = []
    assert digests(go("parts", seen.append)) == digests(expected)
    assert (2, epoch) in begun_at(seen).values()


@pytest.mark.parametrize("lost", [[0], [1], [0, 2]])
@pytest.mark.parametrize("case", TOGETHER)
def test_runs_that_were_saved_at_other_epochs_go_on_together(
    case: str,
    lost: list[int],
    whole_together: Callable[[str], dict[int, str]],
    tmp_path: Path,
) -> None:
    """Some begin the task again, which others have begun to learn."""
    expected = whole_together(case)

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished) and (event.task, event.epoch) == (1, 2):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="every finished epoch is saved in"):
        run_together(case, tmp_path, observer=observer)
    for seed in lost:
        (path,) = tmp_path.glob(f"**/seed-{seed}/epoch.safetensors")
        path.unlink()
    seen: list[Event] = []
    assert digests(run_together(case, tmp_path, observer=seen.append)) == expected
    begun = begun_at(seen)
    for seed in range(3):
        assert (begun[seed] == (1, 0)) == (seed in lost)


@pytest.mark.parametrize("case", ["trgp", "er"])
def test_a_stack_of_another_width_is_refused(case: str, tmp_path: Path) -> None:
    """It would not come to the same bits; nothing of what was learnt is lost by it."""

    def stop(event: Event) -> None:
        if isinstance(event, EpochFinished) and event.task == 1:
            raise KeyboardInterrupt

    def go(*seeds: int, **options: Any) -> dict[int, str]:
        return digests(run_together(case, tmp_path / "parts", seeds, **options))

    with pytest.raises(Interrupted):
        go(0, 1, 2, observer=stop)
    before = {path: path.read_bytes() for path in tmp_path.glob("**/*.safetensors")}
    assert len(before) >= 3
    sentence = r"another run \(engine 'stacked, {} of 3' there, '{}' here\); give the command"
    for seeds, options, place, engine in (
        ([0, 1], {}, 1, "stacked, 1 of 2"),
        ([3, 0, 1, 2], {}, 1, "stacked, 2 of 4"),
        ([2, 1, 0], {}, 3, "stacked, 1 of 3"),
        ([1], {}, 2, "captured"),
        ([1], {"captured": False}, 2, "eager"),
    ):
        with pytest.raises(RunError, match=sentence.format(place, engine)):
            go(*seeds, **options)
    assert {path: path.read_bytes() for path in before} == before
    assert go(0, 1, 2) == digests(run_together(case, tmp_path / "whole"))


def test_a_run_of_its_own_goes_on_in_any_company(tmp_path: Path) -> None:
    """Alone or among others it comes to the same bits."""

    def stop(event: Event) -> None:
        if isinstance(event, EpochFinished) and event.task == 1:
            raise KeyboardInterrupt

    expected = digests(run_together("convolutions", tmp_path / "whole"))
    with pytest.raises(Interrupted):
        run_together("convolutions", tmp_path / "parts", observer=stop)
    seen: list[Event] = []
    for seeds in ([1], [0, 1, 2]):
        found = digests(
            run_together("convolutions", tmp_path / "parts", seeds, observer=seen.append)
        )
        assert found == {seed: expected[seed] for seed in seeds}
    assert all(done[0] == 1 for done in begun_at(seen).values())


def test_a_damaged_checkpoint_of_one_leaves_the_others_whole(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, EpochFinished) and (event.task, event.seed) == (1, 2):
            raise KeyboardInterrupt

    expected = digests(run_together("trgp", tmp_path / "whole"))
    with pytest.raises(Interrupted):
        run_together("trgp", tmp_path / "parts", observer=stop)
    (damaged,) = tmp_path.glob("parts/**/seed-1/epoch.safetensors")
    content = damaged.read_bytes()
    damaged.write_bytes(b"")
    with pytest.raises(RunError, match=r"The checkpoint .*seed-1.* is damaged: .* give --fresh"):
        run_together("trgp", tmp_path / "parts")
    damaged.write_bytes(content)
    assert digests(run_together("trgp", tmp_path / "parts")) == expected


# ---- how often is saved ----------------------------------------------------------------------


class Clock:
    """Time that passes when an epoch is trained and when a checkpoint is written, and only then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, epoch: float, write: float) -> None:
        self.now = 100.0
        self.written: list[tuple[str, int]] = []  # the file, and the epochs that it holds
        self.spent = 0.0
        self._epoch = epoch

        def slow(path: Path, tensors: Any, meta: Any) -> None:
            write_tensors(path, tensors, meta)
            self.now += write
            self.spent += write
            self.written.append((path.name, meta["schedule"]["epoch"]))

        monkeypatch.setattr(checkpoint, "write_tensors", slow)
        monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: self.now))

    def observer(self, event: Event) -> None:
        if isinstance(event, EpochFinished):
            self.now += self._epoch

    def assert_shared(self, ends: int) -> None:
        """A fortieth was for writing, but for so many writes at the beginning and the end."""
        write, passed = self.spent / len(self.written), self.now - 100.0
        assert self.spent - ends * write <= passed / 40
        assert self.spent + ends * write >= passed / 50

    @property
    def epochs(self) -> list[int]:
        return [epoch for name, epoch in self.written if name == checkpoint.EPOCH]


def forty_epochs(out: Path, **settings: Any) -> Result:
    return run(some_tasks(1), "finetune", out, lambda: mlp(8, 4, CLASSES), epochs=40, **settings)


@pytest.mark.parametrize(("epoch", "write"), [(1.0, 1.0), (1.0, 0.25), (0.01, 2.0)])
def test_saving_takes_a_fortieth_of_the_time(
    epoch: float, write: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, epoch, write)
    forty_epochs(tmp_path, observer=clock.observer)
    assert clock.written[0] == (checkpoint.TASK, 0)  # nobody knows yet how long it takes
    assert clock.epochs[-1] == 40  # before the result
    assert len(clock.epochs) < 40
    clock.assert_shared(2)


@pytest.mark.parametrize("case", ["trgp", "agem"])
def test_saving_takes_a_fortieth_of_the_time_of_all_together(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs at the same time share what there is for writing."""
    clock = Clock(monkeypatch, 1.0, 0.2)
    run_together(case, tmp_path, observer=clock.observer, epochs=80, patience=0)
    clock.assert_shared(2 * 3 + 2)


@pytest.mark.parametrize(("spare", "write"), [(0, 5.0), (19, 0.0)])
def test_every_epoch_is_saved_where_that_costs_nothing(
    spare: int, write: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SPARE", spare)
    clock = Clock(monkeypatch, 1.0, write)
    forty_epochs(tmp_path, observer=clock.observer)
    assert clock.epochs == list(range(1, 41))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, StopError])
@pytest.mark.parametrize("last", [1, 7, 39])
def test_whoever_is_interrupted_saves_the_last_epoch(
    last: int, stop: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = forty_epochs(tmp_path / "whole")
    clock = Clock(monkeypatch, 1.0, 10.0)

    def observer(event: Event) -> None:
        clock.observer(event)
        if isinstance(event, EpochFinished) and event.epoch == last:
            raise stop

    with pytest.raises(stop):
        forty_epochs(tmp_path / "parts", observer=observer)
    assert clock.epochs == [last]
    seen: list[Event] = []
    found = forty_epochs(tmp_path / "parts", observer=seen.append)
    assert begun_at(seen) == {0: (0, last)}
    assert measured_apart(found) == measured_apart(expected)


def test_an_interruption_while_a_task_begins_loses_no_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next task's file is about to be written, and the last epoch is not."""
    write, left = checkpoint.write_tensors, [1]
    monkeypatch.setattr(checkpoint, "SPARE", 1e9)

    def stopped(path: Path, tensors: Any, meta: Any) -> None:
        if (path.name, meta["task"]) == (checkpoint.TASK, 1) and left:
            left.clear()
            raise KeyboardInterrupt
        write(path, tensors, meta)

    def hurry(event: Event) -> None:
        if isinstance(event, TaskFinished):
            monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: 1e99))

    whole = run_case("gpm", tmp_path / "whole")
    monkeypatch.setattr(checkpoint, "write_tensors", stopped)
    with pytest.raises(Interrupted):
        run_case("gpm", tmp_path / "parts", observer=hurry)
    monkeypatch.setattr(checkpoint, "write_tensors", write)
    seen: list[Event] = []
    found = run_case("gpm", tmp_path / "parts", observer=seen.append)
    assert begun_at(seen) == {0: (1, 0)}
    assert measured_apart(found) == measured_apart(whole)


# ---- one process at a time -------------------------------------------------------------------


def test_a_second_process_is_refused_and_the_first_undisturbed(
    whole: Callable[[str], Result], tmp_path: Path
) -> None:
    program = (
        "import sys; from pathlib import Path; from small_runs import run_case; "
        "import trgp.engine.errors as e\n"
        "try: run_case('finetune', Path(sys.argv[1]))\n"
        "except e.RunError as error: print(error)"
    )
    others: list[subprocess.CompletedProcess[str]] = []
    nested: list[str] = []

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished) and not others:
            others.append(in_a_new_process("-c", program, str(tmp_path)))
            with pytest.raises(RunError) as caught:
                run_case("finetune", tmp_path)
            nested.append(str(caught.value))

    result = run_case("finetune", tmp_path, observer=observer)
    assert measured_apart(result) == measured_apart(whole("finetune"))
    assert others[0].returncode == 0, others[0].stderr
    for sentence in (others[0].stdout, nested[0]):
        assert "Another process is working in" in sentence
        assert "give another --out." in sentence


def test_checkpoints_left_beside_a_result_are_swept_up(tmp_path: Path) -> None:
    """As they lie there when a run is killed right after its result was written."""
    folder = half_done(tmp_path)
    left = {name: (folder / name).read_bytes() for name in FILES}
    run_case("finetune", tmp_path)
    assert {path.name for path in folder.iterdir()} == {"lock", "result.json"}
    for name, content in left.items():
        (folder / name).write_bytes(content)
    run_case("finetune", tmp_path)
    assert {path.name for path in folder.iterdir()} == {"lock", "result.json"}


def test_drafts_of_a_killed_writer_are_swept_up(tmp_path: Path) -> None:
    folder = half_done(tmp_path)
    for name in ("task.safetensors", "epoch.safetensors", "result.json"):
        (folder / f".{name}.0123456789abcdef").write_bytes(b"half")
    run_case("finetune", tmp_path)
    assert {path.name for path in folder.iterdir()} == {"lock", "result.json"}


# ---- what cannot be gone on from -------------------------------------------------------------


def half_done(out: Path, case: str = "finetune", **settings: Any) -> Path:
    """The folder of a run that stopped in the middle of its second task."""

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished) and (event.task, event.epoch) == (1, 2):
            raise StopError

    with pytest.raises(StopError):
        run_case(case, out, observer=observer, **settings)
    (found,) = out.glob("**/epoch.safetensors")
    return found.parent


FILES = ("task.safetensors", "epoch.safetensors")
MISSING = object()


def deep(kind: type) -> Any:
    """Lists or dictionaries in each other, more than Python would follow."""
    return json.loads("[" * 500 + "]" * 500 if kind is list else '{"a":' * 500 + "1" + "}" * 500)


def with_a_checksum(path: Path, tensors: dict[str, Tensor], text: str) -> None:
    """Write a file of tensors with any text as its metadata."""
    save_file(tensors, path, metadata={"trgp": text, "sha256": checksum(text, tensors)})


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_a_sentence_and_fresh_recovers(
    name: str, whole: Callable[[str], Result], tmp_path: Path
) -> None:
    folder = half_done(tmp_path)
    content = (folder / name).read_bytes()
    damaged = [content[: int(share * len(content))] for share in (0, 0.001, 0.5, 0.999)]
    damaged += [content + b"!", b"not a checkpoint" * 99]
    for place in range(9, len(content), len(content) // 20):
        flipped = bytearray(content)
        flipped[place] ^= 4
        damaged.append(bytes(flipped))
    for bad in damaged:
        (folder / name).write_bytes(bad)
        with pytest.raises(RunError, match=r"The checkpoint .* is damaged: .* give --fresh"):
            run_case("finetune", tmp_path)
        assert (folder / name).read_bytes() == bad
    result = run_case("finetune", tmp_path, fresh=True)
    assert measured_apart(result) == measured_apart(whole("finetune"))


def test_a_damaged_seed_leaves_the_others_alone(tmp_path: Path) -> None:
    first = run_case("finetune", tmp_path, seeds=[0])
    (kept,) = result_files(tmp_path)
    before = kept.read_bytes()
    folder = half_done(tmp_path, seeds=[1])
    (folder / "epoch.safetensors").write_bytes(b"")
    seen: list[Event] = []
    with pytest.raises(RunError, match="seed-1"):
        run_case("finetune", tmp_path, seeds=[0, 1], observer=seen.append)
    assert seen == [RunFinished(0, first.acc, first.bwt, stored=True)]
    assert kept.read_bytes() == before


OTHERS: dict[str, tuple[Any, str]] = {
    "seed": (7, r"seed 7 there, 0 here"),
    "device": ("cuda", r"device 'cuda' there, 'cpu' here"),
    "trgp": ("0.0.0", r"trgp '0.0.0' there"),
    "method": ("gpm", r"method 'gpm' there, 'finetune' here"),
    "benchmark": ("pmnist", r"benchmark 'pmnist' there"),
}


@pytest.mark.parametrize("key", OTHERS)
@pytest.mark.parametrize("name", FILES)
def test_the_checkpoint_of_another_run_is_refused(name: str, key: str, tmp_path: Path) -> None:
    folder = half_done(tmp_path)
    value, sentence = OTHERS[key]
    meta, tensors = read_tensors(folder / name)
    meta["run"][key] = value
    write_tensors(folder / name, tensors, meta)
    with pytest.raises(RunError, match=f"another run .{sentence}.*give --fresh"):
        run_case("finetune", tmp_path)


@pytest.mark.parametrize(("name", "place"), [FILES, FILES[::-1]])
@pytest.mark.parametrize("move", [shutil.copy, shutil.move])
def test_a_checkpoint_in_the_place_of_the_other_is_refused(
    name: str, place: str, move: Callable[..., Any], tmp_path: Path
) -> None:
    """An epoch's lacks what a task's beginning holds; the run would go on to other numbers."""
    folder = half_done(tmp_path, "trgp")
    both = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    move(folder / name, folder / place)
    if move is shutil.move and name == "task.safetensors":
        (folder / name).write_bytes(both[folder / name])  # alone an epoch's file is never read
    sentence = rf"The checkpoint .*{place} is a {name} in place of {place}; put it back, or give"
    with pytest.raises(RunError, match=sentence):
        run_case("trgp", tmp_path)


NO_NUMBER = (float("nan"), float("inf"), -1, 0.5, True, "1", None, [], 10**400)
CRAFTED: list[tuple[tuple[str, ...], Sequence[Any]]] = [
    (("format",), ("4", 4.0, None, [])),
    (("run",), (None, [], "finetune", 3)),
    (("run", "settings"), (deep(list), deep(dict))),
    (("task",), NO_NUMBER),
    (("task",), (0, 2, 3)),  # more or fewer than the record has
    (("has_best",), (None, 0, "true")),
    (("schedule",), (None, [], deep(dict))),
    (("schedule", "lr"), (float("nan"), float("inf"), None, "0.1", True)),
    (("schedule", "best"), ("nan", "", "one", 0.5, None)),
    *((("schedule", key), NO_NUMBER) for key in ("epoch", "waited")),
    (("schedule", "over"), (None, 0, "true")),
    (("record",), (None, [], 3)),
    (("record", "accuracy_matrix"), (None, [], [[0.5]], [["1", 0, 0]], [[float("nan")] * 3])),
    (("record", "curves"), (None, {}, [], [{}, {"loss": 3}], [{}, {"loss": [float("inf")]}])),
    (("record", "seconds"), (None, {}, [], [{}, {"training": "1"}], [{}, {"training": 1e999}])),
    (("record", "untrained"), ([2], {}, "1", [float("nan")])),
    (("record", "peak_memory_bytes"), NO_NUMBER),
]


def refused(out: Path) -> None:
    """By a sentence that names the file and says what can be done."""
    with pytest.raises(
        RunError, match=r"^The checkpoint .*\.safetensors (is|belongs) .* --fresh.*\.$"
    ):
        run_case("finetune", out)


@pytest.mark.parametrize("name", FILES)
def test_a_crafted_checkpoint_is_a_sentence(name: str, tmp_path: Path) -> None:
    """Whose checksum was computed anew."""
    folder = half_done(tmp_path)
    meta, tensors = read_tensors(folder / name)
    for (*levels, key), values in CRAFTED:
        for value in (MISSING, *values):
            crafted = json.loads(json.dumps(meta))
            place = crafted
            for each in levels:
                place = place[each]
            place[key] = value
            if value is MISSING:
                del place[key]
            with_a_checksum(folder / name, tensors, json.dumps(crafted))
            refused(tmp_path)
    for text in (
        "",
        "{",
        "[]",
        "3",
        "[" * 100_000,
        '{"format": NaN}',
        '{"a":' * 900 + "1" + "}" * 900,
    ):
        with_a_checksum(folder / name, tensors, text)
        refused(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_crafted_tensors_are_a_sentence(name: str, tmp_path: Path) -> None:
    folder = half_done(tmp_path)
    meta, tensors = read_tensors(folder / name)
    weights = [key for key, t in tensors.items() if t.is_floating_point()]
    assert weights
    for key in weights:
        own = tensors[key]
        others = [
            own.double(),
            own.int(),
            own.reshape(-1, 1, 1, 1, 1),
            own.clone().fill_(torch.nan),
        ]
        for crafted in ({}, *({key: other} for other in others)):
            rest = {each: t for each, t in tensors.items() if each != key}
            write_tensors(folder / name, rest | crafted, meta)
            refused(tmp_path)
    for wrong in ({"state/a": own, "state/a/b": own}, {"state/a": own * torch.nan}):
        write_tensors(folder / name, tensors | wrong, meta)
        refused(tmp_path)


def test_the_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    """One that was copied or renamed by hand: settings decide the folder, and the bits."""
    other = half_done(tmp_path / "other", lr=0.01)
    mine = half_done(tmp_path / "mine")
    for name in FILES:
        (mine / name).write_bytes((other / name).read_bytes())
    with pytest.raises(RunError, match=r"another run .*lr"):
        run_case("finetune", tmp_path / "mine")


def test_a_learners_file_is_no_checkpoint(tmp_path: Path) -> None:
    folder = half_done(tmp_path)
    trgp.GPM(torch.nn.Linear(3, 2)).save(folder / "task.safetensors")
    with pytest.raises(RunError, match=r"The checkpoint .* (belongs to another run|is damaged)"):
        run_case("finetune", tmp_path)


def test_an_epoch_of_another_task_is_not_read(
    whole: Callable[[str], Result], tmp_path: Path
) -> None:
    """As it lies there when a run is killed after it began a task and before its first epoch."""
    early = half_done(tmp_path / "early", "trgp")
    old = (early / "epoch.safetensors").read_bytes()

    def observer(event: Event) -> None:
        if isinstance(event, EpochFinished) and event.task == 2:
            raise StopError

    with pytest.raises(StopError):
        run_case("trgp", tmp_path / "early", observer=observer)
    (early / "epoch.safetensors").write_bytes(old)
    result = run_case("trgp", tmp_path / "early")
    assert measured_apart(result) == measured_apart(whole("trgp"))


# ---- a full disk -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1000])
@pytest.mark.parametrize("kind", [RunStarted, EpochFinished, TaskFinished])
def test_a_full_disk_is_a_sentence_and_what_was_saved_is_good(
    kind: type, size: int, whole: Callable[[str], Result], tmp_path: Path
) -> None:
    """From some event of the second task on, or from the start, no file can be written."""
    limits: list[Any] = []

    def observer(event: Event) -> None:
        if isinstance(event, kind) and getattr(event, "task", 1) == 1 and not limits:
            limits.append(files_limited_to(size))
            limits[0].__enter__()

    try:
        with pytest.raises(RunError, match=r"checkpoint .* could not be written: .*free space"):
            run_case("gpm", tmp_path, observer=observer)
    finally:
        limits[0].__exit__(None, None, None)
    assert not result_files(tmp_path)
    assert not list(tmp_path.glob("**/.*.safetensors.*"))
    assert measured_apart(run_case("gpm", tmp_path)) == measured_apart(whole("gpm"))


def test_a_full_disk_at_the_very_end_loses_no_epoch(
    whole: Callable[[str], Result], tmp_path: Path
) -> None:
    last = len(whole("gpm").curves) - 1
    limit = files_limited_to(10)

    def observer(event: Event) -> None:
        if isinstance(event, TaskFinished) and event.task == last:
            limit.__enter__()

    try:
        with pytest.raises(RunError, match=r"The result could not be written in .*free space"):
            run_case("gpm", tmp_path, observer=observer)
    finally:
        limit.__exit__(None, None, None)
    seen: list[Event] = []
    assert measured_apart(run_case("gpm", tmp_path, observer=seen.append)) == measured_apart(
        whole("gpm")
    )
    assert [type(event) for event in seen] == [RunStarted, TaskFinished, RunFinished]


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises((InputError, RunError), match=r"cannot be written to: .*another --out"):
            run_case("finetune", out)
    assert (tmp_path / "file").read_text() == "not a folder"


def test_what_is_kept_of_a_record_does_not_grow_with_it() -> None:
    """Or what is written when a run is interrupted would be of no epoch."""
    record = Record([[0.5, None]], [{"loss": [1.0]}], [{"training": 2.0}], [0.1], 3)
    kept = record.copied()
    before = json.dumps(kept)
    record.accuracy_matrix[0].append(0.25)
    record.accuracy_matrix.append([0.75])
    record.curves[0]["loss"].append(0.5)
    record.curves.append({})
    record.seconds[0]["training"] += 1
    record.seconds.append({})
    assert json.dumps(kept) == before
    assert Record(**kept) != record
