"""Which weights are protected, and how each kind of layer becomes a matrix with columns as inputs.

Every protected layer is seen as W of shape (g, o, n): g groups, o outputs and n inputs per group.
A convolution's kernel is flattened to n = C*k*k, and a bias is one more input that is always 1, so
that weight and bias are protected together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

Norm = Literal["freeze", "per_task", "shared"]

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
PROTECTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
# Layers with a weight matrix whose output is not W times columns of the layer's own input alone.
UNPROTECTABLE = (nn.RNNBase, nn.RNNCellBase, nn.Bilinear, _ConvTransposeNd)


@dataclass(frozen=True)
class Slot:
    """A parameter by its place, since a parametrization or `model.to` may change what is there."""

    module: nn.Module
    attribute: str

    @property
    def param(self) -> nn.Parameter:
        if parametrize.is_parametrized(self.module, self.attribute):
            lists = cast(nn.ModuleDict, self.module.parametrizations)
            return cast(nn.Parameter, lists[self.attribute].original)
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
    order: dict[nn.Module, list[str]]  # of the parameters of every module it is used in

    @property
    def places(self) -> list[Slot]:
        """Every place where the weight or a bias can be found, always in the same order."""
        return _places(self.sites)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(g, o, n), the biases counted as inputs."""
        weight = self.weight.param
        out = weight.shape[0] // self.groups
        return self.groups, out, weight[0].numel() + len(self.biases)

    @property
    def dtype(self) -> torch.dtype:
        """What the layer's memory is held in: half precision cannot hold an orthonormal basis."""
        return torch.promote_types(self.weight.param.dtype, torch.float32)

    @property
    def params(self) -> list[nn.Parameter]:
        return [slot.param for slot in (self.weight, *self.biases)]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """[weight, *biases], or their gradients, as one (g, o, n) matrix."""
        rows = (self.groups, tensors[0].shape[0] // self.groups, -1)
        parts = [t.detach().reshape(rows).to(self.dtype) for t in tensors]
        return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]

    def matrix(self) -> Tensor:
        """W, a view of the parameter where that is possible."""
        return self.pack(self.params)

    @torch.no_grad()
    def assign(self, W: Tensor) -> None:
        """Write W (g, o, n) back into the parameters."""
        weight, *biases = self.params
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
        ones = [float(bias.param is added) for bias in self.biases]
        return torch.cat([columns, columns.new_tensor(ones).expand(*columns.shape[:2], -1)], dim=2)


@dataclass
class Plan:
    """What the learner does with every trainable part of a model."""

    layers: dict[str, Layer]
    norms: dict[str, nn.Module]
    others: dict[str, Slot]  # trainable, but no layer of a kind that can be protected
    per_task: dict[str, Slot]  # parameters and buffers copied for every task


def bare(model: nn.Module) -> nn.Module:
    """The model inside a compiled or parallel one, whose names are those the user knows."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while hasattr(model, "_orig_mod") or isinstance(model, parallel):
        model = cast(nn.Module, getattr(model, "_orig_mod", None) or model.module)
    return model


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names this module (or parameter) or one of the modules it lies in."""
    parts = name.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(p, pattern) for p in prefixes for pattern in patterns)


