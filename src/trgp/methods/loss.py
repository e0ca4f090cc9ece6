"""Cross-entropy, also of runs stacked on each other."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.vmapped import is_batchedtensor, runs_first


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over a batch, of logits (b, classes) and labels (b,)."""
    if is_batchedtensor(logits):
        losses: Tensor = _OfSamples.apply(logits, y)  # type: ignore[no-untyped-call]
        return losses.mean()
    return F.cross_entropy(logits, y)


class _OfSamples(torch.autograd.Function):
    """Under vmap the runs' samples are one long batch.

    torch's own rule gathers and scatters instead: thirty kernels more where each must be
    deterministic.
    """

    @staticmethod
    def forward(logits: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError("Only called under vmap, which does not come here.")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """torch asks for it where there is a rule for vmap; gradients need none of it."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], logits: Tensor, y: Tensor) -> Any:
        logits, y = runs_first(info, in_dims, logits, y)
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return losses.view(y.shape), 0
