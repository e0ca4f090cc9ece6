"""The papers' networks as plain modules: a body without biases and one linear head per task.

`model(x, head=t)` computes the logits of head t alone; `model.features(x)` the input of the heads.
"""

from .alexnet import AlexNet as AlexNet
from .lenet import LeNet as LeNet
from .mlp import MLP as MLP
from .resnet import ResNet18 as ResNet18

__all__ = ["MLP", "AlexNet", "LeNet", "ResNet18"]
