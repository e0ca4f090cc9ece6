"""The gradient of a task's loss, layer by layer: what the trust region is measured by."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.capture import check_finite_input, check_input, observing
from ..core.layers import Layer, Site
from .loader_batches import samples_in, tensors_in

LossFn = Callable[[nn.Module, Any], Tensor]


def layer_gradients(
    model: nn.Module,
    layers: Mapping[str, Layer],
    batches: Iterable[Any],
    loss_fn: LossFn,
    others: Mapping[str, nn.Parameter],
) -> tuple[dict[str, Tensor], list[str]]:
    """Return dL/dW over all batches, up to a factor, per layer as (g, o, n); no `.grad` is touched.

    Also return which of the other parameters, by name, have a gradient at all. Refuses, by name, a
    layer with unusable inputs or gradients, and one whose weight reaches the model's output by
    another way than the layer's own call: its inputs there would stay unseen.
    """
    sums = {name: torch.zeros_like(layer.matrix()) for name, layer in layers.items()}
    params = [p for layer in layers.values() for p in layer.params]
    trained = [p for p in params if p.requires_grad]
    left = {name: p for name, p in others.items() if p.requires_grad}
    used: set[str] = set()
    called: set[str] = set()

    def see(layer: Layer, site: Site, x: Tensor) -> None:
        called.add(layer.name)
        check_finite_input(layer, x)

    for batch in batches:
        with (
            torch.enable_grad(),
            observing(layers.values(), see),
            _called_by_alias(layers.values()) as alias,
            _outputs(model) as outputs,
            _differentiable(model),
        ):
            loss = _check_loss(loss_fn(model, batch))
        require_called(called)
        if not trained:
            continue
        _refuse_other_ways(layers, trained, outputs or [loss])
        # In a call the alias is used; a penalty on the weights, say, finds the parameter itself.
        ends = [*(alias[p] for p in trained), *trained]
        parts = torch.autograd.grad(loss, [*ends, *left.values()], allow_unused=True)
        used |= {
            name for name, part in zip(left, parts[len(ends) :], strict=True) if part is not None
        }
        gradients = {p: torch.zeros_like(p) for p in params}
        for p, part in zip([*trained, *trained], parts[: len(ends)], strict=True):
            if part is not None:
                gradients[p] += part
        for name, layer in layers.items():
            # Batches may differ in size: the mean over all samples weighs each by its own.
            sums[name] += samples_in(batch) * layer.pack([gradients[p] for p in layer.params])
    return sums, sorted(used)


def backward(
    model: nn.Module, layers: Mapping[str, Layer], batches: Iterable[Any], loss_fn: LossFn
) -> None:
    """Leave dL/dW over all batches, up to a factor, in `.grad`, for models that need backward.

    A layer used without its own call is refused here as well, but no NaN: that is in the gradient,
    and an error on one rank alone would leave the others waiting.
    """
    called: set[str] = set()

    def see(layer: Layer, site: Site, x: Tensor) -> None:
        called.add(layer.name)
        check_input(layer, x)

    for p in model.parameters():
        p.grad = None
    for batch in batches:
        with (
            torch.enable_grad(),
            observing(layers.values(), see),
            _refusing_other_uses(model, layers.values()),
        ):
            loss = _check_loss(loss_fn(model, batch))
        require_called(called)
        (samples_in(batch) * loss).backward()


def require_called(called: Collection[str]) -> None:
    """Refuse a pass in which no protected layer was called: the task would be forgotten."""
    if not called:
        raise ValueError(
            "loss_fn called no protected layer of the model, so nothing of this task could be "
            "remembered; compute the loss with the model that loss_fn is given, and with adapters "
            "enabled."
        )


def require_finite(gradients: Mapping[str, Tensor]) -> None:
    """Refuse a gradient with a NaN or an infinity in it, naming the layer."""
    for name, G in gradients.items():
        if not bool(G.isfinite().all()):
            raise ValueError(
                f"The gradient of layer '{name}' is NaN or infinite; check the loss and the data."
            )


@contextmanager
def _called_by_alias(layers: Iterable[Layer]) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """While a layer runs it finds aliases in the place of its parameters, of the same storage.

    What gradient still reaches a parameter itself has come by another way.
    """
    alias: dict[nn.Parameter, nn.Parameter] = {}
    swaps: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}
    for layer in layers:
        for site in layer.sites:
            for slot in (site.weight, site.bias):
                if slot is not None:
                    p = slot.param
                    alias.setdefault(p, nn.Parameter(p.detach(), requires_grad=p.requires_grad))
                    swaps.setdefault(site.module, []).append((slot.module, slot.attribute, p))

    def enter(module: nn.Module, args: Any) -> None:
        for owner, key, p in swaps[module]:
            owner._parameters[key] = alias[p]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        for owner, key, p in swaps[module]:
            owner._parameters[key] = p

    handles = [m.register_forward_pre_hook(enter) for m in swaps]
    handles += [m.register_forward_hook(leave, always_call=True) for m in swaps]
    try:
        yield alias
    finally:
        for handle in handles:
            handle.remove()
        for module in swaps:
            leave(module, None, None)


def _differentiable(model: nn.Module) -> AbstractContextManager[None]:
    """While this is open, no forward runs that cannot be differentiated in eval mode.

    That of recurrent layers in cuDNN cannot.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()


