"""The phases of a run's time, of which results stored earlier tell fewer apart."""

from collections.abc import Iterable, Mapping, Sequence

PHASES = ("training", "validation", "bases", "selection", "evaluation", "checkpoints")
LATER = ("validation", "checkpoints")
"""What older results have within training, and do not have at all."""

Seconds = Sequence[Mapping[str, float]]
"""A run's, by task and phase."""


def tells_all(run: Seconds) -> bool:
    """Whether it has the later phases too; a run that an older version began lacks some."""
    return bool(run) and all(phase in task for task in run for phase in LATER)


def alike(runs: Sequence[Seconds]) -> Sequence[Seconds]:
    """In phases that mean the same in all of them, so that there is a mean over them."""
    return runs if all(map(tells_all, runs)) else [[*map(_as_earlier, run)] for run in runs]


def in_order(known: Iterable[str]) -> list[str]:
    """A run's own phases first, then those of other methods."""
    known = {*known}
    return [phase for phase in PHASES if phase in known] + sorted(known - {*PHASES})


def _as_earlier(task: Mapping[str, float]) -> Mapping[str, float]:
    told = {phase: spent for phase, spent in task.items() if phase not in LATER}
    if "validation" in task:
        told["training"] = told.get("training", 0.0) + task["validation"]
    return told
