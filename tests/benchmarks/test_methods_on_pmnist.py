"""Methods that need no head per task learn three tasks of Permuted MNIST, an epoch each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trgp
from trgp.methods import METHODS

pytestmark = pytest.mark.slow
RATE = 0.05  # for batches of 64
# What is chosen for smaller batches and smaller steps.
OPTIONS: dict[str, dict[str, Any]] = {"ewc": {"strength": 100.0}}


@pytest.mark.parametrize(
    "method", [name for name, method in METHODS.items() if not method.about.several_heads]
)
def test_three_tasks_of_pmnist_are_learnt_in_an_epoch_each(
    method: str, real: Callable[[str], Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"lr": RATE, "batch": 64, **OPTIONS.get(method, {})}

    (result,) = trgp.run(
        "pmnist",
        method,
        tasks=3,
        epochs=1,
        device="cpu",
        data_root=real("mnist"),
        out=tmp_path,
        **options,
    )
    assert result.accuracy_matrix[2][2] > 0.8
    assert result.acc > 0.6
