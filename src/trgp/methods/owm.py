"""Orthogonal Weights Modification, OWM (Zeng, Chen, Cui and Yu, Nature Machine Intelligence 2019).

A layer has a projector P, at first the identity. After each task every batch of it, by the mean r
of the layer's inputs, takes a direction away: P <- P - k k' / (alpha + r' k) with k = P r. Later
tasks step along G P. At constant alpha P is I - A (A'A + alpha I)^-1 A', with all r as A's columns.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..core.capture import observing
from ..core.layers import Layer, Site
from ..options import check_number
from ..tree import State, level, put, tensors
from .base import About, Batch, Grads, Params, Rate
from .layerwise import Layerwise

if TYPE_CHECKING:
    from ..engine.context import Context


@dataclass(frozen=True)
class OWM(Layerwise):
    """Gradients times a projector that every batch of an old task has narrowed."""

    about: ClassVar[About] = About(
        family="gradient projection",
        stores="a projector for each layer's inputs",
        paper="Zeng et al., Nature Machine Intelligence 2019",
        task_id_at_test=False,
    )

    alpha: float = 1.0
    """How much energy along a direction counts as none, in a task's first batch."""
    alpha_end: float = 0.001
    """The same in its last batch; in between it falls geometrically."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("alpha", self.alpha, above=0)
        check_number("alpha_end", self.alpha_end, above=0)

    def layer_step(
        self, name: str, W: Tensor, grads: Grads, state: State, lr: Rate
    ) -> tuple[Tensor, dict[str, Tensor]]:
        G = self.packed(self.layers[name], grads)
        P = tensors(level(state, "projectors")).get(name)
        return W - lr * (G if P is None else G @ P), {}

    def end_task(self, ctx: "Context") -> tuple[Params, State]:
        """Narrow every layer's projector by the batches of the task, under its final weights."""
        found = tensors(level(ctx.state, "projectors"))
        P = {n: found[n].double() if n in found else self.identity(n) for n in self.layers}
        weights = self.weights_for(ctx.params, ctx.state, ctx.task)
        batches = list(ctx.batches(ctx.batch_size, "projectors"))
        for i, batch in enumerate(batches):
            share = i / max(1, len(batches) - 1)
            alpha = self.alpha * (self.alpha_end / self.alpha) ** share
            for name, R in self.mean_inputs(weights, batch).items():
                P[name] = narrowed(P[name], R, alpha)
        kept = {name: p.to(self.layers[name].layer.dtype) for name, p in P.items()}
        state = put(ctx.state, kept, "projectors")
        return ctx.params, self.with_copies(ctx.params, state, ctx.task)

    def identity(self, name: str) -> Tensor:
        g, _, n = self.layers[name].layer.shape
        one = torch.eye(n, dtype=torch.float64, device=self.network.device)
        return one.expand(g, n, n)

    @torch.no_grad()
    def mean_inputs(self, weights: Params, batch: Batch) -> dict[str, Tensor]:
        """R (g, n, k): the mean over the samples of what a layer sees, at each of k positions."""
        seen: dict[str, Tensor] = {}

        def look(layer: Layer, site: Site, x: Tensor) -> None:
            columns = layer.columns(site, x).double()  # (g, samples * positions, n)
            means = columns.unflatten(1, (len(x), -1)).mean(1).mT
            before = seen.get(layer.name)
            seen[layer.name] = means if before is None else torch.cat([before, means], 2)

        self.network.module.eval()
        with observing((each.layer for each in self.layers.values()), look):
            self.network(weights, batch.x, batch.head)
        return seen


def narrowed(P: Tensor, R: Tensor, alpha: float) -> Tensor:
    """P after the columns of R (g, n, k), which is one after another, but in one product."""
    K = P @ R
    inner = R.mT @ K
    inner = inner + alpha * torch.eye(inner.shape[1], dtype=P.dtype, device=P.device)
    taken: Tensor = K @ torch.linalg.solve(inner, K.mT)
    return P - taken
