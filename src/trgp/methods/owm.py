"""Orthogonal Weights Modification, OWM (Zeng, Chen, Cui and Yu, Nature Machine Intelligence 2019).

A layer has a projector P, initially the identity. After each task, every batch of it removes one
direction, given by the mean r of the layer's inputs: P <- P - k k' / (alpha + r' k) with k = P r.
Later tasks step along G P. With all r / sqrt(alpha) as A's columns, P is I - A (A'A + I)^-1 A'.

That is the paper's algorithm. The authors' code narrows P in every batch of every epoch, before the
step, so that a task's own inputs restrict its learning.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.capture import observing
from ..core.decompositions import cholesky, qr
from ..core.layers import Layer, Site
from ..options import check_number
from ..tree import level, put, tensors
from ..types import Params, Rate, State
from .base import About, Batch, Context, Grads, evaluating
from .layerwise import Along, Layerwise, several
from .stacks import batch_count, each, stacks


@dataclass(frozen=True)
class OWM(Layerwise):
    """Multiply gradients by a projector that every batch of an old task has narrowed."""

    about: ClassVar[About] = About(
        family="gradient projection",
        stores="a projector for each layer's inputs",
        paper="Zeng et al., Nature Machine Intelligence 2019",
        task_id_at_test=False,
    )
    consumes: ClassVar[bool] = True

    alpha: float = 1.0
    """Energy along a direction that counts as negligible, in a task's first batch."""
    alpha_end: float = 0.001
    """alpha in a task's last batch; in between it falls geometrically."""
    narrowing: Literal["task", "batch"] = "task"
    """Narrow projectors after a task (task), as in the paper, or in every batch before the step
    (batch), as in the authors' code, where alpha falls within every epoch."""
    alpha_end_per_layer: tuple[float, ...] = ()
    """alpha_end per layer, as in the authors' code (none: one value for all layers)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "alpha_end_per_layer", several(self.alpha_end_per_layer))
        check_number("alpha", self.alpha, above=0)
        check_number("alpha_end", self.alpha_end, above=0)
        for value in self.alpha_end_per_layer:
            check_number("alpha_end_per_layer", value, above=0)
        if self.narrowing not in ("task", "batch"):
            raise ValueError(f"narrowing must be task or batch, not {self.narrowing!r}.")

    def check(self) -> None:
        super().check()
        ends = self.alpha_end_per_layer
        if ends and len(ends) != len(self.layers):
            raise ValueError(
                f"alpha_end_per_layer has {len(ends)} values for {len(self.layers)} layers; give "
                f"one for each of {', '.join(self.layers)}."
            )

    @property
    def moving(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("projectors",) if self.narrowing == "batch" else ()

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("progress",) if self.narrowing == "batch" else ()

    def stackable(self) -> bool:
        return self.narrowing == "task"  # in batch mode a step runs a forward pass of its own

    def alpha_at(self, name: str, progress: Rate) -> Rate:
        """A layer's alpha at a progress from 0 (first batch) to 1 (last batch)."""
        ends = self.alpha_end_per_layer
        end = ends[list(self.layers).index(name)] if ends else self.alpha_end
        return self.alpha * (end / self.alpha) ** progress

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        if self.narrowing == "task" or level(ctx.state, "projectors"):
            return ctx.params, ctx.state
        whole = {
            name: self.projector(name, None).to(each.layer.dtype).contiguous()
            for name, each in self.layers.items()
        }
        return ctx.params, put(ctx.state, whole, "projectors")

    def step(
        self, params: Params, grads: Grads, state: State, batch: Batch, lr: Rate
    ) -> tuple[dict[str, Tensor], State]:
        if self.narrowing == "task":
            return super().step(params, grads, state, batch, lr)
        P = tensors(level(state, "projectors"))
        weights = self.weights_for(params, state, batch.task)
        with evaluating(self.network.module):
            means = self.mean_inputs(weights, batch.head, batch.x)
        for name, R in means.items():
            S = R / self.alpha_at(name, batch.progress) ** 0.5
            P[name] = narrowed_one_by_one(P[name], fewer_columns(S).to(P[name].dtype))
        moved, _ = super().step(params, grads, put(state, P, "projectors"), batch, lr)
        return moved, {"projectors": P}

    def along(self, name: str, grads: Grads, state: State) -> Along:
        P = self.projectors(name, state)
        if P is None:
            return super().along(name, grads, state)
        return self.narrowed(name, P, grads, state)

    def projectors(self, name: str, state: State) -> Tensor | None:
        return tensors(level(state, "projectors")).get(name)

    def factored(self, state: State, batch_size: int) -> frozenset[str]:
        """Weights of the linear layers where a batch has fewer rows than the gradient."""
        narrow = {e.names[0] for e in self.layers.values() if e.fewer_rows(batch_size)}
        return frozenset(narrow) if level(state, "projectors") else frozenset()

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        """Narrow every layer's projector by the batches of the task, under its final weights."""
        if self.narrowing == "batch":
            return ctx.params, self.with_copies(ctx.params, ctx.state, ctx.task)
        found = tensors(level(ctx.state, "projectors"))
        P = {name: self.projector(name, found.get(name)) for name in self.layers}
        weights = self.weights_for(ctx.params, ctx.state, ctx.task)
        last = batch_count(len(ctx.train), ctx.batch_size) - 1
        done = 0
        self.network.module.eval()
        for stack in stacks(ctx, ctx.batch_size, "projectors"):
            means = each(partial(self.mean_inputs, weights, stack.head), stack.x)
            place = torch.arange(done, done + len(stack.y), device=self.network.device)
            for name, R in means.items():
                alpha = torch.as_tensor(self.alpha_at(name, place.double() / max(1, last)))
                S = R / alpha.sqrt().view(-1, 1, 1, 1)
                P[name] = narrowed(P[name], S.permute(1, 2, 0, 3).flatten(2))
            done += len(place)
        kept = {name: p.to(self.layers[name].layer.dtype) for name, p in P.items()}
        state = put(ctx.state, kept, "projectors")
        return ctx.params, self.with_copies(ctx.params, state, ctx.task)

    def projector(self, name: str, kept: Tensor | None) -> Tensor:
        """A layer's stored P in float64, or the identity before the first task."""
        g, _, n = self.layers[name].layer.shape
        one = torch.eye(n, dtype=torch.float64, device=self.network.device)
        if kept is None:
            return one.expand(g, n, n)
        P = kept.double()
        # Rounding in storage may push the least eigenvalues below 0, by at most this amount.
        lost: Tensor = torch.finfo(kept.dtype).eps / 2 * P.norm(dim=(1, 2), keepdim=True)
        return P + lost * one

    @torch.no_grad()
    def mean_inputs(self, weights: Params, head: int, x: Tensor) -> dict[str, Tensor]:
        """R (g, n, k) by layer: the mean input over the samples at each of k positions."""
        seen: dict[str, Tensor] = {}

        def look(layer: Layer, site: Site, x: Tensor) -> None:
            # The columns are linear in the input, so their mean is the columns of the mean input.
            means = layer.columns(site, x.double().mean(0, keepdim=True)).mT
            before = seen.get(layer.name)
            seen[layer.name] = means if before is None else torch.cat([before, means], 2)

        with observing((own.layer for own in self.layers.values()), look):
            self.network(weights, x, head)
        return seen


