"""Guards every step of every torch optimizer that holds a protected parameter.

Torch calls one pair of functions around each step of any optimizer. They find the learner whose
parameters the optimizer holds: nothing has to be attached, and a step that no learner could guard
is an error before it moves a weight.
"""

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..core.keep import Form
from ..core.layers import Layer
from ..core.precision import full_precision
from ..types import TaskId
from .layer_guard import Decay, LayerGuard

log = logging.getLogger("trgp")

Hooked = tuple[tuple[Any, ...], dict[str, Any]]
DECOUPLED = (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon)
COUPLED = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
)


@dataclass
class GuardedTask:
    """An open task as the guard sees it."""

    task: TaskId
    layers: dict[str, LayerGuard]
    form: Form | None  # None: by the optimizer
    scale_rate: float
    resumed: bool = False  # its optimizer's momentum is the task's own from the first step
    forms: dict[str, Form] = field(default_factory=dict)  # by layer, from its first step on
    met: "WeakSet[Optimizer]" = field(default_factory=WeakSet)
    stepped: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Copy without the optimizers: those of the copy are others."""
        return vars(self) | {"met": WeakSet(), "resumed": self.resumed or self.stepped}


class Guarded(Protocol):
    """The part of a learner's knowledge that the guard needs."""

    def reshard(self) -> None:
        """Put every parameter in its place."""

    @property
    def guarded(self) -> GuardedTask | None:
        """The open task."""

    @property
    def closed(self) -> bool:
        """Whether no task is open and there is something to lose."""

    @property
    def visiting(self) -> bool:
        """Whether the model holds the weights of another task for a while."""

    @property
    def frozen(self) -> Mapping[str, nn.Parameter]:
        """Parameters that must not train again."""

    @property
    def shared(self) -> Mapping[str, nn.Parameter]:
        """Excluded parameters that old tasks use as well."""


@dataclass
class Held:
    """The layers of an open task that an optimizer steps, and the groups of their parameters."""

    task: GuardedTask | None
    key: tuple[int, ...]  # of groups and parameters, to see when they change
    kept: list[dict[str, Any]]  # the groups, so that no other can have their ids
    params: tuple[int, ...]
    layers: list[tuple[str, LayerGuard]]
    groups: dict[int, dict[str, Any]]  # by the id of a parameter
    of_layers: list[Tensor]  # its parameters of protected layers, whether a task is open or not
    apart: list[str]  # excluded parameters that old tasks use as well


