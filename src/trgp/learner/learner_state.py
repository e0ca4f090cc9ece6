"""A learner's knowledge, one value that one assignment replaces, and its model's contents.

Whatever fails half-way, at any line, leaves `known` as it was; with it lies the snapshot that puts
the model back.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.keep import with_coordinates
from ..core.layers import local
from ..core.memory import Change, Memory
from ..core.plan import Plan, bare, make_plan, per_task_tensors
from ..types import Norm, TaskId, matches
from . import model_checks
from .layer_gradients import LossFn
from .model_snapshot import Snapshot
from .sharding import refuse_other_ways, reshard, spread_of
from .update_guard import GuardedTask, UpdateGuard, refuse_open


class UnknownTaskError(KeyError):
    """A task that has not been learnt."""

    def __str__(self) -> str:  # KeyError would show the sentence in quotes
        return str(self.args[0])


@dataclass(frozen=True)
class TaskRecord:
    """One learnt task."""

    selected: dict[str, list[TaskId]]  # per layer, strongest first
    changes: dict[str, Change]  # per layer with a trust region
    copies: dict[str, Tensor]  # per-task parameters and buffers, by name
    used: list[str] = field(default_factory=list)  # excluded parameters that it needs
    scores: list[float] = field(default_factory=list)  # of all tasks until then, if evaluated

    @property
    def nbytes(self) -> int:
        """Bytes that the task holds for itself."""
        kept = [t for change in self.changes.values() for t in change.tensors]
        return sum(t.nbytes for t in [*kept, *self.copies.values()])


@dataclass(frozen=True)
class OpenTask:
    """A task between `begin_task` and `end_task`."""

    task: TaskId
    loss_fn: LossFn | None  # None after loading, until begin_task gives it again
    thresholds: dict[str, float]
    selected: dict[str, list[TaskId]]
    used: list[str]
    buffers: dict[str, Tensor]  # as they were at the beginning, where nothing keeps them
    guarded: GuardedTask


@dataclass(frozen=True)
class Known:
    """All that a learner knows, replaced as a whole."""

    memory: dict[str, Memory]
    tasks: dict[TaskId, TaskRecord] = field(default_factory=dict)
    active: TaskId | None = None  # whose weights the model holds between tasks
    open: OpenTask | None = None
    frozen: dict[str, nn.Parameter] = field(default_factory=dict)  # since the first task
    undo: Snapshot | None = None  # of a call that has not come to its end


class LearnerState:
    """A model, the plan for it, and what is known of its tasks."""

    def __init__(
        self, model: nn.Module, exclude: list[str], per_task: list[str], norm: Norm
    ) -> None:
        """Plan for a model that has learnt nothing."""
        self.model = model
        self.bare = bare(model)
        self.exclude, self.per_task, self.norm = exclude, per_task, norm
        reshard(self.bare)
        refuse_other_ways(self.bare)
        self.plan: Plan = make_plan(self.bare, exclude, per_task, norm)
        if not self.plan.layers:
            raise ValueError(
                "The model has nothing to protect: no trainable linear, convolution, attention or "
                "recurrent layer outside exclude=[...] and per_task=[...]; tell of kinds of your "
                "own with trgp.protects."
            )
        self.spread = spread_of(self.bare, self.plan.layers)
        refuse_open(p for layer in self.plan.layers.values() for p in layer.params)
        self.known = Known(
            {
                name: Memory.empty(len(W), W.shape[1], W.shape[2], like=W)
                for name, layer in self.plan.layers.items()
                for W in [layer.matrix()]
            }
        )
        self.visits: list[list[tuple[Tensor, Tensor]]] = []  # what each `task(...)` puts back
        self.detached = False
        self._new_guard()

    def _new_guard(self) -> None:
        self.guard = UpdateGuard(self.plan.layers, self)
        self._lock = threading.RLock()

    # ---- what the guard reads ---------------------------------------------------------------

    @property
    def guarded(self) -> GuardedTask | None:
        """The open task as the guard sees it."""
        return self.known.open.guarded if self.known.open is not None else None

    @property
    def closed(self) -> bool:
        """Whether no task is open and there is something to lose."""
        return self.known.open is None and bool(self.known.tasks)

    @property
    def visiting(self) -> bool:
        """Whether the model holds the weights of another task for a while."""
        return bool(self.visits)

    @property
    def frozen(self) -> Mapping[str, nn.Parameter]:
        """Parameters frozen after the first task, by name."""
        return self.known.frozen

    @property
    def shared(self) -> Mapping[str, nn.Parameter]:
        """Excluded parameters that old tasks use as well."""
        used = {name for record in self.known.tasks.values() for name in record.used}
        return {name: p for name, p in self.excluded().items() if name in used}

    def reshard(self) -> None:
        """Put every parameter in its place: under FSDP2 a pass may leave some joined."""
        self.spread.reshard()

    def excluded(self) -> dict[str, nn.Parameter]:
        """Parameters that exclude=[...] leaves to the user, by name."""
        named = self.bare.named_parameters()
        return {name: p for name, p in named if matches(name, self.exclude)}

    # ---- one call at a time, whole or not at all --------------------------------------------

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Refuse a call from a second thread while this one lasts."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{what} was called while another thread uses this learner; a learner writes into "
                "its model, so use it from one thread, or a copy.deepcopy per thread."
            )
        try:
            self.reshard()
            self.settle()
            yield
        finally:
            self._lock.release()

    def settle(self) -> None:
        """Put back what a call that was interrupted had done to the model.

        The guard looks at weights that were put back as at any others that it did not write.
        """
        if self.known.undo is not None:
            self.known.undo.restore()
            self.known = replace(self.known, undo=None)

    def begin_change(self, loader: object) -> None:
        """From here until `known` is replaced, `settle` puts everything back."""
        tensors = self._weights()
        if self.guarded is not None:
            tensors += [guard.K for guard in self.guarded.layers.values()]
        self.known = replace(self.known, undo=Snapshot(self.bare, loader, tensors))

    # ---- what the model holds ---------------------------------------------------------------

    def _weights(self) -> list[Tensor]:
        """All that differs between tasks, as far as this process holds it."""
        weights = [w for layer in self.plan.layers.values() for w in layer.weights]
        return weights + [local(slot.param) for slot in self.plan.per_task.values()]

    def coordinates(self, task: TaskId) -> dict[str, Tensor]:
        """W_eff M of a learnt task in every layer."""
        changes = self.known.tasks[task].changes
        return {
            name: memory.C + changes[name].coordinates(memory) if name in changes else memory.C
            for name, memory in self.known.memory.items()
        }

    @torch.no_grad()
    def hold(self, coordinates: Mapping[str, Tensor]) -> None:
        """Give every layer's weight these coordinates in span(M)."""
        for name, K in coordinates.items():
            layer = self.plan.layers[name]
            if K.shape[2]:
                layer.assign(with_coordinates(layer.matrix(), self.known.memory[name].M, K))

    @torch.no_grad()
    def become(self, task: TaskId) -> None:
        """Put a task's effective weights and copies into the model."""
        if self.known.open is not None and task == self.known.open.task:
            for tensor, value in self.visits[0]:
                tensor.copy_(value)
            return
        copies = self.known.tasks[task].copies
        slots = {name: slot for name, slot in self.plan.per_task.items() if name in copies}
        for name, slot in slots.items():
            here = local(slot.param).shape
            if here != copies[name].shape:
                raise RuntimeError(
                    f"Task {task!r} has its own '{name}' of shape {tuple(copies[name].shape)}, but "
                    f"the model's is {tuple(here)}; put a module of that shape back."
                )
        self.hold(self.coordinates(task))
        for name, slot in slots.items():
            local(slot.param).copy_(copies[name])

    @contextmanager
    def visit(self, task: TaskId) -> Iterator[None]:
        """Hold a task's weights; on exit every bit is back."""
        if not self.visits:  # inside one, the weights are another task's
            self.guard.settle()
        before = [(t, t.detach().clone()) for t in self._weights()]
        try:
            self.become(task)
            self.visits.append(before)
            try:
                yield
            finally:
                self.visits.pop()
        finally:
            self.reshard()
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            self.guard.remember_writes()

    def freeze(self) -> dict[str, nn.Parameter]:
        """Freeze what no projection protects; returns it by name."""
        params = {name: slot.param for name, slot in self.plan.others.items()}
        for name, norm in self.plan.norms.items():
            own = norm.named_parameters(prefix=name, recurse=False)
            params |= {key: param for key, param in own if param.requires_grad}
        return self.freeze_params(params)

    def freeze_params(self, params: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Freeze these parameters, and norm layers in eval mode."""
        for param in params.values():
            param.requires_grad_(False)
            param.grad = None  # an optimizer kept from before must find nothing to do
        for norm in self.plan.norms.values():
            # `model.train()` calls this on every module: no hook, so nothing is added to a forward.
            norm.train = partial(_stay_in_eval, norm)  # type: ignore[method-assign]
            norm.eval()
        return params

    def thaw(self) -> None:
        """Make everything trainable again."""
        for param in self.known.frozen.values():
            param.requires_grad_(True)
        for norm in self.plan.norms.values():
            vars(norm).pop("train", None)

    # ---- following the model, refusing what cannot be followed ------------------------------

    @torch.inference_mode(False)
    def meet(self) -> None:
        """Follow whatever the user has done to the model since, or refuse it."""
        refuse_other_ways(self.bare)
        if type(spread_of(self.bare, self.plan.layers)) is not type(self.spread):
            raise RuntimeError(
                "fully_shard was applied after the learner was made; make or load the learner with "
                "the model that fully_shard has returned."
            )
        model_checks.present(self.bare, self.plan, self.known.memory)
        # What every task has for itself may be exchanged, and heads may have been added.
        self.plan.per_task = per_task_tensors(self.bare, self.exclude, self.per_task, self.norm)
        memory = dict(self.known.memory)
        tasks = dict(self.known.tasks)
        for name, layer in self.plan.layers.items():
            device, dtype = layer.weight.param.device, layer.dtype
            if memory[name].M.device != device or memory[name].M.dtype != dtype:
                memory[name] = memory[name].to(device, dtype)
                for task, record in tasks.items():
                    if name in record.changes:
                        moved = record.changes[name].to(memory[name].M)
                        tasks[task] = replace(record, changes=record.changes | {name: moved})
                        record = tasks[task]
        self.known = replace(self.known, memory=memory, tasks=tasks)

    @torch.no_grad()
    def require_active(self) -> None:
        """Refuse a model that no longer holds the weights it was left with."""
        known = self.known
        if known.open is None and known.active is not None and not self.visits:
            for name, K in self.coordinates(known.active).items():
                if model_checks.strayed(self.plan.layers[name], known.memory[name].M, K):
                    raise RuntimeError(
                        f"Layer '{name}' no longer holds the weights of task {known.active!r}; "
                        "load the model's weights as they were after that task."
                    )

    def require_alive(self) -> None:
        """Refuse a detached learner."""
        if self.detached:
            raise RuntimeError("This learner has been detached; make or load a new one.")

    def require_home(self, what: str) -> None:
        """Refuse a call inside a visit."""
        self.require_alive()
        if self.visits:
            raise RuntimeError(
                f"{what} cannot be called inside `with learner.task(...)`; leave it first."
            )

    def require_idle(self, what: str) -> None:
        """Refuse a call while a task is open."""
        self.require_home(what)
        if self.known.open is not None:
            raise RuntimeError(
                f"{what} cannot be called while task {self.known.open.task!r} is being learnt; "
                "call end_task or abort_task first."
            )

    def require_open(self, what: str) -> OpenTask:
        """Return the open task, or refuse the call."""
        self.require_home(what)
        if self.known.open is None:
            raise RuntimeError(f"{what} was called without a task; call begin_task first.")
        return self.known.open

    def require_known(self, task: TaskId) -> None:
        """Refuse a task that is neither learnt nor open."""
        opened = [self.known.open.task] if self.known.open is not None else []
        if task not in [*self.known.tasks, *opened]:
            learnt = ", ".join(map(repr, self.known.tasks)) or "none yet"
            raise UnknownTaskError(f"Task {task!r} has not been learnt; learnt so far: {learnt}.")

    # ---- copies -----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the guard: the copy's parameters are in none of the optimizers."""
        self.require_home("A copy or pickle")
        return {k: v for k, v in vars(self).items() if k not in ("guard", "_lock")}

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Guard the copy as the original is guarded."""
        vars(self).update(values)
        self._new_guard()


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    return type(module).train(module, False)
