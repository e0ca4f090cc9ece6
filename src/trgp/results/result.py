"""The result of one run, as stored in result.json, and the results of several seeds.

result.json, schema 1: the fields of `Result`, in this order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import metrics
from .metrics import Spread, over_seeds

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Result:
    """The result of one method on one benchmark with one seed."""

    schema_version: int
    command: str
    """The command as typed, or the equivalent call in Python."""
    benchmark: str
    method: str
    preset: str
    seed: int
    config: Mapping[str, Any]
    """Every setting of the run, those from the preset included."""
    versions: Mapping[str, str]
    device: str
    accuracy_matrix: list[list[float | None]]
    """[i][j]: accuracy on task j after task i, a fraction of 1; None if not evaluated."""
    acc: float
    bwt: float | None
    """None if not defined: for one task, and for tasks learnt jointly."""
    curves: list[dict[str, list[float]]]
    """By task, one value per epoch: loss (while training), valid_loss, valid_accuracy, lr."""
    selected: list[dict[str, list[int]]]
    """By task and layer: the old tasks in the trust region, strongest first."""
    ranks: Mapping[str, list[int]]
    """By layer and task: protected directions after the task."""
    seconds: list[dict[str, float]]
    """By task and phase: training, validation, bases, selection, evaluation, checkpoints.

    Older results count validation as training and have no checkpoints.
    """
    peak_memory_bytes: int
    """On a GPU the largest allocation there, else the largest size of the process."""
    state_bytes: int
    """Memory of the method at the end, the network not counted."""
    network_bytes: int
    form: str | None = None
    """Which of several equivalent computations the method used."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """The settings that differ from the preset's."""
    untrained: list[float] | None = None
    """The accuracies of the network as initialised, where unseen tasks were evaluated."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further figures that the method reports, by name."""
    digest: str = ""
    """Digest of all final weights and the method's state: equal digests mean equal bits."""
    checksum: str | None = field(default=None, compare=False)
    """Checksum of the file it was read from; None for trgp 0.1, whose files have none."""

    @property
    def mean_diagonal(self) -> float | None:
        """Mean accuracy on each task right after it is learnt; None for tasks learnt jointly."""
        diagonal = [row[i] for i, row in enumerate(self.accuracy_matrix)]
        return None if None in diagonal else metrics.mean_diagonal(self.accuracy_matrix)

    @property
    def forgetting(self) -> float | None:
        return None if self.bwt is None else metrics.forgetting(self.accuracy_matrix)

    @property
    def fwt(self) -> float | None:
        if self.untrained is None or self.bwt is None:
            return None
        return metrics.fwt(self.accuracy_matrix, self.untrained)


@dataclass(frozen=True)
class Results(Sequence[Result]):
    """The seeds of one configuration."""

    runs: tuple[Result, ...]

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index: Any) -> Any:
        return self.runs[index]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.runs)

    @property
    def acc(self) -> Spread:
        return over_seeds([run.acc for run in self.runs])

    @property
    def bwt(self) -> Spread:
        return over_seeds([run.bwt for run in self.runs])

    @property
    def mean_diagonal(self) -> Spread:
        return over_seeds([run.mean_diagonal for run in self.runs])

    @property
    def forgetting(self) -> Spread:
        return over_seeds([run.forgetting for run in self.runs])

    @property
    def fwt(self) -> Spread:
        return over_seeds([run.fwt for run in self.runs])
