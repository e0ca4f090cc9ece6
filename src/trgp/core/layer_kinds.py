"""The kinds of modules that are known: how each becomes W times columns, and which are norm layers.

A kind is a class, or the full name of one ("package.module.Class", a glob) in a library that need
not be installed. It stands for its subclasses too, as long as they compute as it does.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from .layers import PLAIN, Layout, Refusal, Site, Slot

Kind = type[nn.Module] | str
Sites = Callable[[str, Any], Iterable[tuple[str, Site]]]
Columns = TypeVar("Columns", bound=Callable[[Any, Tensor], Tensor])
NormKind = TypeVar("NormKind", bound=type[nn.Module])

_KINDS: dict[Kind, "_Known"] = {}  # of two that fit, what was registered later holds
_NORMS: list[type[nn.Module]] = [_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm]
_NORM_NAME = re.compile(r"norm(\d+d|1p|gated)?$", re.IGNORECASE)


@dataclass(frozen=True)
class _Known:
    sites: Sites
    why_not: Callable[[Any], str | None]  # the end of the sentence "Layer 'x' is a Kind, ..."


# ---- telling of a kind -------------------------------------------------------------------------


def protects(
    kind: Kind,
    *,
    weight: str = "weight",
    bias: str = "bias",
    transposed: bool = False,
    groups: str | None = None,
) -> Callable[[Columns], Columns]:
    """Register a kind of layer, by a function that makes the columns of its input.

    The layer's output must be its weight, a matrix (o, n), times these columns, plus its bias. The
    function is given the module and the first argument of its call, with the samples in the first
    dimension, and returns (g, N, n): for each of g groups, N columns of n numbers. Where weight and
    columns lie in a layer is up to the layer; `trgp.testing.check_layer_kind` proves that they fit.

    Args:
        kind: the class, or its full name as a glob, "package.module.Class".
        weight: attribute that holds the parameter. All of its dimensions but the first make n.
        bias: attribute that holds the bias, of o numbers; it may be missing or None.
        transposed: whether the weight is held as (n, o).
        groups: attribute that holds g, the number of groups whose rows lie one after another.
    """
    if not (isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, nn.Module))):
        raise TypeError(f"A kind of layer must be a class of modules or its name, not {kind!r}.")

    def register(columns: Columns) -> Columns:
        @described_by(kind)
        def sites(name: str, module: nn.Module) -> Iterator[tuple[str, Site]]:
            count = getattr(module, groups) if groups is not None else 1
            yield (
                name,
                one_site(module, columns, first_input, weight, bias, Layout(count, transposed)),
            )

        return columns

    return register


def described_by(
    kind: Kind, why_not: Callable[[Any], str | None] = lambda module: None
) -> Callable[[Sites], Sites]:
    """Register a kind by a function that yields every (layer name, site) of a module.

    `why_not` says of a module of this kind why it cannot be protected, if it cannot.
    """

    def register(sites: Sites) -> Sites:
        _KINDS.pop(kind, None)
        _KINDS[kind] = _Known(sites, why_not)
        return sites

    return register


def refuse(kind: Kind, why: str) -> None:
    """Register a kind with a weight matrix that cannot be protected, and why."""
    described_by(kind, lambda module: why)(lambda name, module: ())


def norm_layer(kind: NormKind) -> NormKind:
    """Register a norm layer, of which `norm=` says what becomes; also as a decorator."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"A norm layer must be a class of modules, not {kind!r}.")
    _NORMS.append(kind)
    return kind


# ---- what a module is --------------------------------------------------------------------------


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm layer: registered, or named as one and made of vectors alone."""
    if isinstance(module, tuple(_NORMS)):
        return True
    if _NORM_NAME.search(type(module).__name__) is None or any(module.children()):
        return False
    own = list(module.parameters())
    return bool(own) and all(p.dim() == 1 for p in own)


def is_known(module: nn.Module) -> bool:
    """Whether a module is of a kind that can be protected."""
    _, known = _found(module)
    return known is not None and known.why_not(module) is None


def refusal_of(name: str, module: nn.Module) -> Refusal | None:
    """Why a module that has weights to protect cannot be protected; None where nothing is wrong."""
    cls, known = _found(module)
    if cls is None or known is None:
        return None
    kind, advice = type(module).__name__, f"add '{name}' to exclude=[...] or per_task=[...]"
    why = known.why_not(module)
    if why is not None:
        return Refusal(TypeError, f"Layer '{name}' is a {kind}, {why}", advice)
    if not _computes_as(cls, module):
        why = (
            f"Layer '{name}' is a {kind}, a kind that cannot be protected: its forward is not that "
            f"of {cls.__name__}"
        )
        return Refusal(TypeError, why, f"tell what it computes with trgp.protects, or {advice}")
    sites = [site for _, site in known.sites(name, module)]
    if any(_computed(slot) for s in sites for slot in (s.weight, s.bias) if slot is not None):
        why = (
            f"Layer '{name}' computes its weight from other parameters (weight norm, pruning, "
            "another parametrization), which cannot be protected"
        )
        return Refusal(TypeError, why, f"remove that or {advice}")
    if any(site.weight.param.is_complex() for site in sites):
        why = f"Layer '{name}' has complex weights, which cannot be protected"
        return Refusal(TypeError, why, advice)
    return None


def sites_of(name: str, module: nn.Module) -> Iterable[tuple[str, Site]]:
    """Where a module that is not refused applies weights to inputs, as (layer name, site)."""
    _, known = _found(module)
    return known.sites(name, module) if known is not None else ()


def _found(module: nn.Module) -> tuple[type | None, _Known | None]:
    """The nearest class of a module that is registered, and what is known of it."""
    for cls in type(module).__mro__:
        path = f"{cls.__module__}.{cls.__qualname__}"
        for kind, known in reversed(_KINDS.items()):
            if kind is cls or (isinstance(kind, str) and fnmatchcase(path, kind)):
                return cls, known
    return None, None


def _computes_as(cls: type, module: nn.Module) -> bool:
    """Whether a module computes as its registered class does; a subclass may not."""
    return "forward" not in vars(module) and all(
        getattr(type(module), method, None) is getattr(cls, method, None)
        for method in ("forward", "_conv_forward")
    )


def _computed(slot: Slot) -> bool:
    """Whether a weight is not a parameter, but made from some in every call."""
    held = getattr(slot.module, slot.attribute)
    return parametrize.is_parametrized(slot.module) or not isinstance(held, nn.Parameter)


# ---- what kinds are described with -------------------------------------------------------------


def one_site(
    module: nn.Module,
    columns: Callable[[Any, Tensor], Tensor],
    inputs: Callable[..., list[Tensor]],
    weight: str = "weight",
    bias: str | None = "bias",
    layout: Layout = PLAIN,
) -> Site:
    """The site of one weight of a module, and of its bias if there is one."""
    held = getattr(module, bias, None) if bias is not None else None
    offset = Slot(module, bias) if bias is not None and held is not None else None
    window = getattr(module, "kernel_size", 1)
    unfolds = math.prod(window) if isinstance(window, tuple) else int(window)
    return Site(module, Slot(module, weight), offset, inputs, columns, layout, unfolds)


def first_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """A module's first argument, by its place or its name."""
    return [args[0] if args else kwargs[_first_name(type(module))]]


def rows(module: nn.Module, x: Tensor) -> Tensor:
    """The columns of a linear layer: the rows of its input, whatever the leading dimensions."""
    return x.reshape(1, -1, x.shape[-1])


def _first_name(cls: type[nn.Module]) -> str:
    return list(inspect.signature(cls.forward).parameters)[1]
