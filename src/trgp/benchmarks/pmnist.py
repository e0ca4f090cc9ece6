"""Permuted MNIST: ten tasks with one head, each with its own order of the 784 pixels."""

from typing import Any

from .common import (
    GPM_QUIRKS,
    TRGP_QUIRKS,
    Benchmark,
    Options,
    Preset,
    Published,
    Request,
    hold_out,
    permuted_tasks,
)
from .data import NORMALISATION, to_tensors
from .models import MLP

TASKS = 10
PAPER = {
    "multitask": Published(96.70, 0.02),
    "owm": Published(90.71, 0.11, -1),
    "ewc": Published(89.97, 0.57, -4),
    "agem": Published(83.56, 0.16, -14),
    "er": Published(87.24, 0.53, -11),
    "gpm": Published(93.91, 0.16, -3),
    "trgp": Published(96.34, 0.11, -0.8),
}


# No BatchNorm here, so the size of the test batches changes only speed.
_TRAINING = {"lr": 0.01, "batch": 10, "epochs": 5, "test_batch": 1000}
_GPM = {"threshold": (0.95, 0.99, 0.99), "samples": 300}
_TRGP = {**_GPM, "selection_samples": 300}
# Chosen on validation data by records/choose.py, around the GPM paper's settings from memory; the
# sizes of the memories are from memory too, unverified.
_OTHERS: dict[str, dict[str, Any]] = {
    "finetune": {"lr": 0.003},
    "single": {"lr": 0.03},
    "multitask": {"lr": 0.03},
    "owm": {"lr": 0.03, "alpha": 1000.0, "alpha_end": 100.0},
    "ewc": {"lr": 0.03, "strength": 1000.0},
    "agem": {"lr": 0.01, "memory_size": 1000},
    "er": {"lr": 0.01, "memory_size": 1000},
    "lwf": {"lr": 0.003, "strength": 10.0},
}
# Chosen on validation data of four tasks by records/choose.py, from the same number of settings per
# method: a decaying learning rate, and for TRGP one scaling matrix per layer over the whole memory.
_BEST: dict[str, dict[str, Any]] = {
    "finetune": {"lr": 0.01, "lr_decay": 0.3},
    "single": {"lr": 0.1, "lr_decay": 0.7},
    "multitask": {"lr": 0.02, "lr_decay": 0.7},
    "owm": {"lr": 0.03, "lr_decay": 0.8, "alpha": 1000.0, "alpha_end": 10.0},
    "ewc": {"lr": 0.1, "lr_decay": 0.5, "strength": 1000.0},
    "agem": {"lr": 0.01, "lr_decay": 0.7, "memory_size": 1000},
    "er": {"lr": 0.05, "lr_decay": 0.3, "memory_size": 1000},
    "lwf": {"lr": 0.003, "lr_decay": 0.5, "strength": 2.0},
    "gpm": {**_GPM, "lr": 0.03, "lr_decay": 0.5, "samples": 1000},
    "trgp": {
        **_TRGP,
        "lr": 0.03,
        "lr_decay": 0.5,
        "scaling_over": "union",
        "epsilon": 0.0,
        "top_k": TASKS,
        "threshold": (0.98, 0.995, 0.995),
    },
}
PRESETS = {
    "paper": Preset(_TRAINING, {"gpm": _GPM, "trgp": _TRGP, **_OTHERS}),
    "official": Preset(
        {**_TRAINING, "test_batch": 64},
        {
            "gpm": {**_GPM, **GPM_QUIRKS},
            "trgp": {**_TRGP, "epsilon": 0.2, "third_task_trusts_second": True, **TRGP_QUIRKS},
            **_OTHERS,
        },
    ),
    "best": Preset(_TRAINING, _BEST),
}


def make(request: Request, options: Options) -> Benchmark:
    """54 000 train, 6000 validation and 10 000 test images per task.

    The seed changes the permutations. It does not change the split: the first tenth of MNIST's
    train images is held out.
    """
    images = request.read("mnist", 10, (28, 28, 1))
    norm, device = NORMALISATION["mnist"], request.device
    train = to_tensors(images.train_images, images.train_labels, device, norm)
    test = to_tensors(images.test_images, images.test_labels, device, norm)
    train, valid = hold_out(train, 10, None)
    tasks = permuted_tasks(train, valid, test, 10, request.count, request.seed)
    return Benchmark(request.name, tasks, lambda: MLP(784, (100, 100), 10), False)
