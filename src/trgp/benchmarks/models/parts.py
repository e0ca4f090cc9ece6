"""What the networks are made of that a GPU can compute in one go."""

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary


def norm_relu(
    x: Tensor,
    norm: nn.BatchNorm1d | nn.BatchNorm2d,
    plus: Tensor | None = None,
    dropout: nn.Dropout | None = None,
) -> Tensor:
    """norm(x), plus something, rectified, and then some of it dropped.

    Where kernels of our own compute all at once, hooks of these layers that look at what is between
    would see nothing; so with hooks they are not used.
    """
    if has_torch_function_unary(x):
        found: Tensor = handle_torch_function(norm_relu, (x,), x, norm, plus, dropout)
        return found
    y: Tensor = norm(x)
    y = (y if plus is None else y + plus).relu()
    return y if dropout is None else dropout(y)