@contextmanager
def _outputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects what the model returns; a penalty in loss_fn is no part of it."""
    found: list[Tensor] = []

    def collect(module: nn.Module, args: Any, output: Any) -> None:
        found.extend(t for t in tensors_in(output) if t.requires_grad)

    handle = model.register_forward_hook(collect)
    try:
        yield found
    finally:
        handle.remove()


def _refuse_other_ways(
    layers: Mapping[str, Layer], trained: list[nn.Parameter], ends: list[Tensor]
) -> None:
    total = torch.stack([end.sum() for end in ends]).sum()
    reached = torch.autograd.grad(total, trained, allow_unused=True, retain_graph=True)
    around = {p for p, part in zip(trained, reached, strict=True) if part is not None}
    for name, layer in layers.items():
        if not around.isdisjoint(layer.params):
            raise TypeError(_other_way(name))


def _other_way(name: str) -> str:
    return (
        f"The weight of layer '{name}' is used without calling the layer, where its inputs cannot "
        f"be seen; call the layer itself, or add '{name}' to exclude=[...] or per_task=[...]."
    )


@contextmanager
def _refusing_other_uses(model: nn.Module, layers: Iterable[Layer]) -> Iterator[None]:
    """While the model runs, refuse a layer's weight in any operation outside the layer's own call.

    For parameters that no alias can stand in for, as those that a pass joins from several ranks.
    """
    uses = _Uses(layers)
    modules = {site.module for layer in uses.layers for site in layer.sites}
    handles = [model.register_forward_pre_hook(uses.start)]
    handles += [model.register_forward_hook(uses.stop, always_call=True)]
    handles += [m.register_forward_pre_hook(uses.enter) for m in modules]
    handles += [m.register_forward_hook(uses.leave, always_call=True) for m in modules]
    try:
        with uses:
            yield
    finally:
        for handle in handles:
            handle.remove()
    for layer in uses.layers:
        if layer.name in uses.found:
            raise TypeError(_other_way(layer.name))


class _Uses(TorchFunctionMode):
    """Sees every operation with a layer's parameter that autograd follows."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__()
        self.layers = list(layers)
        self.found: set[str] = set()
        self._running = False  # the model; a penalty in loss_fn is no part of it
        self._called: list[nn.Module] = []  # layers whose call has not ended

    def start(self, module: nn.Module, args: Any) -> None:
        self._running = True

    def stop(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running = False

    def enter(self, module: nn.Module, args: Any) -> None:
        self._called.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._called.remove(module)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if self._running and any(t.requires_grad for t in tensors_in([output])):
            params = [t for t in tensors_in([args, kwargs]) if isinstance(t, nn.Parameter)]
            for layer in self.layers if params else ():
                if not any(site.module in self._called for site in layer.sites) and any(
                    own is p for own in layer.params for p in params
                ):
                    self.found.add(layer.name)
        return output


def _check_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(f"loss_fn(model, batch) must return a scalar tensor, not {found}.")
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without a gradient; compute it from the model's output "
            "without no_grad or detach."
        )
    return loss
