"""Two benchmarks from scikit-learn's 1797 digits of 8 x 8, which need no download."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .common import (
    GPM_QUIRKS,
    TRGP_QUIRKS,
    Benchmark,
    Options,
    Preset,
    Request,
    class_tasks,
    hold_out,
    permuted_tasks,
    shuffled,
)
from .data import Tensors
from .models import MLP

PERMUTED_TASKS, SPLIT_TASKS = 10, 5
FILE = "datasets/data/digits.csv.gz"  # in scikit-learn's folder
TEST = 360  # of the 1797; the set has no split of its own

# Chosen on validation data by records/choose.py.
_TRAINING = {"batch": 32, "epochs": 10, "test_batch": 360}
_PERMUTED_GPM = {"lr": 0.4, "threshold": (0.9,), "samples": 1294}
_PERMUTED_TRGP = {
    "lr": 0.4,
    "threshold": (0.99,),
    "samples": 1294,
    "selection_samples": 1294,
    "scale_rate": 0.02,
}
_PERMUTED: dict[str, dict[str, Any]] = {
    "finetune": {"lr": 0.1},
    "single": {"lr": 0.4},
    "multitask": {"lr": 0.8},
    "owm": {"lr": 0.4, "alpha_end": 0.01},
    "ewc": {"lr": 0.2, "strength": 100.0},
    "hat": {"lr": 0.4, "s_max": 50.0, "sparsity": 0.75},
    "agem": {"lr": 0.2, "memory_size": 200},
    "er": {"lr": 0.2, "memory_size": 200},
    "lwf": {"lr": 0.1, "strength": 5.0},
}
PERMUTED_PRESETS = {
    "paper": Preset(_TRAINING, {"gpm": _PERMUTED_GPM, "trgp": _PERMUTED_TRGP, **_PERMUTED}),
    "official": Preset(
        _TRAINING,
        {
            "gpm": {**_PERMUTED_GPM, **GPM_QUIRKS},
            "trgp": {**_PERMUTED_TRGP, "third_task_trusts_second": True, **TRGP_QUIRKS},
            **_PERMUTED,
        },
    ),
}
_SPLIT_GPM = {"lr": 0.2, "threshold": (0.93,), "samples": 258}
_SPLIT_TRGP = {
    "lr": 0.8,
    "threshold": (0.97,),
    "samples": 258,
    "selection_samples": 258,
    "scale_rate": 0.01,
}
_SPLIT: dict[str, dict[str, Any]] = {
    "finetune": {"lr": 0.05},
    "single": {"lr": 0.1},
    "multitask": {"lr": 0.2},
    "owm": {"lr": 0.4, "alpha_end": 0.001},
    "ewc": {"lr": 0.05, "strength": 10000.0},
    "hat": {"lr": 0.4, "s_max": 50.0, "sparsity": 0.75},
    "agem": {"lr": 0.2, "memory_size": 50},
    "er": {"lr": 0.4, "memory_size": 50},
    "lwf": {"lr": 0.2, "strength": 0.5},
    "pnn": {"lr": 0.01, "width": 0.17},
    "den": {"lr": 0.01, "l1": 0.1, "sigma": 0.05, "growth": 0.02},
    "rcl": {"lr": 0.01, "growth": 0.1},
    "apd": {"lr": 0.01, "l1": 6e-4, "consolidate_every": 2},
}
SPLIT_PRESETS = {
    "paper": Preset(_TRAINING, {"gpm": _SPLIT_GPM, "trgp": _SPLIT_TRGP, **_SPLIT}),
    "official": Preset(
        _TRAINING,
        {
            "gpm": {**_SPLIT_GPM, **GPM_QUIRKS},
            "trgp": {**_SPLIT_TRGP, **TRGP_QUIRKS},
            **_SPLIT,
        },
    ),
}


def permuted(request: Request, options: Options) -> Benchmark:
    """Permuted digits, like PMNIST: ten tasks with one head, 1294 train, 143 validation, 360 test.

    The seed changes the permutations and which tenth of the train images is held out. It does
    not change the test images.
    """
    train, test = digits(request)
    kept, held = hold_out(train, 10, request.seed)
    tasks = permuted_tasks(kept, held, test, 10, request.count, request.seed)
    return Benchmark(request.name, tasks, lambda: MLP(64, (100, 100), 10), False)


def split(request: Request, options: Options) -> Benchmark:
    """Split digits: five tasks of two digits, a head each, about 258, 28 and 72 images per task.

    The seed changes which tenth of the train images is held out. It does not change the test
    images, nor the classes: task t has 2 t and 2 t + 1.
    """
    train, test = digits(request)
    groups = [(2 * t, 2 * t + 1) for t in range(request.count)]
    tasks = class_tasks(train, test, groups, 10, request.seed)
    heads = request.count
    return Benchmark(request.name, tasks, lambda: MLP(64, (100, 100), 2, heads=heads), True)


def digits(request: Request) -> tuple[Tensors, Tensors]:
    """Train and test images as floats from 0 to 1, with a fixed split."""
    # Only its file: importing scikit-learn takes as long as some of the runs on it.
    package = importlib.util.find_spec("sklearn")
    folders = (package and package.submodule_search_locations) or []
    files = [path for folder in folders if (path := Path(folder, FILE)).is_file()]
    if not files:
        raise ImportError(
            f"{request.name} needs scikit-learn's digits; install it with `pip install "
            "'trgp[digits]'`."
        )
    content = torch.from_numpy(np.loadtxt(files[0], delimiter=","))  # 64 pixels and a label per row
    x = content[:, :-1].float().div_(16).view(-1, 1, 8, 8)
    samples = Tensors(x, content[:, -1].long()).to(request.device)
    order = shuffled(len(samples), 0).to(samples.y.device)
    return samples.subset(order[TEST:]), samples.subset(order[:TEST])
