"""A bar on stderr while a call of the learner is long, where a person can see it."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from . import ranks

if TYPE_CHECKING:  # rich is imported when a bar is shown
    from rich.progress import Progress

T = TypeVar("T")

SWITCH = "TRGP_PROGRESS"  # an environment variable: 0 shows no bar
PATIENCE = 2.0  # seconds without a bar
PAUSE = 0.1  # seconds between two drawings of it


@contextmanager
def watched(things: Iterable[T], what: str, whole: object = None) -> Iterator[Iterator[T]]:
    """Hand the things on, one by one, and show how many were once this has taken two seconds.

    `whole` is what has as many, the loader of some batches say, where the things do not tell.
    """
    bar = Bar(what, _length(things if whole is None else whole))
    try:
        yield bar.over(things)
    finally:
        bar.close()


class Bar:
    """A progress bar that waits for its time; nothing runs beside the work itself."""

    def __init__(self, what: str, total: int | None) -> None:
        """Start the clock."""
        self._what, self._total = what, total
        self._next = time.monotonic() + PATIENCE
        self._progress: Progress | None = None

    def over(self, things: Iterable[T]) -> Iterator[T]:
        """Hand the things on, and count those that are done with."""
        for done, thing in enumerate(things):
            if time.monotonic() >= self._next:
                self._show(done)
            yield thing

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()

    def _show(self, done: int) -> None:
        if self._progress is None:
            if not visible():
                self._next = float("inf")
                return
            self._progress = _started(self._what, self._total)
        self._progress.update(self._progress.task_ids[0], completed=done, refresh=True)
        self._next = time.monotonic() + PAUSE


def visible() -> bool:
    """Whether a person sees stderr: on a terminal, or in a notebook that can draw a bar."""
    if os.environ.get(SWITCH) == "0" or ranks.rank():
        return False
    notebook = "ipykernel" in sys.modules and find_spec("ipywidgets") is not None
    return notebook or sys.stderr.isatty()


def _length(things: Any) -> int | None:
    try:
        return len(things)
    except Exception:  # a loader without a length says so in a way of its own
        return None


def _started(what: str, total: int | None) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,  # no thread: loaders may fork while a bar is shown
        transient=True,
    )
    progress.add_task(what, total=total)
    progress.start()
    return progress
