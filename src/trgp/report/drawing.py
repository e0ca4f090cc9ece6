"""Draw many figures, in several processes where that is faster."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from .draw import drawn
from .model import Chart

EACH = 20  # figures per process; with fewer, starting it takes longer than drawing them
MOST = 8  # processes


def all_drawn(charts: Sequence[Chart]) -> Iterator[Mapping[str, bytes]]:
    """Draw every chart; yield its files by extension, in the order of the charts."""
    processes = min(len(charts) // EACH, _cores(), MOST)
    if processes < 2:
        yield from map(drawn, charts)
        return
    # Spawned, because a fork would lose the threads of torch and the progress bar.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _leave_interrupts)
    try:
        yield from pool.map(drawn, charts, chunksize=2)
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts() -> None:
    """Ignore Ctrl-C; the parent process handles it and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _cores() -> int:
    """Return the number of cores this process may use, or all if the system does not say."""
    may = getattr(os, "sched_getaffinity", None)
    return len(may(0)) if may else os.cpu_count() or 1
