"""Loss and accuracy on samples that are not learnt."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..methods.base import Params
from .batches import Part, epoch_batches
from .network import Network
from .replay import Replay


class Evaluation:
    """Measures a network; its forward passes are captured where steps are."""

    def __init__(self, network: Network, captured: bool) -> None:
        self._network = network
        self._captured = captured
        self._replay = Replay(network.device)
        self._weights: dict[tuple[str, torch.Size], Tensor] = {}
        self._batches: dict[torch.Size, tuple[Tensor, Tensor]] = {}
        self._totals = torch.zeros(2, dtype=torch.float64, device=network.device)

    @torch.no_grad()
    def __call__(
        self, weights: Params, part: Part, size: int, passes: int, *key: int | str
    ) -> Tensor:
        """Mean loss and accuracy (2,) on the device, in shuffled batches, over some passes.

        The order belongs to the key alone: where BatchNorm uses the batch at hand, an old task is
        always measured in the same batches, and its accuracy changes only if the network does.
        """
        self._network.module.eval()
        if self._captured:
            weights = self._held(weights)
        self._totals.zero_()
        for k in range(passes):
            for batch in epoch_batches([part], size, *key, part.task, k):
                if self._captured:
                    self._replayed(weights, batch.x, batch.y, batch.head)
                else:
                    self._add(weights, batch.x, batch.y, batch.head)
        return self._totals / (passes * len(part.samples))

    def _add(self, weights: Params, x: Tensor, y: Tensor, head: int) -> None:
        logits = self._network(weights, x, head)
        loss = F.cross_entropy(logits, y, reduction="sum")
        right = (logits.argmax(1) == y).sum()
        self._totals += torch.stack([loss.double(), right.double()])

    def _held(self, weights: Params) -> Params:
        """The weights in tensors that the graphs know."""
        held = {}
        for name, tensor in weights.items():
            key = name, tensor.shape
            if key not in self._weights:
                self._weights[key] = tensor.clone()
            held[name] = self._weights[key]
        torch._foreach_copy_(list(held.values()), list(weights.values()))
        return held

    def _replayed(self, weights: Params, x: Tensor, y: Tensor, head: int) -> None:
        if x.shape not in self._batches:
            self._batches[x.shape] = x.clone(), y.clone()
        held = self._batches[x.shape]
        kind = (head, x.shape, frozenset((n, w.shape) for n, w in weights.items()))
        if kind not in self._replay:
            before = self._totals.clone()
            # A view, so that a network that reshapes its input in place leaves this as it is.
            self._replay.prepare(
                kind, lambda: self._add(weights, held[0].detach(), held[1], head), coming=1
            )
            self._totals.copy_(before)
        torch._foreach_copy_(list(held), [x, y])
        self._replay(kind)


def mean(scores: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Over the samples of several parts."""
    sums = [count * score for count, score in zip(counts, scores, strict=True)]
    return torch.stack(sums).sum(0) / sum(counts)
