"""An epoch as replayed CUDA graphs: a whole step, from the batch's index to the update, in one.

The text of a step is the eager one. What differs from step to step lies in tensors that stay where
they are: the place in the epoch's order, the rate, the parameters, what moves of the state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..draws import seed_of
from ..methods.base import Batch, Method, Params
from ..tree import State, from_leaves, leaves
from .batches import Part, orders_of, pieces_of
from .train import Epoch, progress_of, train_step

WARM_UP = 3  # steps before a capture, in which libraries settle their work space


@dataclass
class Order:
    """The samples of one part in the order of an epoch: full batches, and what is left."""

    full: Tensor  # (batches, size)
    rest: Tensor  # (fewer or one more,)
    place: Tensor  # (1,) how many full ones are done


class CapturedTask:
    """The steps of one task: its tensors, and a graph for every kind of batch it meets."""

    def __init__(self, method: Method, params: Params, state: State, epoch: Epoch) -> None:
        device = method.network.device
        self.task = epoch.task
        self._method = method
        self._trained = epoch.trained
        self._factored = method.factored(state, epoch.batch_size)
        self._fixed = {key: value for key, value in state.items() if key not in method.moving}
        self._params = {name: tensor.clone() for name, tensor in params.items()}
        self._moving = {path: t.clone() for path, t in leaves(_moving(method, state))}
        self._numbers = epoch.numbers(method).clone()
        self._progress = progress_of(self._numbers)
        self._orders = [
            Order(full, rest, torch.zeros(1, dtype=torch.long, device=device))
            for full, rest in _cut(epoch, device)
        ]
        self._lr = torch.zeros((), device=device)
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}

    def train_epoch(
        self, params: Params, state: State, epoch: Epoch
    ) -> tuple[Params, State, float]:
        """As the eager one."""
        method = self._method
        method.train_mode(self.task)
        pieces = pieces_of(epoch.parts, epoch.batch_size, *epoch.order_key)
        kinds = [
            (i, cut.stop - cut.start == epoch.batch_size, epoch.number == 0) for i, cut in pieces
        ]
        for kind in dict.fromkeys(kinds):
            if kind not in self._graphs:
                self._graphs[kind] = self._captured(epoch.parts[kind[0]], *kind)
        self._load(params, state, epoch)
        torch.manual_seed(seed_of(epoch.seed, "dropout", epoch.task, epoch.number))
        for kind in kinds:
            self._graphs[kind].replay()
        count = sum(len(part.samples) for part in epoch.parts)
        new = {name: tensor.clone() for name, tensor in self._params.items()}
        return new, {**state, **self._state(clone=True)}, float(self._total) / count

    def _load(self, params: Params, state: State, epoch: Epoch) -> None:
        """What an epoch begins with, into the tensors that the graphs know."""
        for name, tensor in self._params.items():
            tensor.copy_(params[name])
        for path, tensor in leaves(_moving(self._method, state)):
            self._moving[path].copy_(tensor)
        self._numbers.copy_(epoch.numbers(self._method))
        for order, (full, rest) in zip(
            self._orders, _cut(epoch, self._method.network.device), strict=True
        ):
            order.full.copy_(full)
            order.rest.copy_(rest)
            order.place.zero_()
        self._lr.fill_(epoch.lr)
        self._step.zero_()
        self._total.zero_()

    def _captured(self, part: Part, i: int, full: bool, first: bool) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self._method.network.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # what it does to the tensors is undone when they are loaded
                self._orders[i].place.zero_()
                self._step.zero_()
                self._body(part, i, full, first)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._body(part, i, full, first)
        return graph

    def _body(self, part: Part, i: int, full: bool, first: bool) -> None:
        order = self._orders[i]
        index = order.full.index_select(0, order.place).squeeze(0) if full else order.rest
        x, y = part.samples.batch(index)
        u = self._numbers.index_select(0, self._step).squeeze(0)
        progress = self._progress.index_select(0, self._step).squeeze(0)
        batch = Batch(x, y, part.task, part.head, u, first, progress)
        begun: State = {**self._fixed, **self._state()}
        params, state, loss = train_step(
            self._method, self._params, begun, batch, self._lr, self._trained, self._factored
        )
        with torch.no_grad():
            for name, tensor in self._params.items():
                if params[name] is not tensor:
                    tensor.copy_(params[name])
            for path, tensor in leaves(_moving(self._method, state)):
                if tensor is not self._moving[path]:
                    self._moving[path].copy_(tensor)
            self._total += loss.double() * len(y)
            self._step += 1
            if full:
                order.place += 1

    def _state(self, clone: bool = False) -> State:
        return from_leaves({p: t.clone() if clone else t for p, t in self._moving.items()})


def _moving(method: Method, state: State) -> State:
    return {key: state[key] for key in method.moving if key in state}


def _cut(epoch: Epoch, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """By part its full batches as the epoch meets them, and the one that is not full."""
    found = []
    pieces = pieces_of(epoch.parts, epoch.batch_size, *epoch.order_key)
    for i, order in enumerate(orders_of(epoch.parts, *epoch.order_key)):
        batches = [order[cut] for part, cut in pieces if part == i]
        full = [batch for batch in batches if len(batch) == epoch.batch_size]
        rest = [batch for batch in batches if len(batch) != epoch.batch_size]
        rows = torch.stack(full) if full else order.new_zeros(0, epoch.batch_size)
        found.append((rows.to(device), (rest[0] if rest else order[:0]).to(device)))
    return found
