"""The reduced ResNet18 of 5-Datasets (32x32) and split MiniImageNet (84x84)."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from ...gates import HEADS, Gate
from ...options import check_count
from .parts import norm_relu


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, a 1x1 convolution where shapes differ."""

    def __init__(self, inputs: int, planes: int, stride: int, track_running_stats: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes, track_running_stats=track_running_stats)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes, track_running_stats=track_running_stats)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, planes, 1, stride=stride, bias=False),
                nn.BatchNorm2d(planes, track_running_stats=track_running_stats),
            )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = norm_relu(self.conv1(x), self.bn1)
        return norm_relu(self.conv2(y), self.bn2, plus=self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet18 with 20 filters instead of 64: four stages of two blocks, no biases, no dropout.

    For 5-Datasets images of 32x32 enter at stride 1 (maps of 32, 16, 8, 4; 640 features); for
    MiniImageNet images of 84x84 enter at stride 2 (maps of 42, 21, 11, 6; 1440 features).
    """

    def __init__(
        self,
        heads: int = 5,
        classes: int = 10,
        *,
        image_size: int = 32,
        stride: int = 1,
        filters: int = 20,
        track_running_stats: bool = False,
    ) -> None:
        """Create a network with `heads` heads of `classes` outputs.

        image_size: height and width of the images, which set the size of the heads' inputs.
        stride: stride of the first convolution; as published 1 for 32x32 and 2 for 84x84.
        filters: filters of the first stage; each later stage has twice as many as the previous.
        track_running_stats: whether BatchNorm keeps averages to evaluate with. As published it
            does not: training and evaluation both use the statistics of the current batch, so
            that accuracy depends on the test batches.
        """
        super().__init__()
        for name, count in [
            ("heads", heads),
            ("classes", classes),
            ("image_size", image_size),
            ("stride", stride),
            ("filters", filters),
        ]:
            check_count(name, count)
        self.conv1 = nn.Conv2d(3, filters, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters, track_running_stats=track_running_stats)
        stages: list[nn.Module] = []
        planes, side = filters, _side_after(image_size, stride)
        for step in (1, 2, 2, 2):
            inputs, planes, side = planes, planes * step, _side_after(side, step)
            stages.append(
                nn.Sequential(
                    BasicBlock(inputs, planes, step, track_running_stats),
                    BasicBlock(planes, planes, 1, track_running_stats),
                )
            )
        if side < 2:
            raise ValueError(
                f"Images of {image_size}x{image_size} are too small at stride {stride}: the last "
                f"maps would be {side}x{side}, and the pool needs 2x2."
            )
        self.stages = nn.ModuleList(stages)
        n = planes * (side // 2) ** 2
        self.heads = nn.ModuleList(nn.Linear(n, classes, bias=False) for _ in range(heads))

    def gates(self) -> list[Gate]:
        """The channels inside every block and those between blocks.

        A block's sum is gated before the next block's layers and its identity shortcut.
        """
        found = []
        before: tuple[str, ...] = ("conv1", "bn1")
        units = self.conv1.out_channels
        for i, stage in enumerate(self.stages):
            for j, module in enumerate(stage.children()):
                block = cast(BasicBlock, module)
                name = f"stages.{i}.{j}"
                short = (f"{name}.shortcut.0", f"{name}.shortcut.1") if len(block.shortcut) else ()
                found.append(Gate(name, units, before, (f"{name}.conv1", *short[:1])))
                units = block.conv1.out_channels
                within = (f"{name}.conv1", f"{name}.bn1")
                found.append(Gate(f"{name}.conv2", units, within, (f"{name}.conv2",)))
                before = (f"{name}.conv2", f"{name}.bn2", *short)
        return [*found, Gate(HEADS, units, before, ())]

    def features(self, x: Tensor) -> Tensor:
        """Compute the heads' inputs: the last maps, averaged over 2x2 and flattened."""
        x = norm_relu(self.conv1(x), self.bn1)
        for stage in self.stages:
            x = stage(x)
        return F.avg_pool2d(x, 2).flatten(1)

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        """Compute the logits of one head."""
        logits: Tensor = self.heads[head](self.features(x))
        return logits


def _side_after(side: int, stride: int) -> int:
    """Side of a map after a 3x3 convolution with this stride and padding 1."""
    return (side - 1) // stride + 1
