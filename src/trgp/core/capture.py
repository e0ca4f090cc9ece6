"""Hooks that see every input of every protected layer, and the Gram matrices streamed from them."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Layer, Site
from .precision import home_of_float64

Observer = Callable[[Layer, Site, Tensor], None]

# Columns are unfolded in slices of about this many numbers: large images would fill the memory.
SLICE = 1 << 24


@dataclass
class Gram:
    """A = R R' of a layer's inputs R, summed in float64.

    R itself is held only as long as it has fewer columns than half its rows: then R'R is the
    smaller matrix to decompose.
    """

    A: Tensor  # (g, n, n)
    columns: int = 0  # how many columns of R have been seen
    eps: float = 0.0  # rounding of the activations: what a numerical zero is measured by
    few: list[Tensor] = field(default_factory=list)  # the columns (g, n, k), batch by batch

    @property
    def inputs(self) -> Tensor | None:
        """R (g, n, N), where it has few columns."""
        return torch.cat(self.few, 2) if self.few else None

    def add(self, columns: Tensor) -> None:
        """Add the columns (g, N, n) of a batch."""
        self.columns += columns.shape[1]
        few = 0 < 2 * self.columns < self.A.shape[1]
        # What is kept is a copy: inputs may lie where a loader puts the next batch.
        X = columns.to(self.A, copy=few)
        self.A += X.mT @ X
        self.few = [*self.few, X.mT] if few else []
        # Half precision counts as float32: n * eps would otherwise exceed the largest eigenvalue.
        dtype = torch.promote_types(columns.dtype, torch.float32)
        self.eps = max(self.eps, torch.finfo(dtype).eps)

    def reduce(
        self, summed: Callable[[Tensor], Tensor], largest: Callable[[float, torch.device], float]
    ) -> None:
        """Join what several processes have seen, by functions that sum and compare over them."""
        columns = torch.tensor(self.columns, device=self.A.device)
        seen = int(summed(columns.clone()))
        summed(self.A)
        self.eps = largest(self.eps, self.A.device)
        if seen != self.columns:  # the columns themselves are elsewhere
            self.few = []
        self.columns = seen


class GramCapture:
    """Accumulates one Gram matrix a layer while a model runs under `observing`."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.grams: dict[str, Gram] = {}
        for layer in layers:
            groups, _, n = layer.shape
            home = home_of_float64(layer.weight.param.device)
            A = torch.zeros(groups, n, n, dtype=torch.float64, device=home)
            self.grams[layer.name] = Gram(A)

    def __call__(self, layer: Layer, site: Site, x: Tensor) -> None:
        check_input(layer, x)
        unfolded = x.numel() * site.unfolds
        for part in torch.split(x, max(1, SLICE * len(x) // max(1, unfolded))):
            self.grams[layer.name].add(layer.columns(site, part))

    def finite(self) -> None:
        """Refuse a Gram matrix with a NaN or an infinity in it, naming the layer."""
        for name, gram in self.grams.items():
            _require_finite(name, gram.A)


def check_input(layer: Layer, x: Tensor) -> None:
    """Refuse inputs that no layer can multiply with its weight."""
    if not x.is_floating_point():
        raise TypeError(
            f"Layer '{layer.name}' received integer inputs ({x.dtype}); convert them to floating "
            "point in loss_fn before the model sees them."
        )


def check_finite_input(layer: Layer, x: Tensor) -> None:
    """Refuse inputs that are integers, NaN or infinite, naming the layer."""
    check_input(layer, x)
    _require_finite(layer.name, x)


def _require_finite(name: str, x: Tensor) -> None:
    if not bool(x.isfinite().all()):
        raise ValueError(
            f"Layer '{name}' received NaN or infinite inputs; check the data and the weights of "
            "the layers before it."
        )


@contextmanager
def observing(layers: Iterable[Layer], observer: Observer) -> Iterator[None]:
    """While this is open, the observer is called with every input of every layer.

    Fused inference kernels and compiled graphs would step around the hooks, so both are off.
    """
    by_module: dict[nn.Module, list[tuple[Layer, Site]]] = {}
    for layer in layers:
        for site in layer.sites:
            by_module.setdefault(site.module, []).append((layer, site))

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Nothing here may enter the graph: a checkpointed forward is run again without the hooks.
        with torch.no_grad():
            for layer, site in by_module[module]:
                for x in site.inputs(module, args, kwargs):
                    observer(layer, site, x)

    handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in by_module]
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # Importing the compiler takes seconds: without it nothing can have been compiled.
    compiler = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if compiler else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for handle in handles:
            handle.remove()
