"""Results as runs write them, for the tests of what is stored and shown."""

import random
from typing import Any

from trgp.results import metrics
from trgp.results.result import SCHEMA_VERSION, Result, Results


def a_matrix(T: int, seed: int) -> list[list[float | None]]:
    """Accuracies of T tasks, none evaluated before it is learnt."""
    draw = random.Random(seed)
    return [[draw.random() if j <= i else None for j in range(T)] for i in range(T)]


def a_result(seed: int = 0, T: int = 4, **changes: Any) -> Result:
    R = changes.pop("accuracy_matrix", None) or a_matrix(T, seed)
    T = len(R)
    epoch = {"loss": 0.5, "valid_loss": 0.4, "valid_accuracy": 0.875, "lr": 0.01}
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": f"trgp run split-cifar100 trgp --seeds {seed}",
        "benchmark": "split-cifar100",
        "method": "trgp",
        "preset": "paper",
        "seed": seed,
        "config": {"lr": 0.01, "threshold": [0.97, 0.99], "patience": 0, "model": None},
        "versions": {"trgp": "0.1.0", "torch": "2.11.0"},
        "device": "cpu",
        "accuracy_matrix": R,
        "acc": metrics.acc(R),
        "bwt": None if "bwt" in changes else metrics.bwt(R),
        "curves": [{key: [v] * (t + 1) for key, v in epoch.items()} for t in range(T)],
        "selected": [{"conv1": list(range(min(t, 2))), "fc1": []} for t in range(T)],
        "ranks": {"conv1": [10 * (t + 1) for t in range(T)], "fc1": [7] * T},
        "seconds": [
            {"training": 30.0 + seed, "bases": 2.0, "selection": 1.0, "evaluation": 0.5}
            for _ in range(T)
        ],
        "peak_memory_bytes": 3 * 2**30,
        "state_bytes": 5 * 2**20,
        "network_bytes": 2 * 2**20,
        "form": "native",
        "digest": "0123abcd",
    }
    return Result(**fields | changes)


def with_all_phases(seconds: list[dict[str, float]]) -> list[dict[str, float]]:
    """What an older result tells, as it is told now: 5 seconds of every training are validation."""
    return [
        {**task, "training": task["training"] - 5, "validation": 5.0, "checkpoints": 0.25}
        for task in seconds
    ]


def some_results(count: int = 3, T: int = 4, **changes: Any) -> Results:
    return Results(tuple(a_result(seed, T, **changes) for seed in range(count)))