def unmatched(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The patterns that name nothing in the model."""
    names = [name for aliases in names_of(model).values() for name in aliases]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]


def make_plan(
    model: nn.Module, exclude: Sequence[str], per_task: Sequence[str], norm: Norm
) -> Plan:
    """Sort every trainable part of the model into protected, normalising, per-task and other."""
    aliases = names_of(model)
    modules = {names[0]: module for module, names in aliases.items()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
            raise TypeError(
                f"'{name}' has no shape yet; run one batch through the model before making the "
                "learner."
            )
    plan = Plan({}, {}, {}, per_task_tensors(model, exclude, per_task, norm))
    owners: dict[nn.Parameter, list[tuple[str, Slot]]] = {}
    sites: dict[nn.Parameter, list[tuple[str, Site]]] = {}
    within_attention = {
        _join(name, "out_proj")
        for name, m in modules.items()
        if isinstance(m, nn.MultiheadAttention)
    }
    for name, module in modules.items():
        for key, param in module.named_parameters(recurse=False):
            owners.setdefault(param, []).append((_join(name, key), Slot(module, key)))
        if any(matches(alias, [*exclude, *per_task]) for alias in aliases[module]):
            continue
        if isinstance(module, NORMS):
            plan.norms[name] = module
        elif name not in within_attention and _trainable(module):
            for layer_name, site in _sites(name, module):
                sites.setdefault(site.weight.param, []).append((layer_name, site))

    norm_modules = set(plan.norms.values())
    for param, places in owners.items():
        left = [
            name in plan.per_task or _matched(aliases[slot.module], slot.attribute, exclude)
            for name, slot in places
        ]
        if any(left) and not all(left) and param.requires_grad:
            raise ValueError(
                f"{' and '.join(repr(name) for name, _ in places)} are one parameter, but exclude "
                "or per_task names only a part of them; name all of them or none."
            )
        if (
            param.requires_grad
            and not any(left)
            and not any(slot.module in norm_modules for _, slot in places)
        ):
            plan.others[places[0][0]] = places[0][1]

    for weight, uses in sites.items():
        name = owners[weight][0][0]
        # A weight also used in some other way (an embedding tied to it) is frozen, not projected.
        if name in plan.others and len(uses) == len(owners[weight]):
            layer = _layer(uses, owners, plan.others)
            plan.layers[layer.name] = layer
            for slot in (layer.weight, *layer.biases):
                del plan.others[owners[slot.param][0][0]]
    if norm != "freeze":
        plan.norms = {}
    return plan


def per_task_tensors(
    model: nn.Module, exclude: Sequence[str], per_task: Sequence[str], norm: Norm
) -> dict[str, Slot]:
    """Parameters and buffers of which every task has its own copy, by their names."""
    found = {}
    for module, names in names_of(model).items():
        own = norm == "per_task" and isinstance(module, NORMS)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, _ in tensors:
            if not _matched(names, key, exclude) and (own or _matched(names, key, per_task)):
                found[_join(names[0], key)] = Slot(module, key)
    return found


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module with all the names it is registered under, the first of them its own."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _matched(names: Sequence[str], key: str, patterns: Sequence[str]) -> bool:
    return any(matches(_join(name, key), patterns) for name in names)


def _layer(
    uses: list[tuple[str, Site]],
    owners: Mapping[nn.Parameter, list[tuple[str, Slot]]],
    free: Mapping[str, Slot],
) -> Layer:
    name, first = uses[0]
    groups = {getattr(site.module, "groups", 1) for _, site in uses}
    if len(groups) > 1:
        raise TypeError(
            f"Layer '{name}' shares its weight with layers of another number of groups, which "
            f"cannot be protected together; add '{name}' to exclude=[...] or per_task=[...]."
        )
    sites = [site for _, site in uses]
    here = [site.bias for site in sites]
    biases: dict[nn.Parameter, Slot] = {}
    for bias in here:
        # A bias that another weight uses as well cannot be protected with this one: it is frozen.
        if bias is not None and all(slot in here for _, slot in owners[bias.param]):
            place, slot = owners[bias.param][0]
            if place in free:
                biases[bias.param] = slot
    order = {slot.module: list(slot.module._parameters) for slot in _places(sites)}
    return Layer(name, first.weight, list(biases.values()), groups.pop(), sites, order)


def _places(sites: Sequence[Site]) -> list[Slot]:
    slots = (slot for s in sites for slot in (s.weight, s.bias) if slot is not None)
    return list(dict.fromkeys(slots))


def _sites(name: str, module: nn.Module) -> Iterator[tuple[str, Site]]:
    """Where a module applies weights to inputs, as (layer name, site)."""
    kind = type(module)
    known = isinstance(module, PROTECTABLE)
    advice = f"add '{name}' to exclude=[...] or per_task=[...]"
    if isinstance(module, UNPROTECTABLE) or (known and not _as_built(module)):
        raise TypeError(
            f"Layer '{name}' is a {kind.__name__}, a kind that cannot be protected; {advice}."
        )
    if not known:
        return
    if any(_computed(part) for part in (module, *module.children())):
        raise TypeError(
            f"Layer '{name}' computes its weight from other parameters (weight norm, pruning, "
            "another parametrization, or a task that another learner has begun and not ended), "
            f"which cannot be protected; remove that or {advice}."
        )
    if any(p.is_complex() for p in module.parameters()):
        raise TypeError(f"Layer '{name}' has complex weights, which cannot be protected; {advice}.")

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
        yield _join(name, slot.attribute), Site(module, slot, bias, _attention_inputs, _rows)
    else:
        # The packed bias belongs to three weights at once, so it is left to the others.
        for i, key in enumerate(("query", "key", "value")):
            slot = Slot(module, f"{key[0]}_proj_weight")
            inputs = partial(_argument, i, key)
            yield _join(name, slot.attribute), Site(module, slot, None, inputs, _rows)
    out_bias = Slot(out, "bias") if out.bias is not None else None
    site = Site(module, Slot(out, "weight"), out_bias, _attention_output, _rows)
    yield _join(name, "out_proj"), site


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


def _trainable(module: nn.Module) -> bool:
    """Whether a module has anything of its own to train.

    A layer that could be protected also owns what its weight is computed from.
    """
    nested = isinstance(module, PROTECTABLE)
    return any(p.requires_grad for p in module.parameters(recurse=nested))


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


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
