"""Random draws by what they are for: no draw depends on how many came before it.

So a run that goes on after an interruption, or beside others, draws what it would have drawn.
"""

import zlib

import numpy as np
import torch
from torch import Tensor


def seed_of(*key: int | str) -> int:
    """A seed for torch from a key such as (run's seed, "order", task, epoch)."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def uniform(rows: int, columns: int, *key: int | str) -> Tensor:
    """Numbers in [0, 1) of a key, the same on every device."""
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed_of(*key)))


def order(n: int, *key: int | str) -> Tensor:
    """0 to n - 1 in the order of a key, the same on every device."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed_of(*key)))
