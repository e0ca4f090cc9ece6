"""The tasks of one run in order: begin, epochs, end, evaluation.

A run is a generator, so that several can take turns on one device: it yields an epoch to train,
receives the result, and pauses (yields None) before it waits for the device.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..benchmarks import Benchmark
from ..methods.base import Method
from ..types import Params
from .batches import Part, joined
from .checkpoint import Checkpoints
from .clock import Clock
from .config import Config
from .context import Context
from .divergence import LIMIT
from .evaluate import Evaluation, mean
from .events import EpochFinished, Observer, RunStarted, TaskFinished
from .machine import finish, peak_memory
from .position import Position, Record
from .schedule import Schedule
from .train import Epoch, Trained, Work, diverged, trained_names

TURN = 256  # test batches queued per turn, about as much work as a turn of training
Turns = Generator[Work | None, Trained | None, None]


class Sequencer:
    """One run, from its last checkpoint to its end."""

    def __init__(
        self,
        config: Config,
        benchmark: Benchmark,
        method: Method,
        seed: int,
        checkpoints: Checkpoints,
        observer: Observer,
        clock: Clock,
        captured: bool = False,
    ) -> None:
        """`clock` is shared by all runs that take turns."""
        self.config = config
        self.network = method.network
        self.method = method
        self._training = config.training
        self._seed = seed
        self._checkpoints = checkpoints
        self._observer = observer
        self._clock = clock
        self._captured = captured
        self._evaluation = Evaluation(method.network, captured)
        self._company = 1
        self.stacked = False  # vmapped with other runs
        self.position: Position | None = None  # the final position, once reached
        kinds = ("train", "valid", "test")
        self._train, self._valid, self._test = (
            [
                Part(t, t if benchmark.separate_heads else 0, getattr(task, kind))
                for t, task in enumerate(benchmark.tasks)
            ]
            for kind in kinds
        )
        if config.training.score_on == "validation":
            self._test = self._valid
        self._joint = config.method.about.joint
        self._stages = [[part] for part in self._train]
        if self._joint:
            together = self._train if benchmark.separate_heads else [joined(self._train)]
            self._stages = [list(together)]

    @property
    def company(self) -> int:
        """Number of runs that share the device."""
        return self._company

    @company.setter
    def company(self, count: int) -> None:
        self._company = count
        self._clock.among(count)

    def learn(self) -> Turns:
        """Train all tasks; `position` is then the final position."""
        params = self.network.initial_params()
        position = self._checkpoints.load({} if self.method.resizes else params)
        self._observer(
            RunStarted(
                self.config.benchmark,
                self.config.method_name,
                self.config.preset,
                self._seed,
                tasks=len(self._stages),
                epochs=self._training.epochs,
                folder=str(self._checkpoints.folder),
                done_tasks=position.task if position else 0,
                done_epochs=position.schedule.epoch if position else 0,
                form=self.method.report({}).form,
            )
        )
        if position is None:
            record = Record()
            if self._training.evaluate_unseen:
                scores = [self._score(params, j) for j in range(len(self._test))]
                record.untrained = torch.stack(scores)[:, 1].tolist()
            position = self._begin(Position(0, params, {}, self._schedule(), record))
        for stage in range(position.task, len(self._stages)):
            while not position.schedule.over:
                yield from self._epoch(position)
            last = stage + 1 == len(self._stages)
            if last:
                with self._alone(position, "checkpoints"):
                    self._checkpoints.begin_to_catch_up()
            yield from self._end(position)
            if not last:
                position = self._begin(position)
        self.position = position

    def save(self) -> None:
        """Save the finished epochs of an interrupted run that are not on the disk yet."""
        self._checkpoints.catch_up()

    def _begin(self, position: Position) -> Position:
        record = position.record
        record.seconds.append({})
        record.curves.append({})
        with self._alone(position, "selection"):
            params, state = self.method.begin_task(self._context(position))
            finish(self.network.device)
        position.params, position.state = params, state
        position.schedule = self._schedule()
        with self._alone(position, "checkpoints"):
            return self._checkpoints.save_task(position, self.company)

    def _epoch(self, position: Position) -> Turns:
        method, training, schedule = self.method, self._training, position.schedule
        task, lr = position.task, schedule.lr
        epoch = Epoch(
            self._seed,
            task,
            schedule.epoch,
            self._stages[task],
            training.batch,
            lr,
            trained_names(method, position.params, task),
        )
        begun = Work(self._apart(position.params), position.state, epoch)
        with self._shared(position, "training"):
            trained = yield begun._replace(params=self._apart(position.params))
            assert trained is not None
            parts = self._valid if self._joint else [self._valid[task]]
            redrawn = (schedule.epoch,) if training.redrawn_validation else ()
            with self._clock.validation():
                scores = [
                    self._evaluation(
                        method.weights_for(trained.params, trained.state, part.task),
                        part,
                        training.test_batch,
                        1,
                        *(self._seed, "valid", *redrawn),
                    )
                    for part in parts
                ]
            figures = torch.cat(
                [trained.loss.reshape(1), mean(scores, [len(part.samples) for part in parts])]
            )
            yield None
            loss, valid_loss, valid_accuracy = figures.tolist()
        if not (loss <= LIMIT and valid_loss <= LIMIT):
            raise diverged(method, begun)
        position.params, position.state = trained.params, trained.state
        moving = {key: position.state[key] for key in method.moving if key in position.state}
        if schedule.after_epoch(valid_loss, training):
            position.best = position.params, moving
        curve = {
            "loss": loss,
            "valid_loss": valid_loss,
            "valid_accuracy": valid_accuracy,
            "lr": lr,
        }
        for name, value in curve.items():
            position.record.curves[task].setdefault(name, []).append(value)
        position.record.peak_memory_bytes = max(
            position.record.peak_memory_bytes, peak_memory(self.network.device)
        )
        with self._alone(position, "checkpoints"):
            self._checkpoints.save_epoch(position, moving, self.company)
        self._observer(EpochFinished(self._seed, task, schedule.epoch, **curve))

    def _apart(self, params: Params) -> Params:
        """Clone the buffers, because training updates them in place."""
        return {**params, **{name: params[name].clone() for name in self.network.buffers}}

    def _end(self, position: Position) -> Turns:
        """Restore the best weights, let the method end the task, evaluate the tasks seen."""
        record, task = position.record, position.task
        if position.best is not None:
            params, moving = position.best
            position.params, position.state = params, {**position.state, **moving}
            position.best = None
        with self._alone(position, "bases"):
            position.params, position.state = self.method.end_task(self._context(position))
            finish(self.network.device)
        count = len(self._test)
        if self._joint:
            record.accuracy_matrix = [[None] * count for _ in range(count - 1)]
        seen = count if self._joint or self._training.evaluate_unseen else task + 1
        scores = []
        queued = 0  # samples
        for j in range(seen):
            with self._turn(position, "evaluation"):
                weights = self.method.weights_for(position.params, position.state, j)
                scores.append(self._score(weights, j))
            queued += self._training.test_passes * len(self._test[j].samples)
            if queued >= TURN * self._training.test_batch or j + 1 == seen:
                with self._shared(position, "evaluation"):
                    yield None
                queued = 0
        with self._alone(position, "evaluation"):
            row: list[float | None] = torch.stack(scores)[:, 1].tolist()
        row += [None] * (count - seen)
        record.accuracy_matrix.append(row)
        if position.task + 1 == len(self._stages):
            with self._alone(position, "checkpoints"):
                self.save()  # before the result, for which the disk may be full
        self._observer(TaskFinished(self._seed, task, row, dict(record.seconds[-1])))
        position.task += 1

    def _score(self, weights: Params, j: int) -> Tensor:
        """Return loss and accuracy on task j's test samples, on the device."""
        training = self._training
        return self._evaluation(
            weights,
            self._test[j],
            training.test_batch,
            training.test_passes,
            *(self._seed, "test"),
        )

    def _context(self, position: Position) -> Context:
        part = self._stages[position.task][0]
        return Context(
            self.network,
            position.task,
            part.head,
            part.samples,
            position.params,
            position.state,
            self._training.batch,
            self._seed,
            len(self._stages),
            self._captured,
            self._training,
            self._valid[position.task].samples,
        )

    def _schedule(self) -> Schedule:
        return Schedule(self._training.lr)

    def _turn(self, position: Position, phase: str) -> AbstractContextManager[None]:
        """Share the time of queued work, except in vmapped runs, where the others wait for it."""
        return (self._alone if self.stacked else self._shared)(position, phase)

    def _alone(self, position: Position, phase: str) -> AbstractContextManager[None]:
        return self._clock.alone(position.record.seconds[-1], phase)

    def _shared(self, position: Position, phase: str) -> AbstractContextManager[None]:
        return self._clock.shared(position.record.seconds[-1], phase)
