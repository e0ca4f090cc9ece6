"""Layers as other libraries have them, written anew, under the names that they have there."""

import math
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = TypeVar("Kind", bound=type)


def named(path: str):
    """Give a class the full name of one in a library that is not installed."""

    def rename(cls: Kind) -> Kind:
        cls.__module__, _, name = path.rpartition(".")
        cls.__name__ = cls.__qualname__ = name
        return cls

    return rename


@named("transformers.pytorch_utils.Conv1D")
class Conv1D(nn.Module):
    """GPT-2's linear layer: its weight is (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(0.3 * torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], self.nf)


def pad_same(conv: nn.Conv2d, x: Tensor) -> Tensor:
    def total(size: int, d: int) -> int:
        span = (conv.kernel_size[d] - 1) * conv.dilation[d] + 1
        return max((math.ceil(size / conv.stride[d]) - 1) * conv.stride[d] + span - size, 0)

    high, wide = (total(x.shape[-2 + d], d) for d in range(2))
    return F.pad(x, [wide // 2, wide - wide // 2, high // 2, high - high // 2])


@named("timm.layers.conv2d_same.Conv2dSame")
class Conv2dSame(nn.Conv2d):
    """TensorFlow's "same" padding, by the size of the input."""

    def forward(self, x: Tensor) -> Tensor:
        x = pad_same(self, x)
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


@named("timm.layers.std_conv.StdConv2d")
class StdConv2d(nn.Conv2d):
    """A convolution with a standardised weight."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6)
        weight = weight.reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@named("timm.layers.linear.Linear")
class CastLinear(nn.Linear):
    """timm's own linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


@named("transformers.models.llama.modeling_llama.LlamaRMSNorm")
class LlamaRMSNorm(nn.Module):
    """A norm layer that is no subclass of torch's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@named("transformers.models.t5.modeling_t5.T5LayerNorm")
class T5LayerNorm(LlamaRMSNorm):
    """T5's, likewise."""


@named("transformers.models.mixtral.modeling_mixtral.MixtralTopKRouter")
class Router(nn.Module):
    """Chooses experts for each token."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.weight = nn.Parameter(torch.randn(experts, width))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = F.linear(x, self.weight)
        scores, index = torch.topk(F.softmax(logits, -1), self.chosen, -1)
        return logits, scores / scores.sum(-1, keepdim=True), index


@named("transformers.models.mixtral.modeling_mixtral.MixtralExperts")
class Experts(nn.Module):
    """The weights of all experts in two parameters."""

    has_gate, has_bias = True, False

    def __init__(self, width: int, inner: int, experts: int, transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = transposed
        up, down = torch.randn(experts, 2 * inner, width), torch.randn(experts, width, inner)
        self.gate_up_proj = nn.Parameter(0.3 * (up.mT.contiguous() if transposed else up))
        self.down_proj = nn.Parameter(0.3 * (down.mT.contiguous() if transposed else down))

    def _apply_gate(self, y: Tensor) -> Tensor:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(len(self.gate_up_proj)):
            up, down = self.gate_up_proj[expert], self.down_proj[expert]
            up, down = (up.T, down.T) if self.is_transposed else (up, down)
            token, place = torch.where(top_k_index == expert)
            y = F.linear(self._apply_gate(F.linear(hidden_states[token], up)), down)
            out.index_add_(0, token, y * top_k_weights[token, place, None])
        return out


class Mixture(nn.Module):
    """Experts and their router."""

    def __init__(self, width: int, inner: int, experts: int, transposed: bool = False) -> None:
        super().__init__()
        self.gate = Router(width, experts, 2)
        self.experts = Experts(width, inner, experts, transposed)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        _, weights, index = self.gate(rows)
        return self.experts(rows, index, weights).view_as(x)
