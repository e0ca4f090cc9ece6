"""The phases of a run's time; older results distinguish fewer of them."""

from collections.abc import Iterable, Mapping, Sequence

PHASES = ("training", "validation", "bases", "selection", "evaluation", "checkpoints")
LATER = ("validation", "checkpoints")
"""Phases that older results lack: validation is counted as training, checkpoints not at all."""

Seconds = Sequence[Mapping[str, float]]
"""Seconds of a run by task and phase."""


def tells_all(run: Seconds) -> bool:
    """Return whether every task has the later phases; runs begun by older versions lack some."""
    return bool(run) and all(phase in task for task in run for phase in LATER)


def alike(runs: Sequence[Seconds]) -> Sequence[Seconds]:
    """Bring runs to phases with the same meaning, so that a mean over them is valid."""
    return runs if all(map(tells_all, runs)) else [[*map(_as_earlier, run)] for run in runs]


def in_order(known: Iterable[str]) -> list[str]:
    """Sort phases: the suite's own first, then those that methods add."""
    known = {*known}
    return [phase for phase in PHASES if phase in known] + sorted(known - {*PHASES})


def _as_earlier(task: Mapping[str, float]) -> Mapping[str, float]:
    told = {phase: spent for phase, spent in task.items() if phase not in LATER}
    if "validation" in task:
        told["training"] = told.get("training", 0.0) + task["validation"]
    return told
