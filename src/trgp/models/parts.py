"""What the networks are made of that a GPU can compute in one go."""

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary


def norm_relu(x: Tensor, norm: nn.BatchNorm1d | nn.BatchNorm2d) -> Tensor:
    """norm(x), rectified.

    Where kernels of our own compute both at once, the norm layer's hooks are not called.
    """
    if has_torch_function_unary(x):
        found: Tensor = handle_torch_function(norm_relu, (x,), x, norm)
        return found
    y: Tensor = norm(x)
    return y.relu()
