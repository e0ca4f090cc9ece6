"""A training that goes wrong says where it did, and leaves no result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import mlp
from small_runs import CLASSES, Conv, Heads, Samples, result_files, run, some_tasks
from torch import Tensor, nn

from trgp.benchmarks import from_tensors
from trgp.draws import order
from trgp.engine.divergence import DivergenceError
from trgp.engine.errors import RunError

METHODS = ["finetune", "single", "multitask", "gpm", "trgp"]


def names_in(network: nn.Module) -> set[str]:
    """All that can be named as the place: modules, parameters and buffers."""
    modules = {name for name, _ in network.named_modules() if name}
    return modules | network.state_dict().keys()


@pytest.mark.parametrize("method", ["multitask", "trgp"])
@pytest.mark.parametrize("rate", [1e4, 1e8, 1e30, 1e300])
def test_a_rate_too_high_is_told_with_its_place(rate: float, method: str, tmp_path: Path) -> None:
    with pytest.raises(DivergenceError) as caught:
        run(some_tasks(2), method, tmp_path, lr=rate, epochs=9)
    error = caught.value
    assert isinstance(error, RunError)
    assert error.task == 0
    assert error.epoch < 9
    assert 1 <= error.step <= 5 * (2 if method == "multitask" else 1)
    place = f"task {error.task + 1}, epoch {error.epoch + 1}, step {error.step}:"
    assert place in str(error)
    assert f"'{error.layer}'" in str(error)
    assert "Try a smaller --lr" in str(error)
    assert error.layer in names_in(mlp(8, 12, 10, CLASSES))
    assert not result_files(tmp_path)


def tainted(tasks: list[tuple[Samples, Samples]], task: int, sample: int) -> Any:
    """A single feature of a single train sample is no number."""
    made = [((x.clone(), y), test) for (x, y), test in tasks]
    x = made[task][0][0]
    x[(sample, *[0] * (x.dim() - 1))] = torch.nan
    return made


def step_of(tasks: Any, task: int, sample: int) -> int | None:
    """In which step of its first epoch a sample is seen; None if it is held out."""
    train = from_tensors(tasks, lambda: mlp(8, 2)).tasks[task].train
    found = train.x.flatten(1).isnan().any(1).nonzero().flatten().tolist()
    if not found:
        return None
    place = order(len(train), 0, "order", task, 0, 0).tolist().index(found[0])
    return place // 8 + 1


@pytest.mark.parametrize("task", [0, 1])
@pytest.mark.parametrize("method", ["finetune", "trgp"])
@pytest.mark.parametrize("sample", [0, 20, 25])
def test_a_sample_that_is_no_number_is_told_with_its_place(
    sample: int, method: str, task: int, tmp_path: Path
) -> None:
    """Whether it is trained with or held out, and no result is made of it."""
    tasks = tainted(some_tasks(2), task, sample)
    step = step_of(tasks, task, sample)
    with pytest.raises(RunError) as caught:
        run(tasks, method, tmp_path)
    assert not result_files(tmp_path)
    assert f"task {task + 1}" in str(caught.value)
    if step is not None:
        error = caught.value
        assert isinstance(error, DivergenceError)
        assert (error.task, error.epoch, error.step, error.layer) == (task, 0, step, "0")


@pytest.mark.parametrize("sample", [0, 7])
@pytest.mark.parametrize("method", ["finetune", "gpm"])
def test_the_place_is_right_also_with_running_statistics(
    method: str, sample: int, tmp_path: Path
) -> None:
    """They are changed in place while training: going through it again must begin at the old."""
    tasks = tainted(some_tasks(1, 4, 4, 4), 0, sample)
    step = step_of(tasks, 0, sample)
    assert step is not None
    with pytest.raises(DivergenceError) as caught:
        run(tasks, method, tmp_path, Conv)
    assert (caught.value.step, caught.value.layer) == (step, "conv")


def test_a_last_step_that_ruins_the_weights_is_no_result(tmp_path: Path) -> None:
    """One step an epoch: the loss of that step is fine, and the weights after it are not."""
    for method in METHODS:
        with pytest.raises(RunError, match="diverged"):
            run(some_tasks(1), method, tmp_path, lr=1e38, batch=100, epochs=1)
    assert not result_files(tmp_path)


class Exploding(nn.Module):
    """Between two layers something that is no number for what is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.second = Logarithm()
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


class Logarithm(nn.Module):
    """Only while training: the check before a run must not see it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log() if self.training else x


def test_the_layer_named_is_where_it_began(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError) as caught:
        run(some_tasks(1), "gpm", tmp_path, Exploding)
    assert (caught.value.step, caught.value.layer) == (1, "second")


def test_what_was_finished_before_is_kept(tmp_path: Path) -> None:
    """A later task that goes wrong costs nothing of the earlier ones."""
    tasks = tainted(some_tasks(3), 2, 0)
    for _ in range(2):
        seen: list[Any] = []
        with pytest.raises(DivergenceError) as caught:
            run(tasks, "gpm", tmp_path, Heads, observer=seen.append)
        assert caught.value.task == 2
    assert (seen[0].done_tasks, seen[0].done_epochs) == (2, 0)
    assert len(seen) == 1
    assert "finished epochs are saved" in str(caught.value)
