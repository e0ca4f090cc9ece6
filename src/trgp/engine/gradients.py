"""A batch's loss and its gradient, or for linear layers the factors of it."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..methods.base import Batch, Factors, Grads, Method
from ..types import Params, State

Seen = dict[str, list[tuple[Tensor, Tensor]]]  # by weight: (input, probe) of every call


class Gradients(Protocol):
    """What computes them: the function below, or one that was compiled from it."""

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
    """The mean loss and its gradient by name; what the loss does not depend on is left out.

    factored: names of weights that get no gradient of their own, but its factors.
    rounded: whether it is computed as training is, where that is not in full precision.
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
    """A layer's factors from (delta, input) of its calls, None if the loss depends on none.

    dtype: the weight's, also where the pass was rounded. axis: that of the samples; runs may come
    before it.
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
    """While this is open, a zero is added to the output of these linear layers.

    Its gradient is delta, the gradient of the output, and the weight itself needs none.
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
    """While this is open, `see` is given a weight's name and its layer's input and output in every
    call; what it returns, if anything, takes the place of the output."""

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
