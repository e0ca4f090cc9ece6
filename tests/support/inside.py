"""All that tests read of private state: bases, frozen coordinates, shared weights.

Layers are (g, o, n) matrices by name, g groups, with a column for a bias.
"""

from typing import NamedTuple

from small_runs import End
from torch import Tensor
from trgp.core.guard import with_coordinates

from trgp import GPM
from trgp.methods.protected import Directions


class Bases(NamedTuple):
    """A layer's."""

    M: Tensor  # (g, n, m)
    by_task: dict[int | str, Tensor]  # (g, n, r_j)


def bases(learner: GPM) -> dict[str, Bases]:
    """M and the bases of every learnt task, by layer."""
    return {
        name: Bases(memory.M, {task: memory.basis(task) for task in memory.masks})
        for name, memory in learner._memory.items()
    }


def coordinates(learner: GPM) -> dict[str, Tensor]:
    """C = W M (g, o, m) of the shared weights, by layer."""
    return {name: memory.C for name, memory in learner._memory.items()}


def shared_weights(learner: GPM) -> dict[str, Tensor]:
    """W (g, o, n) that all tasks share, by layer, between tasks."""
    C = coordinates(learner)
    return {
        name: with_coordinates(learner._plan.layers[name].matrix(), each.M, C[name]).detach()
        for name, each in bases(learner).items()
    }


def bases_of_run(end: End) -> dict[str, Bases]:
    """The same as `bases`, as a run of the suite ended a task; GPM there keeps no task's own."""
    found = {}
    for name, each in end.method.layers.items():
        held = Directions.read(end.state, each.layer)
        found[name] = Bases(held.M, {task: held.basis(task) for task in held.masks})
    return found
