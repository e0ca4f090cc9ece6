"""Writing beside what goes on, where that pays: by a thread that waits for device and disk."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch


def pays(device: torch.device) -> bool:
    """On a GPU all runs of a company would wait; on a CPU a run has the one core that it has."""
    return device.type == "cuda"


class Writer:
    """One piece of writing after another; what goes wrong with it `start` or `wait` raises."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # No thread to join: one whose join is interrupted counts as dead, and goes on writing.
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def start(self, write: Callable[[], None]) -> None:
        """Begin, once what was begun before is done; where it does not pay, write."""
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
        """Until all is written; an interrupt ends the waiting, and not the writing."""
        if self._last is not None:
            wait([self._last])
            last, self._last = self._last, None
            last.result()


def _write_when(ready: torch.cuda.Event, device: torch.device, write: Callable[[], None]) -> None:
    ready.synchronize()
    # Of the streams with a priority: all others belong to runs, which may be capturing.
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        write()
