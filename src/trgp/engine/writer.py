"""Writing beside what goes on, where that pays: by a thread that waits for device and disk."""

import threading
from collections.abc import Callable

import torch


def pays(device: torch.device) -> bool:
    """On a GPU all runs of a company would wait; on a CPU a run has the one core that it has."""
    return device.type == "cuda"


class Writer:
    """One piece of writing at a time; what goes wrong with it `start` or `wait` raises."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], None]) -> None:
        """Begin, once what was begun before is done; where it does not pay, write."""
        self.wait()
        if not pays(self._device):
            write()
            return
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        self._thread = threading.Thread(target=self._run, args=(write, ready))
        self._thread.start()

    def wait(self) -> None:
        """Until all is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], None], ready: torch.cuda.Event | None) -> None:
        try:
            if ready is None:
                write()
                return
            ready.synchronize()
            # Of the streams with a priority: all others belong to runs, which may be capturing.
            with torch.cuda.stream(torch.cuda.Stream(self._device, priority=-1)):
                write()
        except Exception as error:
            self._error = error
