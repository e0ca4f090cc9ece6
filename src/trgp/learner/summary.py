"""A learner's memory in a few lines of text."""

from collections.abc import Mapping

from ..tree import in_units
from ..types import TaskId


def summary(
    method: str,
    ranks: Mapping[str, tuple[int, int]],
    memory_bytes: int,
    task_bytes: Mapping[TaskId, int],
    model_bytes: int,
) -> str:
    """Rank used of each layer's width, and the bytes held against one copy of the model."""
    name_width = max(len(name) for name in ["layer", *ranks])
    lines = [f"{method} after {len(task_bytes)} tasks", f"{'layer':<{name_width}}  rank / width"]
    for name, (rank, width) in ranks.items():
        lines.append(f"{name:<{name_width}}  {rank:>5} / {width:<5} {rank / width:7.1%}")
    lines.append(f"model, one copy: {in_units(model_bytes)}")
    lines.append(f"memory shared by all tasks: {_share(memory_bytes, model_bytes)}")
    for task, held in task_bytes.items():
        lines.append(f"task {task!r}: {_share(held, model_bytes)}")
    return "\n".join(lines)


def _share(held: int, whole: int) -> str:
    return f"{in_units(held)} ({held / whole:.1%} of the model)"
