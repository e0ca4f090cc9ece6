"""Cross-entropy, also of runs stacked on each other."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor


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
        stacked = [
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((logits, y), in_dims, strict=True)
        ]
        flat_logits, flat_y = (t.flatten(0, 1) for t in stacked)
        losses = F.cross_entropy(flat_logits, flat_y, reduction="none")
        return losses.view(stacked[1].shape), 0
