"""What methods share that act on a layer's whole weight matrix."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.nn.functional import pad

from ..core import native
from ..core.branches import side_by_side
from ..core.plan import Norm, Plan
from ..tree import State, level, put, tensors
from .base import Batch, Factors, Grads, Method, Params, Rate, sgd
from .protected import Protected, plan_of, protected_layers


@dataclass(frozen=True)
class Layerwise(Method):
    """Protects layers as (g, o, n) matrices; norm layers and the rest by what `norm` says."""

    norm: Norm = "freeze"
    """Norm layers after the first task: freeze, shared (go on training, for all tasks), per_task (a
    copy a task). The published TRGP shares them on split CIFAR-100, by a slip in an index."""

    def __post_init__(self) -> None:
        if self.norm not in ("freeze", "shared", "per_task"):
            raise ValueError(f"norm must be freeze, shared or per_task, not {self.norm!r}.")

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.network.module, self.network.separate_heads, self.norm)

    @cached_property
    def layers(self) -> dict[str, Protected]:
        """The protected layers by their names, first to last."""
        return protected_layers(self.network.module, self.plan)

    def check(self) -> None:
        if not self.layers:
            raise ValueError("The network has no layer that can be protected.")

    def frozen(self, task: int) -> frozenset[str]:
        """After the first task: norm layers, if so chosen, and what cannot be protected."""
        if task == 0:
            return frozenset()
        slots = {id(slot.param) for slot in self.plan.others.values()}
        slots |= {id(p) for norm in self.plan.norms.values() for p in norm.parameters()}
        named = self.network.module.named_parameters()
        return frozenset(name for name, p in named if id(p) in slots)

    def train_mode(self, task: int) -> None:
        self.network.module.train()
        if task:
            for norm in self.plan.norms.values():
                norm.eval()

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        new = sgd(params, {k: g for k, g in grads.items() if k not in self._packed_names}, lr)
        for name, each in side_by_side(self.layers.items()):
            if each.names[0] in grads:
                W = self.layer_step(name, each.pack(params), grads, state, lr)
                new |= each.unpack(W, params)
        return new, {}

    def layer_step(self, name: str, W: Tensor, grads: Grads, state: State, lr: Rate) -> Tensor:
        """A protected layer's weight after a step."""
        return W - lr * self.packed(self.layers[name], grads)

    def narrowed_step(
        self, each: Protected, P: Tensor, W: Tensor, grads: Grads, lr: Rate
    ) -> Tensor:
        """A layer's weight after a step along G P."""
        gradient = grads[each.names[0]]
        if isinstance(gradient, Factors):
            return native.narrowed_factored_step(P, W, *factors_for(W, gradient), lr)
        return native.narrowed_step(P, W, self.packed(each, grads), lr)

    @cached_property
    def _packed_names(self) -> frozenset[str]:
        return frozenset(name for each in self.layers.values() for name in each.names)

    def packed(self, each: Protected, grads: Grads) -> Tensor:
        return each.pack({name: grads[name] for name in each.names})  # type: ignore[misc]

    def with_copies(self, params: Params, state: State, task: int) -> State:
        """The state with a finished task's own norm layers, if each is to have them."""
        if not self.plan.per_task:
            return state
        copies = {name: params[name].clone() for name in self.plan.per_task}
        return put(state, copies, "copies", str(task))

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        copies = tensors(level(state, "copies", str(task)))
        return {**params, **copies} if copies else params


def factors_for(W: Tensor, gradient: Factors) -> Factors:
    """In W's digits, and the inputs with a 1 for a bias, if W (g, o, n) has one."""
    delta, x = (factor.to(W.dtype) for factor in gradient)
    return Factors(delta, pad(x, (0, 1), value=1.0) if W.shape[2] > x.shape[1] else x)


def several(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def between(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
