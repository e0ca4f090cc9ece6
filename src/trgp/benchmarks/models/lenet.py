"""The LeNet variant of CIFAR-100 superclasses, for images of 3x32x32."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from ...gates import HEADS, Gate
from ...options import check_count

SIZE, ALPHA, BETA, K = 4, 0.001 / 9, 0.75, 1  # of the local response norm


def response_norm(x: Tensor) -> Tensor:
    """Local response norm over four channels: F.local_response_norm(x, SIZE, ALPHA, BETA, K).

    torch's function pools in three dimensions, whose gradient on a GPU is not deterministic; this
    one pools in two, with the channels as one of them. Like torch's, it supports overrides.
    """
    if has_torch_function_unary(x):
        found: Tensor = handle_torch_function(response_norm, (x,), x)
        return found
    squares = F.pad(x.square().flatten(2).unsqueeze(1), (0, 0, SIZE // 2, (SIZE - 1) // 2))
    mean = F.avg_pool2d(squares, (SIZE, 1), stride=1).view_as(x)
    return x / (K + ALPHA * mean) ** BETA


class ResponseNorm(nn.Module):
    """The response norm as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return response_norm(x)


class LeNet(nn.Module):
    """Two convolutions with local response norm and two linear layers, no biases, no dropout.

    Maps are 32x32 and 16x16, pooled to 16x16 and 8x8.
    """

    def __init__(self, heads: int = 20, classes: int = 5) -> None:
        """Create a network with `heads` heads of `classes` outputs."""
        super().__init__()
        check_count("heads", heads)
        check_count("classes", classes)
        self.conv1 = nn.Conv2d(3, 20, 5, padding=2, bias=False)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=2, bias=False)
        self.fc1 = nn.Linear(50 * 8 * 8, 800, bias=False)
        self.fc2 = nn.Linear(800, 500, bias=False)
        self.norm1 = ResponseNorm()
        self.norm2 = ResponseNorm()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.heads = nn.ModuleList(nn.Linear(500, classes, bias=False) for _ in range(heads))
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_uniform_(module.weight, mode="fan_in", nonlinearity="relu")

    def gates(self) -> list[Gate]:
        """The units between the layers; channels are gated before the norm that mixes them."""
        return [
            Gate("norm1", 20, ("conv1",), ("conv2",)),
            Gate("norm2", 50, ("conv2",), ("fc1",)),
            Gate("fc2", 800, ("fc1",), ("fc2",)),
            Gate(HEADS, 500, ("fc2",), ()),
        ]

    def features(self, x: Tensor) -> Tensor:
        """Compute the heads' inputs (N, 500)."""
        x = self.pool(self.norm1(self.conv1(x).relu()))
        x = self.pool(self.norm2(self.conv2(x).relu()))
        x = self.fc1(x.flatten(1)).relu()
        x = self.fc2(x).relu()
        return x

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        """Compute the logits of one head."""
        logits: Tensor = self.heads[head](self.features(x))
        return logits
