"""Runs that go on, by what they have saved."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from some_checkpoints import a_checkpoint

from trgp.engine.checkpoint import EPOCH, TASK
from trgp.files import write_tensors
from trgp.report.live import Folder
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


NO_NUMBERS = (float("inf"), float("nan"), "1e999", -1, "3", None, {}, True)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((("task",), value) for value in NO_NUMBERS),
        *((("schedule", "epoch"), value) for value in NO_NUMBERS),
        *((("run", "settings", "epochs"), value) for value in NO_NUMBERS),
        *((("run", "seed"), value) for value in NO_NUMBERS),
        *((("run", "settings", "tasks"), value) for value in NO_NUMBERS if value is not None),
        *((("record", "seconds", 0, "training"), value) for value in NO_NUMBERS if value != -1),
        *((("record", "curves", 0, "valid_accuracy"), [value]) for value in NO_NUMBERS[:3]),
        (("run", "settings"), None),
        (("run", "settings"), []),
        (("run", "benchmark"), 3),
        (("record",), []),
    ],
)
def test_one_bad_header_does_not_stop_the_page(
    tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    """No checksum is read there, and the rows of all other runs are shown."""
    bad = a_checkpoint(tmp_path) / TASK
    a_checkpoint(tmp_path, seed=1)
    content = bad.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    meta = json.loads(header["__metadata__"]["trgp"])
    level = meta
    for key in place[:-1]:
        level = level[key]
    level[place[-1]] = value
    # A number that only a float's range makes infinite.
    header["__metadata__"]["trgp"] = json.dumps(meta).replace('"1e999"', "1e999")
    changed = json.dumps(header).encode()
    bad.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])
    told = json.loads(Folder(tmp_path).progress())
    assert [run["seed"] for run in told["runs"]] == [1]
    (problem,) = told["problems"]
    assert problem.startswith(f"{bad} does not show its run's progress")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_files_are_read(tmp_path: Path, kind: str) -> None:
    """In a process of its own, which can be ended where it waits for ever."""
    bad = a_checkpoint(tmp_path) / TASK
    a_checkpoint(tmp_path, seed=1)
    bad.unlink()
    if kind == "pipe":
        os.mkfifo(bad)
    else:
        bad.symlink_to("/dev/zero")
    code = "import sys; from trgp.report.live import Folder; print(Folder(sys.argv[1]).progress())"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(done.stdout)
    assert [run["seed"] for run in told["runs"]] == [1]
    assert len(told["problems"]) == 1


def test_one_of_another_kind_is_said(tmp_path: Path) -> None:
    path = a_checkpoint(tmp_path) / TASK
    write_tensors(path, {}, {"run": {}, "record": {"curves": 3}})
    assert len(read(tmp_path)[1]) == 1


def test_a_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = a_checkpoint(tmp_path)
    reader = Reader()
    first, _ = reader.read(run_folders(tmp_path))
    monkeypatch.setattr("trgp.report.progress.open_regular", _refuse)
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
