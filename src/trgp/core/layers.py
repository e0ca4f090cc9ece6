"""How each kind of layer becomes a matrix whose inputs are columns.

Every protected layer is seen as W of shape (g, o, n): g groups, o outputs and n inputs per group.
A convolution's kernel is flattened to n = C*k*k, and a bias is one more input that is always 1, so
that weight and bias are protected together.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils import parametrize

PROTECTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
# Layers with a weight matrix whose output is not W times columns of the layer's own input alone.
UNPROTECTABLE = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear, _ConvTransposeNd)


def local(tensor: Tensor) -> Tensor:
    """This process's rows of a tensor that is spread over several; any other as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        rows: Tensor = tensor.to_local()
        return rows


@dataclass(frozen=True)
class Slot:
    """A parameter by its place, since `model.to` or a load may change what is there."""

    module: nn.Module
    attribute: str

    @property
    def param(self) -> nn.Parameter:
        return cast(nn.Parameter, getattr(self.module, self.attribute))


@dataclass(frozen=True)
class Site:
    """One place where a layer's weight meets its inputs."""

    module: nn.Module
    weight: Slot
    bias: Slot | None
    inputs: Callable[..., list[Tensor]]  # batches the weight is applied to, from the module's call
    columns: Callable[[nn.Module, Tensor], Tensor]  # one such input as (g, N, n)


