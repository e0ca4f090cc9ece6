"""What a method is given before and after a task."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..data import Tensors
from ..draws import order
from ..methods.base import Batch, Grads, Method, Params
from ..tree import State
from .batches import Part, epoch_batches
from .gradients import loss_and_gradients
from .network import Network


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

    def samples(self, count: int, purpose: str) -> Batch:
        """So many random train samples of the task (all, if it has fewer)."""
        index = order(len(self.train), self.seed, purpose, self.task)[:count]
        x, y = self.train.batch(index.to(self.train.y.device))
        return Batch(x, y, self.task, self.head)

    def batches(self, size: int, purpose: str) -> Iterator[Batch]:
        """All train samples of the task once, in a random order."""
        part = Part(self.task, self.head, self.train)
        return epoch_batches([part], size, self.seed, purpose, self.task)

    def gradients(self, method: Method, batch: Batch) -> Grads:
        """Of the loss at ctx.params, without dropout and in full precision."""
        self.network.module.eval()
        _, grads = loss_and_gradients(
            method, self.params, self.state, batch, self.network.trainable, rounded=False
        )
        return grads

    def initial_params(self) -> Params:
        """A network freshly initialised for this task."""
        return self.network.initial_params(self.task)
