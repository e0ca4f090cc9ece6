"""A network's protected layers, their inputs, and the directions that old tasks use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..core.capture import Gram, GramCapture, observing
from ..core.layers import Layer, Site
from ..core.native import Product, taken_off
from ..core.plan import Plan, make_plan
from ..core.subspace import columns_of
from ..core.vmapped import is_batchedtensor
from ..tree import level, tensors
from ..types import Norm, Params, State
from .base import Batch, Factors, Grads, Network


@dataclass(frozen=True)
class Protected:
    """A layer and the parameter names of its weight and biases."""

    layer: Layer
    names: tuple[str, ...]

    @property
    def factored(self) -> bool:
        """Whether the gradient is a product of the outputs' gradients and the inputs."""
        sites = self.layer.sites
        return len(sites) == 1 and isinstance(sites[0].module, nn.Linear)

    @property
    def bendable(self) -> bool:
        """Whether inputs can be scaled instead of the weight: one linear module, no bias."""
        return self.factored and len(self.names) == 1

    def fewer_rows(self, batch_size: int) -> bool:
        """Whether a batch's inputs have fewer rows to project than the gradient."""
        return self.factored and batch_size < self.layer.shape[1]

    @property
    def direct(self) -> bool:
        """Whether the layer is stored in the dtype of its computations."""
        return all(param.dtype == self.layer.dtype for param in self.layer.params)

    def factors(self, grads: Grads) -> Factors | None:
        """The gradient's factors, (b, o) and (b, n); None if the gradient is dense."""
        gradient = grads[self.names[0]]
        if not isinstance(gradient, Factors):
            return None
        return Factors(gradient.delta.to(self.layer.dtype), self.inputs(gradient.x))

    def inputs(self, x: Tensor) -> Tensor:
        """Inputs (b, n) of a linear layer, extended by a 1 for a bias."""
        x = x.to(self.layer.dtype)
        return pad(x, (0, 1), value=1.0) if len(self.names) > 1 else x

    def gradient(self, grads: Grads) -> Tensor:
        """The dense gradient, G (g, o, n)."""
        return self.pack({name: grads[name] for name in self.names})  # type: ignore[misc]

    def some_factors(self, grads: Grads) -> Factors:
        """The gradient's factors; a dense G is returned as (I, G)."""
        factors = self.factors(grads)
        if factors is not None:
            return factors
        G = self.gradient(grads)
        g, o, _ = G.shape
        return Factors(torch.eye(o, dtype=G.dtype, device=G.device).expand(g, o, o), G)

    def moved(self, params: Params, along: Product) -> dict[str, Tensor]:
        """Subtract left' right from the parameters; return those not updated in place."""
        named = [params[name] for name in self.names]
        if is_batchedtensor(named[0]) or not all(tensor.is_contiguous() for tensor in named):
            return self.unpack(taken_off(self.pack(params), along), params)
        parts = [self.layer.layout.matrices(named[0])]
        parts += [bias.view(*self.layer.shape[:2], 1) for bias in named[1:]]
        rights = along.right.split([part.shape[2] for part in parts], 2)
        for part, right in zip(parts, rights, strict=True):
            taken_off(part, Product(along.left, right))
        return {}

    def pack(self, named: Mapping[str, Tensor]) -> Tensor:
        """Pack the parameters, or their gradients, into one (g, o, n) matrix."""
        return self.layer.pack([named[name] for name in self.names])

    def joined(self, named: Mapping[str, Tensor]) -> Tensor:
        """Pack differentiably: gradients flow back to the parameters."""
        return self.layer.joined([named[name] for name in self.names])

    def unpack(self, W: Tensor, like: Params) -> dict[str, Tensor]:
        """Split the matrix into parameters again."""
        parts = self.layer.apart(W, [like[name] for name in self.names])
        return {name: p.to(like[name].dtype) for name, p in zip(self.names, parts, strict=True)}


def plan_of(module: nn.Module, separate_heads: bool, norm: Norm) -> Plan:
    """Plan the protection: every layer, but no head that only one task uses."""
    return make_plan(module, ["heads"] if separate_heads else [], [], norm)


def protected_layers(module: nn.Module, plan: Plan) -> dict[str, Protected]:
    """The layers of a plan, in the order of the network."""
    names = {id(p): name for name, p in module.named_parameters()}
    return {
        name: Protected(layer, tuple(names[id(p)] for p in layer.params))
        for name, layer in plan.layers.items()
    }


@dataclass
class Directions:
    """Protected directions of a layer, M (g, n, m), and the place of old tasks' bases in M."""

    M: Tensor
    ranks: Tensor
    masks: dict[int, Tensor] = field(default_factory=dict)
    loose: dict[int, Tensor] = field(default_factory=dict)
    """By task: the direction (g, n, 1) of its basis that is unprotected, outside M."""

    @classmethod
    def read(cls, state: State, layer: Layer) -> "Directions":
        """Read a layer's directions from a method's state; empty before the first task."""
        kept = level(state, "memory", layer.name)
        if kept:
            masks = {int(t): mask for t, mask in tensors(level(kept, "masks")).items()}
            loose = {int(t): u for t, u in tensors(level(kept, "loose")).items()}
            own = tensors(kept)
            return cls(own["M"], own["ranks"], masks, loose)
        g, _, n = layer.shape
        like = layer.weight.param
        M = torch.zeros(g, n, 0, dtype=layer.dtype, device=like.device)
        return cls(M, torch.zeros(g, dtype=torch.long, device=like.device))

    def state(self) -> State:
        """Convert to the form of a method's state."""
        return {
            "M": self.M,
            "ranks": self.ranks,
            "masks": {str(t): mask for t, mask in self.masks.items()},
            "loose": {str(t): u for t, u in self.loose.items()},
        }

    def basis(self, task: int) -> Tensor:
        """The task's basis B_j (g, n, r_j)."""
        columns = columns_of(self.M, self.masks[task])
        return torch.cat([columns, self.loose[task]], 2) if task in self.loose else columns


@torch.no_grad()
def input_grams(
    network: Network,
    layers: Mapping[str, Protected],
    weights: Params,
    batch: Batch,
    images: Sequence[int] = (),
) -> dict[str, Gram]:
    """Compute A = R R' of each layer's inputs, over a batch or its first `images` samples."""
    capture = GramCapture(each.layer for each in layers.values())
    limits = dict(zip(layers, images, strict=True)) if images else {}

    def show(layer: Layer, site: Site, x: Tensor) -> None:
        capture(layer, site, x[: limits.get(layer.name)])

    network.module.eval()
    with observing((each.layer for each in layers.values()), show):
        network(weights, batch.x, batch.head)
    capture.finite()
    return capture.grams
