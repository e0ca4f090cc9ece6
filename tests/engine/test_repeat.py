"""The same run twice is the same to the bit, leaves no trace, and is not repeated for nothing."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import mlp
from small_runs import (
    CASES,
    CLASSES,
    Dropping,
    in_a_new_process,
    measured_apart,
    network_of,
    result_files,
    run,
    run_case,
    some_tasks,
)

import trgp
from trgp.engine.config import configure, defaults
from trgp.engine.errors import InputError, RunError
from trgp.engine.events import EpochFinished, Event, RunFinished, RunStarted, TaskFinished
from trgp.results import store
from trgp.results.phases import PHASES
from trgp.results.store import write_result


@pytest.mark.parametrize("case", CASES)
def test_equal_runs_are_equal_to_the_bit_and_other_seeds_differ(case: str, tmp_path: Path) -> None:
    first = run_case(case, tmp_path / "a", seeds=[4])
    torch.manual_seed(17)  # what the caller drew before must not matter
    again = run_case(case, tmp_path / "b", seeds=[4])
    other = run_case(case, tmp_path / "a", seeds=[5])
    assert measured_apart(first) == measured_apart(again)
    assert len(first.digest) == 64
    assert first.digest != other.digest


def test_a_seed_is_the_same_alone_and_among_others(tmp_path: Path) -> None:
    alone = run_case("trgp", tmp_path / "a", seeds=[1])
    together = trgp.run(
        some_tasks(3, 4, 4, 4),
        "trgp",
        network=Dropping,
        out=tmp_path / "b",
        seeds=2,
        device="cpu",
        **{
            key: alone.config[key]
            for key in ("epochs", "patience", "lr", "batch", "evaluate_unseen")
        },
        **CASES["trgp"][1],
    )
    assert [result.seed for result in together] == [0, 1]
    assert together[1].digest == alone.digest


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_the_callers_settings_are_as_before(mode: str, threads: int, tmp_path: Path) -> None:
    expected = run_case("gpm", tmp_path / "plain").digest
    before = torch.get_num_threads()
    torch.set_deterministic_debug_mode(mode)
    torch.set_num_threads(threads)
    cudnn = torch.backends.cudnn.benchmark
    try:
        assert run_case("gpm", tmp_path / "changed").digest == expected
        assert torch.get_num_threads() == threads
        names = {0: "default", 1: "warn", 2: "error"}
        assert names[torch.get_deterministic_debug_mode()] == mode
        assert torch.backends.cudnn.benchmark == cudnn
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.set_num_threads(before)


def test_no_random_state_is_touched_whether_a_run_ends_well_or_not(tmp_path: Path) -> None:
    def boom(event: Event) -> None:
        if isinstance(event, EpochFinished):
            raise OverflowError

    def states() -> tuple[Any, ...]:
        numpy = np.random.get_state()
        assert isinstance(numpy, tuple)
        return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2]

    torch.manual_seed(3)
    before = states()
    run_case("trgp", tmp_path / "a")
    assert states() == before
    with pytest.raises(OverflowError):
        run_case("trgp", tmp_path / "b", observer=boom)
    assert states() == before
    with pytest.raises(InputError):
        run_case("trgp", tmp_path / "c", lr=-1.0)
    with pytest.raises(InputError):
        run(some_tasks(1), "gpm", tmp_path / "c", threshold=(0.9, 0.9))
    with pytest.raises(RunError):
        run(some_tasks(1), "gpm", tmp_path / "c", lr=1e30, epochs=9)
    assert states() == before
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.is_grad_enabled()


def test_a_caller_without_gradients_can_run_all_the_same(tmp_path: Path) -> None:
    expected = run_case("trgp", tmp_path / "a").digest
    with torch.no_grad():
        assert run_case("trgp", tmp_path / "b").digest == expected
        assert not torch.is_grad_enabled()


def test_networks_and_data_may_be_in_float64(tmp_path: Path) -> None:
    tasks = some_tasks(2, dtype=torch.float64)
    result = run(tasks, "trgp", tmp_path, lambda: mlp(8, 12, CLASSES).double(), epsilon=0.0)
    weights = 8 * 12 + 12 + 12 * CLASSES + CLASSES
    assert result.network_bytes == 8 * weights
    torch.set_default_dtype(torch.float64)
    again = run(tasks, "trgp", tmp_path / "b", lambda: mlp(8, 12, CLASSES), epsilon=0.0)
    assert again.network_bytes == 8 * weights
    with pytest.raises(InputError, match=r"cannot compute samples of shape \(8,\) of task 0"):
        run(some_tasks(1), "trgp", tmp_path / "c", lambda: mlp(8, 12, CLASSES))


def test_a_run_imports_no_compiler(tmp_path: Path) -> None:
    """It would take longer than many a run."""
    program = (
        "import sys; from pathlib import Path; from small_runs import run, some_tasks\n"
        "run(some_tasks(2), 'trgp', Path(sys.argv[1]))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = in_a_new_process("-c", program, str(tmp_path))
    assert done.stdout == "False\n", done.stderr


# ---- stored runs -----------------------------------------------------------------------------


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    first = run_case("gpm", tmp_path)
    (path,) = result_files(tmp_path)
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert {each.name for each in path.parent.iterdir()} == {"lock", "result.json"}
    seen: list[Event] = []
    again = run_case("gpm", tmp_path, observer=seen.append)
    assert again == first
    assert seen == [RunFinished(0, first.acc, first.bwt, stored=True)]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_a_run_that_another_has_finished_in_the_meantime_is_not_repeated(tmp_path: Path) -> None:
    """Between the look for a result and the lock lies the time that reading the data takes."""
    quicker: list[Any] = []

    def make() -> torch.nn.Module:
        if not quicker:
            quicker.append(None)
            quicker[0] = run(some_tasks(1), "finetune", tmp_path, make)
        return mlp(8, 4, CLASSES)

    seen: list[Event] = []
    result = run(some_tasks(1), "finetune", tmp_path, make, observer=seen.append)
    assert result == quicker[0]
    assert [type(event) for event in seen] == [RunFinished]


def test_fresh_repeats_it_and_keeps_the_old_result(tmp_path: Path) -> None:
    first = run_case("gpm", tmp_path)
    (path,) = result_files(tmp_path)
    before = path.read_bytes()
    seen: list[Event] = []
    again = run_case("gpm", tmp_path, fresh=True, observer=seen.append)
    assert measured_apart(again) == measured_apart(first)
    assert isinstance(seen[0], RunStarted)
    assert seen[-1] == RunFinished(0, first.acc, first.bwt)
    previous = path.with_name("result.previous.json")
    assert previous.read_bytes() == before
    assert path.read_bytes() != before
    assert store.find(tmp_path, defaults).problems == []
    assert len(store.find(tmp_path, defaults).results) == 1


def test_fresh_starts_over_also_where_a_run_was_interrupted(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, TaskFinished):
            raise OverflowError

    with pytest.raises(OverflowError):
        run_case("gpm", tmp_path, observer=stop)
    seen: list[Event] = []
    run_case("gpm", tmp_path, fresh=True, observer=seen.append)
    begun = seen[0]
    assert isinstance(begun, RunStarted)
    assert (begun.done_tasks, begun.done_epochs) == (0, 0)
    assert Path(begun.folder) == result_files(tmp_path)[0].parent


@pytest.mark.parametrize("case", CASES)
def test_what_is_returned_is_what_is_stored(case: str, tmp_path: Path) -> None:
    method, options = CASES[case]
    returned = trgp.run(
        some_tasks(2, 4, 4, 4),
        method,
        network=network_of(case),
        out=tmp_path,
        seeds=[2, 0],
        epochs=1,
        **options,
    )
    folder = result_files(tmp_path)[0].parents[1]
    assert list(returned) == sorted(store.read(folder, defaults), key=lambda run: -run.seed)
    (found,) = store.find(tmp_path, defaults).results
    assert len(found) == 2
    for result in returned:
        assert store.read(folder / f"seed-{result.seed}", defaults) == store.Results((result,))
        assert result.changed["epochs"] == 1
        assert result.config["epochs"] == 1
        assert result.versions["torch"] == torch.__version__
        assert result.device.startswith("cpu (")
        assert {frozenset(task) for task in result.seconds} == {frozenset(PHASES)}


def test_a_damaged_result_is_a_sentence_and_fresh_recovers(tmp_path: Path) -> None:
    first = run_case("finetune", tmp_path)
    (path,) = result_files(tmp_path)
    path.write_text("{")
    with pytest.raises(RunError, match=r"is not JSON or was cut short .*--fresh"):
        run_case("finetune", tmp_path)
    assert path.read_text() == "{"
    assert measured_apart(run_case("finetune", tmp_path, fresh=True)) == measured_apart(first)


def test_events_come_in_order_and_agree_with_the_result(tmp_path: Path) -> None:
    seen: list[Event] = []
    result = run_case("gpm", tmp_path, observer=seen.append)
    assert isinstance(seen[0], RunStarted)
    assert (seen[0].tasks, seen[0].epochs, seen[0].seed) == (3, 4, 0)
    assert seen[-1] == RunFinished(0, result.acc, result.bwt)
    epochs = [event for event in seen if isinstance(event, EpochFinished)]
    for t, curve in enumerate(result.curves):
        ours = [event for event in epochs if event.task == t]
        assert [event.epoch for event in ours] == list(range(1, len(ours) + 1))
        for key, values in curve.items():
            assert [getattr(event, key) for event in ours] == values
    rows = [event.accuracies for event in seen if isinstance(event, TaskFinished)]
    assert rows == result.accuracy_matrix


def test_other_networks_and_other_data_are_other_runs(tmp_path: Path) -> None:
    """Whatever a run depends on must lead to another folder, or a stored one is a lie."""
    tasks = some_tasks(2)
    narrow = run(tasks, "finetune", tmp_path, lambda: mlp(8, 4, CLASSES))
    wide = run(tasks, "finetune", tmp_path, lambda: mlp(8, 20, CLASSES))
    assert wide.network_bytes > narrow.network_bytes
    begun = [run(tasks, "finetune", tmp_path, starting_at(value)) for value in (0.1, 0.2)]
    assert begun[0].digest != begun[1].digest
    other = [(task[0], task[1]) for task in tasks]
    other[1] = ((tasks[1][0][0] + 1, tasks[1][0][1]), tasks[1][1])
    assert run(other, "finetune", tmp_path, lambda: mlp(8, 4, CLASSES)).digest != narrow.digest


def starting_at(value: float) -> Any:
    """A network as one that was trained before: its first weights are given."""

    def make() -> torch.nn.Module:
        network = mlp(8, 4, CLASSES)
        torch.nn.init.constant_(network.get_parameter("0.weight"), value)
        return network

    return make


def test_data_of_another_shape_or_kind_with_the_same_bytes_is_another_run(tmp_path: Path) -> None:
    def flat(width: int) -> Any:
        return lambda: torch.nn.Sequential(torch.nn.Flatten(), mlp(width, 4, CLASSES))

    def viewed(dtype: torch.dtype, *shape: int) -> Any:
        return [
            tuple((x.view(dtype).view(-1, *shape), y) for x, y in task) for task in some_tasks(1)
        ]

    one = run(viewed(torch.float32, 8), "finetune", tmp_path, flat(8))
    two = run(viewed(torch.float32, 2, 4), "finetune", tmp_path, flat(8))
    three = run(viewed(torch.uint8, 32), "finetune", tmp_path, flat(32))
    assert len(result_files(tmp_path)) == 3
    assert one.digest == two.digest
    assert three.digest != one.digest


def test_a_result_of_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """As when a preset has changed since: its name is the same, and so is the folder."""
    result = trgp.run("split-digits", "finetune", tasks=1, epochs=1, out=tmp_path)[0]
    (path,) = result_files(tmp_path)
    write_result(path.parent, replace(result, config={**result.config, "lr": 0.123}))
    with pytest.raises(RunError, match=r"other settings.*--fresh"):
        trgp.run("split-digits", "finetune", tasks=1, epochs=1, out=tmp_path)


def test_all_tasks_are_the_whole_benchmark(tmp_path: Path) -> None:
    assert configure("split-digits", "gpm", tasks=5).changed == {}
