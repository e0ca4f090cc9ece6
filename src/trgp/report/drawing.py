"""Many figures, by several processes where that is quicker."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from .draw import drawn
from .model import Chart

EACH = 20  # figures that a process must have to draw, or its start takes longer than they do
MOST = 8  # processes


def all_drawn(charts: Sequence[Chart]) -> Iterator[Mapping[str, bytes]]:
    """Every figure's files by their endings, in the order of the charts."""
    processes = min(len(charts) // EACH, _cores(), MOST)
    if processes < 2:
        yield from map(drawn, charts)
        return
    # Not forked: torch and the progress bar have threads, which no fork takes along.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _leave_interrupts)
    try:
        yield from pool.map(drawn, charts, chunksize=2)
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C is for the process that waits for these, which then ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    may = getattr(os, "sched_getaffinity", None)
    return len(may(0)) if may else os.cpu_count() or 1
