"""Events that a run reports to an observer, such as a progress bar or a log."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RunStarted:
    """A run begins, or resumes after an interrupt."""

    benchmark: str
    method: str
    preset: str
    seed: int
    tasks: int
    epochs: int
    """Upper bound per task."""
    folder: str
    """Folder of its checkpoints and its result."""
    done_tasks: int = 0
    done_epochs: int = 0
    """Finished epochs of the next task; above 0 only if the run resumes."""
    form: str | None = None


@dataclass(frozen=True)
class EpochFinished:
    """One epoch is trained and validated."""

    seed: int
    task: int
    epoch: int
    """Counted from 1."""
    loss: float
    """Mean over the training samples, measured during the steps."""
    valid_loss: float
    valid_accuracy: float
    lr: float
    """The learning rate of this epoch."""


@dataclass(frozen=True)
class TaskFinished:
    """A task is trained, and every task seen is evaluated."""

    seed: int
    task: int
    accuracies: list[float | None]
    """R[task]: one entry per task of the benchmark, None where it was not evaluated."""
    seconds: dict[str, float]


@dataclass(frozen=True)
class RunFinished:
    """All tasks are trained; the result is stored."""

    seed: int
    acc: float
    bwt: float | None
    stored: bool = False
    """Whether the result was already stored by an earlier run."""


Event = RunStarted | EpochFinished | TaskFinished | RunFinished
Observer = Callable[[Event], None]


def nobody(event: Event) -> None:
    """Ignore the event: the default observer."""
