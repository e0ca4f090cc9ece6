"""Checkpoints of a run, which can be killed at any time and resumes from complete files.

`task.safetensors` stores the beginning of a task with everything in it; `epoch.safetensors` stores
the end of an epoch with only what epochs change. Both are written so often that writing takes a
fortieth of the time, on a GPU in the background, and when the run is interrupted; epochs that were
not written are trained again. An epoch file belongs to the task file only if both name the same
task; one left from the task before is ignored. The number of finished epochs distinguishes the two
files, so that neither is read in place of the other.
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
SPARE = 39  # parts of the time for other work per part for writing
TASK, EPOCH = "task.safetensors", "epoch.safetensors"


class Checkpoints:
    """The checkpoints of one run in its folder."""

    def __init__(self, folder: Path, run: Mapping[str, Any], device: torch.device) -> None:
        """`run` identifies this run; the checkpoint of another run is refused."""
        self.folder = folder
        self._task_file = folder / TASK
        self._epoch_file = folder / EPOCH
        self._run = dict(run)
        self._device = device
        self._due = 0.0  # time of the next write
        # Content not known to be on the disk, the task file first. The writer only notes what it
        # has written, so that an interrupt loses nothing wherever it arrives.
        self._left: dict[Path, Content] = {}
        self._written: list[Content] = []
        self._writer = Writer(device)
        for draft in (*folder.glob(".*.safetensors.*"), *folder.glob(".*.json.*")):
            draft.unlink()  # left by a killed writer

    def save_task(self, position: Position, company: int = 1) -> Position:
        """Save the beginning of a task and return the position to continue from.

        Args:
            company: number of concurrent runs, which share the time that writing may take.
        """
        self._left = {self._task_file: self._content(settled(position), position.state)}
        self._write(company)
        return position

    def save_epoch(self, position: Position, moving: Mapping[str, Any], company: int = 1) -> None:
        """Save the end of an epoch, which changed only the parameters and `moving`."""
        self._left[self._epoch_file] = self._content(settled(position), moving)
        self._write(company)

    def begin_to_catch_up(self) -> None:
        """Start writing all content that is not on the disk; `catch_up` waits for it."""
        with suppress(Exception):  # a failed write is tried again
            self._settle()
        self._begin(company=1)

    def catch_up(self) -> None:
        """Write all content that is not on the disk, and wait for it."""
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
        """Wait for the current write; content that an error kept from the disk stays queued."""
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
        """Return the last saved position, or None if the run has not begun.

        Args:
            initial: parameters whose shapes and types the files must match; empty if the method
                resizes the network.
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
                f"The checkpoint {path} could not be written: {error.strerror or error}. "
                "Earlier saves are intact; free space or allow writing there, and repeat the "
                "command without --fresh."
            ) from error

    def _read(self, path: Path, initial: Params) -> Position:
        start_over = "give --fresh to start the run over"
        try:
            meta, tensors = read_tensors(path)
            check_fields(meta, IDENTITY, path, FIX)
            if meta["format"] != FORMAT or meta["run"] != self._run:
                raise RunError(
                    f"The checkpoint {path} belongs to another run "
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
                f"The checkpoint {path} is a {own} in place of {place}; put it back, or "
                f"{start_over}."
            )
        return position


def clear(folder: Path) -> None:
    """Delete the checkpoints of the run."""
    # The task file first: an epoch file alone is never read.
    for name in (TASK, EPOCH):
        (folder / name).unlink(missing_ok=True)


def _difference(stored: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    keys = [key for key in {**stored, **asked} if stored.get(key) != asked.get(key)]
    parts = [f"{key} {stored.get(key)!r} there, {asked.get(key)!r} here" for key in keys]
    return "; ".join(parts) or "of another format"
