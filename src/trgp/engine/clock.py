"""Whose the time is, where several runs take turns in one thread.

Steps, validation and, but for stacks, evaluation are queued in turns: a run counts its share of the
time that they take. What else a run does between epochs all others wait for: it is counted whole,
as that run's, and left out of what the others share. So what all runs count adds up to no more than
what passed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Spent = dict[str, float]
"""Seconds by phase."""


class Clock:
    """One for all runs that take turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._company = 1
        self._at = time.perf_counter()  # until when time has been counted
        self._open = 0.0  # seconds that no run had for itself
        self._share = 0.0  # what each run's share of these has come to
        # By stream: what a stack's runs validate after each other all of them wait for.
        self._queued: dict[object, list[tuple[Any, Any]]] = {}
        self._validated: dict[object, float] = {}

    def among(self, company: int) -> None:
        """From now on so many runs share the time."""
        if company != self._company:
            self._count()
            self._company = company

    @contextmanager
    def alone(self, spent: Spent, phase: str) -> Iterator[None]:
        """What others wait for, counted whole however many they are.

        On a GPU that is rather too much: meanwhile it works off what the others have queued.
        """
        self._count()
        yield
        now = time.perf_counter()
        _add(spent, phase, now - self._at)
        self._at = now

    @contextmanager
    def shared(self, spent: Spent, phase: str) -> Iterator[None]:
        """What takes turns, from where the run has waited for the device to where it has again."""
        self._count()
        opened, share, validated = self._open, self._share, self._validation()
        yield
        self._count()
        passed, share = self._open - opened, self._share - share
        # On a GPU it may have gone on while another run had the thread for itself.
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
        """What of the shared time is validation; nobody waits for it here."""
        stream = self._stream()
        begin, end = self._event(), self._event()
        begin.record(stream)
        yield
        end.record(stream)
        self._queued.setdefault(stream, []).append((begin, end))

    def _validation(self) -> float:
        """Seconds so far, where this run's work is queued."""
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
    """An event on a CPU, which has done what it was given to do."""

    def record(self, stream: None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Moment") -> float:
        return 1000 * (end._at - self._at)


def _add(spent: Spent, phase: str, seconds: float) -> None:
    spent[phase] = spent.get(phase, 0.0) + seconds
