"""The position of a run, and its form in a checkpoint: named tensors, and JSON metadata.

A checksum is no signature, so a file's content is checked before anything is built from it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import SETTINGS, Kind, check_fields, is_number, is_text, is_whole
from ..results.check import FIELDS
from ..tree import from_leaves, leaves
from ..types import Params, State
from .schedule import Schedule

Content = tuple[dict[str, Tensor], dict[str, Any]]
FIX = "use another copy"


@dataclass
class Record:
    """The results of a run so far; JSON throughout."""

    accuracy_matrix: list[list[float | None]] = field(default_factory=list)
    curves: list[dict[str, list[float]]] = field(default_factory=list)
    seconds: list[dict[str, float]] = field(default_factory=list)
    untrained: list[float] | None = None
    peak_memory_bytes: int = 0

    def copied(self) -> dict[str, Any]:
        """Copy the record, by hand because a deep copy after every epoch would be slow."""
        return {
            **vars(self),
            "accuracy_matrix": [[*row] for row in self.accuracy_matrix],
            "curves": [{name: [*values] for name, values in task.items()} for task in self.curves],
            "seconds": [{**task} for task in self.seconds],
        }


@dataclass
class Position:
    """The position of a run: a task, and the epochs finished in it."""

    task: int
    params: Params
    state: State
    schedule: Schedule
    record: Record
    best: tuple[Params, State] | None = None  # parameters and moving state of the best epoch


def _is_loss(text: Any) -> bool:
    try:
        return is_text(text) and not math.isnan(float(text))  # infinite before the first epoch
    except ValueError:
        return False


_WHOLE = Kind(is_whole, "a whole number from 0 on")
_TRUTH = Kind(lambda value: isinstance(value, bool), "true or false")
IDENTITY = {"format": _WHOLE, "run": SETTINGS}
META = {
    **IDENTITY,
    "task": _WHOLE,
    "schedule": SETTINGS,
    "record": SETTINGS,
    "has_best": _TRUTH,
}
SCHEDULE = {
    "lr": Kind(is_number, "a number"),
    "epoch": _WHOLE,
    "best": Kind(_is_loss, "a number as a text"),
    "waited": _WHOLE,
    "over": _TRUTH,
}
RECORD = {each.name: FIELDS[each.name] for each in fields(Record)}


def described(position: Position, state: State) -> Content:
    """Describe the current position, with this part of its state, for `restored`.

    Tensors are not copied, because they are never changed in place; the rest is.
    """
    tensors = _named("params", position.params) | _named("state", state)
    if position.best is not None:
        params, moving = position.best
        tensors |= _named("best params", params) | _named("best state", moving)
    meta = {
        "task": position.task,
        "schedule": {**asdict(position.schedule), "best": repr(position.schedule.best)},
        "record": position.record.copied(),
        "has_best": position.best is not None,
    }
    return tensors, meta


def check_meta(meta: Mapping[str, Any], path: str | Path) -> None:
    """Refuse metadata that no checkpoint has."""
    check_fields(meta, META, path, FIX)
    check_fields(meta["schedule"], SCHEDULE, path, FIX)
    check_fields(meta["record"], RECORD, path, FIX)
    task, record = meta["task"], meta["record"]
    matrix = record["accuracy_matrix"]
    lengths = {len(record["curves"]) - 1, len(record["seconds"]) - 1, len(matrix)}
    if lengths != {task} or any(not task < len(row) == len(matrix[0]) for row in matrix):
        raise ValueError(f"{path} has a record that does not fit {task} finished tasks; {FIX}.")


def restored(
    meta: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device
) -> Position:
    """Rebuild the position that was passed to `described`, on the device."""
    # Cloned, because tensors read from a file may lie where arithmetic rounds differently.
    tensors = {name: tensors[name].clone().to(device) for name in sorted(tensors)}
    schedule = {key: meta["schedule"][key] for key in SCHEDULE}
    best = (
        (_part("best params", tensors), from_leaves(_part("best state", tensors)))
        if meta["has_best"]
        else None
    )
    return Position(
        task=meta["task"],
        params=_part("params", tensors),
        state=from_leaves(_part("state", tensors)),
        schedule=Schedule(**{**schedule, "best": float(schedule["best"])}),
        record=Record(**{key: meta["record"][key] for key in RECORD}),
        best=best,
    )


def check_tensors(
    tensors: Mapping[str, Tensor], initial: Params, has_best: bool, path: str | Path
) -> None:
    """Refuse NaN, which no loss survives, and parameters that the network or the run cannot have.

    Args:
        initial: parameters whose shapes and types `tensors` must match.
    """
    for name, tensor in tensors.items():
        if bool(tensor.isnan().any()):
            raise ValueError(f"{path} has NaN in '{name}'; {FIX}.")
    params, best = (_part(prefix, tensors) for prefix in ("params", "best params"))
    _check_alike(params, initial, path)
    if has_best:
        _check_alike(best, params, path)


def _check_alike(here: Params, expected: Params, path: str | Path) -> None:
    for name, tensor in expected.items():
        if name not in here:
            raise ValueError(f"{path} lacks the parameter '{name}'; {FIX}.")
        found = here[name]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{path} has the parameter '{name}' of shape {tuple(found.shape)} and "
                f"{found.dtype}, not {tuple(tensor.shape)} and {tensor.dtype}; {FIX}."
            )


def settled(position: Position) -> Position:
    """Give every tensor, in place, the layout and the order that it has when read again.

    Products and sums may round differently in another layout or order, and a run that continues
    from here must have the bits of one that was interrupted.
    """
    position.params = {name: t.contiguous() for name, t in _in_order(position.params.items())}
    # An empty level of the state has no tensor to write, so it is dropped here.
    position.state = from_leaves(
        {path: t.contiguous() for path, t in _in_order(leaves(position.state))}
    )
    if position.best is not None:
        params, moving = position.best
        best = {name: t.contiguous() for name, t in _in_order(params.items())}
        position.best = (
            best,
            from_leaves({path: t.contiguous() for path, t in _in_order(leaves(moving))}),
        )
    return position


def _in_order(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return sorted(named, key=lambda pair: pair[0])


def _named(prefix: str, tree: State) -> dict[str, Tensor]:
    if prefix.endswith("params"):  # flat, and a name may be anything
        return {f"{prefix}/{name}": t for name, t in tree.items() if isinstance(t, Tensor)}
    return {f"{prefix}/{path}": t for path, t in leaves(tree)}


def _part(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix += "/"
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
