"""Parts of the networks that a GPU can compute in one kernel."""

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary


def norm_relu(
    x: Tensor,
    norm: nn.BatchNorm1d | nn.BatchNorm2d,
    plus: Tensor | None = None,
    dropout: nn.Dropout | None = None,
) -> Tensor:
    """Compute dropout(relu(norm(x) + plus)).

    The project's fused kernels skip the intermediate tensors that hooks on these layers would read;
    layers with hooks therefore do not use them.
    """
    if has_torch_function_unary(x):
        found: Tensor = handle_torch_function(norm_relu, (x,), x, norm, plus, dropout)
        return found
    y: Tensor = norm(x)
    y = (y if plus is None else y + plus).relu()
    return y if dropout is None else dropout(y)
