"""What records/choose.py tries: by benchmark and method the values of the settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Value = float | str | tuple[float, ...]
Grid = Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Search:
    """What is tried on a benchmark."""

    benchmark: str
    grids: Mapping[str, Grid | Sequence[Grid]]
    """By method the values of its settings, each with each; or several such grids."""
    seeds: tuple[int, ...]
    tasks: int | None = None
    """Only so many, from the first on (None: all)."""
    epochs: int | None = None
    """At most so many a task (None: as the preset has it)."""
    preset: str = "paper"
    """That which holds what comes out; what is not searched is as in `paper`."""


PLAIN = {"lr": (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)}
DIGITS: Mapping[str, Grid] = {
    "finetune": PLAIN,
    "single": PLAIN,
    "multitask": PLAIN,
    "owm": {"lr": (0.05, 0.1, 0.2, 0.4, 0.8), "alpha_end": (0.001, 0.01, 0.1, 1.0)},
    "ewc": {"lr": (0.05, 0.1, 0.2, 0.4), "strength": (10.0, 100.0, 1e3, 1e4, 1e5)},
    "hat": {"lr": (0.1, 0.2, 0.4), "s_max": (50.0, 400.0), "sparsity": (0.1, 0.75)},
    "agem": PLAIN,
    "er": PLAIN,
    "lwf": {"lr": (0.05, 0.1, 0.2), "strength": (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)},
    "pnn": {"lr": (0.001, 0.003, 0.01, 0.03), "width": (0.1, 0.17, 0.3)},
    "den": {
        "lr": (0.003, 0.01),
        "l1": (0.01, 0.03, 0.1),
        "sigma": (0.05, 0.5),
        "growth": (0.02, 0.05),
    },
    "rcl": {"lr": (0.001, 0.003, 0.01), "growth": (0.02, 0.05, 0.1)},
    "apd": {
        "lr": (0.001, 0.003, 0.01),
        "l1": (6e-4, 2e-3, 6e-3, 0.02),
        "consolidate_every": (2,),
    },
    "gpm": {
        "lr": (0.05, 0.1, 0.2, 0.4, 0.8),
        "threshold": (0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99),
    },
    "trgp": {
        "lr": (0.1, 0.2, 0.4, 0.8),
        "threshold": (0.95, 0.97, 0.99, 0.995),
        "scale_rate": (0.005, 0.01, 0.02, 0.05, 0.1),
    },
}
# From here on nine cells a method at least, around what is remembered of the GPM paper, over all
# tasks: what protects three tasks well may have nothing left to learn ten with, or forget seven.
RATES = (0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)
PLAIN_NINE: Grid = {"lr": RATES}
LIMIT = (100.0,)  # as long as the gradients of EWC and LwF may be in HAT's published code


def narrowed_in_batches(rates: tuple[float, ...], ends: tuple[float, ...]) -> list[Grid]:
    """OWM as its authors' code has it, by their alphas and by two larger ones."""
    batch: Grid = {"lr": rates, "narrowing": ("batch",)}
    return [
        {**batch, "alpha_end_per_layer": (ends,)},
        {**batch, "alpha": (100.0,), "alpha_end": (1.0,)},
        {**batch, "alpha": (1e4,), "alpha_end": (100.0,)},
    ]


