"""Writes in a background thread, where that pays; it waits for device and disk."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch


def pays(device: torch.device) -> bool:
    """Whether a thread pays: on a GPU all runs would wait; on a CPU a run has just one core."""
    return device.type == "cuda"


class Writer:
    """Does one write after another; `start` or `wait` raises the errors of a write."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Not a Thread: if its join is interrupted, it counts as dead but goes on writing.
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def start(self, write: Callable[[], None]) -> None:
        """Begin a write after the one before it; write at once if a thread does not pay."""
        self.wait()
        if not pays(self._device):
            write()
        elif self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            ready = torch.cuda.Event()
            ready.record(stream)
            self._last = self._thread.submit(_write_when, ready, stream.device, write)
        else:
            self._last = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until all is written; an interrupt ends the waiting, but not the writing."""
        if self._last is not None:
            wait([self._last])
            last, self._last = self._last, None
            last.result()


def _write_when(ready: torch.cuda.Event, device: torch.device, write: Callable[[], None]) -> None:
    ready.synchronize()
    # A stream with a priority, because all others belong to runs, which may be capturing.
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        write()
