"""The plan for every trainable part of a model: protected, frozen, per task, or left alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import cast

from torch import nn
from torch.nn.parameter import is_lazy

from ..types import Norm, matches
from . import library_kinds, recurrent_kinds, torch_kinds  # noqa: F401  they register what is known
from .layer_kinds import is_known, is_norm, refusal_of, sites_of
from .layers import Layer, Refusal, Site, Slot, join


@dataclass
class Plan:
    """The treatment of every trainable part of a model."""

    layers: dict[str, Layer]
    norms: dict[str, nn.Module]
    others: dict[str, Slot]  # trainable, but no layer of a kind that can be protected
    per_task: dict[str, Slot]  # parameters and buffers copied for every task
    refused: dict[str, Refusal] = field(default_factory=dict)  # by module or parameter


def bare(model: nn.Module) -> nn.Module:
    """The model inside a compiled or parallel one, whose names are those the user knows."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while hasattr(model, "_orig_mod") or isinstance(model, parallel):
        model = cast(nn.Module, getattr(model, "_orig_mod", None) or model.module)
    return model


def unmatched(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The patterns that name nothing in the model."""
    names = [name for aliases in names_of(model).values() for name in aliases]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [p for p in patterns if not any(fnmatchcase(n, p) for n in names)]


def make_plan(
    model: nn.Module, exclude: Sequence[str], per_task: Sequence[str], norm: Norm
) -> Plan:
    """Sort the parts of the model, and refuse the first that no learner could be made with."""
    plan = sorted_parts(model, exclude, per_task, norm)
    for refusal in plan.refused.values():
        raise refusal.error()
    return plan


def sorted_parts(
    model: nn.Module, exclude: Sequence[str], per_task: Sequence[str], norm: Norm
) -> Plan:
    """Sort every trainable part into protected, normalising, per-task, other and refused."""
    aliases = names_of(model)
    modules = {names[0]: module for module, names in aliases.items()}
    plan = Plan({}, {}, {}, per_task_tensors(model, exclude, per_task, norm), _shapeless(modules))
    owners: dict[nn.Parameter, list[tuple[str, Slot]]] = {}
    sites: dict[nn.Parameter, list[tuple[str, Site]]] = {}
    within_attention = {
        join(name, "out_proj")
        for name, m in modules.items()
        if isinstance(m, nn.MultiheadAttention)
    }
    for name, module in modules.items():
        for key, param in module.named_parameters(recurse=False):
            owners.setdefault(param, []).append((join(name, key), Slot(module, key)))
        if any(matches(alias, [*exclude, *per_task]) for alias in aliases[module]):
            continue
        if is_norm(module):
            plan.norms[name] = module
        elif name not in {*within_attention, *plan.refused} and _trainable(module):
            refusal = refusal_of(name, module)
            if refusal is not None:
                plan.refused[name] = refusal
                continue
            for layer_name, site in sites_of(name, module):
                sites.setdefault(site.weight.param, []).append((layer_name, site))

    norm_modules = set(plan.norms.values())
    for param, places in owners.items():
        left = [
            name in plan.per_task or _matched(aliases[slot.module], slot.attribute, exclude)
            for name, slot in places
        ]
        if any(left) and not all(left) and param.requires_grad:
            plan.refused[places[0][0]] = _named_in_part(places)
        elif (
            param.requires_grad
            and not any(left)
            and not any(slot.module in norm_modules for _, slot in places)
        ):
            plan.others[places[0][0]] = places[0][1]
    _protect(plan, sites, owners)
    if norm != "freeze":
        plan.norms = {}
    return plan


def _protect(
    plan: Plan,
    sites: Mapping[nn.Parameter, list[tuple[str, Site]]],
    owners: Mapping[nn.Parameter, list[tuple[str, Slot]]],
) -> None:
    """Make layers of the weights that nothing but their sites uses; the others keep the rest."""
    for weight, uses in sites.items():
        name = owners[weight][0][0]
        # A weight also used in some other way (an embedding tied to it) is frozen, not projected.
        if name not in plan.others or len(uses) < len(owners[weight]):
            continue
        layer_name, first = uses[0]
        here = [site for _, site in uses]
        if any(site.layout != first.layout for site in here):
            plan.refused[layer_name] = Refusal(
                TypeError,
                f"Layer '{layer_name}' shares its weight with layers that read it another way (in "
                "other groups, or transposed), which cannot be protected together",
                f"add {' and '.join(repr(n) for n, _ in uses)} to exclude=[...] or per_task=[...]",
            )
            continue
        biases = _biases(here, owners, plan.others)
        layer = Layer(layer_name, first.weight, biases, first.layout, here)
        plan.layers[layer_name] = layer
        for slot in (layer.weight, *layer.biases):
            del plan.others[owners[slot.param][0][0]]


def per_task_tensors(
    model: nn.Module, exclude: Sequence[str], per_task: Sequence[str], norm: Norm
) -> dict[str, Slot]:
    """Parameters and buffers of which every task has its own copy, by their names."""
    found = {}
    for module, names in names_of(model).items():
        own = norm == "per_task" and is_norm(module)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, _ in tensors:
            if not _matched(names, key, exclude) and (own or _matched(names, key, per_task)):
                found[join(names[0], key)] = Slot(module, key)
    return found


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module with all the names it is registered under, the first of them its own."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _matched(names: Sequence[str], key: str, patterns: Sequence[str]) -> bool:
    return any(matches(join(name, key), patterns) for name in names)


def _shapeless(modules: Mapping[str, nn.Module]) -> dict[str, Refusal]:
    """Refuse modules that get their shape from a first batch."""
    refused = {}
    for name, module in modules.items():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key in [key for key, tensor in tensors if is_lazy(tensor)][:1]:
            why = f"'{join(name, key)}' has no shape yet"
            fix = "run one batch through the model before making the learner"
            refused[name] = Refusal(TypeError, why, fix)
    return refused


def _named_in_part(places: Sequence[tuple[str, Slot]]) -> Refusal:
    return Refusal(
        ValueError,
        f"{' and '.join(repr(name) for name, _ in places)} are one parameter, but exclude or "
        "per_task names only a part of them",
        "name all of them or none",
    )


def _biases(
    sites: Sequence[Site],
    owners: Mapping[nn.Parameter, list[tuple[str, Slot]]],
    free: Mapping[str, Slot],
) -> list[Slot]:
    """The biases that are added at these sites and nowhere else."""
    here = [site.bias for site in sites]
    biases: dict[nn.Parameter, Slot] = {}
    for bias in here:
        # A bias that another weight uses as well cannot be protected with this one: it is frozen.
        if bias is not None and all(slot in here for _, slot in owners[bias.param]):
            place, slot = owners[bias.param][0]
            if place in free:
                biases[bias.param] = slot
    return list(biases.values())


def _trainable(module: nn.Module) -> bool:
    """Whether a module has anything of its own to train.

    A layer that could be protected also owns what its weight is computed from.
    """
    nested = is_known(module)
    return any(p.requires_grad for p in module.parameters(recurse=nested))
