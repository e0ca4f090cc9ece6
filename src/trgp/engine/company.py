"""Concurrent runs on one device.

Every run has its own stream, on which its steps are replayed, and all runs take turns in a single
thread: while the device works off what one run has queued, the others queue theirs. Runs of equal
shapes, with networks so small that a step is all overhead, are vmapped instead and share every
step.

A run's random numbers depend on its seed alone. On its own stream it ends with the same bits as
alone; a vmapped run ends with the bits of the same place in any group of the same width.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import torch
from torch import nn

from ..methods.base import Method
from .captured import CapturedTask
from .errors import RunError
from .gradients import Gradients, loss_and_gradients
from .sequence import Sequencer
from .stacked import draws, vmaps
from .stream import Stream
from .train import Trained, Work, train_epoch


def stacks_well(method: Method, x: torch.Tensor) -> bool:
    """Whether runs of a method are faster vmapped than on streams, judged by some samples.

    Measured: vmapped convolutions become grouped ones, which are slower than streams. Dropout would
    draw for the whole group at once, and running statistics cannot be vmapped.
    """
    network = method.network
    convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in network.module.modules())
    return (
        method.stackable()
        and not convolves
        and not network.buffers
        and not draws(network, x)
        and vmaps(network, x)
    )


class Member:
    """One of several concurrent runs."""

    def __init__(
        self, sequencer: Sequencer, captured: bool, stream: Stream, compiled: bool = False
    ) -> None:
        """`stream` is the run's own, or the one of its vmapped group."""
        self.sequencer = sequencer
        self.method = sequencer.method
        self.asked: Work | None = None
        self.over = False
        self.error: RunError | None = None
        self._stream = stream
        self._captured = captured
        self._compiled = compiled
        self._turns = sequencer.learn()
        self._steps: CapturedTask | None = None
        self._training: Generator[None, None, Trained] | None = None

    @property
    def members(self) -> Sequence["Member"]:
        return [self]

    def turn(self) -> AbstractContextManager[None]:
        return self._stream.turn()

    def take_turn(self) -> None:
        """Advance to the next pause: queue some steps, or read the result of an epoch."""
        if self._training is None:
            self.go_on()
        if self.asked is not None:
            self._training = self._trained(self.asked)
            self.asked = None
        if self._training is not None:
            with self.turn():
                try:
                    next(self._training)
                except StopIteration as end:
                    self._training = None
                    trained = end.value
                else:
                    return
            self.go_on(trained)

    def go_on(self, answer: Trained | None = None) -> None:
        """Advance until the run requests an epoch, pauses or ends."""
        self.asked = None
        with self.turn():
            try:
                self.asked = self._turns.send(answer)
            except StopIteration:
                self.over = True
            except RunError as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the run with an error, unless it has ended; its finished epochs are saved."""
        if not self.over:
            told = error if isinstance(error, RunError) else None
            self.over, self.asked = True, None
            self.error = told or RunError(f"{type(error).__name__}: {error}")
            with suppress(Exception):  # report the error that ended the run
                self.sequencer.save()

    def _trained(self, work: Work) -> Generator[None, None, Trained]:
        if not self._captured:
            return train_epoch(self.method, work)
        if self._steps is None or self._steps.task != work.epoch.task:
            if self._steps is not None:  # free the old task before the new one allocates
                self._steps.forget()
                self._steps = None
            gradients: Gradients = loss_and_gradients
            if self._compiled:
                from .compiled import Compiler  # imports torch's: takes seconds, rarely needed

                gradients = Compiler(work.epoch.batch_size)
            self._steps = CapturedTask(self.method, [work], gradients=gradients)
        (trained,) = yield from self._steps.train([work])
        return trained


class Stack:
    """Vmapped runs, which share every step and one stream."""

    def __init__(self, sequencers: Mapping[int, Sequencer], width: int, stream: Stream) -> None:
        """`sequencers` by place; of the `width` places some may be empty."""
        self._places = {
            place: Member(each, captured=True, stream=stream) for place, each in sequencers.items()
        }
        for each in sequencers.values():
            each.stacked = True
        self._width = width
        self._group: dict[int, Member] = {}
        self._steps: CapturedTask | None = None
        self._proven = False  # whether an epoch was trained: torch can vmap these runs
        self._held: frozenset[int] = frozenset()  # the places whose runs are captured
        self._training: Generator[None, None, list[Trained]] | None = None

    @property
    def members(self) -> list[Member]:
        return list(self._places.values())

    def take_turn(self) -> None:
        """Queue steps of the runs furthest behind, once all have requested an epoch.

        Runs that end a task early therefore wait for the others. Every run keeps its place, and an
        empty place gets a copy of another run: a run's bits do not depend on the other runs.
        """
        if self._training is None:
            for member in self.members:
                while member.asked is None and not member.over:
                    member.go_on()
            stages = {k: self._stage(m) for k, m in self._places.items() if m.asked is not None}
            if not stages:
                return
            now = min(stages.values())
            self._group = {k: self._places[k] for k, stage in stages.items() if stage == now}
            self._training = self._trained()
        first = next(iter(self._group.values()))
        with first.turn():
            try:
                next(self._training)
            except StopIteration as end:
                self._training, self._proven = None, True
                trained = end.value
            except RuntimeError as error:
                if self._proven or isinstance(error, torch.OutOfMemoryError):
                    raise
                name = type(first.method).__name__
                raise RunError(
                    f"{name} cannot be vmapped over several seeds ({error}); let its stackable() "
                    "return False, or give --together 1 and --fresh."
                ) from error
            else:
                return
        for place, member in self._group.items():
            member.go_on(trained[place])

    def _trained(self) -> Generator[None, None, list[Trained]]:
        asked = {k: member.asked for k, member in self._group.items() if member.asked is not None}
        copied = next(iter(asked.values()))
        works = [asked.get(place, copied) for place in range(self._width)]
        task = copied.epoch.task
        if self._steps is None or self._steps.task != task or not asked.keys() <= self._held:
            if self._steps is not None:
                self._steps.forget()
                self._steps = None
            method = next(iter(self._group.values())).method
            self._steps = CapturedTask(method, works, stacked=True)
            self._held = frozenset(asked)
        return (yield from self._steps.train(works))

    def _stage(self, member: Member) -> tuple[int, bool]:
        """Key of the runs that train together: the task, and whether it is new, if that matters."""
        assert member.asked is not None
        epoch = member.asked.epoch
        return epoch.task, not ("first" in member.method.needs and epoch.number == 0)


@dataclass(frozen=True)
class Waiting:
    """Runs that begin when there is room for them, as one vmapped group or a single run."""

    runs: int
    begin: Callable[[Stream], Member | Stack | None]
    """Start on a stream; None if there is nothing left to do."""


def together(
    waiting: Sequence[Waiting], streams: Sequence[Stream], most: int, forgiving: bool
) -> Iterator[Member]:
    """Train all runs in order, and yield each run when it ends.

    Args:
        streams: as many as groups or single runs can train at the same time; one that is waiting
            gets the stream of one that has ended.
        most: upper bound on concurrent runs, except within a single group.
        forgiving: whether an error other than a `RunError`, for example in a method, is also
            reported as the failure of its own run or group.
    """
    queue = deque(waiting)
    free = list(streams)
    going: dict[Member | Stack, Stream] = {}
    left: list[Member] = []
    while queue or going:
        while queue and free and (not left or len(left) + queue[0].runs <= most):
            stream = free.pop()
            unit = queue.popleft().begin(stream)
            if unit is None:
                free.append(stream)
            else:
                going[unit] = stream
                left += unit.members
        for unit in list(going):
            for member in unit.members:
                member.sequencer.company = len(left)
            try:
                unit.take_turn()
            except Exception as error:
                if not (forgiving or isinstance(error, RunError)):
                    raise
                for member in unit.members:
                    member.fail(error)
            for member in [m for m in unit.members if m.over and m in left]:
                left.remove(member)
                yield member
            if not any(member in left for member in unit.members):
                free.append(going.pop(unit))