class UpdateGuard:
    """Keeps what any optimizer does to a learner's model away from old tasks."""

    def __init__(self, layers: Mapping[str, Layer], known: Guarded) -> None:
        """Watch every optimizer of this process that holds a parameter of these layers."""
        self.layers = layers
        self._known = ref(known)  # a learner that is gone guards nothing
        self.attached: WeakSet[Optimizer] = WeakSet()
        self._stopped = False
        self._held: WeakKeyDictionary[Optimizer, Held] = WeakKeyDictionary()
        self._stepping = False  # a step that was interrupted leaves this set
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_before))
            _watching.append(register_optimizer_step_post_hook(_after))
        _guards.add(self)

    @property
    def known(self) -> Guarded | None:
        """The learner's knowledge, unless it is gone or detached."""
        return None if self._stopped else self._known()

    def stop(self) -> None:
        """Let every optimizer go."""
        self._stopped = True

    @property
    def _task(self) -> GuardedTask | None:
        return self.known.guarded if self.known is not None else None

    def remember_writes(self) -> None:
        """Take the weights as they are now for the guard's own."""
        task = self._task
        for guard in task.layers.values() if task is not None else ():
            guard.remember_writes()

    @torch.no_grad()
    @full_precision
    def settle(self) -> None:
        """Finish what an interrupted step left undone, and adopt weights that were loaded."""
        task = self._task
        if task is None:
            return
        if self._stepping:
            for guard in task.layers.values():
                guard.follow()
                guard.keep_update()
            self._stepping = False
        # Writes through `.data` leave no trace: here, where it is not per step, all are looked at.
        self._adopt(task, task.layers.items(), every=True)

    def _adopt(
        self, task: GuardedTask, layers: Iterable[tuple[str, LayerGuard]], *, every: bool = False
    ) -> None:
        refused = {}
        for name, guard in layers:
            if every or guard.written_elsewhere:
                guard.follow()
                share = guard.adopt()
                if share:
                    refused[name] = share
        if refused:
            worst = max(refused, key=lambda name: refused[name])
            log.warning(
                "Weights were loaded or written by hand while task %r is being learnt. Old tasks "
                "forbid a part of the change, which was taken out: in %d layers, most in '%s', "
                "%.1e of the weights' norm.",
                task.task,
                len(refused),
                worst,
                refused[worst],
            )

    # ---- the hooks --------------------------------------------------------------------------

    @torch.no_grad()
    @full_precision
    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Hooked | None:
        """Refuse a step that cannot be guarded; else show the optimizer its gradients."""
        known = self.known
        if known is None:
            return None
        known.reshard()
        held = self._held_by(optimizer, known)
        _refuse_thawed(held, known)
        if not (held.of_layers or held.apart):
            return None
        self._refuse(optimizer, held, known)
        task = held.task
        if task is None:
            return None
        if self._stepping:
            self.settle()
        self._adopt(task, held.layers)
        if optimizer not in task.met:
            self._meet(optimizer, held, task, known)
        self._stepping = True
        task.stepped = True
        for _, guard in held.layers:
            guard.follow()
            guard.remember()
            guard.remember_decay(_decay(optimizer, held, guard)[0])
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._filter(optimizer, held, task)
            return None

        def shown() -> Any:
            loss = closure()
            known.reshard()
            with torch.no_grad():
                for _, guard in held.layers:  # now that there are gradients
                    guard.remember_decay(_decay(optimizer, held, guard)[0])
                self._filter(optimizer, held, task)
            return loss

        return (args[0], shown, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    @torch.no_grad()
    @full_precision
    def after_step(self, optimizer: Optimizer) -> None:
        """Keep the step's update within the reach."""
        known = self.known
        held = self._held_by(optimizer, known) if known is not None else None
        if held is None or held.task is None:
            return
        for _, guard in held.layers:
            decay, lr = _decay(optimizer, held, guard)
            guard.keep_update(decay, lr)
        self._stepping = False

    def _filter(self, optimizer: Optimizer, held: Held, task: GuardedTask) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, undone in a fused step
        for name, guard in held.layers:
            # SGD's update is linear: what leaves it inside span(M) is taken out after the step.
            if type(optimizer) is torch.optim.SGD and not guard.region.blocks:
                continue
            decay, _ = _decay(optimizer, held, guard)
            if decay is not None and scale is not None:
                decay = decay._replace(rate=decay.rate * scale)
            guard.filter_gradients(task.forms[name], task.scale_rate, decay)

    def _meet(self, optimizer: Optimizer, held: Held, task: GuardedTask, known: Guarded) -> None:
        """See an optimizer's first step in this task: the form, and an earlier task's momentum."""
        linear = type(optimizer) is torch.optim.SGD
        for name, guard in held.layers:
            task.forms.setdefault(name, task.form or ("paper" if linear else "range"))
            if task.resumed:
                continue
            for key in ("momentum_buffer", "exp_avg"):
                buffers = [optimizer.state.get(p, {}).get(key) for p in guard.params]
                if all(b is not None for b in buffers):
                    guard.follow()
                    guard.forget_momentum(buffers)
        shared = known.shared
        idle = [
            name
            for name in held.apart
            if (grad := shared[name].grad) is not None
            and bool((grad.reshape(len(grad), -1) == 0).all(1).any())
            and (
                held.groups[id(shared[name])].get("weight_decay") or shared[name] in optimizer.state
            )
        ]
        if idle:
            log.warning(
                "Old tasks use the excluded %s, of which rows have no gradient in this task: "
                "weight decay and momentum move them all the same. Give it weight_decay=0, no "
                "momentum, or each task a head of its own, with zero_grad(set_to_none=True).",
                ", ".join(map(repr, idle[:3])),
            )
        task.met.add(optimizer)

    def _refuse(self, optimizer: Optimizer, held: Held, known: Guarded) -> None:
        if known.visiting:
            raise RuntimeError(
                "An optimizer stepped inside `with learner.task(...)`, whose weights are put back "
                "when it is left; train outside of it."
            )
        if not held.of_layers:
            return
        if held.task is None:
            if known.closed and any(p.grad is not None for p in held.of_layers):
                raise RuntimeError(
                    "An optimizer stepped protected weights while no task is open; call "
                    "begin_task first, or learner.detach(task) to train the model freely."
                )
            return
        if self.attached and optimizer not in self.attached:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds protected weights but was not attached, though "
                "another optimizer was; give all of them to learner.attach(...)."
            )
        if needs_closure(optimizer):
            raise TypeError(f"{type(optimizer).__name__} {NO_CLOSURES}")

    # ---- what an optimizer holds ------------------------------------------------------------

    def _held_by(self, optimizer: Optimizer, known: Guarded) -> Held:
        # Groups are replaced when an optimizer's state is loaded; `held` keeps those it has seen.
        groups_now = map(id, optimizer.param_groups)
        params = tuple(map(id, _params(optimizer)))
        key = (*groups_now, *params)
        held = self._held.get(optimizer)
        task = known.guarded
        if held is None or held.key != key or held.task is not task:
            layers = task.layers.items() if task is not None else ()
            groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
            protected = {id(p) for layer in self.layers.values() for p in layer.params}
            shared = {id(p): name for name, p in known.shared.items()}
            held = self._held[optimizer] = Held(
                task,
                key,
                [*optimizer.param_groups],
                params,
                [(n, g) for n, g in layers if any(id(p) in groups for p in g.params)],
                groups,
                [p for p in _params(optimizer) if id(p) in protected],
                [shared[p] for p in params if p in shared],
            )
        return held


