"""Single-task learning (STL): a network of its own for every task."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..tree import State
from .base import About, Method, Params

if TYPE_CHECKING:
    from ..engine.context import Context


@dataclass(frozen=True)
class Single(Method):
    """A freshly initialised network for every task: no transfer, no forgetting."""

    about: ClassVar[About] = About(
        family="baseline",
        stores="a network a task",
        paper="-",
        task_id_at_test=True,
        holds_network=True,
    )

    def begin_task(self, ctx: "Context") -> tuple[Params, State]:
        return ctx.initial_params(), ctx.state

    def end_task(self, ctx: "Context") -> tuple[Params, State]:
        return ctx.params, {**ctx.state, f"network {ctx.task}": dict(ctx.params)}

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        kept = state.get(f"network {task}")
        return params if kept is None else kept  # type: ignore[return-value]
