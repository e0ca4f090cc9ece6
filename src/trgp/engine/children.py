"""Training of children: networks that a method needs before or after a task's own epochs.

A child is trained like a task, with the run's learning rate, batch size and plateau rule, and with
captured steps if the run has them. Children of one call that differ only in parameters and moving
state share one captured step, into which each is loaded in turn; a child's bits do not depend on
the other children.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ..benchmarks.data import Tensors
from ..draws import seed_of
from ..methods.base import Child, TrainedChild
from ..tree import leaves
from ..types import Params
from .batches import Part
from .captured import CapturedTask
from .config import Training
from .divergence import LIMIT
from .evaluate import Evaluation
from .schedule import Schedule
from .train import Epoch, Trained, Work, diverged, train_epoch, trained_names


class TaskContext(Protocol):
    """The part of a task's context that training its children needs."""

    @property
    def training(self) -> Training: ...
    @property
    def seed(self) -> int: ...
    @property
    def task(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def train(self) -> Tensors: ...
    @property
    def valid(self) -> Tensors | None: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def captured(self) -> bool: ...


def train_children(
    ctx: TaskContext, children: Sequence[Child], epochs: int, purpose: str
) -> list[TrainedChild]:
    """Train every child on the task's train samples.

    Args:
        epochs: upper bound; with a patience, the weights of the best validation loss are returned.
        purpose: key of the order of samples, together with the run's seed and the task.
    """
    trainer = _Trainer(ctx, epochs, purpose)
    try:
        return [trainer.train(child) for child in children]
    finally:
        trainer.forget()


class _Trainer:
    """Captured steps and evaluations that the children of one call share."""

    def __init__(self, ctx: TaskContext, epochs: int, purpose: str) -> None:
        self._ctx = ctx
        self._training = replace(ctx.training, epochs=epochs)
        self._seed = seed_of(ctx.seed, "children", purpose)
        self._train = Part(ctx.task, ctx.head, ctx.train)
        self._valid = Part(ctx.task, ctx.head, ctx.train if ctx.valid is None else ctx.valid)
        self._evaluations: dict[int, Evaluation] = {}
        self._steps: dict[object, CapturedTask] = {}

    def train(self, child: Child) -> TrainedChild:
        schedule = Schedule(self._training.lr)
        best: TrainedChild | None = None
        while not schedule.over:
            work = self._work(child, schedule)
            trained = self._epoch(child, work._replace(params=_apart(child)))
            child = child._replace(params=trained.params, state=trained.state)
            now = self._measured(child)
            if not (float(trained.loss) <= LIMIT and now.loss <= LIMIT):
                raise diverged(child.method, work)
            if schedule.after_epoch(now.loss, self._training) or not self._training.patience:
                best = now
        assert best is not None
        return best

    def forget(self) -> None:
        """Release the captured steps, which keep their tensors alive."""
        for steps in self._steps.values():
            steps.forget()

    def _work(self, child: Child, schedule: Schedule) -> Work:
        method, task = child.method, self._ctx.task
        epoch = Epoch(
            self._seed,
            task,
            schedule.epoch,
            [self._train],
            self._ctx.batch_size,
            schedule.lr,
            trained_names(method, child.params, task),
        )
        return Work(_apart(child), child.state, epoch)

    def _epoch(self, child: Child, work: Work) -> Trained:
        if not self._ctx.captured:
            return train_epoch(child.method, work)
        key = _shared_by(child)
        if key not in self._steps:
            self._steps[key] = CapturedTask(child.method, [work])
        (trained,) = _result(self._steps[key].train([work]))
        return trained

    @torch.no_grad()
    def _measured(self, child: Child) -> TrainedChild:
        network = child.method.network
        if id(network) not in self._evaluations:
            self._evaluations[id(network)] = Evaluation(network, self._ctx.captured)
        weights = child.method.weights_for(child.params, child.state, self._ctx.task)
        figures = self._evaluations[id(network)](
            weights, self._valid, self._training.test_batch, 1, self._ctx.seed, "valid"
        )
        loss, accuracy = figures.tolist()
        return TrainedChild(child.params, child.state, loss, accuracy)


def _apart(child: Child) -> Params:
    """Clone the running statistics, because training updates them in place."""
    buffers = child.method.network.buffers
    return {**child.params, **{name: child.params[name].clone() for name in buffers}}


def _shared_by(child: Child) -> object:
    """Key of the children that one captured step can train.

    It holds the method, all shapes, and the identity of the state tensors that no step changes.
    """
    tensors = tuple((name, tensor.shape) for name, tensor in child.params.items())
    state = tuple(
        (path, tensor.shape if path.partition("/")[0] in child.method.moving else id(tensor))
        for path, tensor in leaves(child.state)
    )
    return id(child.method), tensors, state


def _result(turns: Generator[None, None, list[Trained]]) -> list[Trained]:
    """Run captured steps to the end of their epoch and return its result."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            found: list[Trained] = end.value
            return found
