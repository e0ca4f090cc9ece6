"""Runs in their own processes: one that is killed or crashes ends no other."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors import InputError, RunError
from .events import Event, Observer, nobody
from .run import run

Job = dict[str, Any]
"""The arguments of `run`."""

PATIENCE = 10.0  # seconds that runs have to save finished epochs


class CrashError(Exception):
    """A run failed with an unforeseen error; the note holds its traceback."""


class Answer(NamedTuple):
    """The end of a job: its error, if any."""

    failure: tuple[type[Exception], tuple[Any, ...], dict[str, Any]] | None = None
    """Class, arguments and attributes of an error, since not every error can be pickled."""
    usable: bool = True
    """Whether the process can do another job."""

    @property
    def error(self) -> Exception | None:
        if self.failure is None:
            return None
        kind, args, values = self.failure
        error = kind.__new__(kind, *args)
        vars(error).update(values)
        return error

    @classmethod
    def of(cls, error: Exception, usable: bool = True) -> "Answer":
        return cls((type(error), error.args, vars(error)), usable)


class Worker:
    """A process that does jobs in turn; starting it is slow, if only for importing torch."""

    def __init__(self, start: str) -> None:
        """`start` is spawn (a new program) or fork (a copy of this one)."""
        context: Any = multiprocessing.get_context(start)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        if start == "spawn":
            resource_tracker.ensure_running()  # now, because its start unblocks signals
        # The new process inherits blocked signals. A terminal sends Ctrl-C to all processes, but
        # only this one handles it, and ends the others.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with warnings.catch_warnings():
                # It says that a copy lacks this program's other threads, which it does not need.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # so that the pipe ends when the process ends

    def begin(self, job: Job, tells: bool) -> None:
        """Send a job; `tells` decides whether events are reported before the answer."""
        with suppress(OSError):  # the process has died: `said` reports it
            self.pipe.send((job, tells))

    def said(self) -> Event | Answer:
        """Receive the next event or the answer of the job."""
        try:
            message: Event | Answer = self.pipe.recv()
            return message
        except (EOFError, OSError):
            self.process.join()
            return Answer.of(RunError(_died(self.process.exitcode)), usable=False)

    def end(self) -> None:
        """Kill the process at once: saved files are always complete."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def in_processes(jobs: Sequence[Job], count: int) -> Generator[tuple[int, str | None]]:
    """Do up to `count` jobs at a time; yield the index and the error text of each that ends.

    If closed early, it ends all processes, after their runs have saved finished epochs.
    """
    with closing(watched(jobs, count)) as ends:
        for place, error in ends:
            yield place, None if error is None else str(error)


def watched(
    jobs: Sequence[Job], count: int, observer: Observer = nobody, start: str = "spawn"
) -> Generator[tuple[int, Exception | None]]:
    """Do the jobs, yield errors as exceptions, and pass the jobs' events to the observer."""
    waiting = deque(range(len(jobs)))
    idle: list[Worker] = []
    busy: dict[Any, tuple[Worker, int]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < count:
                worker = idle.pop() if idle else Worker(start)
                place = waiting.popleft()
                busy[worker.pipe] = worker, place
                worker.begin(jobs[place], observer is not nobody)
            for pipe in wait(list(busy)):
                worker, place = busy[pipe]
                said = worker.said()
                if not isinstance(said, Answer):
                    observer(said)
                    continue
                del busy[pipe]
                if said.usable:
                    idle.append(worker)
                else:
                    worker.end()
                yield place, said.error
    except BaseException as error:
        # Epochs that finish after Ctrl-C are still reported, for example to the log.
        heard = observer if isinstance(error, KeyboardInterrupt) else nobody
        _let_save([worker for worker, _ in busy.values()], heard)
        raise
    finally:
        for worker in [*idle, *(worker for worker, _ in busy.values())]:
            worker.end()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quickest_start() -> str:
    """Return fork, which starts at once, where it is safe: on Linux without CUDA."""
    return "fork" if sys.platform == "linux" and not torch.cuda.is_available() else "spawn"


def forget_peak() -> None:
    """Reset the peak memory of the process, where the system can (Linux), and of GPUs."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)


def _let_save(workers: Iterable[Worker], observer: Observer) -> None:
    """Interrupt the runs, and wait until they have saved finished epochs."""
    deadline = time.monotonic() + PATIENCE
    busy = {worker.pipe: worker for worker in workers}
    for worker in busy.values():
        worker.process.terminate()
    while busy and (ready := wait(list(busy), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            said = busy[pipe].said()
            if isinstance(said, Answer):
                del busy[pipe]
            else:
                observer(said)


def _work(pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # other processes use the other cores
    answer = Answer()
    while answer.usable:
        try:
            job, tells = pipe.recv()
        except EOFError:
            return
        answer = _done(job, pipe.send if tells else nobody)
        pipe.send(answer)


def _done(job: Job, observer: Observer) -> Answer:
    """Do a job, unless it is interrupted."""
    try:
        with _interruptible():
            return _tried(job, observer)
    except KeyboardInterrupt:  # may also come while an error is reported
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return Answer.of(RunError("Its process was terminated; every finished epoch is saved."))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM interrupt the work while open, as Ctrl-C does in the foreground."""
    before = sys.unraisablehook
    sys.unraisablehook = _come_again
    signal.signal(signal.SIGALRM, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.unraisablehook = before


def _tried(job: Job, observer: Observer) -> Answer:
    try:
        forget_peak()
        run(**job, observer=observer)
    except (InputError, RunError) as error:
        return Answer.of(error)
    except Exception as error:
        crash = CrashError(f"{type(error).__name__}: {error}")
        crash.add_note(traceback.format_exc().rstrip())
        return Answer.of(crash, usable=False)  # a GPU may be in a bad state
    return Answer()


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the saving
    raise KeyboardInterrupt


def _come_again(unraisable: Any) -> None:
    """Re-send an interrupt that arrived in a finaliser, where Python drops it."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(unraisable)


def _end_with_parent() -> None:
    """End this process when the parent ends, since killing the parent is to end all."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _died(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"Its process was killed by {name}; if memory ran out, give fewer --jobs."
    return f"Its process ended with exit code {code} in the middle of the run."
