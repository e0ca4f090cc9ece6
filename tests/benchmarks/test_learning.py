"""Real data is learnt: the papers' first two benchmarks, cut short."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import trgp

pytestmark = pytest.mark.slow


def test_three_tasks_of_pmnist_are_learnt_in_an_epoch_each(
    real: Callable[[str], Path], tmp_path: Path
) -> None:
    root = real("mnist")
    (result,) = trgp.run(
        "pmnist", "trgp", tasks=3, epochs=1, device="cpu", data_root=root, out=tmp_path
    )
    assert result.acc > 0.9
    assert result.bwt is not None
    assert result.bwt > -0.05
    assert result.form == "native"
    assert any(result.selected[2].values())


def test_two_tasks_of_split_cifar100_are_learnt_in_three_epochs_each(
    real: Callable[[str], Path], tmp_path: Path
) -> None:
    root = real("cifar100")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (result,) = trgp.run(
            "split-cifar100", "trgp", tasks=2, epochs=3, device="cpu", data_root=root, out=tmp_path
        )
    finally:
        torch.set_num_threads(before)
    assert result.acc > 0.35  # chance is 0.1
    assert result.bwt is not None
    assert result.bwt > -0.1
