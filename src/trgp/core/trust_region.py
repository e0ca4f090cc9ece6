"""Which old tasks a layer trusts (paper, section 4.1)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..types import J
from .keep import SumRows
from .precision import doubled, full_precision


@full_precision
def projections(
    G: Tensor, M: Tensor, masks: Mapping[J, Tensor], sum_rows: SumRows | None = None
) -> dict[J, float]:
    """||G B_j B_j'||_F^2 for every old task j, from the one product T = G M.

    B_j is orthonormal and made of columns of M, so the squared norm is the sum over its columns of
    the energy of T there. sum_rows: see keep.Region.
    """
    energy = doubled(G @ M).square().sum(1)  # (g, m)
    if sum_rows is not None:
        energy = sum_rows(energy)
    widened = [torch.nn.functional.pad(k, (0, M.shape[2] - k.shape[1])) for k in masks.values()]
    if not widened:
        return {}
    sums = (torch.stack(widened).to(energy.device) * energy).sum((1, 2)).tolist()
    return dict(zip(masks, sums, strict=True))


def squared_norm(G: Tensor, sum_rows: SumRows | None = None) -> float:
    """||G||_F^2; sum_rows: see keep.Region."""
    energy = doubled(G).square().sum()
    return float(energy if sum_rows is None else sum_rows(energy))


def trust_region(squared: Mapping[J, float], total: float, epsilon: float, top_k: int) -> list[J]:
    """The old tasks with ||G B_j B_j'|| >= epsilon ||G||, the `top_k` strongest, strongest first.

    Nothing is trusted where the gradient is zero: it says nothing about any task.
    """
    passing = [j for j, s in squared.items() if s > 0 and s**0.5 >= epsilon * total**0.5]
    return sorted(passing, key=lambda j: -squared[j])[:top_k]


def total_over(layers: Sequence[Mapping[J, float]]) -> dict[J, float]:
    """Squared norms for the gradient of all layers together (a task-wise trust region)."""
    tasks = dict.fromkeys(j for layer in layers for j in layer)
    return {j: sum(layer.get(j, 0.0) for layer in layers) for j in tasks}