NO_CLOSURES = (
    "calls a closure several times a step, moving the weights in between, where they cannot be "
    "protected; use a first-order optimizer such as SGD or AdamW."
)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer cannot be made without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_optimizers(
    given: Sequence[Optimizer], attached: Sequence[Optimizer], to_train: Mapping[str, nn.Parameter]
) -> None:
    """Refuse optimizers that cannot be guarded, or that would leave something untrained."""
    if not given:
        raise TypeError("attach needs a torch optimizer, or several.")
    for optimizer in given:
        if needs_closure(optimizer):
            raise TypeError(f"{type(optimizer).__name__} {NO_CLOSURES}")
    held = {id(p) for o in [*given, *attached] for p in _params(o)}
    missing = [name for name, param in to_train.items() if id(param) not in held]
    if missing:
        raise ValueError(
            f"The optimizer does not hold '{missing[0]}' ({len(missing)} parameters are missing); "
            "make it from learner.parameters(), or give several: learner.attach(first, second)."
        )


def unwrapped(optimizer: Any) -> list[Optimizer]:
    """A torch optimizer and those inside it, or those inside a wrapper of another library."""
    found = [optimizer] if isinstance(optimizer, Optimizer) else []
    for attribute in ("base_optimizer", "optimizer", "_optimizer"):
        inner = vars(optimizer).get(attribute) if hasattr(optimizer, "__dict__") else None
        if isinstance(inner, Optimizer):
            found += unwrapped(inner)
    if not found:
        raise TypeError(f"attach needs a torch optimizer, not {type(optimizer).__name__}.")
    return found


def _refuse_thawed(held: Held, known: Guarded) -> None:
    """Refuse a step of parameters that were frozen after the first task and train again."""
    for name, param in known.frozen.items():
        if param.requires_grad and (held.of_layers or held.apart or id(param) in held.params):
            raise RuntimeError(
                f"'{name}' was frozen after the first task and trains again, where nothing "
                "protects it; set its requires_grad to False."
            )


def _decay(
    optimizer: Optimizer, held: Held, guard: LayerGuard
) -> tuple[Decay | None, float | Tensor]:
    """How the optimizer's weight decay acts on a layer, and its learning rate."""
    weight, *biases = guard.params
    group = held.groups.get(id(weight))
    if group is None or not group.get("weight_decay") or not guard.region.blocks:
        return None, 0.0
    if weight.grad is None:  # which an optimizer passes over
        return None, 0.0
    rate = group["weight_decay"]
    decoupled = isinstance(optimizer, DECOUPLED) or bool(group.get("decoupled_weight_decay"))
    if not decoupled and not isinstance(optimizer, COUPLED):
        return None, 0.0
    own = [
        held.groups.get(id(b), {}).get("weight_decay", 0.0) / rate if b.grad is not None else 0.0
        for b in biases
    ]
    sign = -1 if group.get("maximize") and not decoupled else 1
    skipped = getattr(optimizer, "found_inf", None)  # by a GradScaler, inside a fused step
    taken = sign * rate if skipped is None else sign * rate * (1 - skipped)
    return Decay(decoupled, taken, tuple(own)), group["lr"]


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


_guards: WeakSet[UpdateGuard] = WeakSet()
_watching: list[Any] = []


def refuse_open(params: Iterable[nn.Parameter]) -> None:
    """Refuse parameters that another learner is teaching a task right now."""
    wanted = {id(p) for p in params}
    for guard in list(_guards):
        task = guard._task
        if task is not None and any(
            id(p) in wanted for layer in guard.layers.values() for p in layer.params
        ):
            raise RuntimeError(
                f"Another learner has begun task {task.task!r} on this model and not ended it; "
                "call its end_task or abort_task first."
            )


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked | None:
    changed = None
    for guard in list(_guards):
        answer = guard.before_step(optimizer, args, kwargs)
        if answer is not None:
            changed = args, kwargs = answer
    return changed


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for guard in list(_guards):
        guard.after_step(optimizer)
