"""A run's own stream and random numbers on a GPU, where runs take turns."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..core.branches import set_branches

POOL = 32  # streams that torch has per device and hands out in turn
BRANCHES = 7  # upper bound per graph


class Stream:
    """The queue of a run's work; on a CPU there is nothing to separate."""

    def __init__(self, device: torch.device, company: int) -> None:
        """`company` is the number of streams in use at the same time."""
        self._device = device
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._stream = torch.cuda.Stream(device)
            count = min(BRANCHES, POOL // company - 1)
            count = count if count > 1 else 0  # a single one would only be a detour
            set_branches(self._stream, [torch.cuda.Stream(device) for _ in range(count)])
            # Data loaded before was queued on the default stream.
            self._stream.wait_stream(torch.cuda.default_stream(device))
            self._shared = torch.cuda.default_generators[index]
            # A running graph reads its seed from the random state it was captured with: runs that
            # share one state would read each other's seeds.
            self._own = self._shared.clone_state()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Queue work and draw random numbers for this run while open."""
        if self._device.type != "cuda":
            yield
            return
        before = self._shared.graphsafe_get_state()
        self._shared.graphsafe_set_state(self._own)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._shared.graphsafe_set_state(before)
