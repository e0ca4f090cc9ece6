"""One epoch of one task, eagerly."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.donation import donated
from ..draws import seed_of, uniform
from ..methods.base import Batch, Method
from ..types import Params, State
from .batches import Cut, Part, cuts, epoch_batches, rows_of
from .divergence import DivergenceError, locate
from .gradients import Gradients, loss_and_gradients


@dataclass(frozen=True)
class Epoch:
    """The samples and settings of an epoch."""

    seed: int
    task: int
    number: int  # from 0 on
    parts: Sequence[Part]
    batch_size: int
    lr: float
    trained: Collection[str]

    @property
    def steps(self) -> int:
        return sum(len(cuts(len(part.samples), self.batch_size)) for part in self.parts)

    def rows(self) -> tuple[tuple[Cut, ...], Tensor]:
        """Return the batches, and a row of indices for each."""
        return rows_of(self.parts, self.batch_size, *self._order_key)

    def numbers(self, method: Method) -> Tensor:
        """Draw a row of uniform random numbers per step, as many as the method asks for."""
        # A last sample may have been merged into a full batch.
        count = method.random_numbers(self.batch_size + 1)
        drawn = uniform(self.steps, count, self.seed, "steps", self.task, self.number)
        return drawn.to(method.network.device)

    def settle(self, method: Method) -> None:
        """Set the network's mode, and seed dropout for this epoch."""
        method.train_mode(self.task)
        # On a CPU its generator alone: seeding all other devices takes torch a millisecond.
        cpu = method.network.device.type == "cpu"
        seed_torch = torch.default_generator.manual_seed if cpu else torch.manual_seed
        seed_torch(seed_of(self.seed, "dropout", self.task, self.number))

    def batches(self, method: Method) -> Iterator[Batch]:
        """Yield the batches in order, after setting the network's mode and seeding dropout."""
        self.settle(method)
        numbers = self.numbers(method)
        progress = progress_of(numbers)
        ordered = epoch_batches(self.parts, self.batch_size, *self._order_key)
        for k, batch in enumerate(ordered):
            yield batch._replace(u=numbers[k], first=self.number == 0, progress=progress[k])

    @property
    def _order_key(self) -> tuple[int | str, ...]:
        """Key of the order of samples."""
        return self.seed, "order", self.task, self.number


class Work(NamedTuple):
    """An epoch to train, and the parameters and state it starts from."""

    params: Params
    state: State
    epoch: Epoch


class Trained(NamedTuple):
    """The result of an epoch."""

    params: Params
    state: State
    loss: Tensor  # mean over the steps, on the device: its step may still be queued


def trained_names(method: Method, params: Params, task: int) -> list[str]:
    """List the network's parameters that train in a task, and the method's own."""
    network = method.network
    free = network.trainable - method.frozen(task)
    return [name for name in params if name in free or name not in network.names]


def progress_of(numbers: Tensor) -> Tensor:
    """Return the epoch progress in [0, 1] per step; 1 if there is a single step."""
    count = len(numbers)
    steps = torch.arange(count, dtype=torch.float64, device=numbers.device)
    return steps / (count - 1) if count > 1 else steps + 1.0


def train_epoch(method: Method, work: Work) -> Trained:
    """Train an epoch eagerly without waiting for the device; a NaN loss makes the mean NaN."""
    params, state, epoch = work
    factored = method.factored(state, epoch.batch_size)
    total = torch.zeros((), dtype=torch.float64, device=method.network.device)
    count = 0
    for batch in epoch.batches(method):
        params, state, loss = train_step(
            method, params, state, batch, epoch.lr, epoch.trained, factored
        )
        total.add_(loss, alpha=len(batch.y))
        count += len(batch.y)
    return Trained(params, state, total / count)


def train_step(
    method: Method,
    params: Params,
    state: State,
    batch: Batch,
    lr: float | Tensor,
    trained: Collection[str],
    factored: Collection[str],
    gradients: Gradients = loss_and_gradients,
    give: bool = False,
) -> tuple[Params, State, Tensor]:
    """Take one step: loss, gradient, the method's update.

    Args:
        give: whether the method may update the parameters in place.
    """
    loss, grads = gradients(method, params, state, batch, trained, factored)
    with torch.no_grad(), donated() if give and method.may_consume() else nullcontext():
        params, changes = method.step(params, grads, state, batch, lr)
    check_moving(method, changes)
    return params, {**state, **changes}, loss


def check_moving(method: Method, changes: Collection[str]) -> None:
    """Refuse a change that a resumed run would lose."""
    if not set(changes) <= set(method.moving):
        raise ValueError(
            f"A step changed {', '.join(changes)} of the state, but {type(method).__name__}.moving "
            f"names {method.moving}; name every key that a step changes, or a resumed run loses it."
        )


def diverged(method: Method, work: Work) -> DivergenceError:
    """Build the error of an epoch that diverged, by repeating it from its start."""
    params, state, epoch = work
    factored = method.factored(state, epoch.batch_size)
    found = locate(method, params, state, epoch.batches(method), epoch.lr, epoch.trained, factored)
    if found is not None:
        return DivergenceError(epoch.task, epoch.number, *found)
    return DivergenceError.unlocated(epoch.task, epoch.number)
