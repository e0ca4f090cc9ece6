"""The fate of every parameter of a model under a plan, the reason, and how to change it."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import nn

from ..core.layer_kinds import is_known, is_norm
from ..core.layers import Refusal
from ..core.plan import Plan
from ..types import Norm, matches

Verdict = Literal["protected", "frozen", "copied", "left alone", "refused"]


class Fate(NamedTuple):
    """The fate of a parameter."""

    verdict: Verdict
    why: str
    fix: str = ""
    part: str | None = None  # the layer or the refused part that it belongs to


PROTECTED = "moves orthogonally to the inputs of old tasks"
FROZEN_NORM = Fate(
    "frozen",
    "a norm layer: trained with the first task, then frozen",
    "norm='per_task' copies it for every task, norm='shared' goes on training it",
)
TO_TRAIN = "name it in exclude=[...] or per_task=[...] to go on training it"
COPIED = Fate("copied", "named by per_task: every task has its own")
COPIED_NORM = Fate("copied", "norm='per_task': every task has its own")
SHARED_NORM = Fate(
    "left alone",
    "norm='shared': every task trains it, which old tasks feel",
    "norm='freeze' or norm='per_task' protects them",
)
UNTRAINED = Fate("left alone", "requires_grad is False: it is not trained")
EXCLUDED = Fate(
    "left alone",
    "named by exclude: right for the head of one task",
    "what several tasks use belongs to per_task=[...]",
)


def parts(
    model: nn.Module, plan: Plan, exclude: Sequence[str], norm: Norm
) -> dict[tuple[str, Fate], list[nn.Parameter]]:
    """The parameters by part: a layer, a refused module, or all of a module that fares alike."""
    fates = _fates(model, plan, exclude, norm)
    within: dict[str, set[Fate]] = defaultdict(set)
    for name, fate in fates.items():
        for module in _modules_of(name):
            within[module].add(fate)
    found: dict[tuple[str, Fate], list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        fate = fates[name]
        alike = (module for module in _modules_of(name) if within[module] == {fate})
        part = next(alike, name) if fate.part is None else fate.part
        found.setdefault((part, fate), []).append(param)
    for part, refusal in plan.refused.items():  # of buffers alone
        found.setdefault((part, _refused(part, refusal)), [])
    return found


def _fates(model: nn.Module, plan: Plan, exclude: Sequence[str], norm: Norm) -> dict[str, Fate]:
    layer_of = {p: layer.name for layer in plan.layers.values() for p in layer.params}
    copied = {slot.param for slot in plan.per_task.values()}
    others = {slot.param for slot in plan.others.values()}
    norms = {p for module in plan.norms.values() for p in module.parameters()}
    places = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    fates = {}
    for name, param in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        of_norm = is_norm(owner) and not matches(name, exclude)
        refused = next((part for part in plan.refused if _lies_in(name, part)), None)
        if refused is not None:
            fates[name] = _refused(refused, plan.refused[refused])
        elif param in layer_of:
            fates[name] = Fate("protected", PROTECTED, part=layer_of[param])
        elif param in copied:
            fates[name] = COPIED_NORM if of_norm and norm == "per_task" else COPIED
        elif not param.requires_grad:
            fates[name] = UNTRAINED
        elif param in norms:
            fates[name] = FROZEN_NORM
        elif param in others:
            why = f"{_unprotected(owner, places[param])}: trained with the first task, then frozen"
            fates[name] = Fate("frozen", why, TO_TRAIN)
        else:
            fates[name] = SHARED_NORM if of_norm else EXCLUDED
    return fates


def _refused(part: str, refusal: Refusal) -> Fate:
    return Fate("refused", refusal.why, refusal.fix, part)


def _unprotected(owner: nn.Module, places: int) -> str:
    """Why no layer protects a parameter that could be trained."""
    if places > 1:
        return "shared by parts that cannot be protected together"
    if is_known(owner):
        return f"a parameter of {type(owner).__name__} that no protected weight is learnt with"
    return f"a parameter of {type(owner).__name__}, no kind that can be protected"


def _lies_in(name: str, part: str) -> bool:
    return part in ("", name) or name.startswith(f"{part}.")


def _modules_of(name: str) -> list[str]:
    """The names of the modules around a parameter, the outermost first, without the model."""
    path = name.split(".")
    return [".".join(path[:i]) for i in range(1, len(path))]
