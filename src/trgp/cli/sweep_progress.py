"""Show the progress of a sweep on stderr: a bar on a terminal, else one line per cell."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from ..engine.events import Event, TaskFinished
from ..engine.sweep import Ended, Plan
from ..results.layout import duration, points
from .screen import printable

QUIET = 30.0  # seconds without a line, after which the next finished task is printed


class Tally:
    """Count finished and failed cells."""

    def __init__(self, planned: Plan) -> None:
        self.finished = self._before = len(planned.finished)
        self.failed = 0
        self.learnt = 0  # tasks, if this process receives their events
        self.total = self.finished + len(planned.left)
        self._begun = time.monotonic()

    def count(self, ended: Ended) -> None:
        self.finished += ended.result is not None
        self.failed += ended.result is None

    @property
    def done(self) -> int:
        return self.finished + self.failed

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    @property
    def left(self) -> str:
        """The estimated time left, from the mean time of the cells that ended."""
        ended = self.done - self._before
        if not ended:
            return ""
        return f"about {duration(self.elapsed / ended * (self.total - self.done))} left"


class Lines:
    """Print one plain line for every cell that ends."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._told = tally.elapsed

    def tell(self, ended: Ended) -> None:
        tally = self._tally
        times = ", ".join(filter(None, (duration(tally.elapsed), tally.left)))
        self._print(f"{tally.done}/{tally.total} {_line(ended)} ({tally.failed} failed, {times})")

    def hear(self, event: Event) -> None:
        """Print the number of finished tasks now and then, because the first cells may end late."""
        tally = self._tally
        if isinstance(event, TaskFinished):
            tally.learnt += 1
            if tally.elapsed - self._told >= QUIET:
                done = f"{tally.done}/{tally.total} cells, {tally.learnt} tasks learnt"
                self._print(f"{done} ({duration(tally.elapsed)})")

    def _print(self, line: str) -> None:
        self._told = self._tally.elapsed
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing; a `Bar` must be closed."""


class Bar:
    """Draw one bar over all cells, and print a line above it for each that ends."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._progress = Progress(
            TextColumn("{task.completed}/{task.total} cells"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
            TextColumn("{task.fields[learnt]}{task.fields[failed]} failed"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
            expand=True,
            transient=True,
        )
        done, total = tally.done, tally.total
        self._bar = self._progress.add_task(
            "", completed=done, total=total, learnt="", failed=0, left=""
        )
        self._progress.start()

    def tell(self, ended: Ended) -> None:
        tally = self._tally
        self._progress.console.print(_line(ended), highlight=False, markup=False)
        failed, left = tally.failed, tally.left
        self._progress.update(
            self._bar, completed=tally.done, failed=failed, left=left, refresh=True
        )

    def hear(self, event: Event) -> None:
        if isinstance(event, TaskFinished):
            self._tally.learnt += 1
            self._progress.update(self._bar, learnt=f"{self._tally.learnt} tasks learnt, ")

    def close(self) -> None:
        self._progress.stop()


def _line(ended: Ended) -> str:
    """Return one line with the result of a cell."""
    if ended.result is None:
        return printable(f"{ended.cell}: failed: {ended.failure}")
    bwt = "" if ended.result.bwt is None else f", BWT {points(ended.result.bwt)} %"
    return printable(ended.cell) + f": ACC {points(ended.result.acc)} %{bwt}"
