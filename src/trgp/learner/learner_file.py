"""A learner as tensors and plain values, and in one file of both."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..core.layers import local
from ..core.memory import Change, Memory, in_memory_order, in_region_order
from ..files import read_tensors, write_tensors
from ..types import PathLike, TaskId
from . import ranks
from .learner_state import Known, LearnerState, OpenTask, TaskRecord
from .sharding import as_laid, own_change, own_rows, whole
from .update_guard import GuardedTask

FORMAT = 2
READABLE = (1, 2)
KINDS = {"S": "scalings", "D": "shift", "P": "parts"}


class Learner(Protocol):
    """The part of a learner that a file needs."""

    functions: ClassVar[tuple[str, ...]]  # options that may be functions
    plain: ClassVar[tuple[str, ...]]
    _state: LearnerState

    def _guarded(self, task: TaskId, selected: Mapping[str, Sequence[TaskId]]) -> GuardedTask:
        """Guard a task that trusts these tasks."""


def save(learner: Learner, path: PathLike, *, include_model: bool) -> None:
    """Write all that the learner knows, whole or not at all; of several ranks the first does."""
    state = learner._state
    meta, tensors = describe(learner, everywhere=False)
    if include_model:
        for key, value in state.bare.state_dict().items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"The model's state holds '{key}', which is no tensor; save the model yourself "
                    "and leave include_model out."
                )
            tensors[f"model/{key}"] = whole(local(value), value, 0, everywhere=False)
    if ranks.rank() == 0:
        write_tensors(path, tensors, meta)


def options(
    method: str,
    functions: Sequence[str],
    meta: Mapping[str, Any],
    given: Mapping[str, Any],
    path: PathLike,
) -> dict[str, Any]:
    """Return the options of a saved learner of this class, with those given again."""
    _check_method(method, meta, path)
    found = dict(meta["options"])
    for name in functions:
        if given.get(name) is not None:
            found[name] = given[name]
        elif name in meta["functions"]:
            raise ValueError(f"{path} was saved with {name} as a function; give it to load again.")
    return found


def describe(
    learner: Learner, *, everywhere: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return all that the learner knows, as plain values and as tensors by name.

    everywhere: whether ranks other than the first need what is joined from several.
    """
    known, plan = learner._state.known, learner._state.plan
    joined = partial(whole, everywhere=everywhere)
    weights = {name: layer.weight.param for name, layer in plan.layers.items()}
    tensors: dict[str, Tensor] = {}
    for name, memory in known.memory.items():
        tensors |= {f"memory/{name}/{key}": getattr(memory, key) for key in ("M", "ranks")}
        tensors[f"memory/{name}/C"] = joined(memory.C, weights[name], 1)
        for i, task in enumerate(known.tasks):
            tensors[f"memory/{name}/mask/{i}"] = memory.masks[task]
    for i, record in enumerate(known.tasks.values()):
        for name, change in record.changes.items():
            kind = "D" if change.shift is not None else "P" if change.parts else "S"
            for j, tensor in enumerate(change.tensors):
                tensors[f"task/{i}/{kind}{j}/{name}"] = joined(tensor, weights[name], 1)
        for name, copy in record.copies.items():
            here = plan.per_task[name].param if name in plan.per_task else copy
            tensors[f"task/{i}/copy/{name}"] = joined(copy, here, 0)
    options = {name: getattr(learner, name) for name in (*learner.functions, *learner.plain)}
    functions = [name for name in learner.functions if callable(options[name])]
    meta = {
        "format": FORMAT,
        "method": type(learner).__name__,
        "options": {k: v for k, v in options.items() if k not in functions},
        "functions": functions,
        "layers": _shapes(learner),
        "tasks": list(known.tasks),
        "active": known.active,
        "frozen": list(known.frozen),
        "selected": [record.selected for record in known.tasks.values()],
        "used": [record.used for record in known.tasks.values()],
        "scores": [record.scores for record in known.tasks.values()],
    }
    if known.open is not None:
        meta["open"], K = _describe_open(learner, known.open)
        tensors |= {f"open/K/{name}": joined(t, weights[name], 1) for name, t in K.items()}
        tensors |= {f"open/buffer/{name}": t for name, t in known.open.buffers.items()}
    return meta, tensors


def _describe_open(learner: Learner, opened: OpenTask) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the open task's plain values, and K of the layers that may reach into their memory."""
    guarded = opened.guarded
    memory = learner._state.known.memory
    K = {
        name: in_memory_order(guard.K, guard.region, memory[name].M.shape[2])
        for name, guard in guarded.layers.items()
        if guard.region.blocks
    }
    return {
        "task": opened.task,
        "thresholds": opened.thresholds,
        "selected": opened.selected,
        "used": opened.used,
        "resumed": guarded.resumed or guarded.stepped,
        "forms": guarded.forms,
        "steps": {name: guard.steps for name, guard in guarded.layers.items()},
    }, K


