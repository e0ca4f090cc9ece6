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
    """What is learnt in an epoch, and how."""

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
        """Its batches, and the indices of each in a row."""
        return rows_of(self.parts, self.batch_size, *self._order_key)

    def numbers(self, method: Method) -> Tensor:
        """A row of uniform random numbers for every step, as many as the method asks for."""
        # A last sample may have joined a full batch.
        count = method.random_numbers(self.batch_size + 1)
        drawn = uniform(self.steps, count, self.seed, "steps", self.task, self.number)
        return drawn.to(method.network.device)

    def settle(self, method: Method) -> None:
        """Let the network be in its mode, and dropout draw what it draws in this epoch."""
        method.train_mode(self.task)
        # On a CPU its generator alone: torch takes a millisecond for those of all other devices.
        cpu = method.network.device.type == "cpu"
        seed_torch = torch.default_generator.manual_seed if cpu else torch.manual_seed
        seed_torch(seed_of(self.seed, "dropout", self.task, self.number))

    def batches(self, method: Method) -> Iterator[Batch]:
        """Its batches in order, once the network and its dropout are ready for them."""
        self.settle(method)
        numbers = self.numbers(method)
        progress = progress_of(numbers)
        ordered = epoch_batches(self.parts, self.batch_size, *self._order_key)
        for k, batch in enumerate(ordered):
            yield batch._replace(u=numbers[k], first=self.number == 0, progress=progress[k])

    @property
    def _order_key(self) -> tuple[int | str, ...]:
        """What its order of samples is drawn by."""
        return self.seed, "order", self.task, self.number


class Work(NamedTuple):
    """An epoch to be trained, and from where."""

    params: Params
    state: State
    epoch: Epoch


class Trained(NamedTuple):
    """What came of it."""

    params: Params
    state: State
    loss: Tensor  # the mean on the way, on the device: nobody has waited for it


def trained_names(method: Method, params: Params, task: int) -> list[str]:
    """The network's parameters that train in a task, and the method's own."""
    network = method.network
    free = network.trainable - method.frozen(task)
    return [name for name in params if name in free or name not in network.names]


def progress_of(numbers: Tensor) -> Tensor:
    """From 0 at the first row to 1 at the last, which a single one is."""
    count = len(numbers)
    steps = torch.arange(count, dtype=torch.float64, device=numbers.device)
    return steps / (count - 1) if count > 1 else steps + 1.0


def train_epoch(method: Method, work: Work) -> Trained:
    """Step by step; none waits for the device: a loss that is no number stays one in the mean."""
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
    """One step: loss, gradient, the method's update.

    give: whether the parameters' memory is given away to it.
    """
    loss, grads = gradients(method, params, state, batch, trained, factored)
    with torch.no_grad(), donated() if give and method.may_consume() else nullcontext():
        params, changes = method.step(params, grads, state, batch, lr)
    check_moving(method, changes)
    return params, {**state, **changes}, loss


def check_moving(method: Method, changes: Collection[str]) -> None:
    """Refuse a change that a resumed run would not know of."""
    if not set(changes) <= set(method.moving):
        raise ValueError(
            f"A step changed {', '.join(changes)} of the state, but {type(method).__name__}.moving "
            f"names {method.moving}; name all that a step changes, or a resumed run loses it."
        )


def diverged(method: Method, work: Work) -> DivergenceError:
    """What to say of an epoch that went wrong, given what it began with."""
    params, state, epoch = work
    factored = method.factored(state, epoch.batch_size)
    found = locate(method, params, state, epoch.batches(method), epoch.lr, epoch.trained, factored)
    if found is not None:
        return DivergenceError(epoch.task, epoch.number, *found)
    return DivergenceError.unlocated(epoch.task, epoch.number)
