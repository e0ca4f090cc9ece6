"""Kinds of layers of other libraries, known by their full names: none of these is imported."""

import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from .layer_kinds import described_by, protects, refuse, rows
from .torch_kinds import convolution, unfolded

protects("transformers.pytorch_utils.Conv1D", transposed=True)(rows)
protects("transformers.modeling_utils.Conv1D", transposed=True)(rows)  # before 4.26
protects("timm.layers.linear.Linear")(rows)
refuse(
    "timm.*StdConv2d*",
    "which standardises its weight in every call: an update orthogonal to old tasks' inputs still "
    "changes the weight's variance, and with it their outputs, so it cannot be protected",
)


def same_patches(module: _ConvNd, x: Tensor) -> Tensor:
    """The patches under TensorFlow's "same" padding, which depends on the size of the input."""
    pads: list[int] = []
    for d in reversed(range(len(module.kernel_size))):
        size, stride = x.shape[2 + d], module.stride[d]
        span = module.dilation[d] * (module.kernel_size[d] - 1) + 1
        total = max(0, (-(-size // stride) - 1) * stride + span - size)
        pads += [total // 2, total - total // 2]
    return unfolded(module, F.pad(x, pads))


described_by("timm.*.Conv2dSame")(convolution(same_patches))
