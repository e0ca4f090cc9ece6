"""A run's own place on a GPU, where runs take turns: a stream, and random numbers of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..core.branches import set_branches

POOL = 32  # streams that torch has on a device, given out in turn
BRANCHES = 7  # of one graph, at most


class Stream:
    """Where a run's work is queued; on a CPU there is nothing to keep apart."""

    def __init__(self, device: torch.device, company: int) -> None:
        """One of so many that work at the same time."""
        self._device = device
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._stream = torch.cuda.Stream(device)
            count = min(BRANCHES, POOL // company - 1)
            count = count if count > 1 else 0  # one would only be a way round
            set_branches(self._stream, [torch.cuda.Stream(device) for _ in range(count)])
            # What was loaded before lies on the default stream.
            self._stream.wait_stream(torch.cuda.default_stream(device))
            self._shared = torch.cuda.default_generators[index]
            # A graph reads its seed from the random state it was captured with, while it runs:
            # with one state for all runs they would read each other's.
            self._own = self._shared.clone_state()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """While this is open the device works for this run."""
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
