"""Figures of the TRGP paper other than ACC and BWT: capacity, time, ablations and A_ii."""

from collections.abc import Mapping, Sequence
from typing import Any

CAPACITY: Mapping[str, float] = {
    "single": 2000,
    "pnn": 271,
    "den": 191,
    "rcl": 184,
    "apd": 130,
    "gpm": 100,
    "trgp": 100,
}
"""Final size of the network on cifar100-superclass, in per cent of one network."""

TIME: Mapping[str, Mapping[str, float]] = {
    "split-cifar100": {
        "owm": 2.41,
        "ewc": 1.76,
        "hat": 1.62,
        "agem": 3.48,
        "er": 1.49,
        "gpm": 1.0,
        "trgp": 1.65,
    },
    "five-datasets": {
        "ewc": 1.52,
        "hat": 1.47,
        "agem": 2.41,
        "er": 1.40,
        "gpm": 1.0,
        "trgp": 1.21,
    },
    "split-miniimagenet": {
        "ewc": 1.22,
        "hat": 0.91,
        "agem": 1.79,
        "er": 0.82,
        "gpm": 1.0,
        "trgp": 1.34,
    },
}
"""Training time by benchmark and method, in multiples of GPM's."""

ABLATION: Mapping[str, Mapping[tuple[str, Any] | None, float]] = {
    "split-cifar100": {
        None: 74.46,
        ("epsilon", 0.2): 74.52,
        ("epsilon", 0.7): 74.30,
        ("scope", "task"): 73.25,
        ("top_k", 1): 74.00,
    },
    "five-datasets": {
        None: 93.56,
        ("epsilon", 0.2): 93.28,
        ("epsilon", 0.7): 93.43,
        ("scope", "task"): 92.85,
        ("top_k", 1): 92.94,
    },
}
"""ACC of TRGP with one setting changed, and with none."""

_MINI_GPM = (
    *(58.6, 63.6, 57.2, 59.0, 53.6, 78.0, 63.0, 66.0, 74.0, 83.8),
    *(43.0, 60.4, 55.6, 57.8, 59.6, 53.0, 56.0, 47.6, 66.0, 56.8),
)
_MINI_TRGP = (
    *(58.7, 66.1, 59.2, 59.3, 57.1, 81.4, 67.3, 70.1, 75.7, 85.2),
    *(43.2, 61.8, 58.0, 60.1, 60.0, 54.8, 61.4, 48.4, 69.8, 62.2),
)
DIAGONAL: Mapping[str, Mapping[str, Sequence[float]]] = {
    "pmnist": {
        "gpm": (97.5, 97.5, 97.3, 97.1, 97.0, 96.9, 96.8, 96.4, 96.5, 96.5),
        "trgp": (97.5, 97.5, 97.5, 97.3, 97.1, 97.1, 96.9, 96.7, 96.9, 96.7),
    },
    "split-cifar100": {
        "gpm": (76.8, 68.5, 72.4, 69.9, 74.8, 72.3, 70.3, 71.9, 73.2, 75.1),
        "trgp": (76.9, 69.5, 75.1, 74.1, 75.3, 75.8, 72.8, 73.8, 73.9, 78.1),
    },
    "five-datasets": {
        "gpm": (78.3, 99.1, 87.1, 99.1, 94.1),
        "trgp": (80.9, 99.3, 92.8, 99.4, 95.3),
    },
    "split-miniimagenet": {"gpm": _MINI_GPM, "trgp": _MINI_TRGP},
}
"""A_ii: accuracy on each task right after it is learnt, by benchmark and method."""
