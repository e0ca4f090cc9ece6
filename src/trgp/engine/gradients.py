"""Loss and gradient of a batch; for linear layers also the factors of the gradient."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..methods.base import Batch, Factors, Grads, Method
from ..types import Params, State

Seen = dict[str, list[tuple[Tensor, Tensor]]]  # by weight: (input, probe) of every call


class Gradients(Protocol):
    """Signature of `loss_and_gradients` and of functions compiled from it."""

    def __call__(
        self,
        method: Method,
        params: Params,
        state: State,
        batch: Batch,
        trained: Collection[str],
        factored: Collection[str] = ...,
    ) -> tuple[Tensor, Grads]: ...


def loss_and_gradients(
    method: Method,
    params: Params,
    state: State,
    batch: Batch,
    trained: Collection[str],
    factored: Collection[str] = (),
    *,
    rounded: bool = True,
) -> tuple[Tensor, Grads]:
    """Compute the mean loss and its gradients by name, without names that the loss ignores.

    Args:
        factored: names of weights that get the factors of their gradient in its place.
        rounded: whether to round as training does, if training is not in full precision.
    """
    free = {n: params[n].detach().requires_grad_() for n in trained if n not in factored}
    with method.network.rounding() if rounded else nullcontext():
        with probed(method.network.module, factored) as seen:
            loss = method.loss({**params, **free}, state, batch)
        probes = [probe for calls in seen.values() for _, probe in calls]
        found = iter(torch.autograd.grad(loss, [*free.values(), *probes], allow_unused=True))
    grads: dict[str, Tensor | Factors] = {}
    for name in free:
        gradient = next(found)
        if gradient is not None:
            grads[name] = gradient
    for name, calls in seen.items():
        factors = factors_of([(next(found), x) for x, _ in calls], params[name].dtype)
        if factors is not None:
            grads[name] = factors
    return loss.detach(), grads


def factors_of(
    calls: Sequence[tuple[Tensor | None, Tensor]], dtype: torch.dtype, axis: int = 0
) -> Factors | None:
    """Return a layer's factors from (delta, input) of its calls; None if the loss uses no call.

    Args:
        dtype: the weight's, even if the pass was rounded.
        axis: the axis of the samples; an axis of runs may precede it.
    """
    used = [
        (delta.flatten(axis, -2).to(dtype), x.detach().flatten(axis, -2).to(dtype))
        for delta, x in calls
        if delta is not None
    ]
    if len(used) > 1:
        return Factors(*(torch.cat(parts, axis) for parts in zip(*used, strict=True)))
    return Factors(*used[0]) if used else None


@contextmanager
def probed(module: nn.Module, weights: Collection[str]) -> Iterator[Seen]:
    """Add a zero to the output of these linear layers while open.

    The gradient of the zero is delta, the gradient of the output; the weight needs no gradient.
    """
    seen: Seen = {}

    def add(name: str, x: Tensor, output: Tensor) -> Tensor:
        probe = torch.zeros_like(output, requires_grad=True)
        seen.setdefault(name, []).append((x, probe))
        return output + probe

    with watched(module, weights, add):
        yield seen


@contextmanager
def watched(
    module: nn.Module, weights: Collection[str], see: Callable[[str, Tensor, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call `see` with a weight's name and its layer's input and output in every call, while open.

    If `see` returns a tensor, it replaces the output.
    """

    def hook(name: str) -> Any:
        def seen(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
            return see(name, args[0] if args else kwargs["input"], output)

        return seen

    handles = [
        module.get_submodule(name.rpartition(".")[0]).register_forward_hook(
            hook(name), with_kwargs=True
        )
        for name in weights
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
