"""The perceptron of Permuted MNIST: 784-100-100-10."""

import itertools
import math
from collections.abc import Sequence

from torch import Tensor, nn

from ...gates import HEADS, Gate
from ...options import check_count


class MLP(nn.Module):
    """Linear layers with ReLU between them, no bias, no dropout, PyTorch's own initialisation.

    Permuted MNIST has one head, shared by all tasks and protected like every layer.
    """

    def __init__(
        self,
        inputs: int | tuple[int, ...] = 784,
        hidden: Sequence[int] = (100, 100),
        classes: int = 10,
        *,
        heads: int = 1,
    ) -> None:
        """Create a network from the sizes of the input, the hidden layers and each head."""
        super().__init__()
        sizes = [math.prod(inputs) if isinstance(inputs, tuple) else inputs, *hidden]
        for name, size in [("classes", classes), ("heads", heads)]:
            check_count(name, size)
        for size in sizes:
            check_count("Every size of an MLP", size)
        self.layers = nn.ModuleList(
            nn.Linear(n, o, bias=False) for n, o in itertools.pairwise(sizes)
        )
        self.heads = nn.ModuleList(nn.Linear(sizes[-1], classes, bias=False) for _ in range(heads))

    def gates(self) -> list[Gate]:
        """The hidden units."""
        found = []
        for k, layer in enumerate(self.layers):
            after = f"layers.{k + 1}" if k + 1 < len(self.layers) else HEADS
            consumers = () if after == HEADS else (after,)
            found.append(Gate(after, int(layer.weight.shape[0]), (f"layers.{k}",), consumers))  # type: ignore[index]
        return found

    def features(self, x: Tensor) -> Tensor:
        """Compute the last hidden layer for samples of any shape."""
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x).relu()
        return x

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        """Compute the logits of one head."""
        logits: Tensor = self.heads[head](self.features(x))
        return logits
