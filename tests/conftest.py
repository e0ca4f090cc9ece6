"""Set-up that every test shares: one thread a worker, fixed seeds, no time limit on an example."""

import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# A shell starts background jobs deaf to Ctrl-C, and so would be what tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("trgp", deadline=None, derandomize=True)
settings.load_profile("trgp")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same random state and the usual default dtype."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
