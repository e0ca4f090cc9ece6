"""Benchmarks of a user's own: an npz file of images, or tensors."""

import inspect
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from .common import Benchmark, Options, Preset, Request, Task, class_tasks, hold_out
from .data import Normalisation, Tensors, to_tensors
from .data import load as load_set
from .data.store import Images
from .models import MLP

TENSORS = "tensors"  # the name of a benchmark made from tensors
HELD_OUT = 10  # per cent
Samples = tuple[Tensor, Tensor]

# A starting point for untested data: training and thresholds of split CIFAR-100.
_PROJECTION = {"threshold": (0.97,), "samples": 125}
PRESETS = {
    "paper": Preset(
        {"lr": 0.01, "batch": 64, "epochs": 50, "patience": 6, "lr_factor": 2.0, "lr_min": 1e-5},
        {"gpm": _PROJECTION, "trgp": {**_PROJECTION, "selection_samples": 125}},
    )
}


def from_file(request: Request, options: Options) -> Benchmark:
    """The classes of an npz file in equal groups by number, with a task and a head per group.

    The seed holds out a tenth of each task's train images. Pixels are normalised to mean 0 and
    deviation 1 per channel. The default network is an MLP with two hidden layers of 100 units.
    """
    images = load_set(request.name)
    classes = images.classes
    counts = [str(k) for k in range(1, classes // 2 + 1) if classes % k == 0]
    possible = " or ".join(counts)
    if classes % request.count:
        raise ValueError(
            f"{request.name} has {classes} classes, which {request.count} tasks cannot share "
            f"equally; give --tasks {possible}."
        )
    each = classes // request.count
    if each < 2:
        raise ValueError(
            f"{request.name} has {classes} classes, so that {request.count} tasks would have one "
            f"each, with nothing to distinguish; give --tasks {possible}."
        )
    norm = statistics(images.train_images)
    train = to_tensors(images.train_images, images.train_labels, request.device, norm)
    test = to_tensors(images.test_images, images.test_labels, request.device, norm)
    absent = set(range(classes)) - set(images.test_labels.tolist())
    if absent:
        raise ValueError(
            f"{request.name} has no test image of class {min(absent)}; add some, or remove the "
            "class from train."
        )
    groups = [range(each * t, each * (t + 1)) for t in range(request.count)]
    tasks = class_tasks(train, test, groups, HELD_OUT, request.seed)
    inputs, heads = train.x[0].numel(), request.count
    return Benchmark(
        request.name, tasks, lambda: MLP(inputs, (100, 100), each, heads=heads), heads > 1
    )


def statistics(images: Images) -> Normalisation:
    """Mean and standard deviation of the pixels per channel, scaled to 0 to 1."""
    counts = np.stack([np.bincount(c.ravel(), minlength=256) for c in np.moveaxis(images, 3, 0)])
    values = np.arange(256) / 255
    share = counts / counts.sum(1, keepdims=True)
    mean = share @ values
    std = np.sqrt(np.maximum(share @ values**2 - mean**2, 0))
    flat = std < 1e-6  # a constant channel carries no information: it becomes 0
    return Normalisation(tuple(mean.tolist()), tuple(np.where(flat, 1.0, std).tolist()))


def from_tensors(
    tasks: Sequence[tuple[Samples, Samples]],
    network: Callable[[], nn.Module],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Benchmark:
    """Make a benchmark from tasks (train, test), each a pair (x, y): y int64 labels from 0 on.

    x is float, used unchanged, or uint8, divided by 255. The seed holds out a tenth of the train
    samples for validation. A network whose forward takes a `head` has one head per task.
    """
    made: list[Task] = []
    for t, pair in enumerate(tasks):
        try:
            (train_x, train_y), (test_x, test_y) = pair
        except (TypeError, ValueError):
            raise ValueError(
                f"Task {t} is not ((train x, train y), (test x, test y)); give these four tensors."
            ) from None
        train, test = (Tensors(x, y).to(device) for x, y in ((train_x, train_y), (test_x, test_y)))
        if not len(train) or not len(test):
            raise ValueError(f"Task {t} has no train or no test samples; give some of both.")
        if train.x.shape[1:] != test.x.shape[1:]:
            raise ValueError(
                f"Task {t} has train samples of shape {tuple(train.x.shape[1:])} and test samples "
                f"of shape {tuple(test.x.shape[1:])}; give both in one shape."
            )
        if made and train.x.dtype != made[0].train.x.dtype:
            raise ValueError(
                f"Task {t} has samples of {train.x.dtype}, task 0 of {made[0].train.x.dtype}; give "
                "all as uint8 or all as floats of one type."
            )
        if int(train.y.min()) < 0 or int(test.y.min()) < 0:
            raise ValueError(f"Task {t} has a negative label; number the classes from 0 on.")
        classes = int(max(train.y.max(), test.y.max())) + 1
        made.append(Task(f"task {t}", classes, *hold_out(train, HELD_OUT, seed), test))
    if not made:
        raise ValueError("There are no tasks; give at least one ((x, y), (x, y)).")
    heads = "head" in inspect.signature(network().forward).parameters
    return Benchmark(TENSORS, tuple(made), network, heads)
