"""Show the progress of a run's seeds on stderr: a bar on a terminal, else nothing."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from ..engine.events import EpochFinished, Event, RunFinished, RunStarted, TaskFinished
from ..results.layout import points


class Bar:
    """One bar over all seeds, with position and figures of the seed that reported last."""

    def __init__(self, seeds: int) -> None:
        self._seeds = seeds
        self._done = 0
        self._started: dict[int, RunStarted] = {}
        self._epochs: dict[int, int] = {}  # finished epochs of the seeds in progress
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            expand=True,
            transient=True,
        )
        self._bar = self._progress.add_task("starting", total=None, figures="")
        self._progress.start()

    def close(self) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._started[event.seed] = event
                self._show(event.seed, event.done_tasks, event.done_epochs)
            case EpochFinished():
                figures = f"loss {event.loss:.3f} val {100 * event.valid_accuracy:.1f} %"
                self._show(event.seed, event.task, event.epoch, figures)
            case TaskFinished():
                self._show(event.seed, event.task + 1, 0)
            case RunFinished():
                self._done += 1
                self._epochs.pop(event.seed, None)
                self._progress.console.print(run_line(event), highlight=False)

    def _show(self, seed: int, task: int, epoch: int, figures: str = "") -> None:
        """Update the bar; a finished task counts all its epochs, also if it ended early."""
        run = self._started[seed]  # every run that is not stored sends RunStarted first
        each = run.tasks * run.epochs
        self._epochs[seed] = task * run.epochs + epoch
        count = f" ({self._done + len(self._epochs)}/{self._seeds})" if self._seeds > 1 else ""
        self._progress.update(
            self._bar,
            description=f"seed {seed}{count} task {min(task + 1, run.tasks)}/{run.tasks} "
            f"epoch {epoch}/{run.epochs}",
            total=self._seeds * each,
            completed=self._done * each + sum(self._epochs.values()),
            figures=figures,
        )


def run_line(event: RunFinished) -> str:
    """Return one line with the result of a seed."""
    bwt = "" if event.bwt is None else f", BWT {points(event.bwt)} %"
    before = " (finished before, not repeated)" if event.stored else ""
    return f"seed {event.seed}: ACC {points(event.acc)} %{bwt}{before}"
