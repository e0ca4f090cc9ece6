"""Work that is captured once and then replayed: as a CUDA graph, or on a CPU as a tape.

A body of work reads and writes tensors that stay where they are, and depends on nothing else.
"""

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch

from .tape import Body, taped

OFTEN = 24  # times: what has come so often will come again, and a tape is dear to make


class _Often:
    """Work on a CPU that is taped once it has shown to come often, or is known to."""

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
        """Capture a body where it is new; what it does to its tensors meanwhile is of no use.

        coming: how many times it is about to be called, for all that is known.
        """
        if kind not in self:
            cuda = self._device.type == "cuda"
            self._graphs[kind] = self._captured(body) if cuda else _Often(body, coming)

    def __call__(self, kind: Hashable) -> None:
        self._graphs[kind]()

    def _captured(self, body: Body) -> Body:
        # Not by torch.cuda.graph, which waits for the whole device, on which others are at work.
        # And on the stream that it will be replayed on: the libraries keep a work space a stream,
        # and graphs that share one must not run at the same time.
        stream = torch.cuda.current_stream(self._device)
        if stream == torch.cuda.default_stream(self._device):
            raise RuntimeError("A graph cannot be captured on the default stream.")
        body()  # once before, in which libraries settle
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            body()
        except BaseException:
            with suppress(RuntimeError):  # the error that ended it is the one to tell
                graph.capture_end()
            raise
        graph.capture_end()
        self._pool = graph.pool()
        return graph.replay
