"""The tasks of one run, one after another: begin, epochs, end, evaluation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..benchmarks import Benchmark
from ..methods.base import Method, Params
from ..tree import State
from .batches import Part, joined
from .captured import CapturedTask
from .checkpoint import Checkpoints, Position, Record
from .config import Config
from .context import Context
from .divergence import LIMIT
from .evaluate import evaluate
from .events import EpochFinished, Observer, RunStarted, TaskFinished
from .machine import finish, peak_memory
from .schedule import Schedule
from .train import Epoch, diverged, train_epoch


class Sequencer:
    """One run, from wherever its checkpoints say."""

    def __init__(
        self,
        config: Config,
        benchmark: Benchmark,
        method: Method,
        seed: int,
        checkpoints: Checkpoints,
        observer: Observer,
        captured: bool = False,
    ) -> None:
        self.config = config
        self.network = method.network
        self.method = method
        self._training = config.training
        self._seed = seed
        self._checkpoints = checkpoints
        self._observer = observer
        self._captured = captured
        self._steps: CapturedTask | None = None
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

    def learn(self) -> Position:
        """Where the run stands when all is learnt."""
        position = self._checkpoints.load()
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
            params = self.network.initial_params()
            record = Record()
            if self._training.evaluate_unseen:
                record.untrained = [self._accuracy(params, j) for j in range(len(self._test))]
            position = self._begin(Position(0, params, {}, self._schedule(), record))
        for stage in range(position.task, len(self._stages)):
            while not position.schedule.over:
                position = self._epoch(position)
            position = self._end(position)
            if stage + 1 < len(self._stages):
                position = self._begin(position)
        return position

    def _begin(self, position: Position) -> Position:
        record = position.record
        record.seconds.append({})
        record.curves.append({})
        with self._clock(record, "selection"):
            params, state = self.method.begin_task(self._context(position))
        position.params, position.state = params, state
        position.schedule = self._schedule()
        return self._checkpoints.save_task(position)

    def _epoch(self, position: Position) -> Position:
        method, training, schedule = self.method, self._training, position.schedule
        task, lr = position.task, schedule.lr
        epoch = Epoch(
            self._seed,
            task,
            schedule.epoch,
            self._stages[task],
            training.batch,
            lr,
            self._trained(position),
        )
        begun = self._apart(position.params), position.state
        with self._clock(position.record, "training"):
            params, position.state, loss = self._train_epoch(
                self._apart(position.params), position.state, epoch
            )
            position.params = params
            parts = self._valid if self._joint else [self._valid[task]]
            score = evaluate(
                self.network,
                [method.weights_for(params, position.state, p.task) for p in parts],
                parts,
                training.test_batch,
                1,
                *(self._seed, "valid"),
            )
        if not (loss <= LIMIT and score.loss <= LIMIT):
            raise diverged(method, *begun, epoch)
        moving = {key: position.state[key] for key in method.moving if key in position.state}
        if schedule.after_epoch(score.loss, training):
            position.best = position.params, moving
        curve = {
            "loss": loss,
            "valid_loss": score.loss,
            "valid_accuracy": score.accuracy,
            "lr": lr,
        }
        for name, value in curve.items():
            position.record.curves[task].setdefault(name, []).append(value)
        position.record.peak_memory_bytes = max(
            position.record.peak_memory_bytes, peak_memory(self.network.device)
        )
        position = self._checkpoints.save_epoch(position, moving)
        self._observer(EpochFinished(self._seed, task, schedule.epoch, **curve))
        return position

    def _train_epoch(
        self, params: Params, state: State, epoch: Epoch
    ) -> tuple[Params, State, float]:
        """One epoch, by the engine chosen."""
        if not self._captured:
            return train_epoch(self.method, params, state, epoch)
        if self._steps is None or self._steps.task != epoch.task:
            self._steps = None  # the old task's graphs are freed before the new one's are made
            self._steps = CapturedTask(self.method, params, state, epoch)
        return self._steps.train_epoch(params, state, epoch)

    def _trained(self, position: Position) -> list[str]:
        """The network's parameters that train in this task, and the method's own."""
        names, still = self.network.names, self.method.frozen(position.task)
        free = self.network.trainable - still
        return [name for name in position.params if name in free or name not in names]

    def _apart(self, params: Params) -> Params:
        """The same with running statistics of its own, which training changes in place."""
        return {**params, **{name: params[name].clone() for name in self.network.buffers}}

    def _end(self, position: Position) -> Position:
        """Restore the best weights, let the method keep what it needs, evaluate what was seen."""
        record, task = position.record, position.task
        if position.best is not None:
            params, moving = position.best
            position.params, position.state = params, {**position.state, **moving}
            position.best = None
        with self._clock(record, "bases"):
            position.params, position.state = self.method.end_task(self._context(position))
        count = len(self._test)
        with self._clock(record, "evaluation"):
            if self._joint:
                record.accuracy_matrix = [[None] * count for _ in range(count - 1)]
            seen = count if self._joint or self._training.evaluate_unseen else task + 1
            row: list[float | None] = [None] * count
            for j in range(seen):
                weights = self.method.weights_for(position.params, position.state, j)
                row[j] = self._accuracy(weights, j)
            record.accuracy_matrix.append(row)
        self._observer(TaskFinished(self._seed, task, row, dict(record.seconds[-1])))
        position.task += 1
        return position

    def _accuracy(self, weights: Params, j: int) -> float:
        training = self._training
        return evaluate(
            self.network,
            [weights],
            [self._test[j]],
            training.test_batch,
            training.test_passes,
            *(self._seed, "test"),
        ).accuracy

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
        )

    def _schedule(self) -> Schedule:
        return Schedule(self._training.lr)

    @contextmanager
    def _clock(self, record: Record, phase: str) -> Iterator[None]:
        finish(self.network.device)
        start = time.perf_counter()
        yield
        finish(self.network.device)
        spent = record.seconds[-1]
        spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - start
