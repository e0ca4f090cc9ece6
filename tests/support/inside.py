"""All that tests read of private state: layers, memories, bases, and what an open task holds.

Layers are (g, o, n) matrices by name, g groups, with a column for a bias.
"""

from typing import NamedTuple

from small_runs import End
from torch import Tensor

from trgp import GPM
from trgp.core.keep import Region, reached, with_coordinates
from trgp.core.layers import Layer
from trgp.core.memory import Change, Memory, in_memory_order
from trgp.learner.update_guard import GuardedTask
from trgp.methods.protected import Directions


class Bases(NamedTuple):
    """A layer's."""

    M: Tensor  # (g, n, m)
    by_task: dict[int | str, Tensor]  # (g, n, r_j)


def layers(learner: GPM) -> dict[str, Layer]:
    """The protected layers."""
    return learner._state.plan.layers


def memories(learner: GPM) -> dict[str, Memory]:
    """The memory of every layer."""
    return learner._state.known.memory


def matrices(learner: GPM) -> dict[str, Tensor]:
    """The weights that the model holds now, copied."""
    return {name: layer.matrix().clone() for name, layer in layers(learner).items()}


def bases(learner: GPM) -> dict[str, Bases]:
    """M and the bases of every learnt task, by layer."""
    return {
        name: Bases(memory.M, {task: memory.basis(task) for task in memory.masks})
        for name, memory in memories(learner).items()
    }


def coordinates(learner: GPM) -> dict[str, Tensor]:
    """C = W M (g, o, m) of the shared weights, by layer."""
    return {name: memory.C for name, memory in memories(learner).items()}


def shared_weights(learner: GPM) -> dict[str, Tensor]:
    """W (g, o, n) that all tasks share, by layer."""
    return {
        name: with_coordinates(W, memory.M, memory.C)
        for (name, W), memory in zip(
            matrices(learner).items(), memories(learner).values(), strict=True
        )
    }


def guarded_task(learner: GPM) -> GuardedTask:
    """The open task as the guard sees it."""
    guarded = learner._state.guarded
    assert guarded is not None
    return guarded


def regions(learner: GPM) -> dict[str, Region]:
    """By layer with a memory, what the open task may reach."""
    return {name: guard.region for name, guard in guarded_task(learner).layers.items()}


def present_coordinates(learner: GPM) -> dict[str, Tensor]:
    """K (g, o, m) of the open task, in the order of the memory."""
    return {
        name: in_memory_order(guard.K, guard.region, memories(learner)[name].M.shape[2])
        for name, guard in guarded_task(learner).layers.items()
    }


def changes(learner: GPM, task: int | str) -> dict[str, Change]:
    """By layer with a trust region, what a learnt task keeps."""
    return learner._state.known.tasks[task].changes


def forbidden(learner: GPM, name: str, change: Tensor) -> Tensor:
    """The part of a change (g, o, n) of a layer's weight that old tasks forbid to the open one."""
    region = regions(learner)[name]
    D = change @ region.M
    return D - reached(D, region)


def settle(learner: GPM) -> None:
    """Adopt weights that were written, as every step and call does first."""
    learner._state.guard.settle()


def bases_of_run(end: End) -> dict[str, Bases]:
    """The same as `bases`, as a run of the suite ended a task; GPM there keeps no task's own."""
    found = {}
    for name, each in end.method.layers.items():
        held = Directions.read(end.state, each.layer)
        found[name] = Bases(held.M, {task: held.basis(task) for task in held.masks})
    return found


def frozen(learner: GPM) -> set[str]:
    """Names of the parameters frozen after the first task."""
    return set(learner._state.known.frozen)


def copies(learner: GPM, task: int | str) -> set[str]:
    """Names of the parameters and buffers that a task has for itself."""
    return set(learner._state.known.tasks[task].copies)
