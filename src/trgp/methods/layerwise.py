"""Shared base of the methods that act on a layer's whole weight matrix."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..core import native
from ..core.branches import side_by_side
from ..core.donation import writable
from ..core.plan import Plan
from ..tree import level, put, tensors
from ..types import Norm, Params, Rate, State
from .base import EARLY, Batch, Factors, Grads, Method, sgd
from .protected import Protected, plan_of, protected_layers


class Along(NamedTuple):
    """Direction along which a layer's weight moves in a step."""

    plain: bool = True  # move along the gradient itself
    product: native.Product | None = None  # subtracted if plain, else the direction itself


@dataclass(frozen=True)
class Layerwise(Method):
    """Protect layers as (g, o, n) matrices; `norm` decides about norm layers."""

    consumes: ClassVar[bool] = True

    norm: Norm = "freeze"
    """Norm layers after the first task. freeze: keep them; shared: train them on for all tasks;
    per_task: store a copy per task. The published TRGP shares them on split CIFAR-100, through an
    index error."""

    def __post_init__(self) -> None:
        if self.norm not in ("freeze", "shared", "per_task"):
            raise ValueError(f"norm must be freeze, shared or per_task, not {self.norm!r}.")

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.network.module, self.network.separate_heads, self.norm)

    @cached_property
    def layers(self) -> dict[str, Protected]:
        """The protected layers by name, first to last."""
        return protected_layers(self.network.module, self.plan)

    def check(self) -> None:
        if not self.layers:
            raise ValueError(
                "The network has no layer that can be protected; give one with linear layers or "
                "convolutions."
            )

    def frozen(self, task: int) -> frozenset[str]:
        """After the first task: norm layers if `norm` is freeze, and unprotectable parameters."""
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
        layers = {name: each for name, each in self.layers.items() if each.names[0] in grads}
        found: dict[str, Along] = {}
        for name in side_by_side(layers):
            found[name] = self.along(name, grads, state)
            if found[name].plain and isinstance(grads[layers[name].names[0]], Factors):
                raise TypeError(f"The gradient of {name} comes as factors; `along` must use them.")
        apart = {
            own
            for name, each in layers.items()
            if not (found[name].plain and each.direct)
            for own in each.names
        }
        # Plain steps first, all at once; the rest of each layer's step follows on top of them.
        # A bias is skipped together with its weight if the weight has no gradient.
        apart |= {own for name, e in self.layers.items() if name not in layers for own in e.names}
        plain_ones = {name: grad for name, grad in grads.items() if name not in apart}
        new = sgd(params, plain_ones, lr)
        new |= {own: writable(params[own]) for own in apart if own in grads}
        back = -lr if any(plain and product for plain, product in found.values()) else lr
        for name, each in side_by_side(layers.items()):
            plain, product = found[name]
            if product is not None:
                product = native.Product((back if plain else lr) * product.left, product.right)
            if each.direct:
                new |= {} if product is None else each.moved(new, product)
                continue
            W = each.pack(params)
            if plain:
                W = W - lr * each.gradient(grads)
            new |= each.unpack(W if product is None else native.taken_off(W, product), params)
        return new, {}

    def along(self, name: str, grads: Grads, state: State) -> Along:
        """Direction along which a protected layer's weight moves."""
        return Along()

    def projectors(self, name: str, state: State) -> Tensor | None:
        """The dense projector P (g, n, ...) of a layer's inputs, or None."""
        return None

    def early(self, weight: str, x: Tensor, params: Params, state: State) -> State:
        for name, each in self.layers.items():
            if each.names[0] == weight:
                return self.ahead(name, each.inputs(x), params, state)
        return {}

    def ahead(self, name: str, x: Tensor, params: Params, state: State) -> State:
        """`early` for a layer's inputs x, extended by a 1 for a bias."""
        P = self.projectors(name, state)
        return {} if P is None else {"xP": native.projected(P, x)}

    def projected(self, name: str, P: Tensor, x: Tensor, state: State) -> Tensor:
        """x P, taken from the state if `early` has computed it."""
        found = tensors(level(state, EARLY, self.layers[name].names[0])).get("xP")
        return native.projected(P, x) if found is None else found

    def narrowed(self, name: str, P: Tensor, grads: Grads, state: State) -> Along:
        """The direction G P for a dense projector P (g, n, n)."""
        each = self.layers[name]
        factors = each.factors(grads)
        if factors is None:
            return Along(False, native.Product(each.gradient(grads).mT, P))
        xP = self.projected(name, P, factors.x, state)
        return Along(False, native.narrowed_factors(factors.delta, xP))

    def with_copies(self, params: Params, state: State, task: int) -> State:
        """Add a copy of a finished task's norm layers to the state, if `norm` is per_task."""
        if not self.plan.per_task:
            return state
        copies = {name: params[name].clone() for name in self.plan.per_task}
        return put(state, copies, "copies", str(task))

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        copies = tensors(level(state, "copies", str(task)))
        return {**params, **copies} if copies else params


def several(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def between(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
