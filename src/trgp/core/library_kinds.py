"""Kinds of layers of other libraries, known by their full names: none of these is imported."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import pad_sequence

from .layer_kinds import described_by, one_site, protects, refuse, rows
from .layers import Layout, Site, join
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


# ---- mixtures of experts -----------------------------------------------------------------------

protects("transformers.models.*.*Top[Kk]Router")(rows)


@described_by("transformers.models.*.*Experts")
def experts(name: str, module: Any) -> Iterator[tuple[str, Site]]:
    """Two weights that hold a matrix for each expert, a group for each.

    Experts that are made otherwise (with biases, or spread over processes) are left to the others.
    """
    gated, biased = getattr(module, "has_gate", False), getattr(module, "has_bias", True)
    if not gated or biased or getattr(module, "_is_expert_parallel", False):
        return
    parts: list[tuple[str, Callable[..., list[Tensor]]]] = [
        ("gate_up_proj", _routed),
        ("down_proj", _between),
    ]
    for weight, inputs in parts:
        held: nn.Parameter = getattr(module, weight)
        layout = Layout(len(held), transposed=bool(module.is_transposed), stacked=True)
        site = one_site(module, _by_expert, inputs, weight, None, layout)
        yield join(name, weight), site


def _routed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tokens that each expert is given, (most, experts, n): zeros where it has fewer."""
    return [pad_sequence(_tokens(module, args, kwargs))]


def _between(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The inputs of each expert's second weight."""
    layout = Layout(transposed=bool(module.is_transposed), stacked=True)
    up = layout.matrices(module.gate_up_proj)
    tokens = _tokens(module, args, kwargs)
    inner = [module._apply_gate(F.linear(x, W)) for x, W in zip(tokens, up, strict=True)]
    return [pad_sequence(inner)]


def _tokens(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tokens of each expert; one that is chosen twice for a token has it twice."""
    named = dict(zip(("hidden_states", "top_k_index"), args, strict=False)) | kwargs
    x, chosen = named["hidden_states"], named["top_k_index"]
    return [x[torch.where(chosen == expert)[0]] for expert in range(len(module.gate_up_proj))]


def _by_expert(module: nn.Module, x: Tensor) -> Tensor:
    return x.movedim(1, 0)
