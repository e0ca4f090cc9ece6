"""Consolidation of task-adaptive weights, as in APD: the common part of a cluster is stored once.

Tasks are clustered by k-means, layer by layer. Its distances are between points and means of
points, so it needs only the inner products of the points, one number per pair of tasks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STEPS = 100  # upper bound on the steps of Lloyd's algorithm


def clusters(points: Tensor, starts: Sequence[Sequence[int]]) -> list[int]:
    """Assign every point (n, ...) to a cluster; initial centres are means of the `starts` groups.

    A cluster that loses its last point keeps its centre. Ties go to the first centre.
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
    """Split the members (m, ...) of a cluster into a common part and a rest per member.

    An entry whose values differ by at most `spread` moves to the common part, as their midpoint.
    """
    high, low = members.amax(0), members.amin(0)
    alike = high - low <= spread
    common = torch.where(alike, (high + low) / 2, torch.zeros_like(high))
    return common, torch.where(alike, torch.zeros_like(members), members)


def _mean_of(group: Sequence[int], count: int) -> Tensor:
    """The mean of a group out of `count` points, as weights of the points."""
    weights = torch.zeros(count, dtype=torch.float64)
    weights[list(group)] = 1 / len(group)
    return weights
