"""One epoch of one task, eagerly."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..draws import seed_of, uniform
from ..methods.base import Batch, Method, Params
from ..tree import State
from .batches import Part, cuts, epoch_batches
from .divergence import DivergenceError, locate
from .errors import RunError
from .gradients import loss_and_gradients


@dataclass(frozen=True)
class Epoch:
    """What is learnt in an epoch, and how."""

    seed: int
    task: int
    number: int  # from 0 on
    parts: Sequence[Part]
    batch_size: int
    lr: float
    trained: Collection[str]

    @property
    def order_key(self) -> tuple[int | str, ...]:
        """What its order of samples is drawn by."""
        return self.seed, "order", self.task, self.number

    def numbers(self, method: Method) -> Tensor:
        """A row of uniform random numbers for every step, as many as the method asks for."""
        steps = sum(len(cuts(len(part.samples), self.batch_size)) for part in self.parts)
        # A last sample may have joined a full batch.
        count = method.random_numbers(self.batch_size + 1)
        drawn = uniform(steps, count, self.seed, "steps", self.task, self.number)
        return drawn.to(method.network.device)

    def batches(self, method: Method) -> Iterator[Batch]:
        """Its batches in order, once the network and its dropout are ready for them."""
        method.train_mode(self.task)
        torch.manual_seed(seed_of(self.seed, "dropout", self.task, self.number))
        numbers = self.numbers(method)
        progress = progress_of(numbers)
        ordered = epoch_batches(self.parts, self.batch_size, *self.order_key)
        for k, batch in enumerate(ordered):
            yield batch._replace(u=numbers[k], first=self.number == 0, progress=progress[k])


def progress_of(numbers: Tensor) -> Tensor:
    """From 0 at the first row to 1 at the last."""
    return torch.arange(len(numbers), device=numbers.device) / max(1, len(numbers) - 1)


def train_epoch(
    method: Method, params: Params, state: State, epoch: Epoch
) -> tuple[Params, State, float]:
    """Parameters and state after an epoch, and the mean loss on the way.

    No step waits for the device: a loss that is no number stays one in the sum.
    """
    factored = method.factored(state, epoch.batch_size)
    total = torch.zeros((), dtype=torch.float64, device=method.network.device)
    count = 0
    for batch in epoch.batches(method):
        params, state, loss = train_step(
            method, params, state, batch, epoch.lr, epoch.trained, factored
        )
        total += loss.double() * len(batch.y)
        count += len(batch.y)
    return params, state, float(total) / count


def train_step(
    method: Method,
    params: Params,
    state: State,
    batch: Batch,
    lr: float | Tensor,
    trained: Collection[str],
    factored: Collection[str],
) -> tuple[Params, State, Tensor]:
    """One step: loss, gradient, the method's update."""
    loss, grads = loss_and_gradients(method, params, state, batch, trained, factored)
    with torch.no_grad():
        params, changes = method.step(params, grads, state, batch, lr)
    if not changes.keys() <= set(method.moving):
        raise ValueError(
            f"A step changed {', '.join(changes)} of the state, but {type(method).__name__}.moving "
            f"names {method.moving}; name all that a step changes, or a resumed run loses it."
        )
    return params, {**state, **changes}, loss


def diverged(method: Method, params: Params, state: State, epoch: Epoch) -> RunError:
    """What to say of an epoch that went wrong, given what it began with."""
    factored = method.factored(state, epoch.batch_size)
    found = locate(method, params, state, epoch.batches(method), epoch.lr, epoch.trained, factored)
    if found is not None:
        return DivergenceError(epoch.task, epoch.number, *found)
    return RunError(
        f"The validation loss of task {epoch.task + 1}, epoch {epoch.number + 1} is beyond all "
        "bounds or no number, though every step of the training is sound; see that the validation "
        "samples are finite."
    )
