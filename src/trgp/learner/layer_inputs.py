"""The Gram matrices of the layers' inputs, in passes over the data whose matrices fit in memory."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..core.capture import GramCapture, observing
from ..core.layers import Layer
from .layer_gradients import LossFn

GRAM_BYTES = 4 << 30  # of float64 matrices at once: more layers than fit take another pass


def passes(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Layers in parts whose Gram matrices lie in memory together."""
    parts: list[list[Layer]] = []
    held = GRAM_BYTES
    for layer in layers:
        size = gram_bytes(layer)
        if held + size > GRAM_BYTES:
            parts.append([])
            held = 0
        parts[-1].append(layer)
        held += size
    return parts


def gram_bytes(layer: Layer) -> int:
    """Bytes of a layer's Gram matrices in float64."""
    groups, _, n = layer.shape
    return 8 * groups * n * n


def layer_inputs(
    model: nn.Module, layers: Sequence[Layer], batches: Iterable[Any], loss_fn: LossFn
) -> GramCapture:
    """Run the batches through the model without gradients, and see these layers' inputs."""
    capture = GramCapture(layers)
    with torch.no_grad(), observing(layers, capture):
        for batch in batches:
            loss_fn(model, batch)
    return capture
