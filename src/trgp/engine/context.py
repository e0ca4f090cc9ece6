"""What a method is given before and after a task."""

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
    """A task about to begin or just learnt, and the run it belongs to."""

    network: Network
    task: int
    head: int
    train: Tensors
    params: Params
    state: State
    batch_size: int
    seed: int
    tasks: int
    """Of the whole run."""
    captured: bool = False
    """Whether what comes often is captured once and then replayed."""
    training: Training = field(default_factory=Training)
    """How the run trains a task."""
    valid: Tensors | None = None
    """Validation samples of the task; where there are none, the train samples stand in."""

    def samples(self, count: int, purpose: str) -> Batch:
        """So many random train samples of the task (all, if it has fewer)."""
        index = order(len(self.train), self.seed, purpose, self.task)[:count]
        x, y = self.train.batch(index.to(self.train.y.device))
        return Batch(x, y, self.task, self.head)

    def batches(self, size: int, purpose: str) -> Iterator[Batch]:
        """All train samples of the task once, in a random order."""
        part = Part(self.task, self.head, self.train)
        return epoch_batches([part], size, self.seed, purpose, self.task)

    def add_up(
        self,
        totals: Mapping[str, Tensor],
        of: Callable[[Batch], Mapping[str, Tensor]],
        size: int,
        purpose: str,
    ) -> None:
        """Add to totals, by name, what is computed of every batch of the task's train samples.

        `of` reads the batch and tensors that stay as they are, and nothing else.
        """
        replay = Replay(self.network.device)
        held: dict[torch.Size, Batch] = {}

        def add(batch: Batch) -> None:
            # A view, so that a network that reshapes its input in place leaves the batch as it is.
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
                torch._foreach_copy_(list(totals.values()), before)  # as before the capture
            torch._foreach_copy_([held[shape].x, held[shape].y], [batch.x, batch.y])
            replay(shape)

    def gradients(self, method: Method, batch: Batch) -> Grads:
        """Of the loss at ctx.params, without dropout and in full precision."""
        self.network.module.eval()
        _, grads = loss_and_gradients(
            method, self.params, self.state, batch, self.network.trainable, rounded=False
        )
        return grads

    def train_children(
        self, children: Sequence[Child], epochs: int, purpose: str
    ) -> list[TrainedChild]:
        """Children trained on the task's samples as the task itself is, for so many epochs at most.

        Each comes back with its loss and accuracy on the task's validation samples.
        """
        return train_children(self, children, epochs, purpose)

    def initial_params(self) -> Params:
        """A network freshly initialised for this task."""
        return self.network.initial_params(self.task)
