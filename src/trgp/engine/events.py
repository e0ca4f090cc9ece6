"""What a run tells while it goes on: to a progress bar, a log, or nobody."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RunStarted:
    """A run begins, or goes on where it was interrupted."""

    benchmark: str
    method: str
    preset: str
    seed: int
    tasks: int
    epochs: int
    """At most so many a task."""
    folder: str
    """Where its checkpoints and its result are kept."""
    done_tasks: int = 0
    done_epochs: int = 0
    """Of the task after those done; more than 0 only for a run that goes on."""
    form: str | None = None


@dataclass(frozen=True)
class EpochFinished:
    """One epoch is trained and validated."""

    seed: int
    task: int
    epoch: int
    """Counted from 1."""
    loss: float
    """Mean over the training samples, while they were learnt."""
    valid_loss: float
    valid_accuracy: float
    lr: float
    """The rate it was trained with."""


@dataclass(frozen=True)
class TaskFinished:
    """A task is learnt, and every task seen is evaluated."""

    seed: int
    task: int
    accuracies: list[float | None]
    """R[task], one entry a task of the benchmark, None where it was not evaluated."""
    seconds: dict[str, float]


@dataclass(frozen=True)
class RunFinished:
    """All tasks are learnt; the result is stored."""

    seed: int
    acc: float
    bwt: float | None
    stored: bool = False
    """Whether an earlier run had finished it already."""


Event = RunStarted | EpochFinished | TaskFinished | RunFinished
Observer = Callable[[Event], None]


def nobody(event: Event) -> None:
    """The observer of a run that nobody watches."""
