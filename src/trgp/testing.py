"""A test kit for kinds of layers: does trgp know of a layer what the layer computes?"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .core.capture import GramCapture, observing
from .core.layers import Layer, Site
from .core.memory import Memory
from .core.plan import make_plan
from .core.subspace import extend
from .learner.layer_guard import LayerGuard

CLOSE = 1e-9


def check_layer_kind(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Prove that a layer is protected exactly, on a call with these arguments.

    In float64 and eval mode, on a copy: the output of a layer with one weight is the weight times
    its columns, in whatever order; after any guarded update of a weight the output is as before;
    and an update along the columns changes it. Give few samples: their columns must leave room for
    updates. What does not hold is an AssertionError that says so.
    """
    module = deepcopy(module).double().eval()
    args, kwargs = tree_map(_in_float64, (args, kwargs))
    kind = type(module).__name__
    layers = make_plan(nn.ModuleDict({kind: module}), [], [], "freeze").layers
    if not layers:
        raise AssertionError(
            f"{kind} has no weight that is protected; register it with trgp.protects, and see that "
            "its weight trains."
        )
    capture = GramCapture(layers.values())
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}

    def look(layer: Layer, site: Site, x: Tensor) -> None:
        shape = tuple(site.columns(site.module, x).shape)
        groups, n = layer.groups, layer.shape[2] - len(layer.biases)
        if len(shape) != 3 or (shape[0], shape[2]) != (groups, n):
            raise AssertionError(
                f"The columns of '{layer.name}' have the shape {shape}; it must be "
                f"({groups}, N, {n})."
            )
        seen[layer.name].append(layer.columns(site, x))
        capture(layer, site, x)

    @torch.no_grad()
    def outputs() -> list[Tensor]:
        found = tree_leaves(module(*deepcopy(args), **deepcopy(kwargs)))
        return [t for t in found if isinstance(t, Tensor)]

    with observing(layers.values(), look):
        before = outputs()
    for name, layer in layers.items():
        if not seen[name]:
            raise AssertionError(f"The call has shown no input of '{name}'.")
        if len(layers) == len(layer.sites) == 1:
            _check_product(layer, torch.cat(seen[name], 1), before)
        _check_guard(layer, capture, before, outputs)


def _check_product(layer: Layer, columns: Tensor, outputs: list[Tensor]) -> None:
    """The output is W times the columns."""
    expected = (columns @ layer.matrix().mT).flatten().sort().values
    sized = [t for t in outputs if t.numel() == expected.numel()]
    if not any(_distance([t.flatten().sort().values], [expected]) < CLOSE for t in sized):
        raise AssertionError(
            f"The output of '{layer.name}' is not its weight times its columns; look for rows that "
            "are scaled, missing or counted twice, and at the order of the weight's inputs."
        )


@torch.no_grad()
def _check_guard(
    layer: Layer, capture: GramCapture, before: list[Tensor], outputs: Callable[[], list[Tensor]]
) -> None:
    """Guarded updates of the weight leave the output alone, and only these do."""
    W = layer.matrix().clone()
    empty = Memory.empty(*layer.shape, like=W)
    grown = extend(empty.M, empty.ranks, capture.grams[layer.name], threshold=1.0, pooled=False)
    memory = empty.grown(grown, W, 0)
    if int(memory.ranks.min()) == layer.shape[2]:
        raise AssertionError(
            f"The inputs of '{layer.name}' leave no room for updates; call it with fewer samples."
        )
    guard = LayerGuard(layer, memory, memory.region([]))
    size = W.norm() / W.numel() ** 0.5 + 1
    for param in layer.params:
        param.add_(size * torch.randn_like(param))
    guard.keep_update()
    if _distance([layer.matrix()], [W]) < CLOSE:
        raise AssertionError(f"A guarded update of '{layer.name}' has not moved its weight.")
    if _distance(outputs(), before) > CLOSE:
        raise AssertionError(
            f"An update of '{layer.name}' orthogonal to its columns changes the output: something "
            "that the weight is applied to is missing among them."
        )
    layer.assign(W + size * torch.randn_like(memory.C) @ memory.M.mT)
    if _distance(outputs(), before) < CLOSE:
        raise AssertionError(
            f"An update of '{layer.name}' along its columns does not change the output: they are "
            "not what the weight is applied to."
        )
    layer.assign(W)


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference, in proportion to the largest number."""
    pairs = [(a.double(), b.double()) for a, b in zip(some, others, strict=True) if a.numel()]
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    scale = max([1.0, *(float(b.abs().max()) for _, b in pairs)])
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0) / scale


def _in_float64(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.double() if floating else leaf
