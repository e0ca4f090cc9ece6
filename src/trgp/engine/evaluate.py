"""Loss and accuracy on samples that are not trained on."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..methods.base import Network
from ..types import Params
from .batches import Part, epoch_batches, fetched
from .replay import Replay


class Evaluation:
    """Measures a network, with captured forward passes if steps are captured."""

    def __init__(self, network: Network, captured: bool) -> None:
        self._network = network
        self._captured = captured
        self._replay = Replay(network.device)
        self._weights: dict[tuple[str, torch.Size], Tensor] = {}
        self._samples: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._place = torch.zeros(1, dtype=torch.long, device=network.device)
        self._totals = torch.zeros(2, dtype=torch.float64, device=network.device)

    @torch.no_grad()
    def __call__(
        self, weights: Params, part: Part, size: int, passes: int, *key: int | str
    ) -> Tensor:
        """Return mean loss and accuracy, (2,) on the device, over passes of shuffled batches.

        The order depends on the key alone: where BatchNorm uses the current batch, an old task is
        always measured in the same batches, and its accuracy changes only if the network does.
        """
        self._network.module.eval()
        if self._captured:
            weights = self._held(weights)
        self._totals.zero_()
        for k in range(passes):
            if self._captured:
                self._replayed(weights, part, size, *key, part.task, k)
                continue
            for batch in epoch_batches([part], size, *key, part.task, k):
                self._add(weights, batch.x, batch.y, batch.head)
        return self._totals / (passes * len(part.samples))

    def _add(self, weights: Params, x: Tensor, y: Tensor, head: int) -> None:
        logits = self._network(weights, x, head)
        loss = F.cross_entropy(logits, y, reduction="sum")
        right = (logits.argmax(1) == y).sum()
        self._totals += torch.stack([loss.double(), right.double()])

    def _held(self, weights: Params) -> Params:
        """Copy the weights into the tensors that the graphs use."""
        held = {}
        for name, tensor in weights.items():
            key = name, tensor.shape
            if key not in self._weights:
                self._weights[key] = tensor.clone()
            held[name] = self._weights[key]
        torch._foreach_copy_(list(held.values()), list(weights.values()))
        return held

    def _replayed(self, weights: Params, part: Part, size: int, *key: int | str) -> None:
        """Replay batch by batch on samples in fixed buffers; each begins where the last ended."""
        shapes = frozenset((name, tensor.shape) for name, tensor in weights.items())
        for _, lengths, x, y in fetched([part], size, *key):
            held = self._room(x, y)
            torch._foreach_copy_([t[: len(y)] for t in held], [x, y])
            self._place.zero_()
            for length in lengths:
                kind = (length, part.head, held[0].shape, held[0].dtype, shapes)
                if kind not in self._replay:
                    before = self._totals.clone(), self._place.clone()
                    body = partial(self._next, weights, held, length, part.head)
                    self._replay.prepare(kind, body, coming=1)
                    torch._foreach_copy_([self._totals, self._place], list(before))
                self._replay(kind)

    def _room(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return buffers for samples of this shape, as many as have ever come together."""
        key = x.shape[1:], x.dtype
        if key not in self._samples or len(self._samples[key][1]) < len(y):
            self._samples[key] = torch.empty_like(x), torch.empty_like(y)
        return self._samples[key]

    def _next(self, weights: Params, held: tuple[Tensor, Tensor], length: int, head: int) -> None:
        places = self._place + torch.arange(length, device=self._place.device)
        x, y = (tensor.index_select(0, places) for tensor in held)
        self._add(weights, x, y, head)
        self._place += length


def mean(scores: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Return the mean scores over the samples of several parts."""
    sums = [count * score for count, score in zip(counts, scores, strict=True)]
    return torch.stack(sums).sum(0) / sum(counts)
