"""A run that can be killed at any moment: what is finished lies on the disk, whole.

`task.safetensors` is of the beginning of a task and holds everything; `epoch.safetensors` is of an
epoch and holds what epochs change. Both are written as often as takes a fortieth of the time, on a
GPU beside it, and when the run is interrupted: what was not is learnt again. The second belongs to
the first only if it names the same task: one left from the task before is ignored.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import read_tensors, write_tensors
from ..tree import from_leaves, leaves
from ..types import Params, State
from .errors import RunError
from .schedule import Schedule
from .writer import Writer

FORMAT = 4
SPARE = 39  # of forty parts of the time; one is for writing
TASK, EPOCH = "task.safetensors", "epoch.safetensors"
Content = tuple[dict[str, Tensor], dict[str, Any]]


@dataclass
class Record:
    """What a run has to tell so far; JSON throughout."""

    accuracy_matrix: list[list[float | None]] = field(default_factory=list)
    curves: list[dict[str, list[float]]] = field(default_factory=list)
    seconds: list[dict[str, float]] = field(default_factory=list)
    untrained: list[float] | None = None
    peak_memory_bytes: int = 0

    def copied(self) -> dict[str, Any]:
        """As it is now. By hand: this comes after every epoch, and a copy of any depth is slow."""
        return {
            **vars(self),
            "accuracy_matrix": [[*row] for row in self.accuracy_matrix],
            "curves": [{name: [*values] for name, values in task.items()} for task in self.curves],
            "seconds": [{**task} for task in self.seconds],
        }


@dataclass
class Position:
    """Where a run stands: in a task, after some epochs."""

    task: int
    params: Params
    state: State
    schedule: Schedule
    record: Record
    best: tuple[Params, State] | None = None  # parameters and what moves, of the best epoch


class Checkpoints:
    """The checkpoints of one run in its folder."""

    def __init__(self, folder: Path, run: Mapping[str, Any], device: torch.device) -> None:
        """`run` says which run this is; the checkpoint of another is refused."""
        self.folder = folder
        self._task_file = folder / TASK
        self._epoch_file = folder / EPOCH
        self._run = dict(run)
        self._device = device
        self._due = 0.0  # when something is written next
        # What is not known to be on the disk, a task's beginning first. The writer only notes what
        # it has written, so that nothing is lost wherever an interrupt comes.
        self._left: dict[Path, Content] = {}
        self._written: list[Content] = []
        self._writer = Writer(device)
        for draft in (*folder.glob(".*.safetensors.*"), *folder.glob(".*.json.*")):
            draft.unlink()  # of a writer that was killed

    def save_task(self, position: Position, company: int = 1) -> Position:
        """At the beginning of a task; the position to go on from.

        company: how many runs share the time that writing may take.
        """
        self._left = {self._task_file: self._content(_settled(position), position.state)}
        self._write(company)
        return position

    def save_epoch(self, position: Position, moving: Mapping[str, Any], company: int = 1) -> None:
        """After an epoch, in which only the parameters and `moving` have changed."""
        self._left[self._epoch_file] = self._content(_settled(position), moving)
        self._write(company)

    def begin_to_catch_up(self) -> None:
        """Begin to write what is not written yet; `catch_up` tells when it is."""
        with suppress(Exception):  # what went wrong before is tried once more
            self._settle()
        self._begin(company=1)

    def catch_up(self) -> None:
        """Write what is not written yet."""
        self.begin_to_catch_up()
        self._settle()

    def _write(self, company: int) -> None:
        if not self._writer.busy:
            self._settle()
            if time.monotonic() >= self._due:
                self._begin(company)

    def _begin(self, company: int) -> None:
        if self._left:
            self._writer.start(partial(self._write_all, {**self._left}, company))

    def _settle(self) -> None:
        """Wait for what is being written; what is not, for an error, is left as before."""
        try:
            self._writer.wait()
        finally:
            written, self._written = self._written, []
            for path, content in [*self._left.items()]:
                if any(content is each for each in written):
                    del self._left[path]

    def _write_all(self, contents: Mapping[Path, Content], company: int) -> None:
        start = time.monotonic()
        for path, content in contents.items():
            self._save(path, content)
            self._written.append(content)
        now = time.monotonic()
        self._due = now + SPARE * company * (now - start)

    def load(self) -> Position | None:
        """Where the run was interrupted, or None where it has not begun."""
        if not self._task_file.exists():
            return None
        begun = self._read(self._task_file)
        if self._epoch_file.exists():
            later = self._read(self._epoch_file)
            if later.task == begun.task:
                later.state = {**begun.state, **later.state}
                return later
        return begun

    def _content(self, position: Position, state: State) -> Content:
        """As it is now: the tensors are never changed in place, and the rest is copied."""
        tensors = _named("params", position.params) | _named("state", state)
        if position.best is not None:
            params, moving = position.best
            tensors |= _named("best params", params) | _named("best state", moving)
        meta = {
            "format": FORMAT,
            "run": self._run,
            "task": position.task,
            "schedule": {**asdict(position.schedule), "best": repr(position.schedule.best)},
            "record": position.record.copied(),
            "has_best": position.best is not None,
        }
        return tensors, meta

    def _save(self, path: Path, content: Content) -> None:
        tensors, meta = content
        try:
            write_tensors(path, tensors, meta)
        except OSError as error:
            raise RunError(
                f"The checkpoint {path} could not be written: {error.strerror or error}. What was "
                "saved before is whole; make room or allow writing there, and give the same "
                "command, without --fresh, again."
            ) from error

    def _read(self, path: Path) -> Position:
        start_over = "give --fresh to start the run over"
        try:
            meta, tensors = read_tensors(path)
        except (ValueError, OSError) as error:
            raise RunError(
                f"The checkpoint {path} is damaged: {error} Restore it, or {start_over}."
            ) from error
        if meta.get("format") != FORMAT or meta.get("run") != self._run:
            differing = _difference(meta.get("run", {}), self._run)
            raise RunError(
                f"The checkpoint {path} is of another run ({differing}); give the command that "
                f"began it, or {start_over}."
            )
        # Copied, because tensors read from a file may lie where arithmetic rounds differently.
        tensors = {name: tensors[name].clone().to(self._device) for name in sorted(tensors)}
        schedule = meta["schedule"]
        best = (
            (_part("best params", tensors), from_leaves(_part("best state", tensors)))
            if meta["has_best"]
            else None
        )
        return Position(
            task=meta["task"],
            params=_part("params", tensors),
            state=from_leaves(_part("state", tensors)),
            schedule=Schedule(**{**schedule, "best": float(schedule["best"])}),
            record=Record(**meta["record"]),
            best=best,
        )


def clear(folder: Path) -> None:
    """Forget the run."""
    # The task's file first: an epoch's file alone is never read.
    for name in (TASK, EPOCH):
        (folder / name).unlink(missing_ok=True)


def _settled(position: Position) -> Position:
    """In place: every tensor laid out, and in the order, as it will be when read again.

    Products and sums may round differently in another one, and a run that goes on from here must
    not differ from one that was interrupted.
    """
    position.params = {name: t.contiguous() for name, t in _in_order(position.params.items())}
    # An empty level of the state has no tensor to be written, so that it ends here.
    position.state = from_leaves(
        {path: t.contiguous() for path, t in _in_order(leaves(position.state))}
    )
    if position.best is not None:
        params, moving = position.best
        best = {name: t.contiguous() for name, t in _in_order(params.items())}
        position.best = (
            best,
            from_leaves({path: t.contiguous() for path, t in _in_order(leaves(moving))}),
        )
    return position


def _in_order(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return sorted(named, key=lambda pair: pair[0])


def _named(prefix: str, tree: State) -> dict[str, Tensor]:
    if prefix.endswith("params"):  # flat, and a name may be anything
        return {f"{prefix}/{name}": t for name, t in tree.items() if isinstance(t, Tensor)}
    return {f"{prefix}/{path}": t for path, t in leaves(tree)}


def _part(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix += "/"
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def _difference(stored: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    keys = [key for key in {**stored, **asked} if stored.get(key) != asked.get(key)]
    parts = [f"{key} {stored.get(key)!r} there, {asked.get(key)!r} here" for key in keys]
    return "; ".join(parts) or "of another format"
