"""Pixels as bytes and as the normalised floats that a network computes with."""

import torch
from torch import Tensor


def floats_of(pixels: Tensor, mean: Tensor | None = None, std: Tensor | None = None) -> Tensor:
    """Pixels, uint8, divided by 255 and normalised."""
    x = pixels.to(torch.float32).div_(255)
    if mean is not None and std is not None:
        x = x.sub_(mean).div_(std)
    return x


def pixels_of(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """The pixels that `floats_of` has made x of, exactly: rounding is far below half a level."""
    return (x * std).add_(mean).mul_(255).round_().to(torch.uint8)
