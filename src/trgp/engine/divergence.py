"""Where a training that went wrong did so."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..methods.base import Batch, Method, Params
from .errors import RunError
from .gradients import loss_and_gradients
from .tree import State

LIMIT = 1e6  # a mean loss above this is no training any more


class DivergenceError(RunError):
    """A loss that grew beyond bounds or is no number."""

    def __init__(self, task: int, epoch: int, step: int, layer: str, what: str) -> None:
        super().__init__(
            f"The training diverged in task {task}, epoch {epoch + 1}, step {step}: {what} "
            f"'{layer}'. Try a smaller --lr, or for trgp a smaller --scale-rate; epochs "
            "finished before are kept."
        )
        self.task, self.epoch, self.step, self.layer = task, epoch, step, layer


def locate(
    method: Method,
    params: Params,
    state: State,
    batches: Iterable[Batch],
    lr: float,
    trained: Collection[str],
    factored: Collection[str],
) -> tuple[int, str, str]:
    """The step, the layer and what was wrong there, by going through the epoch once more.

    Nothing is looked at while training, since looking would make every step wait for the device.
    """
    last = 0
    layer = next(iter(params))
    for last, batch in enumerate(batches, 1):
        with _watched(method.network.module) as odd:
            loss, grads = loss_and_gradients(method, params, state, batch, trained, factored)
        if odd:
            return last, odd[0], "an output is infinite or no number in layer"
        if not float(loss) <= LIMIT:
            return last, method.network.module.__class__.__name__, f"the loss is {float(loss):g} of"
        with torch.no_grad():
            params, changes = method.step(params, grads, state, lr)
        state = {**state, **changes}
        sizes = {name: float(params[name].abs().max()) for name in params if params[name].numel()}
        for name, largest in sizes.items():
            if not largest < float("inf"):
                return last, name, "after the update an entry is infinite or no number in"
        layer = max(sizes, key=lambda name: sizes[name])
    return last, layer, "the mean loss exceeded all bounds, with the largest weights in"


@contextmanager
def _watched(module: nn.Module) -> Iterator[list[str]]:
    """Collects the names of the layers with an output that is not finite, first to last."""
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
