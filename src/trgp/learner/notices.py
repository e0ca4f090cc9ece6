"""Warnings that a learner logs where an error would be too much."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.memory import Memory
from ..core.plan import Plan, unmatched
from .learner_state import Known, LearnerState, OpenTask

log = logging.getLogger("trgp")


def of_plan(model: nn.Module, plan: Plan, patterns: Sequence[str]) -> None:
    """Warn of patterns that match nothing, and of parameters that only the first task trains."""
    idle = unmatched(model, patterns)
    if idle:
        log.warning("No module has a name that matches %s (yet).", ", ".join(map(repr, idle)))
    if plan.others:
        frozen = sum(slot.param.numel() for slot in plan.others.values())
        share = frozen / sum(p.numel() for p in model.parameters())
        log.warning(
            "Trained with the first task, then frozen, %.0f%% of all parameters: %s (exclude "
            "them or make them per_task to go on training them).",
            100 * share,
            ", ".join(plan.others),
        )


def of_resized(frozen: Mapping[str, nn.Parameter], resized: Mapping[str, nn.Parameter]) -> None:
    """Warn of frozen parameters that were given another shape; from then on that is theirs."""
    for name, param in resized.items():
        log.warning(
            "'%s' was frozen after the first task with shape %s and has shape %s now; nothing "
            "trains it: give what is new its values by hand, or make a learner with "
            "exclude=['%s'], whose tasks all train it.",
            name,
            tuple(frozen[name].shape),
            tuple(param.shape),
            name,
        )


def of_full(known: Known, learnt: Known) -> None:
    """Warn of layers whose memory the last task has filled."""
    full = [
        name
        for name, memory in learnt.memory.items()
        if _is_full(memory) and not _is_full(known.memory[name])
    ]
    if full:
        log.warning(
            "The memory of %s is full after task %r: later tasks find no direction of their "
            "own there. A learner with a lower threshold or with max_rank leaves them some.",
            ", ".join(map(repr, full)),
            learnt.active,
        )


def _is_full(memory: Memory) -> bool:
    return bool((memory.ranks == memory.M.shape[1]).all())


def of_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Warn of buffers that training has changed and nothing keeps."""
    now = dict(model.named_buffers())
    moved = [n for n, b in before.items() if n in now and not torch.equal(b.to(now[n]), now[n])]
    if moved:
        log.warning(
            "Training changes buffers that old tasks need as they were: %s (make them per_task "
            "to keep them).",
            ", ".join(moved),
        )


def of_heads(state: LearnerState, opened: OpenTask) -> None:
    """Warn of excluded parameters that the task needs and no attached optimizer holds."""
    optimizers = [*state.guard.attached]
    held = _held(optimizers)
    excluded = state.excluded()
    missing = [name for name in opened.used if id(excluded[name]) not in held]
    if optimizers and missing:
        log.warning(
            "No attached optimizer holds %s, which task %r trains; add it with "
            "optimizer.add_param_group(...).",
            ", ".join(map(repr, missing[:3])),
            opened.task,
        )


def of_untrained(
    state: LearnerState, opened: OpenTask, to_train: Mapping[str, nn.Parameter]
) -> None:
    """Warn of parameters that the task needs and no optimizer that stepped holds."""
    met = [*opened.guarded.met]
    if not met:
        return
    held = _held(met)
    missing = [name for name, p in to_train.items() if id(p) not in held]
    if missing:
        log.warning(
            "No optimizer that stepped in task %r holds %s (%d parameters in all).",
            opened.task,
            ", ".join(map(repr, missing[:3])),
            len(missing),
        )


def _held(optimizers: Iterable[Optimizer]) -> set[int]:
    groups: list[dict[str, Any]] = [group for o in optimizers for group in o.param_groups]
    return {id(p) for group in groups for p in group["params"]}