def fill(
    learner: Learner, meta: Mapping[str, Any], tensors: Mapping[str, Tensor], path: PathLike
) -> None:
    """Give a learner all that another one knew; nothing changes before every check has passed."""
    _check_method(type(learner).__name__, meta, path)
    state = learner._state
    _check_names(meta["layers"], _shapes(learner), path)
    parameters = dict(state.bare.named_parameters())
    for name in meta["frozen"]:
        if name not in parameters:
            raise ValueError(
                f"{path} does not fit the model: it has no parameter '{name}'; load it with the "
                "model it was saved for."
            )
    saved = {
        name: Memory(
            M=tensors[f"memory/{name}/M"],
            C=tensors[f"memory/{name}/C"],
            ranks=tensors[f"memory/{name}/ranks"],
            masks={t: tensors[f"memory/{name}/mask/{i}"] for i, t in enumerate(meta["tasks"])},
        )
        for name in state.plan.layers
    }
    used, scores = (meta.get(key, [[]] * len(meta["tasks"])) for key in ("used", "scores"))
    tasks = {
        task: TaskRecord(
            meta["selected"][i],
            _changes(i, meta["selected"][i], tensors, saved, state),
            _copies(learner, i, task, tensors, path),
            used[i],
            scores[i],
        )
        for i, task in enumerate(meta["tasks"])
    }
    weights = {key.removeprefix("model/"): t for key, t in tensors.items() if key[:6] == "model/"}
    if weights:
        here = state.bare.state_dict()
        _check_names(
            {key: list(t.shape) for key, t in weights.items()},
            {key: list(t.shape) for key, t in here.items()},
            path,
        )
        state.bare.load_state_dict({key: as_laid(t, here[key]) for key, t in weights.items()})
    memory = {
        name: replace(saved[name], C=own_rows(saved[name].C, layer.weight.param, 1))
        for name, layer in state.plan.layers.items()
    }
    state.thaw()  # of another state, which may have been of no task
    state.known = Known(memory, tasks, meta["active"])
    state.meet()
    frozen = state.freeze_params({n: parameters[n] for n in meta["frozen"]}) if tasks else {}
    opened = _open(learner, meta["open"], tensors) if "open" in meta else None
    state.known = Known(state.known.memory, state.known.tasks, meta["active"], opened, frozen)


def _changes(
    i: int,
    selected: Mapping[str, list[TaskId]],
    tensors: Mapping[str, Tensor],
    memory: Mapping[str, Memory],
    state: LearnerState,
) -> dict[str, Change]:
    changes = {}
    for name, trusted in selected.items():
        kept: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for kind, found in kept.items():
            while (key := f"task/{i}/{kind}{len(found)}/{name}") in tensors:
                found.append(tensors[key])
        if trusted:
            shift = kept["D"][0] if kept["D"] else None
            change = Change(trusted, kept["S"], shift, kept["P"])
            weight = state.plan.layers[name].weight.param
            changes[name] = own_change(change, memory[name], weight)
    return changes


def _copies(
    learner: Learner, i: int, task: TaskId, tensors: Mapping[str, Tensor], path: PathLike
) -> dict[str, Tensor]:
    here = {name: list(slot.param.shape) for name, slot in learner._state.plan.per_task.items()}
    prefix = f"task/{i}/copy/"
    copies = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    for name, copy in copies.items():
        if here.get(name) != list(copy.shape):
            raise ValueError(
                f"{path} holds task {task!r}'s own '{name}' of shape {list(copy.shape)}, but "
                f"the model has {here.get(name, 'none')}; load it with the model it was "
                "saved for."
            )
    slots = learner._state.plan.per_task
    return {name: own_rows(copy, slots[name].param, 0) for name, copy in copies.items()}


@torch.no_grad()
def _open(learner: Learner, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> OpenTask:
    """Put the open task together again; the weights it needs come with the model."""
    guarded: GuardedTask = learner._guarded(meta["task"], meta["selected"])
    guarded.resumed = meta["resumed"]
    guarded.forms = dict(meta["forms"])
    for name, guard in guarded.layers.items():
        K = guard.K
        if guard.region.blocks:
            rows = own_rows(tensors[f"open/K/{name}"], guard.layer.weight.param, 1)
            K = in_region_order(rows.to(K), guard.region)
        guard.resume(meta["steps"][name], K)
    prefix = "open/buffer/"
    buffers = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    return OpenTask(
        meta["task"],
        None,
        dict(meta["thresholds"]),
        meta["selected"],
        meta["used"],
        buffers,
        guarded,
    )


def _check_method(method: str, meta: Mapping[str, Any], path: PathLike) -> None:
    if meta["method"] != method:
        raise ValueError(f"{path} holds a {meta['method']} learner; load it with that class.")


def read(path: PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a learner's file, of this format or an older one."""
    meta, tensors = read_tensors(path, writer="learner.save")
    if "format" not in meta:
        raise ValueError(
            f"{path} was not written by learner.save; give a file that learner.save wrote."
        )
    if meta["format"] not in READABLE:
        raise ValueError(
            f"{path} has format {meta['format']}, this version reads {READABLE[-1]} and older; use "
            "the version of trgp that wrote it."
        )
    return meta, tensors


def _check_names(
    saved: Mapping[str, list[int]], here: Mapping[str, list[int]], path: PathLike
) -> None:
    """Compare names and shapes of the file with the model's."""
    for name in saved.keys() | here.keys():
        if saved.get(name) != here.get(name):
            raise ValueError(
                f"{path} does not fit the model: '{name}' is {saved.get(name, 'absent')} in the "
                f"file and {here.get(name, 'absent')} in the model; load it with the model it was "
                "saved for."
            )


def _shapes(learner: Learner) -> dict[str, list[int]]:
    return {name: list(layer.shape) for name, layer in learner._state.plan.layers.items()}
