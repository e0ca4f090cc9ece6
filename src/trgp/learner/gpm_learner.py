"""GPM as an object that a user puts beside a model and a training loop (paper, section 4.4)."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from ..core.capture import Gram
from ..core.keep import Form
from ..core.layers import local
from ..core.memory import in_memory_order, scalings_of
from ..core.subspace import Extension, extend
from ..options import (
    Option,
    RankOption,
    check_count,
    check_norm,
    check_option,
    check_patterns,
    check_rank,
    rank_of,
    value_of,
)
from ..types import Norm, PathLike, TaskId, matches
from . import learner_file, model_checks, notices, ranks, sharding
from .layer_gradients import LossFn, require_called
from .layer_guard import LayerGuard
from .layer_inputs import layer_inputs, passes
from .learner_state import Known, LearnerState, OpenTask, TaskRecord
from .loader_batches import first_samples
from .model_snapshot import undisturbed
from .progress import watched
from .summary import summary
from .update_guard import GuardedTask, refuse_optimizers, unwrapped

if TYPE_CHECKING:
    from .evaluation import Metric, Scores

AnyOptimizer = TypeVar("AnyOptimizer")

KEYS = ("M", "ranks", "mask")  # of an extension

log = logging.getLogger("trgp")


class GPM:
    """Gradient projection memory: weights move only orthogonally to the inputs of old tasks.

    `model` is any `torch.nn.Module`; its linear, convolution, attention and recurrent
    layers are protected, and kinds of your own (`trgp.protects`).
    """

    functions: ClassVar[tuple[str, ...]] = ("threshold",)  # options that may be functions
    plain: ClassVar[tuple[str, ...]] = ("max_rank", "memory_samples", "exclude", "per_task", "norm")
    pooled: ClassVar[bool] = False  # every old direction counts before a new one is added

    def __init__(
        self,
        model: nn.Module,
        *,
        threshold: Option = 0.97,
        max_rank: RankOption = None,
        memory_samples: int | None = None,
        exclude: Sequence[str] = (),
        per_task: Sequence[str] = (),
        norm: Norm = "freeze",
    ) -> None:
        """Prepare to protect a model.

        Args:
            model: the network to teach; it is changed only by the calls below.
            threshold: share of the energy of a layer's inputs that its memory keeps, in (0, 1]; a
                number, a mapping from globs over layer names, or a function of (layer, task).
            max_rank: most directions that a layer's memory may hold: a whole number, a share of
                the layer's inputs in (0, 1], or a mapping from globs to either; None is no limit.
            memory_samples: how many samples of a task feed its memory; None is the whole loader.
            exclude: globs over module names; what they match is left alone (heads, for instance).
            per_task: globs over module names; what they match is copied for every task.
            norm: norm layers are frozen after the first task ("freeze"), copied for every task
                ("per_task"), or left trainable and shared ("shared").
        """
        model_checks.module(model)
        self.threshold = check_option("threshold", threshold, zero=False)
        self.max_rank = check_rank(max_rank)
        self.memory_samples = (
            None if memory_samples is None else check_count("memory_samples", memory_samples)
        )
        self.exclude = check_patterns("exclude", exclude)
        self.per_task = check_patterns("per_task", per_task)
        self.norm = check_norm(norm)
        self._state = LearnerState(model, self.exclude, self.per_task, norm)
        state = self._state
        notices.of_plan(state.bare, state.plan, [*self.exclude, *self.per_task])

    @property
    def model(self) -> nn.Module:
        """The model that is taught."""
        return self._state.model

    # ---- the loop ---------------------------------------------------------------------------

    @torch.inference_mode(False)  # what is made here takes part in training
    def begin_task(self, task: TaskId, loader: Iterable[Any], loss_fn: LossFn) -> None:
        """Start learning a task: the model holds the shared weights from now on.

        loss_fn(model, batch) returns a scalar loss. A part of the loader is read, without a trace
        in the model, its modes or any random state. If the call fails, nothing has changed. A task
        that was open when the learner was saved goes on where it was.
        """
        state = self._state
        with state.alone("begin_task"):
            with ranks.agreed(self._device):
                task = model_checks.task_id(task)
                if not callable(loss_fn):
                    raise TypeError("loss_fn must be a function of (model, batch).")
                opened = state.known.open
                if opened is not None and opened.loss_fn is None and opened.task == task:
                    state.require_home("begin_task")
                    state.known = replace(state.known, open=replace(opened, loss_fn=loss_fn))
                    return
                thresholds = self._prepared(task)
            plan = state.plan
            try:
                state.begin_change(loader)
                state.hold({name: memory.C for name, memory in state.known.memory.items()})
                with undisturbed(state.model, loader):
                    selected, used = self._select(task, loader, loss_fn)
                opened = OpenTask(
                    task,
                    loss_fn,
                    thresholds,
                    selected,
                    used,
                    model_checks.loose_buffers(state.bare, plan, self.exclude),
                    self._guarded(task, selected),
                )
                notices.of_heads(state, opened)
                state.known = replace(state.known, open=opened, undo=None)
            except BaseException:
                state.settle()
                raise

    def attach(self, *optimizers: AnyOptimizer) -> Any:
        """Name the optimizers that train the model; returns them, or the one.

        This is optional: every torch optimizer that steps a protected parameter is guarded. Once
        some are attached, a step of any other is an error. Wrappers of accelerate, Lightning,
        Fabric and SAM may be given as they are.
        """
        state = self._state
        state.require_alive()
        state.reshard()
        inner = [each for optimizer in optimizers for each in unwrapped(optimizer)]
        # An earlier task's optimizer may still be alive; it does not train this one.
        met = state.guarded.met if state.guarded is not None else state.guard.attached
        others = [optimizer for optimizer in state.guard.attached if optimizer in met]
        refuse_optimizers(inner, others, self._to_train())
        state.guard.attached.update(inner)
        return optimizers[0] if len(optimizers) == 1 else optimizers

    @torch.inference_mode(False)
    @torch.no_grad()
    def end_task(self, loader: Iterable[Any]) -> None:
        """Finish the task: extend the memory with the loader's samples, keep what the task needs.

        The samples pass through loss_fn without gradients. If the call fails, the task stays open.
        """
        state = self._state
        with state.alone("end_task"):
            with ranks.agreed(self._device):
                opened = state.require_open("end_task")
                if opened.loss_fn is None:
                    raise RuntimeError(
                        f"Task {opened.task!r} was open when this learner was saved; call "
                        "begin_task with the same id, loader and loss_fn to go on with it."
                    )
                state.meet()
            try:
                state.begin_change(loader)
                state.guard.settle()
                with ranks.agreed(self._device):
                    first = not state.known.tasks
                    model_checks.trainable(
                        state.bare, state.plan, self.exclude, self.norm, first=first
                    )
                    model_checks.trained(state.plan.layers, opened.guarded.layers)
                notices.of_buffers(state.bare, opened.buffers)
                notices.of_untrained(state, opened, self._to_train())
                extensions = self._extensions(opened, loader)
                learnt = self._learnt(opened, extensions)
                if not state.known.tasks:
                    learnt = replace(learnt, frozen=state.freeze())
                notices.of_full(state.known, learnt)
                state.known = learnt
            except BaseException:
                state.settle()
                raise

    def abort_task(self) -> None:
        """Give the open task up: the model holds the last learnt task again.

        Old tasks are as they were. Weights that no old task protects, excluded heads and the first
        task's weights keep what training made of them.
        """
        state = self._state
        with state.alone("abort_task"):
            opened = state.require_open("abort_task")
            state.meet()
            try:
                state.begin_change(None)
                given_up = replace(state.known, open=None, undo=None)
                if given_up.active is not None:
                    with state.spread.together(self._device):
                        model_checks.finite(state.plan.layers)
                    state.guard.settle()
                    state.become(given_up.active)
                    model_checks.put_buffers(state.bare, opened.buffers)
                state.known = given_up
            except BaseException:
                state.settle()
                raise
        log.info("Task %r was given up.", opened.task)

    # ---- using what was learnt --------------------------------------------------------------

    @contextmanager
    def task(self, task: TaskId) -> Iterator[nn.Module]:
        """Give the model the effective weights of a learnt task; on exit it is as before."""
        state = self._state
        with state.alone("task"):
            state.require_alive()
            state.require_known(task)
            if state.known.open is not None and task == state.known.open.task and not state.visits:
                yield self.model
                return
            state.meet()
            state.require_active()
            with state.visit(task):
                yield self.model

    def evaluate(self, loaders: Mapping[TaskId, Iterable[Any]], metric: "Metric") -> "Scores":
        """Score every learnt task with its own weights; call it after each end_task.

        `metric(model, batch, task)` returns the mean score of a batch, its accuracy say; batches
        weigh by their samples. The model is in eval mode, and afterwards as it was. The scores stay
        with the learner, also in its file: those returned are of all tasks so far. Loaders of tasks
        that are not learnt yet are not read.
        """
        from . import evaluation  # what only some loops need is no part of `import trgp`

        state = self._state
        with state.alone("evaluate"):
            state.require_idle("evaluate")
            evaluation.refuse_loaders(loaders, self.tasks)
            scores = []
            for task in self.tasks:
                with self.task(task):
                    scores.append(
                        evaluation.mean_score(
                            self._called, loaders[task], metric, task, self._device, state.spread
                        )
                    )
            tasks = dict(state.known.tasks)
            last = self.tasks[-1]
            tasks[last] = replace(tasks[last], scores=scores)
            state.known = replace(state.known, tasks=tasks)
            rows = tuple(tuple(record.scores) for record in tasks.values())
            return evaluation.Scores(tuple(tasks), rows)

    def detach(self, task: TaskId) -> nn.Module:
        """Leave the plain model, holding that task's weights for good; the learner ends here."""
        state = self._state
        with state.alone("detach"):
            state.require_idle("detach")
            state.require_known(task)
            state.meet()
            state.require_active()
            state.become(task)
            state.guard.stop()
            state.thaw()
            state.detached = True
            return self.model

    def parameters(self) -> Iterator[nn.Parameter]:
        """Everything to train now."""
        self._state.require_alive()
        self._state.reshard()
        return (p for p in self.model.parameters() if p.requires_grad)

    def param_groups(self, *, lr: float, scale_lr: float | None = None) -> list[dict[str, Any]]:
        """Refuse by name: removed in 0.2."""
        raise AttributeError(
            "param_groups was removed in 0.2: Q is no parameter any more. Make the optimizer from "
            "learner.parameters(), and give TRGP(..., scale_rate=scale_lr / lr) in its place."
        )

    @property
    def tasks(self) -> list[TaskId]:
        """The tasks learnt so far, in order."""
        return list(self._state.known.tasks)

    @property
    def selected(self) -> dict[TaskId, dict[str, list[TaskId]]]:
        """Per task and layer the trusted old tasks, strongest first."""
        known = self._state.known
        records = {task: record.selected for task, record in known.tasks.items()}
        if known.open is not None:
            records[known.open.task] = known.open.selected
        return {
            task: {layer: list(trusted) for layer, trusted in chosen.items()}
            for task, chosen in records.items()
        }

    def scalings(self, task: TaskId) -> dict[str, list[Tensor]]:
        """Return the paper's Q_j of a learnt task, per layer that trusts some, strongest first.

        They are computed from what the task keeps: the nearest to the identity that have its
        effect on the weight, each of shape (groups, r_j, r_j).
        """
        state = self._state
        state.require_known(task)
        known = state.known
        record = known.tasks.get(task)
        if record is None:
            raise ValueError(f"Task {task!r} is being learnt; call end_task first.")
        found = {}
        for name, change in record.changes.items():
            memory, weight = known.memory[name], state.plan.layers[name].weight.param
            D = sharding.whole(change.coordinates(memory), weight, 1)
            memory = replace(memory, C=sharding.whole(memory.C, weight, 1))
            found[name] = scalings_of(D, memory, change.trusted)
        return found

    @property
    def ranks(self) -> dict[str, tuple[int, int]]:
        """Per layer how many directions are protected, and out of how many (over all groups)."""
        return {
            name: (int(m.ranks.sum()), m.M.shape[0] * m.M.shape[1])
            for name, m in self._state.known.memory.items()
        }

    @property
    def memory_bytes(self) -> int:
        """Bytes that all tasks hold together: bases, frozen coordinates, who uses which basis."""
        return sum(memory.nbytes for memory in self._state.known.memory.values())

    @property
    def task_bytes(self) -> dict[TaskId, int]:
        """Bytes that each task holds for itself: its change of the weights and its copies."""
        return {task: record.nbytes for task, record in self._state.known.tasks.items()}

    def summary(self) -> str:
        """Rank used per layer, and the bytes held per task against one copy of the model."""
        model_bytes = sum(local(p).nbytes for p in self.model.parameters())
        method = type(self).__name__
        return summary(method, self.ranks, self.memory_bytes, self.task_bytes, model_bytes)

    def __repr__(self) -> str:
        """Name the model, the tasks and how full the memory is."""
        known = self._state.known
        used, whole = (sum(pair[i] for pair in self.ranks.values()) for i in (0, 1))
        opened = f", learning {known.open.task!r}" if known.open is not None else ""
        return (
            f"{type(self).__name__}({type(self._state.bare).__name__}, "
            f"{len(self._state.plan.layers)} layers, tasks {self.tasks}{opened}, "
            f"{used / whole:.0%} of all directions protected)"
        )

    # ---- state ------------------------------------------------------------------------------

    def save(self, path: PathLike, *, include_model: bool = False) -> None:
        """Write all that is known, also of an open task; the model's weights only if asked to.

        In a process group rank 0 writes. Under fully_shard every rank must call this, since each
        holds a part of what is written; otherwise the others may call it or not.
        """
        state = self._state
        with state.alone("save"):
            with state.spread.together(self._device):
                state.require_home("save")
                state.meet()
                state.require_active()
            state.guard.settle()
            with state.spread.together(self._device):
                learner_file.save(self, path, include_model=include_model)

    @classmethod
    def load(cls, path: PathLike, model: nn.Module, *, threshold: Option | None = None) -> Self:
        """Continue from a saved learner with a model that holds the weights it had then.

        A threshold that was a function is given again; any other may be replaced.
        """
        return cls._load(path, model, {"threshold": threshold})

    @classmethod
    def _load(cls, path: PathLike, model: nn.Module, given: Mapping[str, Any]) -> Self:
        meta, tensors = learner_file.read(path)
        learner = cls(model, **learner_file.options(cls.__name__, cls.functions, meta, given, path))
        learner_file.fill(learner, meta, tensors, path)
        return learner

    def state_dict(self) -> dict[str, Any]:
        """Return all that is known as plain values and tensors, also while a task is open.

        {"meta": a dictionary that JSON can hold, "tensors": tensors by name}; the model's own
        weights are in `model.state_dict()`.
        """
        state = self._state
        with state.alone("state_dict"):
            state.require_home("state_dict")
            state.meet()
            state.guard.settle()
            meta, tensors = learner_file.describe(self)
            return {"meta": meta, "tensors": {k: t.detach().clone() for k, t in tensors.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, for a model that holds the weights of then."""
        state = self._state
        with state.alone("load_state_dict"):
            state.require_home("load_state_dict")
            learner_file.fill(self, state_dict["meta"], state_dict["tensors"], "The state")

    # ---- pieces -----------------------------------------------------------------------------

    @property
    def _form(self) -> tuple[Form | None, float]:
        """The form asked for, and the rate of Q; both without effect where nothing is trusted."""
        return None, 1.0

    @property
    def _called(self) -> nn.Module:
        """The model as loss_fn is given it: without the wrapper that joins ranks in a step."""
        model = self.model
        parallel = nn.parallel.DistributedDataParallel
        return model.module if isinstance(model, parallel) else model

    @property
    def _device(self) -> torch.device:
        return next(iter(self._state.plan.layers.values())).weight.param.device

    def _to_train(self) -> dict[str, nn.Parameter]:
        """Parameters to train: trainable, and not left to the user."""
        named = self._state.bare.named_parameters()
        return {n: p for n, p in named if p.requires_grad and not matches(n, self.exclude)}

    def _prepared(self, task: TaskId) -> dict[str, float]:
        """Refuse a task that cannot begin now; its threshold for every layer."""
        state = self._state
        state.require_idle("begin_task")
        if task in state.known.tasks:
            raise ValueError(
                f"Task {task!r} has been learnt already; for more data of it begin a task with a "
                "new id and the same head, and use that id from then on."
            )
        state.meet()
        self._take_resized()
        first = not state.known.tasks
        model_checks.trainable(state.bare, state.plan, self.exclude, self.norm, first=first)
        state.require_active()
        return {
            name: value_of("threshold", self.threshold, name, task, zero=False)
            for name in state.plan.layers
        }

    def _take_resized(self) -> None:
        """Take frozen parameters that were given another shape for what is frozen."""
        state = self._state
        resized = model_checks.resized(state.bare, state.known.frozen)
        notices.of_resized(state.known.frozen, resized)
        state.known = replace(state.known, frozen=state.known.frozen | resized)

    def _select(
        self, task: TaskId, loader: Iterable[Any], loss_fn: LossFn
    ) -> tuple[dict[str, list[TaskId]], list[str]]:
        """Trust nothing: one batch shows that loader, loss_fn and model fit together.

        Returns the trusted tasks per layer, and which excluded parameters the task needs.
        """
        _, used = self._gradients(islice(first_samples(loader, None), 1), loss_fn)
        return {name: [] for name in self._state.plan.layers}, used

    def _gradients(
        self, batches: Iterable[Any], loss_fn: LossFn
    ) -> tuple[dict[str, Tensor], list[str]]:
        """The gradient of every layer over the batches of all ranks."""
        state = self._state
        return state.spread.gradients(
            self._called, state.plan.layers, batches, loss_fn, state.excluded(), self._device
        )

    def _guarded(self, task: TaskId, selected: Mapping[str, Sequence[TaskId]]) -> GuardedTask:
        """Guard every layer that has something to lose."""
        known, layers = self._state.known, self._state.plan.layers
        region = self._state.spread.region
        form, scale_rate = self._form
        guards = {
            name: LayerGuard(layers[name], memory, region(memory, selected[name]))
            for name, memory in known.memory.items()
            if memory.M.shape[2]
        }
        return GuardedTask(task, guards, form, scale_rate)

    def _extensions(self, opened: OpenTask, loader: Iterable[Any]) -> dict[str, Extension]:
        """The new directions of every layer, from the samples of all ranks."""
        state = self._state
        layers, device = state.plan.layers, self._device
        for buffer in state.bare.buffers():
            if ranks.world_size() > 1 and buffer.is_floating_point():
                torch.distributed.broadcast(buffer, 0)
        loss_fn = opened.loss_fn
        assert loss_fn is not None
        whole = loader if self.memory_samples is None else None
        extensions: dict[str, Extension] = {}
        called: list[str] = []
        for part in passes(layers.values()):
            batches = first_samples(loader, ranks.share_of(self.memory_samples))
            with (
                state.spread.agreed(device),
                undisturbed(state.model, loader),
                watched(batches, "end_task: batches read", whole) as seen,
            ):
                together = state.spread.in_step(seen, device)
                capture = layer_inputs(self._called, part, together, loss_fn)
            for gram in capture.grams.values():
                gram.reduce(ranks.summed, ranks.largest)
            capture.finite()
            called += [name for name, gram in capture.grams.items() if gram.columns]
            with watched(capture.grams.items(), "end_task: layers decomposed") as grams:
                made = ranks.tensors_from_first(partial(self._extended, opened, grams), device)
            for name in capture.grams:
                M, ranks_now, mask = (made[f"{key}/{name}"] for key in KEYS)
                extensions[name] = Extension(M, ranks_now, mask)
        require_called(called)
        return extensions

    def _extended(self, opened: OpenTask, grams: Iterable[tuple[str, Gram]]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, gram in grams:
            memory = self._state.known.memory[name]
            extension = extend(
                memory.M,
                memory.ranks,
                gram,
                threshold=opened.thresholds[name],
                pooled=self.pooled,
                most=rank_of(self.max_rank, name, memory.M.shape[1]),
            )
            if extension.left_out:
                log.warning(
                    "max_rank leaves %d directions of layer '%s' out of task %r's memory.",
                    extension.left_out,
                    name,
                    opened.task,
                )
            found |= {f"{key}/{name}": getattr(extension, key) for key in KEYS}
        return found

    def _learnt(self, opened: OpenTask, extensions: Mapping[str, Extension]) -> Known:
        """All that is known once the task is closed; the model holds its weights already."""
        state = self._state
        known = state.known
        changes = {}
        for name, guard in opened.guarded.layers.items():
            if guard.region.blocks:
                old = known.memory[name]
                D = in_memory_order(guard.K - guard.region.C, guard.region, old.M.shape[2])
                changes[name] = state.spread.change(opened.selected[name], D, old)
        per_task = state.plan.per_task.items()
        copies = {name: local(slot.param).detach().clone() for name, slot in per_task}
        record = TaskRecord(opened.selected, changes, copies, opened.used)
        memory = {
            name: known.memory[name].grown(extensions[name], layer.matrix(), opened.task)
            for name, layer in state.plan.layers.items()
        }
        C = state.spread.same({name: each.C for name, each in memory.items()}, self._device)
        memory = {name: replace(each, C=C[name]) for name, each in memory.items()}
        tasks = known.tasks | {opened.task: record}
        return Known(memory, tasks, opened.task, None, known.frozen)
