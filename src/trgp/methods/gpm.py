"""Gradient Projection Memory (Saha, Garg and Roy, ICLR 2021).

After each task a layer's memory M is extended until it holds a share `threshold` of the energy of
the layer's inputs; later tasks update weights only orthogonally to it: W <- W - lr G (I - M M').
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core import native
from ..core.capture import Gram
from ..core.keep import with_coordinates
from ..core.subspace import Extension, extend
from ..options import check_count
from ..tree import level, put, tensors
from ..types import Params, State
from .base import About, Context, Grads, Report
from .layerwise import Along, Layerwise, between, several
from .protected import Directions, Protected, input_grams
from .quirks import one_short


@dataclass(frozen=True)
class GPMMethod(Layerwise):
    """Move weights only orthogonally to the span of old tasks' inputs."""

    about: ClassVar[About] = About(
        family="gradient projection",
        stores="a basis of each layer's inputs",
        paper="Saha et al., ICLR 2021",
        task_id_at_test=False,
    )
    pooled: ClassVar[bool] = False
    between_tasks: ClassVar[tuple[str, ...]] = (
        "threshold",
        "threshold_growth",
        "samples",
        "images_per_layer",
        "first_task_short",
    )

    threshold: tuple[float, ...] = (0.97,)
    """Share of the inputs' energy that a task's basis must hold: one value, or one per layer."""
    threshold_growth: float = 0.0
    """Increase of the threshold per task; the threshold never exceeds 1."""
    samples: int = 125
    """Number of random train samples for a task's basis (all, if the task has fewer)."""
    images_per_layer: tuple[int, ...] = ()
    """Quirk: number of samples for the basis of each layer (none: all). The published code loops
    over image patches in Python and uses fewer samples where maps are large."""
    first_task_short: bool = False
    """Quirk: the first task's basis lacks the direction that reaches the threshold. The published
    code counts only the directions before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "threshold", several(self.threshold))
        object.__setattr__(self, "images_per_layer", several(self.images_per_layer))
        if not self.threshold or not all(between(v, 0, 1) and v for v in self.threshold):
            raise ValueError(
                f"threshold must be numbers above 0 and up to 1, not {self.threshold!r}."
            )
        if not between(self.threshold_growth, 0, 1):
            raise ValueError(f"threshold_growth must be in [0, 1], not {self.threshold_growth!r}.")
        check_count("samples", self.samples)
        for count in self.images_per_layer:
            check_count("images_per_layer", count)

    def check(self) -> None:
        super().check()
        for name, values in (
            ("threshold", self.threshold if len(self.threshold) > 1 else ()),
            ("images_per_layer", self.images_per_layer),
        ):
            if values and len(values) != len(self.layers):
                raise ValueError(
                    f"{name} has {len(values)} values for {len(self.layers)} layers; give one for "
                    f"each of {', '.join(self.layers)}."
                )

    def begin_task(self, ctx: Context) -> tuple[Params, State]:
        """Store C = W M, which no step may change."""
        state = ctx.state
        for name, each in self.layers.items():
            M = native.aligned(Directions.read(state, each.layer).M)
            if M.shape[2]:
                state = put(state, {"M": M, "C": each.pack(ctx.params) @ M}, "task", name)
        return ctx.params, state

    def factored(self, state: State, batch_size: int) -> frozenset[str]:
        """Weights of the linear layers whose step is cheaper from gradient factors."""
        task = {name: tensors(level(state, "task", name)) for name in self.layers}
        return frozenset(
            each.names[0]
            for name, each in self.layers.items()
            if task[name] and each.factored and self.factors_pay(each, task[name], batch_size)
        )

    def factors_pay(self, each: Protected, held: Mapping[str, Tensor], batch_size: int) -> bool:
        """Whether a linear layer's step is cheaper from gradient factors than from the gradient."""
        if "P" in held:
            return each.fewer_rows(batch_size)
        shape = (*each.layer.shape, held["M"].shape[2])
        return native.cheaper_form(batch_size, 0, *shape) == "factored"

    def padded(self, state: State) -> State:
        kept = {key: state[key] for key in self.moving if key in state}
        if level(state, "memory"):
            kept["task"] = {name: self.layer_padded(name, state) for name in self.layers}
        return kept

    def layer_padded(self, name: str, state: State) -> State:
        """The dense projector, whose shape does not depend on the size of the memory."""
        return {"P": native.outside(Directions.read(state, self.layers[name].layer).M)}

    def along(self, name: str, grads: Grads, state: State) -> Along:
        held = tensors(level(state, "task", name))
        if not held:
            return super().along(name, grads, state)
        if "P" in held:
            return self.narrowed(name, held["P"], grads, state)
        each = self.layers[name]
        factors = each.factors(grads)
        if factors is not None:
            return Along(False, native.free_factors(held["M"], *factors))
        return Along(True, native.free_excess(held["M"], each.gradient(grads)))

    def projectors(self, name: str, state: State) -> Tensor | None:
        return tensors(level(state, "task", name)).get("P")

    def end_task(self, ctx: Context) -> tuple[Params, State]:
        """Extend every layer's memory by the directions that the task's inputs use."""
        params = self.shared(ctx.params, ctx.state)
        state: State = {key: value for key, value in ctx.state.items() if key != "task"}
        batch = ctx.samples(self.samples, "bases")
        found = input_grams(
            self.network, self.layers, self.seen_by(ctx, params), batch, self.images_per_layer
        )
        for i, (name, each) in enumerate(self.layers.items()):
            old = Directions.read(state, each.layer)
            chosen = self.extended(old, found[name], self.threshold_of(i, ctx.task), ctx.task)
            state = put(state, chosen.state(), "memory", name)
            before = tensors(level(state, "ranks")).get(name)
            now = chosen.ranks.sum().reshape(1)
            state = put(state, now if before is None else torch.cat([before, now]), "ranks", name)
        return params, self.with_copies(params, state, ctx.task)

    def shared(self, params: Params, state: State) -> dict[str, Tensor]:
        """The weights that all tasks share, with their part inside span(M) restored exactly."""
        new = dict(params)
        for name, each in self.layers.items():
            held = tensors(level(state, "task", name))
            if held:
                W = with_coordinates(each.pack(params), held["M"], held["C"])
                new |= each.unpack(W, params)
        return new

    def seen_by(self, ctx: Context, shared: Params) -> Params:
        """The weights under which the task's inputs are computed."""
        return shared

    def extended(self, old: Directions, gram: Gram, threshold: float, task: int) -> Directions:
        """Extend a layer's directions by those of a task."""
        choice = self.choice(old, gram, threshold, task)
        return Directions(choice.M, choice.ranks)

    def choice(self, old: Directions, gram: Gram, threshold: float, task: int) -> Extension:
        choice = extend(old.M, old.ranks, gram, threshold=threshold, pooled=self.pooled)
        return one_short(choice) if task == 0 and self.first_task_short else choice

    def threshold_of(self, layer: int, task: int) -> float:
        value = self.threshold[layer if len(self.threshold) > 1 else 0]
        return min(1.0, value + self.threshold_growth * task)

    def report(self, state: State) -> Report:
        ranks = tensors(level(state, "ranks"))
        return Report(ranks={name: counts.tolist() for name, counts in ranks.items()})
