"""Read the progress and curves of running runs from their checkpoints.

Only the header of a checkpoint is read, never its tensors, and nothing is written or locked.
"""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..benchmarks import NAMES, entry
from ..engine.checkpoint import EPOCH, TASK
from ..engine.position import FIX, check_meta
from ..files import Kind, check_fields, is_text, is_whole, no_number, open_regular, or_none
from ..methods import METHODS
from ..results.store import RESULT
from .model import Chart, Series

LARGEST = 100_000_000  # bytes; the format allows no larger header
_TEXT, _WHOLE = Kind(is_text, "a text"), Kind(is_whole, "a whole number from 0 on")
RUN = {
    **dict.fromkeys(("benchmark", "method", "preset"), _TEXT),
    **dict.fromkeys(("seed", "epochs"), _WHOLE),
    "tasks": Kind(or_none(is_whole), "a whole number or null"),
}
Stamp = tuple[int, int, int]
"""Distinguishes a file from one that replaces it."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run at its last save; tasks and epochs are counted from 1."""

    benchmark: str
    method: str
    preset: str
    configuration: str
    """The name of its folder, which differs if settings differ."""
    seed: int
    task: int
    tasks: int | None
    """None if the checkpoint does not say."""
    epoch: int
    """Finished epochs of this task."""
    epochs: int
    seconds: float
    saved: float
    """Time of the last save, by the file system."""
    accuracies: tuple[tuple[float, ...], ...]
    """Validation accuracy in per cent, by task and epoch."""

    @property
    def epoch_seconds(self) -> float:
        """The mean time per epoch, work between tasks included."""
        return self.seconds / max(1, sum(map(len, self.accuracies)))


def stamp(path: str) -> Stamp | None:
    """Return the stamp of a file; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def run_folders(out: str | os.PathLike[str]) -> list[str]:
    """Return the folders of all runs, begun or finished."""
    found = glob.glob(os.path.join("*", "*", "*", "seed-[0-9]*"), root_dir=out)
    return sorted(os.path.join(out, folder) for folder in found)


class Reader:
    """Read checkpoints, each again only after it was replaced."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stamp, Progress | str]] = {}

    def read(self, folders: Sequence[str]) -> tuple[list[Progress], list[str]]:
        """Return the running runs in these folders, and a sentence about each damaged one."""
        told = {path: self._told(path, at) for path, at in _latest(folders)}
        self._known = {path: known for path, known in told.items() if known is not None}
        each = [told for _, told in self._known.values()]
        runs = [progress for progress in each if isinstance(progress, Progress)]
        runs.sort(key=lambda p: (p.benchmark, p.method, p.preset, p.configuration, p.seed))
        return runs, [problem for problem in each if isinstance(problem, str)]

    def _told(self, path: str, at: Stamp) -> tuple[Stamp, Progress | str] | None:
        known = self._known.get(path)
        if known is not None and known[0] == at:
            return known
        try:
            return at, _progress(path)
        except FileNotFoundError:
            return None  # the run has just finished
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return at, (
                f"{path} does not show its run's progress: it is damaged or of another version; "
                "the run's own command says more."
            )


def curves(runs: Sequence[Progress]) -> tuple[Chart, ...]:
    """Return charts of validation accuracy by epoch, tasks in sequence, one per benchmark."""
    charts = []
    for benchmark in dict.fromkeys(run.benchmark for run in runs):
        members = [run for run in runs if run.benchmark == benchmark and any(run.accuracies)]
        if members:
            ends = [_ends(run) for run in members]
            longest = max(ends, key=len)
            alike = all(longest[: len(each)] == each for each in ends)
            charts.append(
                Chart(
                    name=f"live {benchmark}",
                    title=f"Validation accuracy while learning {benchmark}",
                    kind="lines",
                    x_label="epoch, all tasks after each other",
                    y_label="accuracy, %",
                    series=tuple(map(_curve, members)),
                    benchmark=benchmark,
                    boundaries=longest if alike else (),
                )
            )
    return tuple(charts)


def _latest(folders: Sequence[str]) -> Iterator[tuple[str, Stamp]]:
    """The checkpoint written last, of every run that has one and no result."""
    for folder in folders:
        if stamp(os.path.join(folder, RESULT)) is None:
            paths = [os.path.join(folder, name) for name in (TASK, EPOCH)]
            stamped = [(at, path) for path in paths if (at := stamp(path)) is not None]
            if stamped:
                at, path = max(stamped)
                yield path, at


def _progress(path: str) -> Progress:
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LARGEST:
            raise ValueError(f"{path} has a header of {length} bytes")
        header = json.loads(file.read(length))
        saved = os.fstat(file.fileno()).st_mtime
    meta = json.loads(header["__metadata__"]["trgp"], parse_constant=no_number)
    check_meta(meta, path)
    run, record = meta["run"], meta["record"]
    settings = {"tasks": None, **run["settings"]}
    check_fields({**run, **settings}, RUN, path, FIX)
    accuracies = (task.get("valid_accuracy", []) for task in record["curves"])
    return Progress(
        benchmark=run["benchmark"],
        method=run["method"],
        preset=run["preset"],
        configuration=os.path.basename(os.path.dirname(os.path.dirname(path))),
        seed=run["seed"],
        task=meta["task"] + 1,
        tasks=_tasks(run, record, settings["tasks"]),
        epoch=meta["schedule"]["epoch"],
        epochs=settings["epochs"],
        seconds=sum(spent for task in record["seconds"] for spent in task.values()),
        saved=saved,
        accuracies=tuple(tuple(100 * a for a in task) for task in accuracies),
    )


def _tasks(run: dict[str, Any], record: dict[str, Any], chosen: int | None) -> int | None:
    """Return the number of tasks to learn; tasks learnt jointly count as one."""
    method, benchmark = run["method"], run["benchmark"]
    if method in METHODS and METHODS[method].about.joint:
        return 1
    if record["accuracy_matrix"]:
        return len(record["accuracy_matrix"][0])
    if chosen is not None:
        return chosen
    return entry(benchmark).tasks if benchmark in NAMES else None


def _curve(run: Progress) -> Series:
    x: list[float] = []
    y: list[float | None] = []
    epochs = 0
    for task in run.accuracies:
        if epochs:  # a gap, since the accuracy is on another task from here on
            x, y = [*x, epochs + 0.5], [*y, None]
        x += range(epochs + 1, epochs + len(task) + 1)
        y += task
        epochs += len(task)
    name = f"{run.method}, {run.configuration}, seed {run.seed}"
    return Series(name, tuple(x), tuple(y), method=run.method)


def _ends(run: Progress) -> tuple[tuple[float, str], ...]:
    """Return the number of epochs after which each finished task ended."""
    counts = [len(task) for task in run.accuracies[: run.task - 1]]
    return tuple((sum(counts[: t + 1]) + 0.5, f"task {t + 1}") for t in range(len(counts)))
