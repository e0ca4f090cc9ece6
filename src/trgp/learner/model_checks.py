"""Checks of a task's id, of the model between calls, and of trained weights."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.layer_kinds import is_norm
from ..core.layers import Layer, local
from ..core.memory import Memory
from ..core.plan import Plan
from ..core.precision import full_precision
from ..types import Norm, TaskId, matches
from .layer_guard import LayerGuard

DIVERGED = 1e6  # coordinates so many times the shared weight's have left every sensible one behind


def task_id(task: Any) -> TaskId:
    """A task's id as a plain int or string."""
    if isinstance(task, str):
        return task
    try:
        if not isinstance(task, bool):
            return operator.index(task)
    except TypeError:
        pass
    raise TypeError(f"A task's id must be an int or a string, not {type(task).__name__}.")


def module(model: Any) -> None:
    """Refuse a model that is no torch module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"The model must be a torch.nn.Module, not {type(model).__name__}.")


def present(model: nn.Module, plan: Plan, memory: Mapping[str, Memory]) -> None:
    """Protected and frozen layers must still be the ones the learner was made for."""
    modules = set(model.modules())
    for name, norm in plan.norms.items():
        if norm not in modules:
            raise RuntimeError(
                f"The norm layer '{name}' was replaced since the learner was made; put the "
                "original module back and load new values into it."
            )
    for name, layer in plan.layers.items():
        if any(site.module not in modules for site in layer.sites):
            raise RuntimeError(
                f"Layer '{name}' was replaced since the learner was made; put the original module "
                "back and load new values into its parameters."
            )
        here = layer.layout.shape(local(layer.weight.param).shape)[:2]  # rows of this process
        if (*here, layer.shape[2]) != (*memory[name].C.shape[:2], memory[name].M.shape[1]):
            raise RuntimeError(
                f"Layer '{name}' has another shape than when the learner was made; put a parameter "
                "of the original shape back."
            )


def resized(model: nn.Module, frozen: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters in the place of frozen ones, where they have another shape now."""
    here = dict(model.named_parameters())
    return {n: here[n] for n, p in frozen.items() if n in here and here[n].shape != p.shape}


def trainable(
    model: nn.Module, plan: Plan, exclude: Sequence[str], norm: Norm, *, first: bool
) -> None:
    """Nothing may be trained that is neither protected nor left to the user."""
    for name, layer in plan.layers.items():
        if len({p.requires_grad for p in layer.params}) > 1:
            raise RuntimeError(
                f"Layer '{name}' trains its weight but not its bias, or the other way round, and "
                "they are protected together; freeze both or neither."
            )
    free = {p for layer in plan.layers.values() for p in layer.params}
    if first:
        free |= {p for module in plan.norms.values() for p in module.parameters()}
        free |= {slot.param for slot in plan.others.values()}
    if norm == "shared":
        shared = [module for module in model.modules() if is_norm(module)]
        free |= {p for module in shared for p in module.parameters()}
    for name, param in model.named_parameters(remove_duplicate=False):
        if matches(name, exclude) or name in plan.per_task:
            free.add(param)
    added = [name for name, p in model.named_parameters() if p.requires_grad and p not in free]
    if added:
        raise RuntimeError(
            f"{', '.join(map(repr, added[:3]))}{', ...' if added[3:] else ''} became trainable "
            "after the learner was made; freeze it with requires_grad_(False), or make a learner "
            "with it in exclude=[...] or per_task=[...]."
        )


def loose_buffers(model: nn.Module, plan: Plan, exclude: Sequence[str]) -> dict[str, Tensor]:
    """Copies of the buffers that nobody looks after: training may change what they hold."""
    norms = {module for module in model.modules() if is_norm(module)}
    found = {}
    for name, buffer in model.named_buffers():
        owner = model.get_submodule(name.rpartition(".")[0])
        looked_after = owner in norms or name in plan.per_task or matches(name, exclude)
        if buffer.is_floating_point() and not looked_after:
            found[name] = buffer.detach().clone()
    return found


@torch.no_grad()
def put_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Give buffers back what they held, where they still are."""
    now = dict(model.named_buffers())
    for name, value in before.items():
        if name in now and now[name].shape == value.shape:
            now[name].copy_(value)


def trained(layers: Mapping[str, Layer], guards: Mapping[str, LayerGuard]) -> None:
    """Refuse weights that are not finite, or far too large inside the trust region."""
    for name, guard in guards.items():
        K, C = guard.K, guard.region.C
        if guard.region.blocks and not float((K - C).norm()) < DIVERGED * float(C.norm() + 1):
            raise RuntimeError(
                f"What layer '{name}' reuses of old tasks has diverged; load earlier weights of "
                "the model or go back to the last save, and train with a smaller learning rate or "
                "scale_rate."
            )
    finite(layers)


def finite(layers: Mapping[str, Layer]) -> None:
    """Refuse weights that are no numbers."""
    for name, layer in layers.items():
        if not all(bool(w.isfinite().all()) for w in layer.weights):
            raise RuntimeError(
                f"Layer '{name}' has NaN or infinite weights; load earlier weights of the model or "
                "go back to the last save, and train with a smaller learning rate."
            )


@full_precision
def strayed(layer: Layer, M: Tensor, K: Tensor) -> bool:
    """Whether W M is not K, beyond what rounding explains."""
    if not M.shape[2]:
        return False
    W = layer.matrix()
    # In float64 a model that was once cast to float32 must pass.
    tolerance = max(1e-6, torch.finfo(layer.weight.param.dtype).eps ** 0.5)
    return not bool((W @ M - K).norm() <= tolerance * (K.norm() + W.norm()))
