"""The context that a method gets before and after a task."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..benchmarks.data import Tensors
from ..draws import order
from ..methods.base import Batch, Child, Grads, Method, Network, TrainedChild
from ..types import Params, State
from .batches import Part, epoch_batches
from .children import train_children
from .config import Training
from .gradients import loss_and_gradients
from .replay import Replay


@dataclass(frozen=True)
class Context:
    """A task that is about to begin or has just been trained, and its run."""

    network: Network
    task: int
    head: int
    train: Tensors
    params: Params
    state: State
    batch_size: int
    seed: int
    tasks: int
    """Number of tasks in the run."""
    captured: bool = False
    """Whether frequent work is captured once and then replayed."""
    training: Training = field(default_factory=Training)
    """The training settings of the run."""
    valid: Tensors | None = None
    """Validation samples of the task; if None, the train samples take their place."""

    def samples(self, count: int, purpose: str) -> Batch:
        """Draw random train samples of the task (all, if it has fewer)."""
        index = order(len(self.train), self.seed, purpose, self.task)[:count]
        x, y = self.train.batch(index.to(self.train.y.device))
        return Batch(x, y, self.task, self.head)

    def batches(self, size: int, purpose: str) -> Iterator[Batch]:
        """Yield all train samples of the task once, in a random order."""
        part = Part(self.task, self.head, self.train)
        return epoch_batches([part], size, self.seed, purpose, self.task)

    def add_up(
        self,
        totals: Mapping[str, Tensor],
        of: Callable[[Batch], Mapping[str, Tensor]],
        size: int,
        purpose: str,
    ) -> None:
        """Add to `totals`, by name, the values that `of` computes from every train batch.

        `of` may read the batch and tensors that do not change, and nothing else.
        """
        replay = Replay(self.network.device)
        held: dict[torch.Size, Batch] = {}

        def add(batch: Batch) -> None:
            # A view, because a network may reshape its input in place.
            found = of(batch._replace(x=batch.x.detach()))
            if found:
                torch._foreach_add_([totals[name] for name in found], list(found.values()))

        for batch in self.batches(size, purpose):
            if not self.captured:
                add(batch)
                continue
            shape = batch.x.shape
            if shape not in held:
                held[shape] = batch._replace(x=batch.x.clone(), y=batch.y.clone())
                before = [total.clone() for total in totals.values()]
                coming = len(self.train) // size if shape[0] == size else 1
                replay.prepare(shape, partial(add, held[shape]), coming)
                torch._foreach_copy_(list(totals.values()), before)  # undo what the capture added
            torch._foreach_copy_([held[shape].x, held[shape].y], [batch.x, batch.y])
            replay(shape)

    def gradients(self, method: Method, batch: Batch) -> Grads:
        """Compute gradients of the loss at ctx.params, without dropout, in full precision."""
        self.network.module.eval()
        _, grads = loss_and_gradients(
            method, self.params, self.state, batch, self.network.trainable, rounded=False
        )
        return grads

    def train_children(
        self, children: Sequence[Child], epochs: int, purpose: str
    ) -> list[TrainedChild]:
        """Train children on the task's samples, with the task's settings, for at most `epochs`.

        Each is returned with its loss and accuracy on the task's validation samples.
        """
        return train_children(self, children, epochs, purpose)

    def initial_params(self) -> Params:
        """Return the parameters of a network freshly initialised for this task."""
        return self.network.initial_params(self.task)
