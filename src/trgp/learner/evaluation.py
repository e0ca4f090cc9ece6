"""Scores of every learnt task after each task: the accuracy matrix of a user's own loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import matrix_figures
from ..core.precision import home_of_float64
from ..types import TaskId
from . import ranks
from .loader_batches import first_samples, samples_in
from .model_snapshot import undisturbed
from .progress import watched
from .sharding import Whole

Metric = Callable[[nn.Module, Any, TaskId], float | Tensor]
"""Called as metric(model, batch, task); returns the mean score of the batch's samples."""


@dataclass(frozen=True)
class Scores:
    """Measurements of `evaluate` after each task; print them.

    `rows[i]` are the scores of the first i + 1 tasks after learning the last of them, empty where
    nothing was measured then.
    """

    tasks: tuple[TaskId, ...]
    rows: tuple[tuple[float, ...], ...]

    @property
    def row(self) -> dict[TaskId, float]:
        """The scores now, by task."""
        return dict(zip(self.tasks, self.rows[-1], strict=True))

    @property
    def matrix(self) -> list[list[float | None]]:
        """R[i][j], the score on task j after learning task i; None where nothing was measured."""
        T = len(self.tasks)
        return [[*row, *[None] * (T - len(row))] for row in self.rows]

    @property
    def acc(self) -> float:
        """The mean score over all tasks now."""
        return matrix_figures.acc(self._entry, len(self.tasks))

    @property
    def bwt(self) -> float | None:
        """How much tasks changed on average since they were learnt, negative where they are
        forgotten; None for a single task, or where a task's end was not measured."""
        return matrix_figures.bwt(self._entry, len(self.tasks)) if all(self.rows) else None

    @property
    def forgetting(self) -> float | None:
        """How much tasks are below their best on average; None where `bwt` is."""
        return matrix_figures.forgetting(self._entry, len(self.tasks)) if all(self.rows) else None

    def _entry(self, i: int, j: int) -> float:
        return self.rows[i][j]

    def __str__(self) -> str:
        """Tell the matrix, a row for each task learnt, and the figures."""
        heads = [str(task) for task in self.tasks]
        left = max(map(len, ["after", *heads]))
        width = max(map(len, [*heads, "-0.000"]))
        lines = ["after".ljust(left) + "".join(f"  {head:>{width}}" for head in heads)]
        for head, row in zip(heads, self.rows, strict=True):
            cells = (f"  {score:{width}.3f}" for score in row)
            lines.append((head.ljust(left) + "".join(cells)).rstrip())
        figures = {"ACC": self.acc, "BWT": self.bwt, "forgetting": self.forgetting}
        told = [f"{name} {value:.3f}" for name, value in figures.items() if value is not None]
        return "\n".join([*lines, ", ".join(told)])


def mean_score(
    model: nn.Module,
    loader: Iterable[Any],
    metric: Metric,
    task: TaskId,
    device: torch.device,
    spread: Whole,
) -> float:
    """The metric's mean over all samples of the loader and of all ranks, in eval mode."""
    total, samples = torch.zeros((), dtype=torch.float64), 0
    batches = first_samples(loader, None)
    with (
        spread.agreed(device),
        undisturbed(model, loader),
        torch.no_grad(),
        watched(batches, f"evaluate task {task!r}: batches read", loader) as seen,
    ):
        for batch in spread.in_step(seen, device):
            size = samples_in(batch)
            total = total + size * _number(metric(model, batch, task))
            samples += size
    home = home_of_float64(device)
    sums = torch.tensor([float(total), samples], dtype=torch.float64, device=home)
    score, count = ranks.summed(sums).tolist()
    return float(score / count)


def refuse_loaders(loaders: Mapping[TaskId, Iterable[Any]], tasks: Sequence[TaskId]) -> None:
    """Refuse loaders that do not tell of all learnt tasks."""
    if not isinstance(loaders, Mapping):
        raise TypeError(
            "evaluate needs a mapping from task ids to loaders, not "
            f"{type(loaders).__name__}: evaluate({{0: loader, ...}}, metric)."
        )
    if not tasks:
        raise RuntimeError("evaluate was called before any task was learnt; call end_task first.")
    missing = [task for task in tasks if task not in loaders]
    if missing:
        raise ValueError(
            f"evaluate needs a loader for every learnt task; add one for "
            f"{', '.join(map(repr, missing))}."
        )


def _number(score: Any) -> Tensor:
    try:
        number = torch.as_tensor(score, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        number = torch.empty(0)
    if number.numel() != 1:
        raise TypeError(
            "metric(model, batch, task) must return a batch's mean score as a number, not "
            f"{type(score).__name__ if not number.numel() else f'{number.numel()} numbers'}."
        )
    return number.reshape(())
