"""Runs that go on, by what they have saved."""

import os
import struct
from pathlib import Path

import pytest
from some_checkpoints import a_checkpoint

from trgp.engine.checkpoint import EPOCH, TASK
from trgp.files import write_tensors
from trgp.report.progress import Progress, Reader, curves, run_folders


def read(out: Path) -> tuple[list[Progress], list[str]]:
    return Reader().read(run_folders(out))


def test_how_far_a_run_is(tmp_path: Path) -> None:
    a_checkpoint(tmp_path)
    ((run,), problems) = read(tmp_path)
    assert problems == []
    assert (run.benchmark, run.method, run.preset, run.seed) == (
        *("permuted-digits", "gpm", "paper"),
        0,
    )
    assert (run.task, run.tasks, run.epoch, run.epochs) == (2, 4, 1, 5)
    assert run.seconds == pytest.approx(5.0)
    assert run.epoch_seconds == pytest.approx(1.25)
    assert run.configuration == "paper"
    (chart,) = curves([run])
    (series,) = chart.series
    assert series.x == (1, 2, 3, 3.5, 4)
    assert series.y == (50.0, 60.0, 70.0, None, 50.0)
    assert chart.boundaries == ((3.5, "task 1"),)


def test_tasks_end_where_they_end_for_all(tmp_path: Path) -> None:
    """Also where one run is ahead; where some take fewer epochs, nothing is claimed."""
    a_checkpoint(tmp_path, (3, 1))
    a_checkpoint(tmp_path, (3, 2, 0), seed=1)
    (chart,) = curves(read(tmp_path)[0])
    assert chart.boundaries == ((3.5, "task 1"), (5.5, "task 2"))
    a_checkpoint(tmp_path, (2, 1), seed=2)
    (chart,) = curves(read(tmp_path)[0])
    assert chart.boundaries == ()


def test_what_was_saved_last_counts(tmp_path: Path) -> None:
    folder = a_checkpoint(tmp_path, (3,))
    (folder / TASK).rename(folder / EPOCH)
    a_checkpoint(tmp_path, (5, 0))
    os.utime(folder / EPOCH, (1, 1))
    ((run,), _) = read(tmp_path)
    assert (run.task, run.epoch) == (2, 0)
    os.utime(folder / TASK, (0, 0))
    ((run,), _) = read(tmp_path)
    assert (run.task, run.epoch) == (1, 3)


def test_how_many_tasks_there_are(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, (1,), "permuted-digits", tasks=None)
    a_checkpoint(tmp_path, (1,), "own.npz", tasks=None)
    a_checkpoint(tmp_path, (1,), "split-digits", "multitask", tasks=None)
    a_checkpoint(tmp_path, (1, 1), "tensors", "os:system", tasks=None)
    runs, problems = read(tmp_path)
    assert problems == []
    assert {run.benchmark: run.tasks for run in runs} == {
        "own.npz": None,
        "permuted-digits": 10,
        "split-digits": 1,
        "tensors": 4,
    }


def test_a_finished_run_goes_on_no_more(tmp_path: Path) -> None:
    folder = a_checkpoint(tmp_path)
    (folder / "result.json").write_text("{}")
    assert read(tmp_path) == ([], [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 4) + b"[[[[",
        struct.pack("<Q", 4000) + b"[" * 4000,
        struct.pack("<Q", 25) + b'{"__metadata__":{"a":"b"}}',
        struct.pack("<Q", 31) + b'{"__metadata__":{"trgp":"[]"}}  ',
    ],
)
def test_what_is_damaged_is_said(tmp_path: Path, content: bytes) -> None:
    (a_checkpoint(tmp_path) / TASK).write_bytes(content)
    a_checkpoint(tmp_path, seed=1)
    runs, (problem,) = read(tmp_path)
    assert [run.seed for run in runs] == [1]
    assert problem.startswith(str(tmp_path))
    assert "damaged" in problem


def test_one_of_another_kind_is_said(tmp_path: Path) -> None:
    path = a_checkpoint(tmp_path) / TASK
    write_tensors(path, {}, {"run": {}, "record": {"curves": 3}})
    assert len(read(tmp_path)[1]) == 1


def test_a_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_checkpoint(tmp_path)
    reader = Reader()
    first, _ = reader.read(run_folders(tmp_path))
    monkeypatch.setattr("trgp.report.progress.open", _refuse, raising=False)
    again, _ = reader.read(run_folders(tmp_path))
    assert again[0] is first[0]
    os.utime(folder / TASK, (1, 1))
    # Gone between the look at the folder and the reading.
    assert reader.read(run_folders(tmp_path)) == ([], [])


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c" / "seed-x").mkdir(parents=True)
    (tmp_path / "a" / "b" / ".c" / "seed-0").mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    assert run_folders(tmp_path) == []
    assert read(tmp_path / "missing") == ([], [])


def _refuse(*_: object, **__: object) -> None:
    raise FileNotFoundError
