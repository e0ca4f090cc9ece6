"""Runs that learn at the same time on one device.

Every run has its own stream, on which its steps are replayed, and all take turns in the one thread
that there is: while the device works off what one has queued, the others queue theirs. Runs of
equal shapes, with networks so small that a step is all overhead, are stacked on each other instead
and share every step.

A run's draws are keyed by its seed alone. On a stream of its own it comes to the bits that it comes
to alone; in a stack to those of the same place in any stack as wide.
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
    """Whether runs of a method are better stacked than side by side, judged by some samples.

    Measured: stacked convolutions become grouped ones, which are slower than streams. Dropout would
    draw for the whole stack at once, and running statistics cannot be stacked.
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
    """One run among others."""

    def __init__(
        self, sequencer: Sequencer, captured: bool, stream: Stream, compiled: bool = False
    ) -> None:
        """`stream` is its own, or that of the stack it belongs to."""
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
        """Up to the next pause: some steps are queued, or what came of an epoch is read."""
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
        """Up to where the run asks for an epoch, pauses or ends."""
        self.asked = None
        with self.turn():
            try:
                self.asked = self._turns.send(answer)
            except StopIteration:
                self.over = True
            except RunError as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """End with an error, if it has not ended already; its finished epochs are saved."""
        if not self.over:
            told = error if isinstance(error, RunError) else None
            self.over, self.asked = True, None
            self.error = told or RunError(f"{type(error).__name__}: {error}")
            with suppress(Exception):  # the error that ended it is the one to tell
                self.sequencer.save()

    def _trained(self, work: Work) -> Generator[None, None, Trained]:
        if not self._captured:
            return train_epoch(self.method, work)
        if self._steps is None or self._steps.task != work.epoch.task:
            if self._steps is not None:  # the old task goes before the new one comes
                self._steps.forget()
                self._steps = None
            gradients: Gradients = loss_and_gradients
            if self._compiled:
                from .compiled import Compiler  # which imports torch's: seconds, and rarely needed

                gradients = Compiler(work.epoch.batch_size)
            self._steps = CapturedTask(self.method, [work], gradients=gradients)
        (trained,) = yield from self._steps.train([work])
        return trained


class Stack:
    """Members that share every step, and one stream."""

    def __init__(self, sequencers: Mapping[int, Sequencer], width: int, stream: Stream) -> None:
        """`sequencers` by their places in a stack of some width, of which some may be empty."""
        self._places = {
            place: Member(each, captured=True, stream=stream) for place, each in sequencers.items()
        }
        for each in sequencers.values():
            each.stacked = True
        self._width = width
        self._group: dict[int, Member] = {}
        self._steps: CapturedTask | None = None
        self._proven = False  # whether an epoch was trained: torch can stack these runs
        self._held: frozenset[int] = frozenset()  # the places whose runs the steps know
        self._training: Generator[None, None, list[Trained]] | None = None

    @property
    def members(self) -> list[Member]:
        return list(self._places.values())

    def take_turn(self) -> None:
        """Some steps of those furthest behind, once all have asked for an epoch.

        So runs that end a task early wait for the others. Every run keeps its place, and in one
        that is empty another is copied: the bits of a run are the same whoever else is there.
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
                    f"{name} cannot be stacked over several seeds ({error}); let its stackable() "
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
        """What those that train together have in common: the task, and whether it is new to them
        where that makes a difference."""
        assert member.asked is not None
        epoch = member.asked.epoch
        return epoch.task, not ("first" in member.method.needs and epoch.number == 0)


@dataclass(frozen=True)
class Waiting:
    """Runs that begin when there is room for them."""

    runs: int
    begin: Callable[[Stream], Member | Stack | None]
    """None if there is nothing left to do."""


def together(
    waiting: Sequence[Waiting], streams: Sequence[Stream], most: int, forgiving: bool
) -> Iterator[Member]:
    """Let all learn, in their order and so many runs at a time, and give each back at its end.

    streams: one for all that can go on at the same time; another takes that of one that has ended.
    forgiving: whether whatever else goes wrong than a `RunError`, in a method say, is also told as
        the failure of that run alone.
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
