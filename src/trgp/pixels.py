"""Convert pixels between bytes and the normalised floats of a network."""

import torch
from torch import Tensor


def floats_of(pixels: Tensor, mean: Tensor | None = None, std: Tensor | None = None) -> Tensor:
    """Divide uint8 pixels by 255 and normalise them."""
    x = pixels.to(torch.float32).div_(255)
    if mean is not None and std is not None:
        x = x.sub_(mean).div_(std)
    return x


def pixels_of(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Invert `floats_of` exactly: its rounding is far below half a level."""
    return (x * std).add_(mean).mul_(255).round_().to(torch.uint8)
