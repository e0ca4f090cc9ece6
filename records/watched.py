"""TRGP that tells what its trust regions are chosen from."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from trgp.methods.base import Report
from trgp.methods.protected import Directions
from trgp.methods.trgp import TRGPMethod
from trgp.tree import level, put, tensors
from trgp.types import Params, State

if TYPE_CHECKING:
    from trgp.methods.base import Context


@dataclass(frozen=True)
class Watched(TRGPMethod):
    """TRGP, with what its bases have in common and what they hold of first gradients.

    Without quirks: with those bases leave the memory, and tasks are no candidates.
    """

    def begin_task(self, ctx: "Context") -> tuple[Params, State]:
        params, state = super().begin_task(ctx)
        if ctx.task:
            squared, totals = self.held(ctx)
            for name, of in squared.items():
                shares = torch.tensor([of[j] / (totals[name] or 1.0) for j in sorted(of)])
                state = put(state, shares, "watched", str(ctx.task), name)
        return params, state

    def report(self, state: State) -> Report:
        """By layer the directions of basis j that i has too, and the share of task i's gradient's
        energy that j holds."""
        told: dict[str, float] = {}
        for name, each in self.layers.items():
            masks = Directions.read(state, each.layer).masks
            for j, mask in masks.items():
                for i in range(j, len(masks)):
                    # A basis holds columns of M, and M only gains new ones.
                    both = mask & masks[i][:, : mask.shape[1]]
                    told[f"{name}: {j} in {i}"] = float(both.sum())
        for task in level(state, "watched"):
            for name, shares in tensors(level(state, "watched", task)).items():
                told |= {f"{name}: {j} of {task}": s for j, s in enumerate(shares.tolist())}
        return replace(super().report(state), figures=told)
