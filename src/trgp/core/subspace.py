"""A layer's memory M, and the choice of a task's bases from it (paper, section 4.3).

Everything is computed from A = R R', the Gram matrix of the layer's inputs R in the task: trace(A)
is ||R||_F^2, an old direction m_i holds delta_i = m_i' A m_i of it, and the new directions with
their squared singular values are the eigenvectors of (I - MM') A (I - MM'). Where R has few columns
these come from the smaller R' (I - MM') R.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .capture import Gram
from .decompositions import eigh, qr
from .precision import doubled


@dataclass
class Extension:
    """The outcome of a task for one layer: its new directions and its basis."""

    M: Tensor  # (g, n, m'), the old columns first
    ranks: Tensor
    mask: Tensor  # (g, m') the columns that make B_t
    left_out: int = 0  # directions that the threshold wants and a limit forbids

    def to(self, like: Tensor) -> "Extension":
        """Where and as precise as a tensor is."""
        ranks, mask = self.ranks.to(like.device), self.mask.to(like.device)
        return Extension(self.M.to(like), ranks, mask, self.left_out)


def extend(
    M: Tensor,
    ranks: Tensor,
    gram: Gram,
    *,
    threshold: float,
    pooled: bool = True,
    most: int | None = None,
) -> Extension:
    """The shortest choice of old and new directions that holds `threshold` of A's energy.

    With `pooled`, old and new directions compete by the energy they hold (TRGP); without, every old
    direction counts before any new one (GPM). Energies below n * eps * lambda_max count as zero.
    Of the new ones at most as many are taken as leave M with `most` columns, the strongest.
    """
    M64, ranks = M.to(gram.A), ranks.to(gram.A.device)
    m = M.shape[2]
    held, vectors, energy = _energies(M64, ranks, gram)
    chosen = _shortest(held, threshold, energy, ahead=0 if pooled else m)
    left_out = 0
    if most is not None:  # new directions come by their energy: the first are the strongest
        room = torch.arange(held.shape[1] - m, device=held.device) < (most - ranks)[:, None]
        left_out = int((chosen[:, m:] & ~room).sum())
        chosen[:, m:] &= room
    return replace(_appended(M64, ranks, chosen, vectors).to(M), left_out=left_out)


def first_ranks(gram: Gram, thresholds: Sequence[float]) -> list[Tensor]:
    """How many directions of each group (g,) a first task with these inputs keeps, by threshold."""
    A = gram.A
    nothing = A.new_zeros(*A.shape[:2], 0)
    held, _, energy = _energies(nothing, A.new_zeros(len(A), dtype=torch.long), gram)
    return [_shortest(held, threshold, energy, ahead=0).sum(1) for threshold in thresholds]


def _energies(M: Tensor, ranks: Tensor, gram: Gram) -> tuple[Tensor, Tensor, Tensor]:
    """The energy of A in each old direction and in each one outside of them (g, m + k).

    Also the directions outside (g, n, k), and all of the energy (g,).
    """
    A = gram.A
    n = A.shape[1]
    energy = A.diagonal(dim1=1, dim2=2).sum(1)
    AM = A @ M
    old = (M * AM).sum(1)
    R = gram.inputs
    values, vectors = _outside(A, AM, M) if R is None else _outside_few(R, M)
    zero = n * gram.eps * torch.maximum(_largest_eigenvalue(A), values[:, 0])
    free = torch.arange(values.shape[1], device=A.device) < (n - ranks)[:, None]
    new = values.where(free & (values > zero[:, None]), 0.0)
    return torch.cat([old.where(old > zero[:, None], 0.0), new], dim=1), vectors, energy


def _shortest(held: Tensor, threshold: float, energy: Tensor, ahead: int) -> Tensor:
    """The fewest directions that hold a share of the energy (g,), as a mask over `held` (g, k).

    The strongest come first, but all of the first `ahead` columns before any other.
    """
    order = held.clone()
    order[:, :ahead] = torch.inf
    by_rank = order.argsort(dim=1, descending=True, stable=True)
    ranked = held.gather(1, by_rank)
    wanted = ranked > 0
    if threshold < 1:  # at 1 all that is not a numerical zero is kept, whatever the sums round to
        before = ranked.cumsum(1) - ranked
        wanted &= before < threshold * energy[:, None]
    return torch.zeros_like(wanted).scatter_(1, by_rank, wanted)


def _appended(M: Tensor, ranks: Tensor, chosen: Tensor, vectors: Tensor) -> Extension:
    """M with the chosen ones of the vectors after each group's last column, and who makes B_t.

    `chosen` (g, m + k) is a mask over M's columns and the vectors, of which it takes the first.
    """
    m = M.shape[2]
    counts = chosen[:, m:].sum(1)
    width = int(counts.max())
    fresh = _orthonormal(vectors[:, :, :width], M, counts)
    places = ranks[:, None] + torch.arange(width, device=M.device)
    wide = torch.cat([M, M.new_zeros(*M.shape[:2], width)], dim=2)
    wide.scatter_add_(2, places[:, None, :].expand_as(fresh), fresh)
    mask = torch.cat([chosen[:, :m], chosen.new_zeros(len(M), width)], dim=1)
    mask.scatter_(1, places, chosen[:, m : m + width])
    ranks = ranks + counts
    used = int(ranks.max())
    return Extension(wide[:, :, :used].contiguous(), ranks, mask[:, :used].contiguous())


def complement(M: Tensor, ranks: Tensor) -> Tensor:
    """An orthonormal basis of what is orthogonal to M, zero columns on the left where it is less.

    Past a group's rank its columns of M are zero, and a complete QR fills them with directions
    orthogonal to the others: these and the rest are the complement.
    """
    Q, _ = qr(doubled(M), mode="complete")
    beyond = torch.arange(M.shape[1], device=Q.device) >= ranks.to(Q.device)[:, None]
    return (Q * beyond[:, None, :])[:, :, int(ranks.min()) :].to(M)


def columns_of(M: Tensor, mask: Tensor) -> Tensor:
    """The columns of M (g, n, m) under a mask (g, <= m), zero-padded to one count: (g, n, r)."""
    index, valid = _places(mask)
    picked = M.gather(2, index[:, None, :].expand(-1, M.shape[1], -1))
    return picked * valid[:, None, :]


def put_columns(values: Tensor, mask: Tensor, width: int) -> Tensor:
    """The inverse of `columns_of`: (g, k, r) at the columns of a mask, in a (g, k, width) zero."""
    index, valid = _places(mask)
    out = values.new_zeros(*values.shape[:2], width)
    return out.scatter_add_(2, index[:, None, :].expand_as(values), values * valid[:, None, :])


def _places(mask: Tensor) -> tuple[Tensor, Tensor]:
    count = int(mask.sum(1).max()) if mask.numel() else 0
    index = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
    return index, mask.gather(1, index)


def _outside(A: Tensor, AM: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """The energies that A holds outside span(M), descending (g, k), and their directions."""
    rest = A - AM @ M.mT
    rest = rest - M @ (M.mT @ rest)
    values, vectors = eigh((rest + rest.mT) / 2)
    return values.flip(1), vectors.flip(2)


def _outside_few(R: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """The energies outside span(M) of A = R R' where R has few columns, from R itself."""
    rest = R - M @ (M.mT @ R)
    values, vectors = eigh(rest.mT @ rest)
    lengths = values.clamp_min(torch.finfo(R.dtype).tiny).sqrt()
    directions = (rest @ vectors) / lengths.unsqueeze(1)
    return values.flip(1), directions.flip(2)


def _largest_eigenvalue(A: Tensor, steps: int = 32) -> Tensor:
    """lambda_max of each A (g, n, n) by power iteration, close enough to measure a zero by."""
    start = A.diagonal(dim1=1, dim2=2).argmax(1)
    v = A[torch.arange(len(A), device=A.device), :, start].unsqueeze(2)
    length = torch.zeros(len(A), dtype=A.dtype, device=A.device)
    for _ in range(steps):
        v = v / v.norm(dim=1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
        v = A @ v
        length = v.norm(dim=1).squeeze(1)
    return length


def _orthonormal(vectors: Tensor, M: Tensor, counts: Tensor) -> Tensor:
    """The first `counts` vectors of each group, orthonormal to each other and to M to rounding."""
    valid = torch.arange(vectors.shape[2], device=M.device) < counts[:, None]
    vectors = vectors * valid[:, None, :]
    for _ in range(2):  # once leaves what cancellation left of weak directions; twice is enough
        vectors, _ = qr(vectors - M @ (M.mT @ vectors))
    return vectors * valid[:, None, :]
