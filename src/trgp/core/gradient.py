"""The gradient of a task's loss, layer by layer: what the trust region is measured by."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .batches import samples_in
from .capture import check_finite_input, observing
from .layers import Layer, Site

LossFn = Callable[[nn.Module, Any], Tensor]


def layer_gradients(
    model: nn.Module, layers: Mapping[str, Layer], batches: Iterable[Any], loss_fn: LossFn
) -> dict[str, Tensor]:
    """dL/dW over all batches, up to a factor, per layer as (g, o, n); no `.grad` is touched.

    Refuses, by name, a layer with unusable inputs or gradients, and one whose weight gets a
    gradient although the layer was never called: its inputs would stay unseen.
    """
    params = {name: layer.params for name, layer in layers.items()}
    sums = {name: torch.zeros_like(layer.matrix()) for name, layer in layers.items()}
    called: set[str] = set()

    def observe(layer: Layer, site: Site, x: Tensor) -> None:
        check_finite_input(layer, x)
        called.add(layer.name)

    for batch in batches:
        with torch.enable_grad(), observing(layers.values(), observe):
            loss = _check_loss(loss_fn(model, batch))
        trained = [p for group in params.values() for p in group if p.requires_grad]
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        by_param = dict(zip(trained, found, strict=True))
        for name, layer in layers.items():
            gradients = {p: by_param.get(p) for p in params[name]}
            if all(g is None for g in gradients.values()):
                continue
            if name not in called:
                raise TypeError(
                    f"The weight of layer '{name}' gets a gradient although the layer is not "
                    "called, so its inputs cannot be seen; call the layer itself, or add "
                    f"'{name}' to exclude=[...] or per_task=[...]."
                )
            # Batches may differ in size: the mean over all samples weighs each by its own.
            sums[name] += samples_in(batch) * layer.pack(
                [torch.zeros_like(p) if g is None else g for p, g in gradients.items()]
            )
    for name, G in sums.items():
        if not bool(G.isfinite().all()):
            raise ValueError(
                f"The gradient of layer '{name}' is NaN or infinite; check the loss and the data."
            )
    return sums


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
