"""Loss and accuracy on samples that are not learnt."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..methods.base import Params
from .batches import Part, epoch_batches
from .network import Network


class Score(NamedTuple):
    """Means over all samples."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(
    network: Network,
    weights: Sequence[Params],
    parts: Sequence[Part],
    size: int,
    passes: int,
    *key: int | str,
) -> Score:
    """Each part with its own weights, in shuffled batches of a size, and the mean of the passes.

    The order belongs to the key alone: where BatchNorm uses the batch at hand, an old task is
    always measured in the same batches, and its accuracy changes only if the network does.
    """
    network.module.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=network.device)
    for each, part in zip(weights, parts, strict=True):
        for k in range(passes):
            for batch in epoch_batches([part], size, *key, part.task, k):
                logits = network(each, batch.x, batch.head)
                loss = F.cross_entropy(logits, batch.y, reduction="sum")
                right = (logits.argmax(1) == batch.y).sum()
                totals += torch.stack([loss.double(), right.double()])
    count = passes * sum(len(part.samples) for part in parts)
    loss, right = totals.tolist()
    return Score(loss / count, right / count)
