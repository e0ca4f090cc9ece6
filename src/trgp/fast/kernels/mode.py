"""Unchanged networks, computed by the kernels of this package where these fit."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from ...benchmarks.models import lenet, parts
from .batch_norm import batch_norm
from .convolution import convolution
from .few_rows import fits, linear
from .max_pool import max_pool2d
from .reach import MOST, reach
from .response_norm import response_norm
from .windows import sides_after

LONGEST = 255  # stride, upper bound: its square is the side of a grid


class OwnKernels(TorchFunctionMode):
    """Sends calls of torch's functions to a kernel that fits, while open.

    All other calls go to torch, including other types, precisions and dimensions, and those that
    torch refuses, since it says why.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        own = _OWN.get(func)
        found = own(*args, **kwargs) if own else None
        return func(*args, **kwargs) if found is None else found


def _convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    if isinstance(padding, str) or _pair(dilation) != (1, 1) or groups != 1:
        return None
    if input.dim() != 4 or weight.dim() != 4 or input.shape[1] != weight.shape[1]:
        return None
    kept = [] if bias is None else [bias]
    if any(tensor.shape != weight.shape[:1] for tensor in kept) or not _fit(input, weight, *kept):
        return None
    o, _, *kernel = weight.shape
    how = _pair(stride), _pair(padding)
    if not _windows(input, o, kernel, *how):
        return None
    y = convolution(input, weight, *how)
    return y if bias is None else y + bias[:, None, None]


def _map(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if input.dim() != 2 or weight.dim() != 2 or input.shape[1] != weight.shape[1]:
        return None
    kept = [] if bias is None else [bias]
    if any(t.shape != weight.shape[:1] for t in kept) or not _fit(input, weight, *kept):
        return None
    if not fits(input, weight.t()):
        return None
    y: Tensor = linear(input, weight)
    return y if bias is None else y + bias


def _normalise(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not _normalises(input, running_mean, weight, bias, training, eps):
        return None
    return batch_norm(input, weight, bias, eps)


def _normalises(
    input: Tensor,
    running_mean: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    """Whether the BatchNorm kernel fits the call."""
    kept = [tensor for tensor in (weight, bias) if tensor is not None]
    if not training or running_mean is not None or input.dim() not in (2, 4) or eps <= 0:
        return False
    if input.numel() <= input.shape[1] or not _fit(input, *kept):
        return False
    return all(tensor.shape == input.shape[1:2] for tensor in kept)


def _normalise_and_rectify(
    x: Tensor, norm: nn.Module, plus: Tensor | None = None, dropout: nn.Module | None = None
) -> Tensor | None:
    # A layer put in its place computes something else, and hooks must see the output.
    if type(norm) is not {2: nn.BatchNorm1d, 4: nn.BatchNorm2d}.get(x.dim()) or _watched(norm):
        return None
    if plus is not None and (plus.shape != x.shape or not _fit(x, plus)):
        return None
    if dropout is not None and (type(dropout) is not nn.Dropout or _watched(dropout)):
        return None
    p = dropout.p if dropout is not None and dropout.training else 0.0
    training = norm.training or norm.running_mean is None
    if not _normalises(x, norm.running_mean, norm.weight, norm.bias, training, norm.eps) or p == 1:
        return None
    keep = None
    if p:
        last = torch.channels_last if x.dim() == 4 else torch.contiguous_format
        keep = torch.empty_like(x, dtype=torch.uint8, memory_format=last).bernoulli_(1 - p)
    return batch_norm(x, norm.weight, norm.bias, norm.eps, True, plus, keep, 1 - p)


def _watched(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _pool(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    kernel = _pair(kernel_size)
    if ceil_mode or return_indices or _pair(dilation) != (1, 1) or kernel[0] * kernel[1] > 127:
        return None
    how = kernel if stride is None or stride == [] else _pair(stride), _pair(padding)
    if input.dim() != 4 or not _fit(input) or not _windows(input, input.shape[1], kernel, *how):
        return None
    if any(2 * side > width for side, width in zip(how[1], kernel, strict=True)):
        return None
    return max_pool2d(input, kernel, *how)


def _respond(input: Tensor) -> Tensor | None:
    if input.dim() != 4 or not _fit(input):
        return None
    return response_norm(input, lenet.SIZE, lenet.ALPHA, lenet.BETA, lenet.K)


def _view(input: Tensor, *shape: Any, **other: Any) -> Tensor | None:
    """Reshape channels-last maps with a copy, where torch's own layout would need none."""
    if other or not shape or isinstance(shape[0], torch.dtype):
        return None
    if is_functorch_wrapped_tensor(input):
        return None
    last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    return input.reshape(*shape) if last and not input.is_contiguous() else None


_OWN: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    torch.conv2d: _convolve,
    F.linear: _map,
    F.batch_norm: _normalise,
    F.max_pool2d: _pool,
    lenet.response_norm: _respond,
    parts.norm_relu: _normalise_and_rectify,
    Tensor.view: _view,
}


def _fit(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors."""
    return not torch.is_autocast_enabled("cuda") and all(
        tensor.dtype == torch.float32
        and tensor.device == tensors[0].device
        and not is_functorch_wrapped_tensor(tensor)
        and tensor.numel() > 0
        and reach(tensor) < MOST
        for tensor in tensors
    )


def _windows(
    x: Tensor,
    channels: int,
    kernel: Sequence[int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> bool:
    """Whether windows fit on the maps, and the kernels can index the result."""
    if min(stride) < 1 or max(stride) > LONGEST or min(padding) < 0:
        return False
    sides = sides_after(x.shape[2:], kernel, stride, padding)
    return min(sides) > 0 and x.shape[0] * channels * sides[0] * sides[1] < MOST


def _pair(value: Any) -> tuple[int, int]:
    """Return a pair from one number for both sides, or from two, as torch accepts them."""
    if isinstance(value, int):
        return value, value
    both = tuple(value)
    return (both[0], both[0]) if len(both) == 1 else (both[0], both[1])
