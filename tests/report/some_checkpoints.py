"""Checkpoints as a run writes them, for the tests of what is told of runs that go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trgp.engine.checkpoint import Checkpoints
from trgp.engine.position import Position, Record
from trgp.engine.schedule import Schedule
from trgp.results.store import run_folder


def a_checkpoint(
    out: Path,
    epochs: Sequence[int] = (3, 1),
    benchmark: str = "permuted-digits",
    method: str = "gpm",
    seed: int = 0,
    **changes: Any,
) -> Path:
    """The folder of a run that has so many epochs of each task behind it, the last going on."""
    settings = {"tasks": 4, "epochs": 5} | changes
    folder = run_folder(out, benchmark, method, "paper", {}, seed)
    folder.mkdir(parents=True, exist_ok=True)
    run = {
        "settings": settings,
        "benchmark": benchmark,
        "method": method,
        "preset": "paper",
        "seed": seed,
    }
    done = len(epochs) - 1
    record = Record(
        accuracy_matrix=[[0.5] * 4 for _ in range(done)],
        curves=[{"valid_accuracy": [0.5 + 0.1 * e for e in range(n)]} for n in epochs],
        seconds=[{"training": 1.0 * n, "bases": 0.5} for n in epochs],
    )
    schedule = Schedule(lr=0.1, epoch=epochs[-1])
    position = Position(done, {"w": torch.zeros(3)}, {}, schedule, record)
    Checkpoints(folder, run, torch.device("cpu")).save_task(position)
    return folder
