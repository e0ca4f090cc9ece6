"""Torch's own kinds of layers: linear layers, convolutions and attention."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .layer_kinds import Sites, described_by, one_site, protects, refuse, rows
from .layers import Layout, Site, join

protects(nn.Linear)(rows)
refuse(nn.Bilinear, "a kind that cannot be protected: its output is not linear in one input")
refuse(_ConvTransposeNd, "a kind that cannot be protected yet")


# ---- convolutions ------------------------------------------------------------------------------


def convolution(columns: Callable[[Any, Tensor], Tensor]) -> Sites:
    """A kind with one weight that is applied to patches."""

    def sites(name: str, module: _ConvNd) -> Iterator[tuple[str, Site]]:
        yield name, one_site(module, columns, samples, layout=Layout(module.groups))

    return sites


def samples(module: _ConvNd, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """A convolution's input, also if it is one sample without a dimension for it."""
    x = args[0] if args else kwargs["input"]
    return [x.unsqueeze(0) if x.dim() == len(module.kernel_size) + 1 else x]


def patches(module: _ConvNd, x: Tensor) -> Tensor:
    """Every patch a convolution sees, flattened in the order of its kernel: (g, N, n)."""
    pads: list[int] = []
    for d in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            total = module.dilation[d] * (module.kernel_size[d] - 1)
            pads += [total // 2, total - total // 2]
        else:
            pads += [0, 0] if module.padding == "valid" else [int(module.padding[d])] * 2
    if any(pads):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, pads, mode=mode)
    return unfolded(module, x)


def unfolded(module: _ConvNd, x: Tensor) -> Tensor:
    """The patches of an input that is padded already."""
    dims = len(module.kernel_size)
    for d in range(dims):
        span = module.dilation[d] * (module.kernel_size[d] - 1) + 1
        x = x.unfold(2 + d, span, module.stride[d])[..., :: module.dilation[d]]
    # Now (N, C, *positions, *kernel): bring the channels of a group beside the kernel.
    x = torch.unflatten(x, 1, (module.groups, -1)).movedim(2, 2 + dims)
    x = x.movedim(1, 0).flatten(2 + dims)
    return x.reshape(module.groups, -1, x.shape[-1])


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    described_by(_kind)(convolution(patches))


# ---- attention ---------------------------------------------------------------------------------


@described_by(nn.MultiheadAttention)
def attention(name: str, module: nn.MultiheadAttention) -> Iterator[tuple[str, Site]]:
    """The packed weight of query, key and value, or one of each, and the output projection."""
    if module.in_proj_weight is not None:
        site = one_site(module, rows, _attention_inputs, "in_proj_weight", "in_proj_bias")
        yield join(name, "in_proj_weight"), site
    else:
        # The packed bias belongs to three weights at once, so it is left to the others.
        for i, key in enumerate(("query", "key", "value")):
            weight = f"{key[0]}_proj_weight"
            site = one_site(module, rows, partial(_argument, i, key), weight, None)
            yield join(name, weight), site
    out = one_site(module.out_proj, rows, _attention_output)
    site = Site(module, out.weight, out.bias, _attention_output, rows)
    yield join(name, "out_proj"), site


def _attention_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Query, key and value, each distinct tensor once: the packed weight is applied to all."""
    named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    return list({id(named[k]): named[k] for k in ("query", "key", "value")}.values())


def _argument(
    position: int, key: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    return [args[position] if len(args) > position else kwargs[key]]


def _attention_output(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The output projection's input: the attention itself, projected by the identity.

    The projection is called as a function inside the attention, where no hook can see its input.
    """
    out = cast(nn.Linear, module.out_proj)
    identity = nn.Linear(out.in_features, out.in_features, bias=False)
    weight = torch.eye(out.in_features, device=out.weight.device, dtype=out.weight.dtype)
    identity.weight = nn.Parameter(weight, requires_grad=False)
    module._modules["out_proj"] = identity
    try:
        attended, _ = module.forward(*args, **kwargs)
    finally:
        module._modules["out_proj"] = out
    return [attended]
