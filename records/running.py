"""CIFAR-100's AlexNet with norm layers that keep averages to evaluate with."""

from trgp.benchmarks import models


def alexnet(heads: int, classes: int) -> models.AlexNet:
    """As torch's BatchNorm is by default: what it keeps follows the latest task."""
    return models.AlexNet(heads, classes, track_running_stats=True)
