"""Work that is captured once and then replayed: as a CUDA graph, or on a CPU as a recording.

A body of work reads and writes tensors at fixed addresses, and depends on nothing else.
"""

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch

from .tape import Body, taped

OFTEN = 24  # calls: work that came so often will come again, and recording is slow


class _Often:
    """Work on a CPU that is recorded once it has come often, or is known to."""

    def __init__(self, body: Body, coming: int) -> None:
        self._work = body
        self._wait = max(1, OFTEN - coming)

    def __call__(self) -> None:
        self._wait -= 1
        if self._wait == 0:
            self._work = taped(self._work)
        self._work()


class Replay:
    """Bodies of work by kind, all on one stream, one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, Body] = {}
        self._pool: Any = None

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._graphs

    def prepare(self, kind: Hashable, body: Body, coming: int) -> None:
        """Capture a body of a new kind; the capture leaves its tensors with useless content.

        Args:
            coming: the number of calls to come, as far as known.
        """
        if kind not in self:
            cuda = self._device.type == "cuda"
            self._graphs[kind] = self._captured(body) if cuda else _Often(body, coming)

    def __call__(self, kind: Hashable) -> None:
        self._graphs[kind]()

    def _captured(self, body: Body) -> Body:
        # Not torch.cuda.graph, which waits for the whole device, which other runs are using. And
        # on the stream of the replay: libraries keep a work space per stream, and graphs that
        # share one must not run at the same time.
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device):
            raise RuntimeError("A graph cannot be captured on the default stream; use a Stream.")
        body()  # a first call, in which libraries initialise
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            body()
        except BaseException:
            with suppress(RuntimeError):  # report the error that ended the capture
                graph.capture_end()
            raise
        graph.capture_end()
        self._pool = graph.pool()
        return graph.replay
