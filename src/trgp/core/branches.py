"""Work that need not wait for each other, as branches of one CUDA graph.

Every layer's update is a chain of small kernels. In a graph the chains of several layers can run
at the same time, if they are captured on streams of their own.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

_BRANCHES: dict[torch.cuda.Stream, Sequence[torch.cuda.Stream]] = {}


def set_branches(stream: torch.cuda.Stream, branches: Sequence[torch.cuda.Stream]) -> None:
    """From now on work that is captured on a stream may branch to these, and to nobody else's.

    The libraries keep a work space a stream, so two graphs that run at the same time must not have
    been captured on the same ones.
    """
    _BRANCHES[stream] = branches


def side_by_side(items: Iterable[T]) -> Iterator[T]:
    """The items one by one, each to be worked on in a branch while a graph is captured.

    What the branches read must be kept until all are through: memory that is freed meanwhile may be
    given away by a stream that does not wait for them.
    """
    if not _BRANCHES or not torch.cuda.is_current_stream_capturing():
        yield from items
        return
    main = torch.cuda.current_stream()
    branches = _BRANCHES.get(main, ())
    if not branches:
        yield from items
        return
    for branch in branches:
        branch.wait_stream(main)
    try:
        for k, item in enumerate(items):
            with torch.cuda.stream(branches[k % len(branches)]):
                yield item
    finally:  # also where the work failed: a capture cannot end while a branch is open
        for branch in branches:
            main.wait_stream(branch)
