"""GPM and TRGP as objects a user attaches to a model and a training loop (paper, section 4.4)."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from . import checks, optimizers, state
from .core.batches import first_samples
from .core.capture import GramCapture, observing
from .core.freeze import Frozen
from .core.gradient import LossFn, layer_gradients
from .core.guard import Guard, Pin, with_coordinates
from .core.plan import bare, make_plan, per_task_tensors, unmatched
from .core.quiet import undisturbed
from .core.scaling import Scaling, scale, unscale
from .core.subspace import Memory, columns_of, extend
from .core.trust_region import projections, total_over, trust_region
from .options import Option, check_count, check_option, check_patterns, value_of
from .summary import summary
from .task import Change, TaskRecord
from .types import Norm, TaskId, matches

Scope = Literal["layer", "task"]
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

log = logging.getLogger("trgp")


class UnknownTaskError(KeyError):
    """A task that has not been learnt."""

    def __str__(self) -> str:  # KeyError would show the sentence in quotes
        return str(self.args[0])


@dataclass
class OpenTask:
    """A task between `begin_task` and `end_task`."""

    task: TaskId
    loss_fn: LossFn
    thresholds: dict[str, float]
    selected: dict[str, list[TaskId]]
    buffers: dict[str, Tensor]  # as they were at the beginning, where nobody looks after them
    scalings: dict[str, Scaling] = field(default_factory=dict)

    @property
    def scaling_params(self) -> list[nn.Parameter]:
        return [S for scaling in self.scalings.values() for S in scaling.S]


class GPM:
    """Gradient projection memory: weights move only orthogonally to the inputs of old tasks.

    `model` is any `torch.nn.Module`; its linear, convolution and attention layers are protected.
    """

    functions: ClassVar[tuple[str, ...]] = ("threshold",)  # options that may be functions
    plain: ClassVar[tuple[str, ...]] = ("memory_samples", "exclude", "per_task", "norm")
    pooled: ClassVar[bool] = False  # every old direction counts before a new one is added

    def __init__(
        self,
        model: nn.Module,
        *,
        threshold: Option = 0.97,
        memory_samples: int | None = None,
        exclude: Sequence[str] = (),
        per_task: Sequence[str] = (),
        norm: Norm = "freeze",
    ) -> None:
        """Prepare to protect a model.

        threshold: share of the energy of a layer's inputs that its memory keeps, in (0, 1]; a
            number, a mapping from globs over layer names, or a function of (layer, task).
        memory_samples: how many samples of a task feed its memory; None is the whole loader.
        exclude: globs over module names; what they match is left alone (heads, for instance).
        per_task: globs over module names; what they match is copied for every task.
        norm: norm layers are frozen after the first task ("freeze"), copied for every task
            ("per_task"), or left trainable and shared ("shared").
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"The model must be a torch.nn.Module, not {type(model).__name__}.")
        self.threshold = check_option("threshold", threshold, zero=False)
        if norm not in ("freeze", "per_task", "shared"):
            raise ValueError(f"norm must be 'freeze', 'per_task' or 'shared', not {norm!r}.")
        self.model = model
        self._bare = bare(model)
        self.memory_samples = (
            None if memory_samples is None else check_count("memory_samples", memory_samples)
        )
        self.exclude = check_patterns("exclude", exclude)
        self.per_task = check_patterns("per_task", per_task)
        self.norm: Norm = norm
        self._plan = make_plan(self._bare, self.exclude, self.per_task, norm)
        if not self._plan.layers:
            raise ValueError(
                "The model has nothing to protect: no trainable linear, convolution or attention "
                "layer outside exclude=[...] and per_task=[...]."
            )
        self._memory = {
            name: Memory.empty(*layer.shape, like=layer.matrix())
            for name, layer in self._plan.layers.items()
        }
        self._tasks: dict[TaskId, TaskRecord] = {}
        self._active: TaskId | None = None  # whose weights the model holds between tasks
        self._open: OpenTask | None = None
        self._frozen = Frozen()
        self._guard = Guard()
        self._attached: WeakKeyDictionary[Optimizer, list[RemovableHandle]] = WeakKeyDictionary()
        self._visits: list[list[tuple[Tensor, Tensor]]] = []  # what each `with task(...)` puts back
        self._detached = False
        self._notice()

    # ---- the loop ---------------------------------------------------------------------------

    @torch.inference_mode(False)  # what is made here takes part in training
    def begin_task(self, task: TaskId, loader: Iterable[Any], loss_fn: LossFn) -> None:
        """Start learning a task: the model computes with its effective weights from now on.

        loss_fn(model, batch) returns a scalar loss. A part of the loader is read, without a trace
        in the model, its modes or any random state. On an error nothing has changed.
        """
        task = self._check_new(task)
        if not callable(loss_fn):
            raise TypeError("loss_fn must be a function of (model, batch).")
        self._meet_model()
        checks.trainable(self._bare, self._plan, self.exclude, self.norm, first=not self._tasks)
        layers = self._plan.layers
        thresholds = {
            name: value_of("threshold", self.threshold, name, task, zero=False) for name in layers
        }
        self._check_active()
        with self._restored(on_error_only=True):
            self._hold({name: memory.C for name, memory in self._memory.items()})
            with undisturbed(self.model, loader):
                selected = self._select(task, loader, loss_fn)
        buffers = checks.loose_buffers(self._bare, self._plan, self.exclude)
        opened = OpenTask(task, loss_fn, thresholds, selected, buffers)
        for name, trusted in selected.items():
            if trusted:
                memory = self._memory[name]
                opened.scalings[name] = Scaling(
                    [columns_of(memory.C, memory.masks[j]) for j in trusted],
                    [memory.basis(j) for j in trusted],
                )
                scale(layers[name], opened.scalings[name])
        self._guard.pins = [
            Pin.of(layers[name], memory)
            for name, memory in self._memory.items()
            if memory.M.shape[2]
        ]
        self._open = opened
        for optimizer in self._attached:
            optimizers.add(optimizer, opened.scaling_params)

    def attach(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        """Keep this optimizer's updates out of the protected space; returns the same optimizer.

        An optimizer kept over several tasks needs this once: later scalings join it by themselves.
        """
        self._require_alive()
        to_train = {
            name: param
            for name, param in self._bare.named_parameters()
            if param.requires_grad and not matches(name, self.exclude)
        }
        optimizers.check(optimizer, to_train)
        if optimizer not in self._attached:
            self._attached[optimizer] = self._guard.watch(optimizer)
        return optimizer

    @torch.inference_mode(False)
    @torch.no_grad()
    def end_task(self, loader: Iterable[Any]) -> None:
        """Finish the task: extend the memory with the loader's samples, keep what the task needs.

        The samples pass through loss_fn without gradients. On an error the task stays open.
        """
        opened = self._require_open()
        self._meet_model()
        checks.trained(self._plan.layers, self._memory, opened.scalings)
        self._notice_buffers(opened.buffers)
        layers = self._plan.layers
        capture = GramCapture(layers.values())
        with undisturbed(self.model, loader), torch.no_grad(), observing(layers.values(), capture):
            for batch in first_samples(loader, self.memory_samples):
                opened.loss_fn(self.model, batch)
        capture.finite()
        extensions = {
            name: extend(
                self._memory[name].M,
                self._memory[name].ranks,
                gram,
                threshold=opened.thresholds[name],
                pooled=self.pooled,
            )
            for name, gram in capture.grams.items()
        }
        # Nothing below can fail: the task closes and becomes part of the memory.
        self._tasks[opened.task] = TaskRecord(
            selected=opened.selected,
            changes={
                name: Change.of(opened.selected[name], list(scaling.S), self._memory[name])
                for name, scaling in opened.scalings.items()
            },
            copies={n: slot.param.detach().clone() for n, slot in self._plan.per_task.items()},
        )
        for optimizer in self._attached:
            optimizers.remove(optimizer, opened.scaling_params)
        for name, layer in layers.items():
            unscale(layer)
            memory = self._memory[name]
            W = with_coordinates(layer.matrix(), memory.M, memory.C)
            layer.assign(W)
            self._memory[name] = memory.grown(extensions[name], W, opened.task)
        self._guard.pins = []
        self._open = None
        self._active = opened.task
        self._hold(self._coordinates(opened.task))
        self._freeze()

    # ---- using what was learnt --------------------------------------------------------------

    @contextmanager
    def task(self, task: TaskId) -> Iterator[nn.Module]:
        """The model with the effective weights of a learnt task; as it was before on exit."""
        self._require_alive()
        self._check_known(task)
        if self._open is not None and task == self._open.task and not self._visits:
            yield self.model
            return
        self._meet_model()
        self._check_active()
        with self._restored() as before:
            self._become(task)
            self._visits.append(before)
            self._guard.paused = True
            try:
                yield self.model
            finally:
                self._visits.pop()
                self._guard.paused = bool(self._visits)

    def detach(self, task: TaskId) -> nn.Module:
        """Leave the plain model, holding that task's weights for good; the learner ends here."""
        self._require_idle("detach")
        self._check_known(task)
        self._meet_model()
        self._check_active()
        self._become(task)
        for handles in self._attached.values():
            for handle in handles:
                handle.remove()
        self._attached.clear()
        self._frozen.thaw()
        self._detached = True
        return self.model

    def parameters(self) -> Iterator[nn.Parameter]:
        """Everything to train now: weights, heads, and the scalings of the task being learnt."""
        self._require_alive()
        return (p for p in self.model.parameters() if p.requires_grad)

    def param_groups(self, *, lr: float, scale_lr: float | None = None) -> list[dict[str, Any]]:
        """The same for an optimizer's constructor, with a learning rate for the scalings."""
        scalings = self._open.scaling_params if self._open is not None else []
        apart = {id(S) for S in scalings}
        weights = [p for p in self.parameters() if id(p) not in apart]
        return [
            {"params": weights, "lr": lr},
            {
                "params": scalings,
                "lr": lr if scale_lr is None else scale_lr,
                optimizers.SCALE_GROUP: True,
            },
        ]

    @property
    def selected(self) -> dict[TaskId, dict[str, list[TaskId]]]:
        """Per task and layer the trusted old tasks, strongest first."""
        records = {task: record.selected for task, record in self._tasks.items()}
        if self._open is not None:
            records[self._open.task] = self._open.selected
        return {
            task: {layer: list(trusted) for layer, trusted in chosen.items()}
            for task, chosen in records.items()
        }

    @property
    def ranks(self) -> dict[str, tuple[int, int]]:
        """Per layer how many directions are protected, and out of how many (over all groups)."""
        return {
            name: (int(m.ranks.sum()), m.M.shape[0] * m.M.shape[1])
            for name, m in self._memory.items()
        }

    @property
    def memory_bytes(self) -> int:
        """What all tasks hold together: bases, frozen coordinates, and who uses which basis."""
        return sum(memory.nbytes for memory in self._memory.values())

    @property
    def task_bytes(self) -> dict[TaskId, int]:
        """What each task holds for itself: its scalings and its copies."""
        return {task: record.nbytes for task, record in self._tasks.items()}

    def summary(self) -> str:
        """Rank used per layer, and the bytes held per task against one copy of the model."""
        scalings = set(self._open.scaling_params) if self._open is not None else set()
        model_bytes = sum(p.nbytes for p in self.model.parameters() if p not in scalings)
        method = type(self).__name__
        return summary(method, self.ranks, self.memory_bytes, self.task_bytes, model_bytes)

    # ---- state ------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, include_model: bool = False) -> None:
        """Write bases, scalings and per-task copies; the model's weights only if asked to."""
        self._require_idle("save")
        self._meet_model()
        self._check_active()
        state.save(self, path, include_model=include_model)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: nn.Module, *, threshold: Option | None = None
    ) -> Self:
        """Continue from a saved learner with a model that holds the weights it had then.

        A threshold that was a function is given again; any other may be replaced.
        """
        return state.load(cls, path, model, {"threshold": threshold})

    def __getstate__(self) -> dict[str, Any]:
        self._require_home("A copy or pickle")
        # A copy has parameters of its own, which none of the attached optimizers holds.
        return vars(self) | {"_attached": None, "_guard": None, "_pins": self._guard.pins}

    def __setstate__(self, values: dict[str, Any]) -> None:
        pins = values.pop("_pins")
        vars(self).update(values)
        self._guard = Guard(pins)
        self._guard.frozen = self._frozen.params
        self._attached = WeakKeyDictionary()

    # ---- pieces -----------------------------------------------------------------------------

    def _select(
        self, task: TaskId, loader: Iterable[Any], loss_fn: LossFn
    ) -> dict[str, list[TaskId]]:
        """No trust region here: one batch shows that loader, loss_fn and model fit together."""
        batch = next(first_samples(loader, None))
        layer_gradients(self.model, self._plan.layers, [batch], loss_fn)
        return {name: [] for name in self._plan.layers}

    def _coordinates(self, task: TaskId) -> dict[str, Tensor]:
        """W_eff M of a task in every layer."""
        changes = self._tasks[task].changes
        return {
            name: memory.C + changes[name].coordinates(memory) if name in changes else memory.C
            for name, memory in self._memory.items()
        }

    @torch.no_grad()
    def _hold(self, coordinates: dict[str, Tensor]) -> None:
        """Give every layer's weight these coordinates in span(M)."""
        for name, K in coordinates.items():
            layer = self._plan.layers[name]
            if K.shape[2]:
                layer.assign(with_coordinates(layer.matrix(), self._memory[name].M, K))

    @torch.no_grad()
    def _become(self, task: TaskId) -> None:
        """Put the task's effective weights and copies into the model."""
        if self._open is not None and task == self._open.task:
            for tensor, value in self._visits[0]:
                tensor.copy_(value)
            return
        copies = self._tasks[task].copies
        slots = {name: slot for name, slot in self._plan.per_task.items() if name in copies}
        for name, slot in slots.items():
            if slot.param.shape != copies[name].shape:
                raise RuntimeError(
                    f"Task {task!r} has its own '{name}' of shape {tuple(copies[name].shape)}, but "
                    f"the model's is {tuple(slot.param.shape)}; put a module of that shape back."
                )
        for S in self._open.scaling_params if self._open is not None else []:
            S.zero_()
        self._hold(self._coordinates(task))
        for name, slot in slots.items():
            slot.param.copy_(copies[name])

    @contextmanager
    def _restored(self, *, on_error_only: bool = False) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Whatever is written into weights, scalings and per-task parts inside is undone."""
        tensors: list[Tensor] = [p for layer in self._plan.layers.values() for p in layer.params]
        tensors += [slot.param for slot in self._plan.per_task.values()]
        tensors += self._open.scaling_params if self._open is not None else []
        before = [(t, t.detach().clone()) for t in tensors]
        undo = True
        try:
            yield before
            undo = not on_error_only
        finally:
            if undo:
                with torch.no_grad():
                    for tensor, value in before:
                        tensor.copy_(value)

    @torch.inference_mode(False)
    def _meet_model(self) -> None:
        """Whatever the user has done to the model since: refuse it, or follow it."""
        checks.one_process()
        checks.present(self._bare, self._plan, self._memory)
        # What every task has for itself may be exchanged, and heads may have been added.
        self._plan.per_task = per_task_tensors(self._bare, self.exclude, self.per_task, self.norm)
        self._follow_model()

    def _follow_model(self) -> None:
        """Keep the memory where the weights are."""
        for name, layer in self._plan.layers.items():
            device, dtype = layer.weight.param.device, layer.dtype
            memory = self._memory[name]
            if memory.M.device != device or memory.M.dtype != dtype:
                memory = self._memory[name] = memory.to(device, dtype)
                for record in self._tasks.values():
                    if name in record.changes:
                        record.changes[name] = record.changes[name].to(memory.M)

    def _freeze(self) -> None:
        """Still what no projection protects; from the first task on, so the rest finds no work."""
        if not (self._frozen.params or self._frozen.norms):
            params = {name: slot.param for name, slot in self._plan.others.items()}
            for name, norm in self._plan.norms.items():
                own = norm.named_parameters(prefix=name, recurse=False)
                params |= {key: param for key, param in own if param.requires_grad}
            self._freeze_params(params)

    def _freeze_params(self, params: dict[str, nn.Parameter]) -> None:
        self._frozen.freeze(params, self._plan.norms.values())
        self._guard.frozen = self._frozen.params

    def _notice(self) -> None:
        idle = unmatched(self._bare, [*self.exclude, *self.per_task])
        if idle:
            log.warning("No module has a name that matches %s (yet).", ", ".join(map(repr, idle)))
        if self._plan.others:
            log.warning(
                "Trained with the first task, then frozen: %s (exclude them or make them per_task "
                "to go on training them).",
                ", ".join(self._plan.others),
            )

    def _notice_buffers(self, before: dict[str, Tensor]) -> None:
        now = dict(self._bare.named_buffers())
        moved = [n for n, b in before.items() if n in now and not torch.equal(b.to(now[n]), now[n])]
        if moved:
            log.warning(
                "Training changes buffers that old tasks need as they were: %s (make them per_task "
                "to keep them).",
                ", ".join(moved),
            )

    # ---- checks -----------------------------------------------------------------------------

    def _require_alive(self) -> None:
        if self._detached:
            raise RuntimeError("This learner has been detached; make or load a new one.")

    def _require_idle(self, what: str) -> None:
        self._require_home(what)
        if self._open is not None:
            raise RuntimeError(
                f"{what} cannot be called while task {self._open.task!r} is being learnt; "
                "call end_task first."
            )

    def _require_home(self, what: str) -> None:
        self._require_alive()
        if self._visits:
            raise RuntimeError(
                f"{what} cannot be called inside `with learner.task(...)`; leave it first."
            )

    def _require_open(self) -> OpenTask:
        self._require_home("end_task")
        if self._open is None:
            raise RuntimeError("end_task was called without a task; call begin_task first.")
        return self._open

    def _check_known(self, task: TaskId) -> None:
        known = [*self._tasks] + ([self._open.task] if self._open is not None else [])
        if task not in known:
            learnt = ", ".join(map(repr, self._tasks)) or "none yet"
            raise UnknownTaskError(f"Task {task!r} has not been learnt; learnt so far: {learnt}.")

    def _check_new(self, task: TaskId) -> TaskId:
        self._require_idle("begin_task")
        task = checks.task_id(task)
        if task in self._tasks:
            raise ValueError(f"Task {task!r} has been learnt already; give the new one its own id.")
        return task

    @torch.no_grad()
    def _check_active(self) -> None:
        """The model must hold the weights it was left with: the rest is computed from them."""
        if self._open is None:
            checks.whole(self._plan.layers, self._memory, list(self._tasks))
        if self._open is None and self._active is not None and not self._visits:
            for name, K in self._coordinates(self._active).items():
                if checks.strayed(self._plan.layers[name], self._memory[name].M, K):
                    raise RuntimeError(
                        f"Layer '{name}' no longer holds the weights of task {self._active!r}; "
                        "load the model's weights as they were after that task."
                    )


class TRGP(GPM):
    """Trust region gradient projection: GPM, and trusted old tasks' weights reused through Q.

    For every layer the old tasks most related to the new one are selected, and their frozen part of
    the weight is scaled by small matrices Q learnt with the new task.
    """

    functions: ClassVar[tuple[str, ...]] = (*GPM.functions, "epsilon")
    plain: ClassVar[tuple[str, ...]] = (*GPM.plain, "top_k", "scope", "selection_samples")
    pooled: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        *,
        threshold: Option = 0.97,
        epsilon: Option = 0.5,
        top_k: int = 2,
        scope: Scope = "layer",
        selection_samples: int = 300,
        memory_samples: int | None = None,
        exclude: Sequence[str] = (),
        per_task: Sequence[str] = (),
        norm: Norm = "freeze",
    ) -> None:
        """Prepare to protect a model; the options of GPM, and:

        epsilon: an old task is trusted if the gradient's projection onto its inputs has at least
            this share of the gradient's norm, in [0, 1]; given as the threshold may be.
        top_k: how many old tasks are trusted at most.
        scope: "layer" chooses for every layer by its own gradient, "task" once by the whole
            gradient (a function or mapping is then asked for the layer '*').
        selection_samples: how many samples that gradient is taken over.
        """
        self.epsilon = check_option("epsilon", epsilon, zero=True)
        if scope not in ("layer", "task"):
            raise ValueError(f"scope must be 'layer' or 'task', not {scope!r}.")
        self.top_k = check_count("top_k", top_k)
        self.scope: Scope = scope
        self.selection_samples = check_count("selection_samples", selection_samples)
        super().__init__(
            model,
            threshold=threshold,
            memory_samples=memory_samples,
            exclude=exclude,
            per_task=per_task,
            norm=norm,
        )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        threshold: Option | None = None,
        epsilon: Option | None = None,
    ) -> Self:
        """Continue from a saved learner with a model that holds the weights it had then.

        An option that was a function is given again; any other may be replaced.
        """
        return state.load(cls, path, model, {"threshold": threshold, "epsilon": epsilon})

    def _select(
        self, task: TaskId, loader: Iterable[Any], loss_fn: LossFn
    ) -> dict[str, list[TaskId]]:
        """The trust region of every layer, from one pass over a part of the loader."""
        layers = self._plan.layers
        names = layers if self.scope == "layer" else ["*"]
        epsilon = {n: value_of("epsilon", self.epsilon, n, task, zero=True) for n in names}
        if not self._tasks:
            return super()._select(task, loader, loss_fn)
        batches = first_samples(loader, self.selection_samples)
        gradients = layer_gradients(self.model, layers, batches, loss_fn)
        squared = {
            name: projections(G, self._memory[name].M, self._memory[name].masks)
            for name, G in gradients.items()
        }
        totals = {name: float(G.double().square().sum()) for name, G in gradients.items()}
        if self.scope == "layer":
            return {
                name: trust_region(squared[name], totals[name], epsilon[name], self.top_k)
                for name in layers
            }
        whole = total_over(list(squared.values()))
        trusted = trust_region(whole, sum(totals.values()), epsilon["*"], self.top_k)
        return {
            name: [j for j in trusted if totals[name] and self._memory[name].masks[j].any()]
            for name in layers
        }
