"""The AlexNet variant of split CIFAR-100, for images of 3x32x32."""

from torch import Tensor, nn

from ...gates import HEADS, Gate
from ...options import check_count
from .parts import norm_relu


class AlexNet(nn.Module):
    """Three convolutions and two linear layers without biases, each BN -> ReLU -> dropout.

    Maps are 29x29, 12x12 and 5x5, pooled to 14x14, 6x6 and 2x2.
    """

    def __init__(
        self, heads: int = 10, classes: int = 10, *, track_running_stats: bool = False
    ) -> None:
        """Create a network with `heads` heads of `classes` outputs.

        track_running_stats: whether BatchNorm keeps averages to evaluate with. As published it
            does not: training and evaluation both use the statistics of the current batch, so
            that accuracy depends on the test batches.
        """
        super().__init__()
        check_count("heads", heads)
        check_count("classes", classes)
        self.conv1 = nn.Conv2d(3, 64, 4, bias=False)
        self.bn1 = nn.BatchNorm2d(64, track_running_stats=track_running_stats)
        self.conv2 = nn.Conv2d(64, 128, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(128, track_running_stats=track_running_stats)
        self.conv3 = nn.Conv2d(128, 256, 2, bias=False)
        self.bn3 = nn.BatchNorm2d(256, track_running_stats=track_running_stats)
        self.fc1 = nn.Linear(256 * 2 * 2, 2048, bias=False)
        self.bn4 = nn.BatchNorm1d(2048, track_running_stats=track_running_stats)
        self.fc2 = nn.Linear(2048, 2048, bias=False)
        self.bn5 = nn.BatchNorm1d(2048, track_running_stats=track_running_stats)
        self.light_dropout = nn.Dropout(0.2)
        self.dropout = nn.Dropout(0.5)
        self.pool = nn.MaxPool2d(2)
        self.heads = nn.ModuleList(nn.Linear(2048, classes, bias=False) for _ in range(heads))

    def gates(self) -> list[Gate]:
        """The units between the layers."""
        return [
            Gate("conv2", 64, ("conv1", "bn1"), ("conv2",)),
            Gate("conv3", 128, ("conv2", "bn2"), ("conv3",)),
            Gate("fc1", 256, ("conv3", "bn3"), ("fc1",)),
            Gate("fc2", 2048, ("fc1", "bn4"), ("fc2",)),
            Gate(HEADS, 2048, ("fc2", "bn5"), ()),
        ]

    def features(self, x: Tensor) -> Tensor:
        """Compute the heads' inputs (N, 2048)."""
        # As published, dropout comes before the pool, not after it.
        light, heavy = self.light_dropout, self.dropout
        x = self.pool(norm_relu(self.conv1(x), self.bn1, dropout=light))
        x = self.pool(norm_relu(self.conv2(x), self.bn2, dropout=light))
        x = self.pool(norm_relu(self.conv3(x), self.bn3, dropout=heavy))
        x = norm_relu(self.fc1(x.flatten(1)), self.bn4, dropout=heavy)
        return norm_relu(self.fc2(x), self.bn5, dropout=heavy)

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        """Compute the logits of one head."""
        logits: Tensor = self.heads[head](self.features(x))
        return logits