PMNIST_RATES = (0.01, 0.03, 0.1)
PMNIST_ENDS = (1e-4, 0.1, 0.5)
PMNIST_PLAIN: Grid = {"lr": (0.001, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)}
PMNIST = Search(
    "pmnist",
    {
        "finetune": PMNIST_PLAIN,
        "single": PMNIST_PLAIN,
        "multitask": PMNIST_PLAIN,
        "owm": [
            {"lr": PMNIST_RATES, "alpha": (100.0, 1e3), "alpha_end": (10.0, 100.0, 1e3)},
            *narrowed_in_batches(PMNIST_RATES, PMNIST_ENDS),
        ],
        "ewc": [
            {"lr": PMNIST_RATES, "strength": (100.0, 1e3, 1e4)},
            {"lr": PMNIST_RATES, "strength": (1e3, 1e4, 1e5), "gradient_limit": LIMIT},
        ],
        "hat": {"lr": (0.03, 0.1, 0.3), "sparsity": (0.1, 0.75, 2.0)},
        "agem": {"lr": (0.003, 0.01, 0.03), "reference_size": (0, 64, 256)},
        "er": PMNIST_PLAIN,
        "lwf": {"lr": (0.003, 0.01, 0.03), "strength": (0.1, 0.5, 2.0, 10.0)},
    },
    seeds=(100,),
    epochs=2,
)
CIFAR = Search(
    "split-cifar100",
    {
        "finetune": PLAIN_NINE,
        "single": PLAIN_NINE,
        "multitask": PLAIN_NINE,
        "owm": [
            {"lr": (0.01, 0.03, 0.1), "alpha_end": (0.001, 0.03, 1.0)},
            *narrowed_in_batches((0.03, 0.1, 0.3), (1e-5, 1e-5, 1e-5, 1e-4, 0.01)),
        ],
        "ewc": {"lr": (0.03, 0.05, 0.1), "strength": (2e3, 5e3, 2e4), "gradient_limit": LIMIT},
        "hat": {"lr": (0.025, 0.05, 0.1), "sparsity": (0.25, 0.75, 1.5)},
        "agem": {"lr": (0.005, 0.01, 0.03), "reference_size": (0, 256, 512)},
        "er": PLAIN_NINE,
        "lwf": {"lr": (0.01, 0.03, 0.05), "strength": (0.5, 2.0, 10.0), "gradient_limit": LIMIT},
    },
    seeds=(100,),
)
SUPERCLASS = Search(
    "cifar100-superclass",
    dict.fromkeys(("finetune", "single", "multitask"), PLAIN_NINE),
    seeds=(100,),
)
MINI = Search(
    "split-miniimagenet",
    {
        "finetune": PLAIN_NINE,
        "single": PLAIN_NINE,
        "multitask": PLAIN_NINE,
        "owm": {"lr": (0.01, 0.03, 0.1), "alpha_end": (0.001, 0.03, 1.0)},
        "ewc": {"lr": (0.01, 0.03, 0.1), "strength": (500.0, 5e3, 5e4), "gradient_limit": LIMIT},
        "hat": {"lr": (0.01, 0.03, 0.1), "sparsity": (0.1, 0.25, 0.75)},
        "agem": {"lr": (0.01, 0.03, 0.1), "reference_size": (0, 128, 256)},
        "er": PLAIN_NINE,
        "lwf": {"lr": (0.01, 0.03, 0.1), "strength": (0.5, 2.0, 10.0), "gradient_limit": LIMIT},
    },
    seeds=(100,),
)
FIVE_PLAIN = {"lr": (0.03, 0.1)}
FIVE = Search(
    "five-datasets",
    {
        "multitask": FIVE_PLAIN,
        "ewc": [
            {"lr": (0.03, 0.1), "strength": (500.0, 5e3, 5e4)},
            {"lr": (0.01,), "strength": (50.0, 500.0, 5e3)},
            {"lr": (0.03,), "strength": (50.0,)},
        ],
        "hat": [
            {"lr": (0.03, 0.1), "sparsity": (0.25, 0.75)},
            {"lr": (0.01,), "sparsity": (0.25,)},
            {"lr": (0.01, 0.03), "sparsity": (0.1,)},
        ],
        "agem": FIVE_PLAIN,
        "er": FIVE_PLAIN,
    },
    seeds=(100,),
    tasks=2,
    epochs=2,
)
# For the preset `best`: rates that fall, and one scaling matrix over all that is protected beside
# those of the two most related tasks; then around what was best of these.
FALLING: Grid = {"lr": (0.03, 0.1), "lr_decay": (0.5,)}
WHOLE: Grid = {"scaling_over": ("union",), "epsilon": (0.0,), "top_k": (10,)}
MOST = (0.98, 0.995, 0.995)
AROUND: Sequence[Grid] = (
    {"lr": (0.01, 0.03, 0.05, 0.1), "lr_decay": (0.3, 0.5, 0.7)},
    {"lr": (0.02,), "lr_decay": (0.5, 0.7)},
)
# Each of the others has as many settings as TRGP, 18; the last four of each go beyond some edges of
# the first fourteen. OWM has them twice, once for each of its two algorithms.
PMNIST_BEST = Search(
    "pmnist",
    {
        "finetune": [*AROUND, {"lr": (0.003, 0.005), "lr_decay": (0.2, 0.3)}],
        "single": [*AROUND, {"lr": (0.1, 0.2), "lr_decay": (0.8, 0.9)}],
        "multitask": [*AROUND, {"lr": (0.02, 0.03), "lr_decay": (0.8, 0.9)}],
        "hat": {"lr": (0.03, 0.1, 0.3), "lr_decay": (0.5, 0.7), "sparsity": (0.1, 0.75, 2.0)},
        "agem": {
            "lr": (0.01, 0.03, 0.1),
            "lr_decay": (0.3, 0.5, 0.7),
            "reference_size": (0, 256),
        },
        "er": [*AROUND, {"lr": (0.03, 0.05), "lr_decay": (0.1, 0.2)}],
        "ewc": [
            {
                "lr": (0.01, 0.03),
                "lr_decay": (0.5,),
                "strength": (100.0, 300.0, 1e3, 3e3, 1e4),
            },
            {"lr": (0.03,), "lr_decay": (0.7,), "strength": (300.0, 1e3, 3e3)},
            {"lr": (0.1,), "lr_decay": (0.5,), "strength": (1e3,)},
            {"lr": (0.1, 0.2), "lr_decay": (0.3,), "strength": (1e3,)},
            {"lr": (0.1, 0.2), "lr_decay": (0.7,), "strength": (1e3,)},
        ],
        "lwf": [
            {
                "lr": (0.003, 0.01, 0.03),
                "lr_decay": (0.5,),
                "strength": (0.5, 2.0, 10.0, 30.0),
            },
            {"lr": (0.01,), "lr_decay": (0.7,), "strength": (2.0, 10.0)},
            {"lr": (0.001, 0.003), "lr_decay": (0.7,), "strength": (1.0, 2.0)},
        ],
        "gpm": [
            {
                "lr": (0.01, 0.03),
                "lr_decay": (0.5,),
                "threshold": ((0.95, 0.99, 0.99), (0.97, 0.99, 0.99), MOST),
                "samples": (300, 1000),
            },
            {
                "lr": (0.03,),
                "lr_decay": (0.7,),
                "threshold": ((0.95, 0.99, 0.99), MOST),
                "samples": (1000,),
            },
            {
                "lr": (0.05, 0.1),
                "lr_decay": (0.5,),
                "threshold": ((0.95, 0.99, 0.99),),
                "samples": (1000, 3000),
            },
        ],
        "owm": [
            {
                "lr": (0.01, 0.03, 0.1),
                "lr_decay": (0.5,),
                "alpha": (100.0, 1e3),
                "alpha_end": (10.0, 100.0),
            },
            {"lr": (0.03,), "lr_decay": (0.7,), "alpha": (1e3,), "alpha_end": (10.0, 100.0)},
            {"lr": (0.03, 0.05), "lr_decay": (0.8,), "alpha": (1e3,), "alpha_end": (1.0, 10.0)},
            *(
                {**grid, "lr_decay": (0.5, 0.7)}
                for grid in narrowed_in_batches(PMNIST_RATES, PMNIST_ENDS)
            ),
        ],
        "trgp": [
            FALLING,
            {**FALLING, **WHOLE, "threshold": ((0.95, 0.99, 0.99), MOST)},
            {"lr": (0.03,), "lr_decay": (0.7,), **WHOLE, "threshold": (MOST,)},
            {"lr": (0.05,), "lr_decay": (0.5,), **WHOLE, "threshold": (MOST,)},
            {
                "lr": (0.05, 0.1),
                "lr_decay": (0.5,),
                **WHOLE,
                "threshold": (MOST,),
                "scale_rate": (0.1, 0.3),
            },
            {
                "lr": (0.03,),
                "lr_decay": (0.5, 0.7),
                **WHOLE,
                "threshold": ((0.99, 0.998, 0.998),),
            },
            {
                "lr": (0.01, 0.02),
                "lr_decay": (0.5, 0.7),
                **WHOLE,
                "threshold": (MOST,),
            },
        ],
    },
    seeds=(100,),
    tasks=4,
    preset="best",
)
# For the preset `best` of CIFAR-100 Split, over all tasks, since a validation set is 250 samples:
# the rates that tasks are learnt best with when nothing is protected, norm layers of their own, and
# one scaling matrix over all that is protected.
OWN_NORM: Grid = {"norm": ("per_task",)}
CIFAR_BEST = Search(
    "split-cifar100",
    {
        "trgp": [
            {"lr": (0.05,), "norm": ("freeze", "per_task")},
            {"lr": (0.05,), **WHOLE},
            {"lr": (0.03, 0.05, 0.1), **WHOLE, **OWN_NORM},
            {"lr": (0.05,), **WHOLE, **OWN_NORM, "scale_rate": (2.0,)},
            {"lr": (0.05,), **WHOLE, **OWN_NORM, "threshold": (0.95,)},
        ],
    },
    seeds=(100,),
    preset="best",
)
SEARCHES = {
    "permuted-digits": Search("permuted-digits", DIGITS, seeds=(100, 101, 102)),
    "split-digits": Search("split-digits", DIGITS, seeds=(100, 101, 102)),
    "pmnist": PMNIST,
    "pmnist-best": PMNIST_BEST,
    "split-cifar100": CIFAR,
    "split-cifar100-best": CIFAR_BEST,
    "cifar100-superclass": SUPERCLASS,
    "five-datasets": FIVE,
    "split-miniimagenet": MINI,
}
