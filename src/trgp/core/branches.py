"""Work that need not wait for each other, as branches of one CUDA graph.

Every layer's update is a chain of small kernels. In a graph the chains of several layers can run
at the same time, if they are captured on streams of their own; and so can what an update needs of a
layer's inputs, while the pass goes on.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

_BRANCHES: dict[torch.cuda.Stream, Sequence[torch.cuda.Stream]] = {}
_OPEN: dict[torch.cuda.Stream, set[torch.cuda.Stream]] = {}  # with work that nobody waits for yet


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
    branches = _of_capture()
    if not branches:
        yield from items
        return
    main = torch.cuda.current_stream()
    for branch in branches:
        branch.wait_stream(main)
    try:
        for k, item in enumerate(items):
            with torch.cuda.stream(branches[k % len(branches)]):
                yield item
    finally:  # also where the work failed: a capture cannot end while a branch is open
        for branch in branches:
            main.wait_stream(branch)


@contextmanager
def aside(k: int) -> Iterator[None]:
    """Work in the k-th branch, which goes on from here; nobody waits for it until `join`.

    What it reads must be kept until then.
    """
    branches = _of_capture()
    if not branches:
        yield
        return
    main, branch = torch.cuda.current_stream(), branches[k % len(branches)]
    branch.wait_stream(main)
    _OPEN.setdefault(main, set()).add(branch)
    with torch.cuda.stream(branch):
        yield


def join() -> None:
    """Go on when all that went on `aside` is through."""
    if _OPEN:
        main = torch.cuda.current_stream()
        for branch in _OPEN.pop(main, ()):
            main.wait_stream(branch)


def _of_capture() -> Sequence[torch.cuda.Stream]:
    """Those of the stream that is being captured, if any is."""
    if not _BRANCHES or not torch.cuda.is_current_stream_capturing():
        return ()
    return _BRANCHES.get(torch.cuda.current_stream(), ())
