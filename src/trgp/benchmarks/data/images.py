"""Images as tensors on the device, batched by index and normalised there."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ...pixels import floats_of
from .store import Images, Labels


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of pixels from 0 to 1: one per channel, or one for all."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


_CIFAR = Normalisation(
    mean=(125.3 / 255, 123.0 / 255, 113.9 / 255), std=(63.0 / 255, 62.1 / 255, 66.7 / 255)
)
NORMALISATION: Mapping[str, Normalisation] = {
    "mnist": Normalisation((0.1307,), (0.3081,)),  # 28 x 28, as in PMNIST
    "mnist_padded": Normalisation((0.1,), (0.2752,)),  # 32 x 32, as in 5-Datasets
    "fashion_mnist": Normalisation((0.2190,), (0.3318,)),  # 32 x 32 too
    "notmnist": Normalisation((0.4254,), (0.4501,)),
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "svhn": Normalisation((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "miniimagenet": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""The constants of the published experiments, by set."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """Samples on one device: x uint8 (pixels) or float (used unchanged), y int64."""

    x: Tensor
    y: Tensor
    normalisation: Normalisation | None = None
    """Applied to every batch of uint8 x after the division by 255."""
    # On the device from the start: a copy per batch would make each step wait.
    _shift: tuple[Tensor, Tensor] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.x.dtype != torch.uint8 and not self.x.is_floating_point():
            raise TypeError(f"x is of type {self.x.dtype}; give pixels as uint8 or floats.")
        if self.y.dtype != torch.int64 or self.y.dim() != 1:
            raise TypeError(
                f"y is of type {self.y.dtype} with {self.y.dim()} axes; give labels as int64 in "
                "one axis."
            )
        if not self.x.dim() or len(self.x) != len(self.y):
            raise ValueError(
                f"x has shape {tuple(self.x.shape)} but y has {len(self.y)} labels; give one label "
                "per sample."
            )
        if self.x.device != self.y.device:
            raise ValueError(
                f"x is on {self.x.device} and y on {self.y.device}; put both on one device."
            )
        given = self.normalisation
        if given is None:
            return
        if self.x.dtype != torch.uint8:
            raise TypeError("x is float already; normalise it beforehand, or give uint8 pixels.")
        channels = self.x.shape[1] if self.x.dim() == 4 else 0
        if not {len(given.mean), len(given.std)} <= {1, channels}:
            raise ValueError(
                f"x has shape {tuple(self.x.shape)}, but the normalisation is for "
                f"{len(given.mean)} channels; give (N, C, H, W) and one mean per channel."
            )
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=self.x.device).view(-1, 1, 1)
            for values in (given.mean, given.std)
        )
        object.__setattr__(self, "_shift", (mean, std))  # bypasses frozen, as dataclasses do

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The indexed samples (by a tensor on the same device, or a slice): x float, y int64."""
        return self._floats(self.x[index]), self.y[index]

    def subset(self, index: Tensor | slice) -> "Tensors":
        """Select the indexed samples; pixels stay uint8."""
        return Tensors(self.x[index], self.y[index], self.normalisation)

    def to(self, device: torch.device | str) -> "Tensors":
        """Copy the samples to another device."""
        return Tensors(self.x.to(device), self.y.to(device), self.normalisation)

    @property
    def scale(self) -> tuple[Tensor, Tensor] | None:
        """Mean and deviation by channel that normalise pixels; None for float samples."""
        if self.x.dtype != torch.uint8:
            return None
        if self._shift is None:
            zero = torch.zeros([1] * (self.x.dim() - 1), device=self.x.device)
            return zero, zero + 1
        mean, std = (values.expand(self.x.shape[1], 1, 1) for values in self._shift)
        return mean, std

    def _floats(self, x: Tensor) -> Tensor:
        return x if x.dtype != torch.uint8 else floats_of(x, *(self._shift or ()))


def to_tensors(
    images: Images,
    labels: Labels,
    device: torch.device | str = "cpu",
    normalisation: Normalisation | None = None,
) -> Tensors:
    """Convert stored images (N, H, W, C) and labels to (N, C, H, W) on the device."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2).to(device).contiguous()
    return Tensors(x, torch.from_numpy(labels).to(device), normalisation)


def as_rgb32(name: str, x: Tensor) -> Tensor:
    """Convert pixels of a set of 5-Datasets, uint8 (N, C, H, W), to 32 x 32 with three channels.

    notMNIST is resized, as in the published experiments; MNIST and Fashion-MNIST are padded.
    """
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] not in (1, 3):
        raise ValueError(
            f"The pixels of {name} are {x.dtype} of shape {tuple(x.shape)}; give uint8 of shape "
            "(N, 1 or 3, H, W)."
        )
    if x.shape[2:] == (28, 28):
        x = resize(x, 32) if name == "notmnist" else F.pad(x, (2, 2, 2, 2))
    if x.shape[2:] != (32, 32):
        raise ValueError(
            f"The images of {name} are {x.shape[2]} x {x.shape[3]}; give 28 x 28 or 32 x 32."
        )
    # A view rather than a copy: indexing a batch materialises it.
    return x.expand(-1, 3, -1, -1)


def resize(x: Tensor, side: int, chunk: int = 4096) -> Tensor:
    """Resize square uint8 images by an antialiased cubic filter, rounded back to uint8."""
    parts = [
        F.interpolate(part.float(), (side, side), mode="bicubic", antialias=True)
        .round_()
        .clamp_(0, 255)  # a cubic filter overshoots at edges
        .to(torch.uint8)
        for part in x.split(chunk)
    ]
    return torch.cat(parts)
