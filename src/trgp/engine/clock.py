"""Time accounting for concurrent runs, which take turns in one thread.

Steps, validation and, except for vmapped runs, evaluation are queued in turns: a run is charged its
share of the time that they take. All other work between epochs blocks the other runs: it is charged
to its run in full, and left out of the time that the runs share. The times of all runs therefore
add up to no more than the time that passed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Spent = dict[str, float]
"""Seconds by phase."""


class Clock:
    """One clock for all runs that take turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._company = 1
        self._at = time.perf_counter()  # time is counted up to here
        self._open = 0.0  # shared seconds, charged to no run alone
        self._share = 0.0  # each run's share of these seconds
        # By stream: vmapped runs validate one after another, and all of them wait for it.
        self._queued: dict[object, list[tuple[Any, Any]]] = {}
        self._validated: dict[object, float] = {}

    def among(self, company: int) -> None:
        """Set how many runs share the time from now on."""
        if company != self._company:
            self._count()
            self._company = company

    @contextmanager
    def alone(self, spent: Spent, phase: str) -> Iterator[None]:
        """Charge blocking work to this run in full, however many others wait.

        On a GPU the charge is somewhat too high: meanwhile it works off what others have queued.
        """
        self._count()
        yield
        now = time.perf_counter()
        _add(spent, phase, now - self._at)
        self._at = now

    @contextmanager
    def shared(self, spent: Spent, phase: str) -> Iterator[None]:
        """Time work interleaved with other runs, between two device syncs."""
        self._count()
        opened, share, validated = self._open, self._share, self._validation()
        yield
        self._count()
        passed, share = self._open - opened, self._share - share
        # On a GPU, validation may have gone on while another run blocked the thread.
        validation = min(passed, self._validation() - validated)
        validation = share * validation / passed if passed else 0.0
        _add(spent, phase, share - validation)
        _add(spent, "validation", validation)

    def _count(self) -> None:
        now = time.perf_counter()
        self._open += now - self._at
        self._share += (now - self._at) / self._company
        self._at = now

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Mark the validation within the shared time, without waiting for the device."""
        stream = self._stream()
        begin, end = self._event(), self._event()
        begin.record(stream)
        yield
        end.record(stream)
        self._queued.setdefault(stream, []).append((begin, end))

    def _validation(self) -> float:
        """Seconds of validation so far on the stream of this run."""
        stream = self._stream()
        queued = self._queued.get(stream, [])
        while queued and queued[0][1].query():
            begin, end = queued.pop(0)
            milliseconds = begin.elapsed_time(end)
            self._validated[stream] = self._validated.get(stream, 0.0) + milliseconds / 1000
        return self._validated.get(stream, 0.0)

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self._device.type == "cuda" else _Moment()


class _Moment:
    """Stand-in for a CUDA event on a CPU, where queued work is already done."""

    def record(self, stream: None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Moment") -> float:
        return 1000 * (end._at - self._at)


def _add(spent: Spent, phase: str, seconds: float) -> None:
    spent[phase] = spent.get(phase, 0.0) + seconds
