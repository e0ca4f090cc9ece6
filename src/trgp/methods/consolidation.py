"""Consolidation of task-adaptive weights, as in APD: what tasks of a cluster have in common is
kept once.

Tasks are clustered by k-means, layer by layer. Its distances are between points and means of
points, so that the points' products with each other, a number per pair of tasks, are all it needs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STEPS = 100  # of Lloyd's, at most


def clusters(points: Tensor, starts: Sequence[Sequence[int]]) -> list[int]:
    """The cluster of every point (n, ...), from clusters whose centres are means of some points.

    A cluster that loses its last point keeps its centre. Of equally near centres the first wins.
    """
    flat = points.flatten(1)
    products = (flat @ flat.T).double().cpu()
    means = torch.stack([_mean_of(group, len(points)) for group in starts])
    found: list[int] = []
    for _ in range(STEPS):
        along = means @ products
        lengths = (along * means).sum(1)
        nearest: list[int] = (lengths[:, None] - 2 * along).argmin(0).tolist()
        if nearest == found:
            break
        found = nearest
        for k in set(found):
            means[k] = _mean_of([i for i, own in enumerate(found) if own == k], len(points))
    return found


def shared_part(members: Tensor, spread: float) -> tuple[Tensor, Tensor]:
    """What the members (m, ...) of a cluster have in common, and what is left of each.

    An entry whose values differ by no more than `spread` is kept once, as the middle of them.
    """
    high, low = members.amax(0), members.amin(0)
    alike = high - low <= spread
    common = torch.where(alike, (high + low) / 2, torch.zeros_like(high))
    return common, torch.where(alike, torch.zeros_like(members), members)


def _mean_of(group: Sequence[int], count: int) -> Tensor:
    """The mean of some of so many points, as weights of the points."""
    weights = torch.zeros(count, dtype=torch.float64)
    weights[list(group)] = 1 / len(group)
    return weights
