"""A learner in one file of tensors, with metadata that says what they are."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from .core.subspace import Memory
from .files import read_tensors, write_tensors
from .task import Change, TaskRecord

if TYPE_CHECKING:
    from .learner import GPM

FORMAT = 1
L = TypeVar("L", bound="GPM")


def save(learner: "GPM", path: str | os.PathLike[str], *, include_model: bool) -> None:
    """Write the learner's state, whole or not at all."""
    meta, tensors = _describe(learner)
    if include_model:
        for key, value in learner._bare.state_dict().items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"The model's state holds '{key}', which is no tensor; save the model yourself "
                    "and leave include_model out."
                )
            tensors[f"model/{key}"] = value
    write_tensors(path, tensors, meta)


def load(
    cls: type[L], path: str | os.PathLike[str], model: nn.Module, given: Mapping[str, Any]
) -> L:
    """Rebuild a learner for a model; the model is changed only after every check has passed."""
    meta, tensors = _read(path)
    if meta["method"] != cls.__name__:
        raise ValueError(f"{path} holds a {meta['method']} learner; load it with that class.")
    options = dict(meta["options"])
    for name in cls.functions:
        if given.get(name) is not None:
            options[name] = given[name]
        elif name in meta["functions"]:
            raise ValueError(f"{path} was saved with {name} as a function; give it to load again.")
    learner = cls(model, **options)
    _check_names(meta["layers"], _shapes(learner), path)
    _fill(learner, meta, tensors, path)
    parameters = dict(learner._bare.named_parameters())
    for name in meta["frozen"]:
        if name not in parameters:
            raise ValueError(
                f"{path} does not fit the model: it has no parameter '{name}'; load it with the "
                "model it was saved for."
            )
    weights = {key.removeprefix("model/"): t for key, t in tensors.items() if key[:6] == "model/"}
    if weights:
        _check_names(
            {key: list(t.shape) for key, t in weights.items()},
            {key: list(t.shape) for key, t in learner._bare.state_dict().items()},
            path,
        )
        learner._bare.load_state_dict(weights)
    learner._follow_model()
    if learner._tasks:
        learner._freeze_params({name: parameters[name] for name in meta["frozen"]})
    return learner


def _describe(learner: "GPM") -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    for name, memory in learner._memory.items():
        tensors |= {f"memory/{name}/{key}": getattr(memory, key) for key in ("M", "C", "ranks")}
        for i, task in enumerate(learner._tasks):
            tensors[f"memory/{name}/mask/{i}"] = memory.masks[task]
    for i, record in enumerate(learner._tasks.values()):
        for name, change in record.changes.items():
            kind = "S" if change.shift is None else "D"
            for j, tensor in enumerate(change.tensors):
                tensors[f"task/{i}/{kind}{j}/{name}"] = tensor
        tensors |= {f"task/{i}/copy/{name}": t for name, t in record.copies.items()}
    options = {name: getattr(learner, name) for name in (*learner.functions, *learner.plain)}
    functions = [name for name in learner.functions if callable(options[name])]
    meta = {
        "format": FORMAT,
        "method": type(learner).__name__,
        "options": {k: v for k, v in options.items() if k not in functions},
        "functions": functions,
        "layers": _shapes(learner),
        "tasks": list(learner._tasks),
        "active": learner._active,
        "frozen": list(learner._frozen.params),
        "selected": [record.selected for record in learner._tasks.values()],
    }
    return meta, tensors


def _fill(
    learner: "GPM", meta: dict[str, Any], tensors: dict[str, Tensor], path: str | os.PathLike[str]
) -> None:
    tasks = meta["tasks"]
    for name in learner._memory:
        learner._memory[name] = Memory(
            M=tensors[f"memory/{name}/M"],
            C=tensors[f"memory/{name}/C"],
            ranks=tensors[f"memory/{name}/ranks"],
            masks={task: tensors[f"memory/{name}/mask/{i}"] for i, task in enumerate(tasks)},
        )
    here = {name: list(slot.param.shape) for name, slot in learner._plan.per_task.items()}
    for i, (task, selected) in enumerate(zip(tasks, meta["selected"], strict=True)):
        changes = {}
        for name, trusted in selected.items():
            scalings = [
                tensors[key]
                for key in (f"task/{i}/S{j}/{name}" for j in range(len(trusted)))
                if key in tensors
            ]
            if trusted:
                changes[name] = Change(trusted, scalings, tensors.get(f"task/{i}/D0/{name}"))
        prefix = f"task/{i}/copy/"
        copies = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        for name, copy in copies.items():
            if here.get(name) != list(copy.shape):
                raise ValueError(
                    f"{path} holds task {task!r}'s own '{name}' of shape {list(copy.shape)}, but "
                    f"the model has {here.get(name, 'none')}; load it with the model it was "
                    "saved for."
                )
        learner._tasks[task] = TaskRecord(selected, changes, copies)
    learner._active = meta["active"]


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    meta, tensors = read_tensors(path, writer="learner.save")
    if "format" not in meta:
        raise ValueError(f"{path} was not written by learner.save; give a file that was.")
    if meta["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {meta['format']}, this version reads {FORMAT}; use the version of "
            "trgp that wrote it."
        )
    return meta, tensors


def _check_names(
    saved: dict[str, list[int]], here: dict[str, list[int]], path: str | os.PathLike[str]
) -> None:
    """Names and shapes of the file against the model's."""
    for name in saved.keys() | here.keys():
        if saved.get(name) != here.get(name):
            raise ValueError(
                f"{path} does not fit the model: '{name}' is {saved.get(name, 'absent')} in the "
                f"file and {here.get(name, 'absent')} in the model; load it with the model it was "
                "saved for."
            )


def _shapes(learner: "GPM") -> dict[str, list[int]]:
    return {name: list(layer.shape) for name, layer in learner._plan.layers.items()}
