"""What a run of the suite learns from, told by a method that only listens."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from small_runs import Make, Samples, run
from torch import Tensor, nn

from trgp.methods.finetune import Finetune

SAMPLES = 30  # of a task, for its trust region and for its bases
Batch = tuple[Tensor, Tensor]


@dataclass
class Lesson:
    """A task: its samples for the trust region, its batches in order, its samples for the bases."""

    first: Batch
    samples: Batch
    batches: list[Batch] = field(default_factory=list)


@dataclass
class Course:
    """The network as a run initialises it, and its tasks in turn."""

    network: nn.Module
    lessons: list[Lesson]


HEARD: list[Any] = []  # the first parameters, then the lessons


@dataclass(frozen=True)
class Listener(Finetune):
    """Fine-tuning that writes down what it is given."""

    def begin_task(self, ctx: Any) -> Any:
        if ctx.task == 0:
            HEARD.append(ctx.params)
        first, samples = (ctx.samples(SAMPLES, purpose) for purpose in ("selection", "bases"))
        HEARD.append(Lesson((first.x, first.y), (samples.x, samples.y)))
        return super().begin_task(ctx)

    def loss(self, params: Any, state: Any, batch: Any) -> Tensor:
        HEARD[-1].batches.append((batch.x, batch.y))
        return super().loss(params, state, batch)


def course_of(tasks: Sequence[tuple[Samples, Samples]], make: Make, **settings: Any) -> Course:
    """What any method's run of these tasks with these settings begins with and learns from."""
    HEARD.clear()
    with TemporaryDirectory() as folder:
        run(tasks, f"{__name__}:Listener", Path(folder), make, engine="eager", **settings)
    network = make()
    network.load_state_dict(copy.deepcopy(HEARD[0]))
    return Course(network, HEARD[1:])