def narrowed(P: Tensor, S: Tensor) -> Tensor:
    """Narrow P by all columns of S (g, n, k), which are r / sqrt(alpha), in one product.

    One column after another gives the same result in any order, (P^-1 + S S')^-1.
    """
    if S.shape[2] > S.shape[1]:
        S = qr(S.mT, mode="r")[1].mT  # fewer columns with the same S S'
    K = P @ S
    inner = S.mT @ K + torch.eye(S.shape[2], dtype=P.dtype, device=P.device)
    half: Tensor = torch.linalg.solve_triangular(cholesky(inner), K.mT, upper=False)
    return P - half.mT @ half


def narrowed_one_by_one(P: Tensor, S: Tensor) -> Tensor:
    """Narrow P column by column, without a decomposition, which CUDA graphs cannot capture."""
    for s in S.split(1, 2):
        k = P @ s
        # Rounding may have pushed the least eigenvalue of P just below 0.
        P = P - k @ k.mT / (1 + (s.mT @ k).clamp(min=0))
    return P


def fewer_columns(S: Tensor) -> Tensor:
    """Reduce S (g, n, k) to at most n columns with the same S S': its Cholesky factor."""
    _, n, k = S.shape
    if k <= n:
        return S
    left = S @ S.mT
    nothing = n * torch.finfo(S.dtype).eps * left.diagonal(dim1=1, dim2=2).amax(1).view(-1, 1, 1)
    found = []
    for j in range(n):
        pivot = left[:, j : j + 1, j : j + 1]
        column = left[:, :, j : j + 1] * pivot.clamp(min=0).rsqrt()
        found.append(torch.where(pivot > nothing, column, torch.zeros_like(column)))
        left = left - found[-1] @ found[-1].mT
    return torch.cat(found, 2)