@dataclass
class Layer:
    """A protected weight, the biases learnt with it, and every place where it is used."""

    name: str
    weight: Slot
    biases: list[Slot]
    groups: int
    sites: list[Site]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(g, o, n) over all processes, the biases counted as inputs."""
        rows, *kernel = self.weight.param.shape
        return self.groups, rows // self.groups, math.prod(kernel) + len(self.biases)

    @property
    def dtype(self) -> torch.dtype:
        """What the layer's memory is held in: half precision cannot hold an orthonormal basis."""
        return torch.promote_types(self.weight.param.dtype, torch.float32)

    @property
    def params(self) -> list[nn.Parameter]:
        return [slot.param for slot in (self.weight, *self.biases)]

    @property
    def weights(self) -> list[Tensor]:
        """The values of `params`, of which this process may hold some rows only."""
        return [local(param) for param in self.params]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """[weight, *biases], or their gradients, as one (g, o, n) matrix."""
        parts = [self.by_group(t.detach()).to(self.dtype) for t in tensors]
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]

    def by_group(self, tensor: Tensor) -> Tensor:
        """A weight (g * o, *kernel) or a bias (g * o) as (g, o, columns); o may be zero."""
        rows, *kernel = tensor.shape
        return tensor.reshape(self.groups, rows // self.groups, math.prod(kernel))

    def matrix(self) -> Tensor:
        """W, the rows that this process holds; a view of the parameter where that is possible."""
        return self.pack(self.weights)

    @torch.no_grad()
    def assign(self, W: Tensor) -> None:
        """Write W (g, o, n) back into the parameters."""
        weight, *biases = self.weights
        kernel = W.shape[2] - len(biases)
        weight.copy_(W[..., :kernel].reshape(weight.shape))
        for i, bias in enumerate(biases):
            bias.copy_(W[..., kernel + i].reshape(bias.shape))

    def columns(self, site: Site, x: Tensor) -> Tensor:
        """The layer's inputs at a site as (g, N, n), with a 1 for the bias that is added there."""
        columns = site.columns(site.module, x.detach())
        if not self.biases:
            return columns
        added = site.bias.param if site.bias is not None else None
        # Filled on the device: a copy to it could not be captured in a graph.
        ones = [columns.new_full((*columns.shape[:2], 1), b.param is added) for b in self.biases]
        return torch.cat([columns, *ones], dim=2)


@dataclass(frozen=True)
class Refusal:
    """Why a part of a model cannot be learnt with, and what helps."""

    kind: type[Exception]
    why: str
    fix: str

    def error(self) -> Exception:
        """Return the refusal as an exception of its kind."""
        return self.kind(f"{self.why}; {self.fix}.")


def refusal_of(name: str, module: nn.Module) -> Refusal | None:
    """Why a module that has weights to protect cannot be protected; None where nothing is wrong."""
    known = isinstance(module, PROTECTABLE)
    advice = f"add '{name}' to exclude=[...] or per_task=[...]"
    if isinstance(module, UNPROTECTABLE) or (known and not _as_built(module)):
        why = f"Layer '{name}' is a {type(module).__name__}, a kind that cannot be protected"
        return Refusal(TypeError, why, advice)
    if known and any(_computed(part) for part in (module, *module.children())):
        why = (
            f"Layer '{name}' computes its weight from other parameters (weight norm, pruning, "
            "another parametrization), which cannot be protected"
        )
        return Refusal(TypeError, why, f"remove that or {advice}")
    if known and any(p.is_complex() for p in module.parameters()):
        why = f"Layer '{name}' has complex weights, which cannot be protected"
        return Refusal(TypeError, why, advice)
    return None


def sites_of(name: str, module: nn.Module) -> Iterator[tuple[str, Site]]:
    """Where a module that is not refused applies weights to inputs, as (layer name, site)."""
    if not isinstance(module, PROTECTABLE):
        return
    if isinstance(module, nn.MultiheadAttention):
        yield from _attention_sites(name, module)
    else:
        bias = Slot(module, "bias") if module.bias is not None else None
        columns = _rows if isinstance(module, nn.Linear) else _patches
        yield name, Site(module, Slot(module, "weight"), bias, _first_input, columns)


def _attention_sites(name: str, module: nn.MultiheadAttention) -> Iterator[tuple[str, Site]]:
    out = module.out_proj
    bias = Slot(module, "in_proj_bias") if module.in_proj_bias is not None else None
    if module.in_proj_weight is not None:
        slot = Slot(module, "in_proj_weight")
        yield join(name, slot.attribute), Site(module, slot, bias, _attention_inputs, _rows)
    else:
        # The packed bias belongs to three weights at once, so it is left to the others.
        for i, key in enumerate(("query", "key", "value")):
            slot = Slot(module, f"{key[0]}_proj_weight")
            inputs = partial(_argument, i, key)
            yield join(name, slot.attribute), Site(module, slot, None, inputs, _rows)
    out_bias = Slot(out, "bias") if out.bias is not None else None
    site = Site(module, Slot(out, "weight"), out_bias, _attention_output, _rows)
    yield join(name, "out_proj"), site


def _first_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    x = args[0] if args else kwargs["input"]
    sample = 1 if isinstance(module, nn.Linear) else len(cast(nn.Conv2d, module).kernel_size) + 1
    return [x.unsqueeze(0) if x.dim() == sample else x]


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
    """What the output projection is applied to: the attention itself, projected by the identity.

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


def _rows(module: nn.Module, x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[-1])


def _patches(module: nn.Module, x: Tensor) -> Tensor:
    """Every patch a convolution sees, flattened in the order of its kernel: (g, N, n)."""
    conv = cast(nn.Conv2d, module)
    dims = len(conv.kernel_size)
    pads: list[int] = []
    for d in reversed(range(dims)):
        if conv.padding == "same":
            total = conv.dilation[d] * (conv.kernel_size[d] - 1)
            pads += [total // 2, total - total // 2]
        else:
            pads += [0, 0] if conv.padding == "valid" else [int(conv.padding[d])] * 2
    if any(pads):
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, pads, mode=mode)
    for d in range(dims):
        span = conv.dilation[d] * (conv.kernel_size[d] - 1) + 1
        x = x.unfold(2 + d, span, conv.stride[d])[..., :: conv.dilation[d]]
    # Now (N, C, *positions, *kernel): bring the channels of a group beside the kernel.
    x = torch.unflatten(x, 1, (conv.groups, -1)).movedim(2, 2 + dims)
    x = x.movedim(1, 0).flatten(2 + dims)
    return x.reshape(conv.groups, -1, x.shape[-1])


def _computed(module: nn.Module) -> bool:
    """Whether a weight is not a parameter, but made from some in every call."""
    weights = [getattr(module, key, None) for key in ("weight", "in_proj_weight")]
    plain = all(w is None or isinstance(w, nn.Parameter) for w in weights)
    return parametrize.is_parametrized(module) or not plain


def _as_built(module: nn.Module) -> bool:
    """Whether a protectable layer computes as its class in torch does; a subclass may not."""
    return "forward" not in vars(module) and any(
        isinstance(module, kind)
        and all(
            getattr(type(module), method, None) is getattr(kind, method, None)
            for method in ("forward", "_conv_forward")
        )
        for kind in PROTECTABLE
    )


def join(prefix: str, name: str) -> str:
    """The dotted name of something inside a module."""
    return f"{prefix}.{name}" if prefix else name
