"""Diverged training: its errors, and a search for the step and layer where it began."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..methods.base import Batch, Method
from ..results.result import Results
from ..types import Params, State
from .errors import RunError
from .gradients import loss_and_gradients

LARGE = "the largest weights are in"
LIMIT = 1e6  # a mean loss above this counts as diverged


class DivergenceError(RunError):
    """The loss exceeds the limit, or it is NaN."""

    def __init__(self, task: int, epoch: int, step: int, layer: str, what: str) -> None:
        super().__init__(
            f"The training diverged in task {task + 1}, epoch {epoch + 1}, step {step}: {what} "
            f"'{layer}'. Try a smaller --lr, or for trgp a smaller --scale-rate, and check that "
            "the data is finite; finished epochs are saved."
        )
        self.task, self.epoch, self.step, self.layer = task, epoch, step, layer

    @classmethod
    def unlocated(cls, task: int, epoch: int) -> "DivergenceError":
        """Build the error for a divergence that a repetition in eager steps does not show.

        Sums round differently there.
        """
        error = cls(task, epoch, 0, "", "")
        error.args = (
            f"The training diverged in task {task + 1}, epoch {epoch + 1}: its loss is NaN or "
            "too large, but repeating the epoch step by step shows no such step. Try a smaller "
            "--lr, and check that the validation samples are finite.",
        )
        return error

    def add_seed(self, seed: int) -> None:
        self.args = (f"Seed {seed}: {self.args[0]}",)


class SeedsFailedError(RunError):
    """Some seeds diverged; `finished` has the results of the others."""

    def __init__(self, failures: Sequence[DivergenceError], finished: Results) -> None:
        super().__init__(" ".join(str(failure) for failure in failures))
        self.failures = list(failures)
        self.finished = finished


def locate(
    method: Method,
    params: Params,
    state: State,
    batches: Iterable[Batch],
    lr: float,
    trained: Collection[str],
    factored: Collection[str],
) -> tuple[int, str, str] | None:
    """Repeat an epoch to find the step and the layer that diverged, and what was wrong there.

    Returns None if every step is sound. Training itself checks nothing, because a check would make
    every step wait for the device.
    """
    step = 0
    for step, batch in enumerate(batches, 1):
        with _watched(method.network.module) as odd:
            loss, grads = loss_and_gradients(method, params, state, batch, trained, factored)
        if odd:
            return step, odd[0], "an output is NaN or infinite in layer"
        if not float(loss) <= LIMIT:
            return step, _largest(params, trained), f"the loss is {float(loss):g}; {LARGE}"
        with torch.no_grad():
            params, changes = method.step(params, grads, state, batch, lr)
        state = {**state, **changes}
        for name in trained:
            if not bool(params[name].isfinite().all()):
                return step, name, "after the update, an entry is NaN or infinite in"
    with torch.no_grad():
        loss = method.loss(params, state, batch)
    if not float(loss) <= LIMIT:
        return step, _largest(params, trained), f"after it, the loss is {float(loss):g}; {LARGE}"
    return None


def _largest(params: Params, trained: Collection[str]) -> str:
    return max(trained, key=lambda name: float(params[name].abs().max()))


@contextmanager
def _watched(module: nn.Module) -> Iterator[list[str]]:
    """Collect the names of the layers with an output that is not finite, first to last."""
    odd: list[str] = []

    def hook(name: str) -> Any:
        def look(layer: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(output.isfinite().all()):
                odd.append(name)

        return look

    leaves = [(name, m) for name, m in module.named_modules() if not any(m.children())]
    handles = [m.register_forward_hook(hook(name)) for name, m in leaves]
    try:
        yield odd
    finally:
        for handle in handles:
            handle.remove()
