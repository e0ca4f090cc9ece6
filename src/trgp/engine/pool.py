"""Runs in processes of their own: one that is killed or breaks down takes no other with it."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from .errors import InputError, RunError
from .run import run

Job = dict[str, Any]
"""The arguments of `run`."""


class Worker:
    """A process that does one job after another; making it is dear, importing torch alone."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork has neither CUDA nor threads
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        # Blocked signals stay so in the new process: Ctrl-C, which a terminal sends to all, is for
        # the one that has them to end.
        resource_tracker.ensure_running()  # which unblocks them when it is started
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that the end of the process is the end of the pipe

    def begin(self, job: Job) -> None:
        with suppress(OSError):  # of one that has died: its answer says so
            self.pipe.send(job)

    def answer(self) -> tuple[str | None, bool]:
        """What is wrong with the job, None if nothing, and whether the process can go on."""
        try:
            failure, usable = self.pipe.recv()
            return failure, usable
        except (EOFError, OSError):
            self.process.join()
            return _died(self.process.exitcode), False

    def end(self) -> None:
        """At once: whatever a run has saved is whole."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def in_processes(jobs: Sequence[Job], count: int) -> Generator[tuple[int, str | None]]:
    """Do the jobs, so many at a time: the place of each when it ends, and what went wrong.

    Closed early, it ends all processes.
    """
    waiting = deque(range(len(jobs)))
    idle: list[Worker] = []
    busy: dict[Any, tuple[Worker, int]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < count:
                worker = idle.pop() if idle else Worker()
                place = waiting.popleft()
                busy[worker.pipe] = worker, place
                worker.begin(jobs[place])
            for pipe in wait(list(busy)):
                worker, place = busy[pipe]
                failure, usable = worker.answer()
                del busy[pipe]
                if usable:
                    idle.append(worker)
                else:
                    worker.end()
                yield place, failure
    finally:
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.end()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def forget_peak() -> None:
    """Let the peak of memory be that of what comes now, where the system can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)


def _work(pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # there are other processes for the other cores
    usable = True
    while usable:
        try:
            job = pipe.recv()
        except EOFError:
            return
        failure = None
        try:
            forget_peak()
            run(**job)
        except (InputError, RunError) as error:
            failure = str(error)
        except Exception as error:
            failure, usable = f"{type(error).__name__}: {error}", False  # a GPU may be in disorder
        pipe.send((failure, usable))


def _end_with_parent() -> None:
    """Whoever kills the parent means all of them."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _died(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"Its process was killed by {name}; if memory ran out, give fewer --jobs."
    return f"Its process ended with exit code {code} in the middle of the run."
