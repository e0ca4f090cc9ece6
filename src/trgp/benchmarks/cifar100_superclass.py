"""CIFAR-100 in twenty tasks, its superclasses of five classes, a head each."""

import numpy as np
from torch import Tensor

from ..data import Tensors, to_tensors
from ..models import LeNet
from .common import Benchmark, Published, Request, class_tasks

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


def make(
    request: Request, *, order: str = "A", scrambled: bool = False, fixed_split: bool = False
) -> Benchmark:
    """2375 train, 125 validation and 500 test images a task, pixels divided by 255 only.

    The seed changes which 5 % are held out. It does not change the order of the tasks, nor the
    labels: a class's rank within its superclass.

    order: A to E, the order of the superclasses.
    scrambled: the pixels as all published results have them, because the loader they share
        reads the three planes of an image as if its colours lay side by side.
    fixed_split: hold out the same images whatever the seed, because that loader always shuffles
        with seed 0.
    """
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}.")
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
    groups = [members[c].tolist() for c in ORDERS[order][: request.count]]
    train = to_tensors(images.train_images, images.train_labels, request.device)
    test = to_tensors(images.test_images, images.test_labels, request.device)
    if scrambled:
        train, test = (Tensors(scramble(part.x), part.y) for part in (train, test))
    seed = 0 if fixed_split else request.seed
    tasks = class_tasks(train, test, groups, 5, seed)
    return Benchmark(request.name, tasks, lambda: LeNet(request.count, 5), True)


def scramble(x: Tensor) -> Tensor:
    """Images (N, 3, 32, 32) whose flat 3 x 32 x 32 vector is read as 32 x 32 x 3."""
    n, channels, height, width = x.shape
    return x.reshape(n, height, width, channels).permute(0, 3, 1, 2).contiguous()
