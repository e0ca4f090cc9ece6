"""CIFAR-100 in twenty tasks, its superclasses of five classes, a head each."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from . import common
from .common import GPM_QUIRKS, TRGP_QUIRKS, Benchmark, Preset, Published, Request, class_tasks
from .data import Tensors, to_tensors
from .models import LeNet

TASKS = 20
ORDERS = {
    "A": tuple(range(20)),
    "B": (15, 12, 5, 9, 7, 16, 18, 17, 1, 0, 3, 8, 11, 14, 10, 6, 2, 4, 13, 19),
    "C": (17, 1, 19, 18, 12, 7, 6, 0, 11, 15, 10, 5, 13, 3, 9, 16, 4, 14, 2, 8),
    "D": (11, 9, 6, 5, 12, 4, 0, 10, 13, 7, 14, 3, 15, 16, 8, 1, 2, 19, 18, 17),
    "E": (6, 14, 0, 11, 12, 17, 13, 4, 9, 1, 7, 19, 8, 10, 3, 15, 18, 5, 2, 16),
}
"""The orders of the superclasses that the APD paper averages over; GPM and TRGP use A."""
PAPER = {
    "single": Published(61.00),
    "pnn": Published(50.76),
    "den": Published(51.10),
    "rcl": Published(51.99),
    "apd": Published(56.81),
    "gpm": Published(57.72),
    "trgp": Published(58.25),
}


_TRAINING = {
    "lr": 0.01,
    "batch": 64,
    "epochs": 50,
    "patience": 6,
    "lr_factor": 2.0,
    "lr_min": 1e-5,
    "test_batch": 500,  # no BatchNorm here, so it changes only speed
}
_GPM = {"threshold": (0.98,), "threshold_growth": 0.001, "samples": 125}
_TRGP = {**_GPM, "selection_samples": 125}
# Growing networks train like APD in the APD paper's code: Adam with a decaying learning rate for 20
# epochs, keeping the weights of the best epoch.
_ADAM = {"lr": 1e-3, "lr_decay": 0.95, "batch": 100, "epochs": 20, "patience": 20}
_GROWING: dict[str, dict[str, Any]] = {
    "pnn": {**_ADAM, "width": 0.17},
    "den": {**_ADAM, "growth": 0.01},
    "rcl": {**_ADAM, "growth": 0.0375, "trials": 50, "trial_epochs": 8},
    "apd": _ADAM,
}
_IMAGES = (24, 100, 125, 125)
PRESETS = {
    "paper": Preset(_TRAINING, {"gpm": _GPM, "trgp": _TRGP, "multitask": {"lr": 0.1}, **_GROWING}),
    "official": Preset(
        {**_TRAINING, "scrambled": True, "fixed_split": True, "test_batch": 64},
        {
            "gpm": {**_GPM, "images_per_layer": _IMAGES, **GPM_QUIRKS},
            "trgp": {
                **_TRGP,
                "images_per_layer": _IMAGES,
                "no_scaling": ("fc1", "fc2"),
                **TRGP_QUIRKS,
            },
            "multitask": {"lr": 0.1},
            **_GROWING,
        },
    ),
}


@dataclass(frozen=True)
class Options(common.Options):
    """Choose tasks, network and data of CIFAR-100 superclasses."""

    order: str = "A"
    """Order of the superclasses, A to E."""
    scrambled: bool = False
    """Quirk: scramble the pixels, as in all published results: their shared loader reads the three
    planes of an image as if the colours of each pixel lay side by side."""
    fixed_split: bool = False
    """Quirk: hold out the same images for every seed. The published loader always shuffles with
    seed 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.order, str) or self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {self.order!r}.")


def make(request: Request, options: Options) -> Benchmark:
    """2375 train, 125 validation and 500 test images per task, pixels divided by 255 only.

    The seed changes which 5 % are held out. It does not change the order of the tasks, nor the
    labels: a class's rank within its superclass.
    """
    images = request.read("cifar100", 100, (32, 32, 3))
    coarse = images.train_coarse_labels
    if coarse is None:
        raise ValueError(
            f"cifar100.npz has no superclasses, which {request.name} needs; add "
            "train_coarse_labels and test_coarse_labels to it."
        )
    members = [np.unique(images.train_labels[coarse == c]) for c in range(20)]
    whole = np.array_equal(np.sort(np.concatenate(members)), np.arange(100))
    if not whole or {len(group) for group in members} != {5}:
        raise ValueError(
            "The superclasses in cifar100.npz are not twenty of five classes each; put the right "
            "file there, or give another root."
        )
    groups = [members[c].tolist() for c in ORDERS[options.order][: request.count]]
    train = to_tensors(images.train_images, images.train_labels, request.device)
    test = to_tensors(images.test_images, images.test_labels, request.device)
    if options.scrambled:
        train, test = (Tensors(scramble(part.x), part.y) for part in (train, test))
    seed = 0 if options.fixed_split else request.seed
    tasks = class_tasks(train, test, groups, 5, seed)
    return Benchmark(request.name, tasks, lambda: LeNet(request.count, 5), True)


def scramble(x: Tensor) -> Tensor:
    """Scramble images (N, 3, 32, 32): read their flat 3 x 32 x 32 vector as 32 x 32 x 3."""
    n, channels, height, width = x.shape
    return x.reshape(n, height, width, channels).permute(0, 3, 1, 2).contiguous()
