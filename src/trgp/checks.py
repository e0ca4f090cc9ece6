"""What the learner asks of a task's id, of the model between calls, and of trained weights."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .core.layers import Layer
from .core.plan import NORMS, Plan
from .core.precision import full_precision
from .core.scaling import Scaling
from .core.subspace import Memory
from .types import Norm, TaskId, matches

DIVERGED = 1e6  # a scaling this far from the identity has left every sensible weight behind


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


def one_process() -> None:
    """Refuse a distributed process group of several ranks: each would keep a memory of its own."""
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if group and torch.distributed.get_world_size() > 1:
        raise RuntimeError(
            f"This process is one of {torch.distributed.get_world_size()} in a distributed group, "
            "which this version does not support: every rank would protect its own data alone. "
            "Train in a single process."
        )


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
        groups, outputs, inputs = layer.shape
        if (groups, outputs, inputs) != (*memory[name].C.shape[:2], memory[name].M.shape[1]):
            raise RuntimeError(
                f"Layer '{name}' has another shape than when the learner was made; put a parameter "
                "of the original shape back."
            )


def whole(
    layers: Mapping[str, Layer], memory: Mapping[str, Memory], tasks: Sequence[TaskId]
) -> None:
    """Between tasks no layer may have scalings, and every memory must hold every learnt task."""
    for name, layer in layers.items():
        begun = any(is_parametrized(slot.module, slot.attribute) for slot in layer.places)
        if begun or list(memory[name].masks) != list(tasks):
            raise RuntimeError(
                f"begin_task or end_task was interrupted half-way, in layer '{name}'; go back to "
                "the last save."
            )


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
        shared = [module for module in model.modules() if isinstance(module, NORMS)]
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
    norms = {module for module in model.modules() if isinstance(module, NORMS)}
    found = {}
    for name, buffer in model.named_buffers():
        owner = model.get_submodule(name.rpartition(".")[0])
        looked_after = owner in norms or name in plan.per_task or matches(name, exclude)
        if buffer.is_floating_point() and not looked_after:
            found[name] = buffer.detach().clone()
    return found


def trained(
    layers: Mapping[str, Layer], memory: Mapping[str, Memory], scalings: Mapping[str, Scaling]
) -> None:
    """What training has left must be finite, and outside the protected space."""
    for name, scaling in scalings.items():
        largest = float(torch.cat([S.detach().abs().flatten() for S in scaling.S]).max())
        if not largest < DIVERGED:
            raise RuntimeError(
                f"The scalings of layer '{name}' have diverged (largest entry {largest:.1e}); go "
                "back to the last save and train with a smaller scale_lr in "
                "learner.param_groups(lr=..., scale_lr=...)."
            )
    for name, layer in layers.items():
        if not all(bool(p.isfinite().all()) for p in layer.params):
            raise RuntimeError(
                f"Layer '{name}' has NaN or infinite weights; go back to the last save and train "
                "with a smaller learning rate."
            )
        if strayed(layer, memory[name].M, memory[name].C):
            raise RuntimeError(
                f"The weights of layer '{name}' moved inside the protected space, so old tasks "
                "would be forgotten; load the weights saved before, and train with an optimizer "
                "given to learner.attach(...)."
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
