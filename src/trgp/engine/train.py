"""One epoch of one task, eagerly."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..methods.base import Batch, Method, Params
from .batches import Part, epoch_batches
from .divergence import LIMIT, DivergenceError, locate
from .draws import seed_of
from .gradients import loss_and_gradients
from .tree import State


def train_epoch(
    method: Method,
    params: Params,
    state: State,
    parts: Sequence[Part],
    lr: float,
    size: int,
    trained: Collection[str],
    *key: int,
) -> tuple[Params, State, float]:
    """Parameters and state after an epoch, and the mean loss on the way.

    No step waits for the device: a loss that is no number stays one in the sum, which is looked at
    in the end.
    """
    seed, task, epoch = key
    factored = method.factored(state, size)
    method.train_mode(task)
    torch.manual_seed(seed_of(seed, "dropout", task, epoch))
    before = params, state
    total = torch.zeros((), dtype=torch.float64, device=method.network.device)
    count = 0
    for batch in epoch_batches(parts, size, seed, "order", task, epoch):
        params, state, loss = train_step(method, params, state, batch, lr, trained, factored)
        total += loss.double() * len(batch.y)
        count += len(batch.y)
    mean = float(total) / count
    if not mean <= LIMIT:
        torch.manual_seed(seed_of(seed, "dropout", task, epoch))
        batches = epoch_batches(parts, size, seed, "order", task, epoch)
        raise DivergenceError(task, epoch, *locate(method, *before, batches, lr, trained, factored))
    return params, state, mean


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
        params, changes = method.step(params, grads, state, lr)
    return params, {**state, **changes}, loss
