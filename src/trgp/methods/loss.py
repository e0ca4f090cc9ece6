"""Cross-entropy with a fast rule for vmapped runs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.vmapped import is_batchedtensor, runs_first


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy over a batch of logits (b, classes) and labels (b,)."""
    if is_batchedtensor(logits):
        losses: Tensor = _OfSamples.apply(logits, y)  # type: ignore[no-untyped-call]
        return losses.mean()
    return F.cross_entropy(logits, y)


class _OfSamples(torch.autograd.Function):
    """Cross-entropy per sample; under vmap the runs' samples form one long batch.

    torch's own rule gathers and scatters instead: thirty more kernels in deterministic mode.
    """

    @staticmethod
    def forward(logits: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError("Call it under vmap, which never runs forward.")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Do nothing; torch requires the method next to a vmap rule."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], logits: Tensor, y: Tensor) -> Any:
        logits, y = runs_first(info, in_dims, logits, y)
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return losses.view(y.shape), 0
