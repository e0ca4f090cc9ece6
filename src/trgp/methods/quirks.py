"""Quirks of the published code in a task's bases, where it deviates from the paper."""

import torch
from torch import Tensor

from ..core.subspace import Extension


def one_short(extension: Extension) -> Extension:
    """Remove the weakest direction from a first task's choice.

    The published code counts the directions before the threshold is reached and omits the one that
    reaches it.
    """
    last = (extension.ranks - 1).clamp_min(0)
    return _without(extension, last, extension.ranks > 0)[0]


def strongest_unprotected(extension: Extension, before: Tensor) -> tuple[Extension, Tensor]:
    """Take the strongest new direction (g, n, 1) of a task after the first out of M.

    The published code requires an index above the number of old directions, where it must be at
    least that: the first new one stays in B_t, but is never projected out of a gradient. `before`
    (g,) is the number of old directions.
    """
    return _without(extension, before, extension.ranks > before)


def _without(extension: Extension, place: Tensor, there: Tensor) -> tuple[Extension, Tensor]:
    """Remove one column per group, where there is one; the others close up."""
    M, mask = extension.M, extension.mask
    width = M.shape[2]
    if not width:
        return extension, M.new_zeros(*M.shape[:2], 1)
    columns = torch.arange(width, device=M.device).expand(len(M), width)
    moved = columns + (there[:, None] & (columns >= place[:, None])).long()
    inside = moved < width
    moved = moved.clamp_max(width - 1)
    taken = M.gather(2, place.clamp_max(width - 1)[:, None, None].expand(-1, M.shape[1], 1))
    M = M.gather(2, moved[:, None, :].expand_as(M)) * inside[:, None, :]
    ranks = extension.ranks - there.long()
    used = int(ranks.max())
    closed = (mask.gather(1, moved) & inside)[:, :used]
    return Extension(M[:, :, :used].contiguous(), ranks, closed), taken * there[:, None, None]
