"""Random draws by purpose: no draw depends on the number of draws before it.

A run that is resumed, or that runs next to others, therefore draws the same numbers.
"""

import zlib

import numpy as np
import torch
from torch import Tensor


def seed_of(*key: int | str) -> int:
    """Derive a seed for torch from a key such as (run's seed, "order", task, epoch)."""
    words = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in key]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def uniform(rows: int, columns: int, *key: int | str) -> Tensor:
    """Draw numbers in [0, 1) by a key, the same on every device."""
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed_of(*key)))


def order(n: int, *key: int | str) -> Tensor:
    """Permute 0 to n - 1 by a key, the same on every device."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed_of(*key)))
