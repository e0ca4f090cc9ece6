"""Single-task learning (STL): a separate network per task."""

from dataclasses import dataclass
from typing import ClassVar

from ..types import Params, State
from .base import About, Context, Method


@dataclass(frozen=True)
class Single(Method):
    """Train a freshly initialised network per task: no transfer, no forgetting."""

    about: ClassVar[About] = About(
        family="baseline",
        stores="a network a task",
        paper="-",
        task_id_at_test=True,
        holds_network=True,
    )

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        return ctx.initial_params(), ctx.state

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        return ctx.params, {**ctx.state, f"network {ctx.task}": dict(ctx.params)}

    def weights_for(self, params: Params, state: State, task: int) -> Params:
        kept = state.get(f"network {task}")
        return params if kept is None else kept  # type: ignore[return-value]
