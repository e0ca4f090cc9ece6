"""A run that can be killed at any moment: what is finished lies on the disk, whole.

`task.safetensors` is of the beginning of a task and holds everything; `epoch.safetensors` is of an
epoch and holds what epochs change. Both are written as often as takes a fortieth of the time, on a
GPU beside it, and when the run is interrupted: what was not is learnt again. The second belongs to
the first only if it names the same task: one left from the task before is ignored. The epochs that
are finished tell the two apart, so that neither is read in the other's place.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..files import check_fields, read_tensors, write_tensors
from ..types import Params, State
from .errors import RunError
from .position import (
    FIX,
    IDENTITY,
    Content,
    Position,
    check_meta,
    check_tensors,
    described,
    restored,
    settled,
)
from .writer import Writer

FORMAT = 4
SPARE = 39  # of forty parts of the time; one is for writing
TASK, EPOCH = "task.safetensors", "epoch.safetensors"


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
        self._left = {self._task_file: self._content(settled(position), position.state)}
        self._write(company)
        return position

    def save_epoch(self, position: Position, moving: Mapping[str, Any], company: int = 1) -> None:
        """After an epoch, in which only the parameters and `moving` have changed."""
        self._left[self._epoch_file] = self._content(settled(position), moving)
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

    def load(self, initial: Params) -> Position | None:
        """Where the run was interrupted, or None where it has not begun.

        initial: parameters of the network whose shapes those in the files must have.
        """
        if not self._task_file.exists():
            return None
        begun = self._read(self._task_file, initial)
        if self._epoch_file.exists():
            later = self._read(self._epoch_file, initial)
            if later.task == begun.task:
                later.state = {**begun.state, **later.state}
                return later
        return begun

    def _content(self, position: Position, state: State) -> Content:
        tensors, meta = described(position, state)
        return tensors, {"format": FORMAT, "run": self._run, **meta}

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

    def _read(self, path: Path, initial: Params) -> Position:
        start_over = "give --fresh to start the run over"
        try:
            meta, tensors = read_tensors(path)
            check_fields(meta, IDENTITY, path, FIX)
            if meta["format"] != FORMAT or meta["run"] != self._run:
                raise RunError(
                    f"The checkpoint {path} is of another run "
                    f"({_difference(meta['run'], self._run)}); give the command that began it, or "
                    f"{start_over}."
                )
            check_meta(meta, path)
            check_tensors(tensors, initial, meta["has_best"], path)
            position = restored(meta, tensors, self._device)
        except (ValueError, OSError) as error:
            raise RunError(
                f"The checkpoint {path} is damaged: {error} Restore it, or {start_over}."
            ) from error
        begun = position.schedule.epoch == 0
        if begun != (path == self._task_file):
            own, place = (TASK, EPOCH) if begun else (EPOCH, TASK)
            raise RunError(
                f"The checkpoint {path} is a {own} in the place of {place}; put it back, or "
                f"{start_over}."
            )
        return position


def clear(folder: Path) -> None:
    """Forget the run."""
    # The task's file first: an epoch's file alone is never read.
    for name in (TASK, EPOCH):
        (folder / name).unlink(missing_ok=True)


def _difference(stored: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    keys = [key for key in {**stored, **asked} if stored.get(key) != asked.get(key)]
    parts = [f"{key} {stored.get(key)!r} there, {asked.get(key)!r} here" for key in keys]
    return "; ".join(parts) or "of another format"
